"""A client of OGC API - Processes that follows the links of the landing page."""

from __future__ import annotations

import base64
import io
import json

import pytest

CORE = "http://www.opengis.net/spec/ogcapi-processes-1/1.0/conf/"
REL = "http://www.opengis.net/def/rel/ogc/1.0/"


def linked(document, rel):
    return next(link["href"] for link in document["links"] if link["rel"] == rel)


def test_from_the_landing_page_to_the_image(server):
    client = server.client
    landing = client.get("/").json()
    assert client.get("/", headers={"Accept": "text/html"}).text.startswith("<!doctype html>")
    conforms = client.get(linked(landing, REL + "conformance")).json()["conformsTo"]
    assert {CORE + "core", CORE + "json", CORE + "job-list", CORE + "dismiss"} <= set(conforms)
    assert client.get(linked(landing, "service-desc")).json()["openapi"].startswith("3.")
    processes = client.get(linked(landing, REL + "processes")).json()["processes"]
    process = client.get(linked(processes[0], "self")).json()
    assert process["id"] == "remove-clouds"
    assert process["jobControlOptions"] == ["sync-execute", "async-execute", "dismiss"]
    assert process["inputs"]["seed"]["schema"]["minimum"] == 0
    execute = linked(process, REL + "execute")

    answer = client.post(execute, json={"inputs": {"paths": ["small"]}}, headers={"Prefer": "respond-async"})
    assert answer.status_code == 201
    assert answer.headers["Preference-Applied"] == "respond-async"
    accepted = answer.json()
    assert accepted["status"] in ("accepted", "running")
    assert accepted["type"] == "process"
    done = server.wait(answer.headers["Location"].rsplit("/", 1)[-1])
    assert (done["status"], done["progress"]) == ("successful", 100)
    assert {"created", "started", "finished", "updated"} <= set(done)
    results = client.get(linked(done, REL + "results")).json()
    assert results["item"]["value"]["type"] == "Feature"
    image = client.get(results["clear"]["href"])
    assert image.headers["content-type"].startswith("image/tiff")
    check_cog(image.content)
    listed = client.get(linked(landing, REL + "job-list"), params={"status": "successful"}).json()["jobs"]
    assert done["jobID"] in [job["jobID"] for job in listed]
    assert client.get("/jobs", params={"limit": 1}).json()["links"][-1]["rel"] == "next"


def check_cog(content):
    rasterio = pytest.importorskip("rasterio")
    with rasterio.open(io.BytesIO(content)) as dataset:
        assert dataset.descriptions == ("B02", "B03", "B04", "B08")
        assert dataset.crs.to_epsg() == 32632
        assert dataset.tags(ns="IMAGE_STRUCTURE")["LAYOUT"] == "COG"
        assert dataset.read().min() > 0


def test_synchronous_execution_answers_with_the_results(server):
    asked = {"inputs": {"paths": ["small"]}, "outputs": {"clear": {"transmissionMode": "value"}}}
    answer = server.client.post("/processes/remove-clouds/execution", json=asked)
    assert answer.status_code == 200
    found = answer.json()
    assert list(found) == ["clear"]
    assert found["clear"]["encoding"] == "base64"
    check_cog(base64.b64decode(found["clear"]["value"]))


def test_raw_response_is_the_image_itself(server):
    asked = {"inputs": {"paths": ["small"]}, "outputs": {"clear": {}}, "response": "raw"}
    answer = server.client.post("/processes/remove-clouds/execution", json=asked)
    assert answer.status_code == 200
    check_cog(answer.content)


def test_raw_response_of_several_outputs_is_links(server):
    asked = {"inputs": {"paths": ["small"]}, "outputs": {"clear": {}, "item": {}}, "response": "raw"}
    answer = server.client.post("/processes/remove-clouds/execution", json=asked)
    assert answer.status_code == 204
    assert answer.headers["link"].count('rel="item"') == 2


def test_the_item_names_addresses_and_no_paths_of_the_server(server, finished):
    _, job = finished
    item = server.client.get(f"/jobs/{job}/results/item").json()
    text = json.dumps(item)
    assert str(server.data) not in text
    assert ".sader" not in text
    assert item["assets"]["data"]["href"] == f"{server.url}/jobs/{job}/results/clear"
    assert item["properties"]["sader:inputs"] == ["S2_2022-03-10.tif", "S2_2022-03-15.tif", "S2_2022-03-20.tif"]
    for asset in item["assets"].values():
        assert server.client.get(asset["href"]).status_code == 200
    assert str(server.data) not in server.client.get(f"/jobs/{job}").text
    pystac = pytest.importorskip("pystac")
    assert pystac.Item.from_dict(item).id == f"clear-{job[:8]}"


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/processes/remove-rain", 404, "no-such-process"),
        ("POST", "/processes/remove-rain/execution", 404, "no-such-process"),
        ("GET", "/jobs/00000000-0000-0000-0000-000000000000", 404, "no-such-job"),
        ("DELETE", "/jobs/00000000-0000-0000-0000-000000000000", 404, "no-such-job"),
        ("GET", "/jobs/00000000-0000-0000-0000-000000000000/results", 404, "no-such-job"),
    ],
)
def test_exceptions_have_the_types_of_the_standard(server, method, path, status, kind):
    body = {"inputs": {"paths": ["small"]}} if method == "POST" else None
    answer = server.client.request(method, path, json=body)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["type"].endswith(f"/ogcapi-processes-1/1.0/{kind}")


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, "exactly one"),
        ({"paths": ["small"], "scene": "0" * 24}, "exactly one"),
        ({"paths": ["small"], "refernce": "auto"}, "refernce"),
        ({"paths": ["small"], "steps": "900"}, "steps"),
        ({"paths": ["small"], "samples": 1000}, "samples"),
        ({"paths": ["small"], "tile": 100000}, "tile"),
        ({"paths": ["small"], "model": "/etc/passwd"}, "this server has"),
        ({"paths": ["small"], "model": "someone/else-on-a-hub"}, "this server has"),
        ({"paths": ["small"], "mask": "/etc/passwd"}, "mask"),
    ],
)
def test_wrong_inputs_are_refused_before_a_job_exists(server, inputs, words):
    before = len(server.client.get("/jobs", params={"limit": 1000}).json()["jobs"])
    answer = server.client.post("/processes/remove-clouds/execution", json={"inputs": inputs})
    assert answer.status_code == 400
    assert words in answer.json()["detail"]
    assert len(server.client.get("/jobs", params={"limit": 1000}).json()["jobs"]) == before


def test_results_of_a_job_that_is_not_done(server):
    job = server.start(paths=["wide"], tile=64)["jobID"]
    answer = server.client.get(f"/jobs/{job}/results")
    assert answer.status_code == 404
    assert answer.json()["type"].endswith("result-not-ready")
    dismissed = server.client.delete(f"/jobs/{job}").json()
    assert dismissed["status"] == "dismissed"
    assert server.client.get(f"/jobs/{job}/results").status_code == 410
    assert server.client.get(f"/jobs/{job}").json()["status"] == "dismissed"


def test_a_failed_job_states_the_reason_in_its_results(server):
    job = server.start(paths=["small"], reference="2001-01-01")["jobID"]
    done = server.wait(job)
    assert done["status"] == "failed"
    assert "2001-01-01" in done["message"]
    answer = server.client.get(f"/jobs/{job}/results")
    assert answer.status_code == 400
    assert answer.json()["title"] == "ConfigError"


def test_a_requested_output_is_written(server):
    asked = {"inputs": {"paths": ["small"]}, "outputs": {"count": {"transmissionMode": "reference"}}}
    found = server.client.post("/processes/remove-clouds/execution", json=asked).json()
    assert list(found) == ["count"]
    assert server.client.get(found["count"]["href"]).content[:2] in (b"II", b"MM")
