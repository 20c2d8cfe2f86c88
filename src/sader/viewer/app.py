"""The FastAPI application: routes of OGC API - Processes and of the page."""

# No "from __future__ import annotations": FastAPI evaluates annotations of functions that are defined in a function.

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request, Response
from fastapi import Path as InPath
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.staticfiles import StaticFiles

from sader._version import __version__
from sader.errors import SaderError
from sader.viewer import ogc
from sader.viewer.problems import NoSuchProcessError, problem, status_of
from sader.viewer.schema import Execute, JobName, NewScene, Reading, Square, Token
from sader.viewer.security.guard import (
    COOKIE,
    PROBLEM,
    SESSION_S,
    TOO_MANY_TOKENS,
    Guard,
    Sessions,
    client_address,
    refused,
)
from sader.viewer.service import Service
from sader.viewer.settings import ServeSettings

STATIC = Path(__file__).parent / "static"
_SCHEMA = {
    "type": "object",
    "properties": {**{name: {"type": "string"} for name in ("type", "title", "detail")}, "status": {"type": "integer"}},
    "required": ["type", "title", "status"],
}
Responses = dict[int | str, dict[str, Any]]
FAILS: Responses = {
    kind: {"description": text, "content": {PROBLEM: {"schema": _SCHEMA}}}
    for kind, text in (("4XX", "the request cannot be answered"), ("5XX", "the server cannot answer"))
}
JobId = Annotated[JobName, InPath()]
SceneName = Annotated[str, InPath(pattern=r"^[a-f0-9]{24}$")]


class Api(FastAPI):
    """FastAPI with a corrected OpenAPI document: status 400 for malformed input, and the body of an upload."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = document = json.loads(json.dumps(super().openapi()))
            for path, methods in document["paths"].items():
                for method, operation in methods.items():
                    operation.get("responses", {}).pop("422", None)
                    if method == "put" and "/files/" in path:
                        body = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
                        operation["requestBody"] = {"required": True, "content": body}
        return self.openapi_schema


def build_app(settings: ServeSettings) -> Guard:
    """Return the application with its access control; worker processes and queue run as long as it does."""
    service = Service(settings)
    sessions = Sessions(settings.token)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await run_in_threadpool(service.stop)

    app = Api(
        title="sader",
        description="One cloud-free image from several cloudy satellite acquisitions. OGC API - Processes.",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=FAILS,
    )
    app.state.service = service
    _add_errors(app)
    _add_ogc(app, service)
    _add_page(app, service, sessions)
    _add_scenes(app, service)
    _add_uploads(app, service)
    return Guard(app, settings, sessions)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(SaderError)
    def known(request: Request, error: SaderError) -> JSONResponse:
        status = status_of(error)
        headers = {"Retry-After": "30"} if status == 429 else None
        return JSONResponse(problem(error), status, headers, media_type=PROBLEM)

    @app.exception_handler(RequestValidationError)
    def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        text = f"{where or 'the request'}: {first['msg']}."
        # An id of another form names no resource.
        status, title = (404, "NotFoundError") if first["loc"][0] == "path" else (400, "RequestError")
        return refused(status, text, title)

    @app.exception_handler(HTTPException)
    def plain(request: Request, error: HTTPException) -> JSONResponse:
        return refused(error.status_code, str(error.detail), "HTTP error", error.headers)

    @app.exception_handler(ClientDisconnect)
    def disconnected(request: Request, error: ClientDisconnect) -> JSONResponse:
        return refused(400, "the connection was closed before the request was complete.", "Disconnected")

    @app.exception_handler(Exception)
    def unexpected(request: Request, error: Exception) -> JSONResponse:
        # As ASCII literals: a path may contain control characters of the terminal.
        print(f"{request.method} {request.url.path!a}: {type(error).__name__}: {error!a}", file=sys.stderr)
        return JSONResponse(problem(error), 500, media_type=PROBLEM)


def _base(request: Request) -> str:
    return str(request.base_url).rstrip("/")


def _add_ogc(app: FastAPI, service: Service) -> None:
    page: Responses = {200: {"content": {"application/json": {}, "text/html": {}}}}

    @app.get("/", tags=["capabilities"], summary="Landing page", responses=page)
    def landing(request: Request, f: Literal["json", "html"] | None = None) -> Response:
        wants_page = f == "html" or (f is None and "text/html" in request.headers.get("accept", ""))
        if wants_page:
            return FileResponse(STATIC / "index.html", media_type="text/html", headers={"Vary": "Accept"})
        return JSONResponse(ogc.landing(_base(request)), headers={"Vary": "Accept"})

    @app.get("/conformance", tags=["capabilities"])
    def conformance() -> dict[str, Any]:
        return {"conformsTo": ogc.CONFORMANCE}

    @app.get("/processes", tags=["processes"])
    def processes(request: Request, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> dict[str, Any]:
        base = _base(request)
        return {"processes": [ogc.summary(base)], "links": [ogc.link(f"{base}/processes", "self", "this document")]}

    @app.get("/processes/{process}", tags=["processes"])
    def process(request: Request, process: str) -> dict[str, Any]:
        _check_process(process)
        return ogc.description(_base(request))

    executed: Responses = {
        200: {"description": "results of a synchronous call", "content": {"application/json": {}}},
        201: {"description": "the job was accepted", "content": {"application/json": {}}},
    }

    @app.post("/processes/{process}/execution", tags=["processes"], responses=executed)
    def execute(request: Request, process: str, body: Execute) -> Response:
        _check_process(process)
        base = _base(request)
        later = "respond-async" in request.headers.get("prefer", "").lower()
        job = service.submit(body)
        if later:
            headers = {"Location": f"{base}/jobs/{job.id}", "Preference-Applied": "respond-async"}
            return JSONResponse(ogc.status_info(job, base), 201, headers)
        job = service.runner.wait(job.id, service.settings.limits.sync_s)
        if not job.ended:
            text = f"the job takes longer than a synchronous call may; its status is at {base}/jobs/{job.id}."
            return refused(504, text, "Timeout")
        return _results(service, job.id, base, raw=body.response == "raw")

    @app.get("/jobs", tags=["jobs"])
    def jobs(
        request: Request,
        status: Literal["accepted", "running", "successful", "failed", "dismissed"] | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        offset: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
    ) -> dict[str, Any]:
        base = _base(request)
        found = service.store.select(status=status, limit=limit, offset=offset)
        links = [ogc.link(f"{base}/jobs", "self", "this document")]
        if len(found) == limit:
            links.append(ogc.link(f"{base}/jobs?limit={limit}&offset={offset + limit}", "next", "the next page"))
        return {"jobs": [ogc.status_info(job, base) for job in found], "links": links}

    @app.get("/jobs/{job}", tags=["jobs"])
    def status(request: Request, job: JobId) -> dict[str, Any]:
        return ogc.status_info(service.store.get(job), _base(request))

    @app.delete("/jobs/{job}", tags=["jobs"])
    def dismiss(request: Request, job: JobId) -> dict[str, Any]:
        return ogc.status_info(service.runner.dismiss(job), _base(request))

    @app.get("/jobs/{job}/results", tags=["jobs"], responses={200: {"content": {"application/json": {}}}})
    def results(request: Request, job: JobId) -> Response:
        return _results(service, job, _base(request), raw=False)

    file: Responses = {200: {"content": {kind: {} for kind in ("image/tiff", *ogc.MEDIA.values())}}}

    @app.get("/jobs/{job}/results/{output}", tags=["jobs"], responses=file)
    def output(request: Request, job: JobId, output: str) -> Response:
        return _file(service, job, output, _base(request))


def _check_process(name: str) -> None:
    if name != ogc.PROCESS:
        raise NoSuchProcessError(f"there is no process {name[:80]!r}; this server has {ogc.PROCESS}.")


def _results(service: Service, name: str, base: str, *, raw: bool) -> Response:
    job = service.finished(service.store.get(name))
    if not raw:
        return JSONResponse(service.results(job, base))
    wanted = service.wanted(job)
    if len(wanted) == 1 and next(iter(wanted.values())) != "reference":
        return _file(service, name, next(iter(wanted)), base)
    # Several outputs, or by reference: a link for each and no body.
    links = [
        f'<{base}/jobs/{name}/results/{one}>; rel="item"; title="{one}"; type="{ogc.MEDIA.get(one, "image/tiff")}"'
        for one in wanted
    ]
    return Response(status_code=204, headers={"Link": ", ".join(links)})


def _file(service: Service, name: str, output: str, base: str) -> Response:
    job = service.store.get(name)
    if output == "item":
        return JSONResponse(service.item(job, base), media_type=ogc.MEDIA["item"])
    path = service.file(job, output)
    date = (job.outcome or {}).get("report", {}).get("date")
    shown = f"sader_{date or job.id[:8]}_{output}{path.suffix}"
    kind = ogc.MEDIA.get(output, ogc.COG)
    return FileResponse(path, media_type=kind, filename=shown, headers={"Cache-Control": "private, max-age=3600"})


def _add_page(app: FastAPI, service: Service, sessions: Sessions) -> None:
    app.mount("/static", StaticFiles(directory=STATIC))

    @app.get("/session", tags=["page"])
    def session(request: Request) -> dict[str, bool]:
        """Return whether a token is needed, and whether this browser has presented it."""
        opened = not sessions.needed or sessions.is_open(request.cookies.get(COOKIE, ""))
        return {"needed": sessions.needed, "open": opened}

    @app.post("/session", tags=["page"])
    def open_session(request: Request, given: Token) -> Response:
        """Exchange the token for a session cookie."""
        accepted = not sessions.needed or sessions.accepts(given.token, client_address(request.scope))
        if accepted is None:
            return refused(429, TOO_MANY_TOKENS)
        if not accepted:
            return refused(401, "the token is not this server's.")
        answer = JSONResponse({"needed": sessions.needed, "open": True})
        if sessions.needed:
            secure = request.url.scheme == "https"
            answer.set_cookie(
                COOKIE, sessions.open(), max_age=SESSION_S, httponly=True, samesite="strict", secure=secure
            )
        return answer

    @app.get("/folder", tags=["page"])
    def folder(path: Annotated[str, Query(max_length=1000)] = "") -> list[dict[str, Any]]:
        """Return the entries of a folder of the data folder."""
        return service.entries(path)


def _add_scenes(app: FastAPI, service: Service) -> None:
    @app.post("/scenes", tags=["scenes"], status_code=201)
    def create(body: NewScene) -> dict[str, Any]:
        """Create a scene: of files of the data folder, the demo, or an empty one for uploads."""
        scene = service.new_scene(body.paths, body.demo)
        return {"id": scene.id, "kind": scene.kind, "title": scene.title}

    @app.get("/scenes/{scene}", tags=["scenes"])
    def describe(scene: SceneName) -> dict[str, Any]:
        return service.describe(service.scenes.get(scene))

    @app.put("/scenes/{scene}/reading", tags=["scenes"])
    def reading(scene: SceneName, body: Reading) -> dict[str, Any]:
        """Set how the files are to be read; return the scene as read with these settings."""
        return service.describe(service.scenes.set_reading(scene, body.model_dump()))

    @app.delete("/scenes/{scene}", tags=["scenes"], status_code=204)
    def delete(scene: SceneName) -> None:
        service.delete_scene(scene)

    @app.get("/scenes/{scene}/clouds", tags=["scenes"])
    def clouds(scene: SceneName) -> list[float]:
        """Return the hidden share of each date."""
        found: list[float] = service.ask("clouds", scene)
        return found

    @app.get("/scenes/{scene}/mercator", tags=["scenes"])
    def mercator(scene: SceneName) -> dict[str, Any]:
        """Return the polynomial from Web Mercator to the scene's pixels, for a background map."""
        found: dict[str, Any] = service.ask("mercator", scene)
        return found

    drawn: Responses = {200: {"content": {"image/png": {}}}}

    @app.get("/scenes/{scene}/layers/{layer}", tags=["scenes"], response_class=Response, responses=drawn)
    def picture(
        scene: SceneName,
        layer: Annotated[str, InPath(pattern=r"^((mask-)?\d{1,3}|result|uncertainty|provenance)$")],
        square: Annotated[Square, Query()],
    ) -> Response:
        """Draw a square of 512 pixels of a date, its cloud mask, the result, its uncertainty or its provenance."""
        found = service.picture(scene, layer, square)
        return Response(found, media_type="image/png", headers={"Cache-Control": "private, max-age=600"})

    @app.get("/scenes/{scene}/values", tags=["scenes"])
    def values(
        scene: SceneName,
        column: Annotated[int, Query(ge=0, le=10_000_000)],
        row: Annotated[int, Query(ge=0, le=10_000_000)],
        job: Annotated[JobName | None, Query()] = None,
    ) -> dict[str, Any]:
        """Return the values of all dates and of the result at one pixel."""
        found: dict[str, Any] = service.ask("values", scene, job=job, column=column, row=row)
        return found


def _add_uploads(app: FastAPI, service: Service) -> None:
    @app.put("/scenes/{scene}/files/{name}", tags=["scenes"], status_code=201)
    async def upload(request: Request, scene: SceneName, name: str) -> dict[str, Any]:
        """Add a file to a scene; the request body is the file."""
        declared = request.headers.get("content-length", "")
        size = int(declared) if declared.isdecimal() else None
        started = await run_in_threadpool(service.scenes.begin_upload, scene, name, size)
        try:
            async for chunk in request.stream():
                await run_in_threadpool(service.scenes.receive, started, chunk)
            await run_in_threadpool(service.finish_upload, started)
        finally:
            service.scenes.end_upload(started)
        return {"name": name, "bytes": started.received}
