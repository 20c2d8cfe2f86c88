"""The documents of OGC API - Processes, part 1, core 1.0: landing page, conformance, process, status, results."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sader._version import __version__
from sader.viewer.jobs import Job
from sader.viewer.schema import RemoveInputs

PROCESS = "remove-clouds"
COG = "image/tiff; application=geotiff; profile=cloud-optimized"
MEDIA = {"item": "application/geo+json", "preview": "image/png", "report": "text/html"}
_REL = "http://www.opengis.net/def/rel/ogc/1.0/"
_SPEC = "http://www.opengis.net/spec/ogcapi-processes-1/1.0/conf/"
CONFORMANCE = [_SPEC + name for name in ("core", "ogc-process-description", "json", "oas30", "job-list", "dismiss")]
"""Without "callback": the server makes no requests of its own."""
OUTPUTS = {
    "clear": "the cloud-free image",
    "item": "STAC Item of the result",
    "preview": "image of the dates and the result",
    "report": "HTML page about the run",
    "uncertainty": "expected standard deviation, in reflectance",
    "provenance": "0 nodata, 1 observed, 2 reconstructed",
    "count": "clear observations per pixel",
}


def link(href: str, rel: str, title: str, kind: str = "application/json") -> dict[str, str]:
    """Return a link of a document."""
    return {"href": href, "rel": rel, "type": kind, "title": title}


def landing(base: str) -> dict[str, Any]:
    """Return the landing page."""
    return {
        "title": "sader",
        "description": "One cloud-free image from several cloudy satellite acquisitions.",
        "links": [
            link(f"{base}/?f=json", "self", "this document"),
            link(f"{base}/?f=html", "alternate", "the page", "text/html"),
            link(f"{base}/openapi.json", "service-desc", "the API", "application/vnd.oai.openapi+json;version=3.0"),
            link(f"{base}/conformance", _REL + "conformance", "conformance classes"),
            link(f"{base}/processes", _REL + "processes", "the processes"),
            link(f"{base}/jobs", _REL + "job-list", "the jobs"),
        ],
    }


def summary(base: str) -> dict[str, Any]:
    """Return the short description of the one process."""
    return {
        "id": PROCESS,
        "title": "Remove clouds",
        "description": "One cloud-free image from several dates of one place, as COG and STAC Item.",
        "version": __version__,
        "jobControlOptions": ["sync-execute", "async-execute", "dismiss"],
        "outputTransmission": ["value", "reference"],
        "links": [link(f"{base}/processes/{PROCESS}", "self", "full description")],
    }


def description(base: str) -> dict[str, Any]:
    """Return the full description; its inputs come from the schema that requests are validated against."""
    schema = RemoveInputs.model_json_schema()
    inputs = {}
    for name, entry in schema["properties"].items():
        kind = {key: value for key, value in entry.items() if key not in ("title", "description")}
        options = [one for one in kind.pop("anyOf", []) if one.get("type") != "null"]
        kind = {**kind, **(options[0] if options else {})}
        if kind.get("default", "") is None:
            kind.pop("default")
        inputs[name] = {
            "title": name,
            "description": entry.get("description", name),
            "schema": kind,
            "minOccurs": 0,
            "maxOccurs": 1,
        }
    outputs = {}
    for name, text in OUTPUTS.items():
        media = MEDIA.get(name, COG)
        kind = {"type": "object"} if name == "item" else {"type": "string", "contentEncoding": "binary"}
        outputs[name] = {"title": name, "description": text, "schema": {**kind, "contentMediaType": media}}
    execute = link(f"{base}/processes/{PROCESS}/execution", _REL + "execute", "execute the process")
    found = summary(base)
    return {**found, "inputs": inputs, "outputs": outputs, "links": [*found["links"], execute]}


def status_info(job: Job, base: str) -> dict[str, Any]:
    """Return the status of a job."""
    here = f"{base}/jobs/{job.id}"
    links = [link(here, "self", "this document")]
    if job.status == "successful":
        links.append(link(f"{here}/results", _REL + "results", "results"))
    found: dict[str, Any] = {
        "processID": PROCESS,
        "type": "process",
        "jobID": job.id,
        "status": job.status,
        "message": job.message,
        "created": _time(job.created),
        "updated": _time(job.updated),
        "progress": job.progress,
        "links": links,
    }
    if job.started is not None:
        found["started"] = _time(job.started)
    if job.finished is not None:
        found["finished"] = _time(job.finished)
    # Additions to the standard, used by the page.
    found["sader:notices"] = job.notices
    if job.request.get("scene"):
        found["sader:scene"] = job.request["scene"]
    if job.outcome is not None and "report" in job.outcome:
        found["sader:report"] = job.outcome["report"]
    return found


def public_item(item: dict[str, Any], job: Job, base: str) -> dict[str, Any]:
    """Return the STAC Item with URLs of this server instead of file paths."""
    here = f"{base}/jobs/{job.id}/results"
    by_name = {file: name for name, file in (job.outcome or {}).get("outputs", {}).items()}
    assets = {}
    for key, asset in item.get("assets", {}).items():
        name = by_name.get(str(asset.get("href", "")).rsplit("/", 1)[-1])
        if name is not None:
            assets[key] = {**asset, "href": f"{here}/{name}"}
    # Inputs by name only, because paths of the server are not exposed.
    inputs = [link_["title"] for link_ in item.get("links", []) if link_.get("rel") == "derived_from"]
    properties = {**item.get("properties", {}), "sader:inputs": inputs, "sader:job": job.id}
    links = [link(f"{here}/item", "self", "this item", "application/geo+json")]
    return {
        **item,
        "id": f"{item.get('id', 'clear')}-{job.id[:8]}",
        "properties": properties,
        "assets": assets,
        "links": links,
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
