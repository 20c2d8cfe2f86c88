"""A server on a free port of this machine, with small limits, and tiny scenes to give it."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sader.viewer.settings import Limits, ServeSettings

httpx = pytest.importorskip("httpx", reason="httpx is needed: pip install httpx")
for _package in ("fastapi", "uvicorn", "rasterio"):
    pytest.importorskip(_package, reason=f'{_package} is needed: pip install "sader[serve,geo]"')

LIMITS = Limits(
    upload_bytes=3 * 2**20, files=6, pixels=1_000_000, bands=16, block_bytes=16 * 2**20, queue=3, scenes=1000,
    body_bytes=64 * 1024, read_s=60, sync_s=120, header_s=2, body_s=2,
)  # fmt: skip


@dataclass
class Running:
    """A server that runs, and how to talk to it."""

    url: str
    data: Path
    service: Any
    client: Any

    def scene(self, *names: str) -> str:
        """Return the id of a scene of files of the data folder."""
        answer = self.client.post("/scenes", json={"paths": list(names)})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def start(self, **inputs: Any) -> dict[str, Any]:
        """Start a job and return its status."""
        answer = self.client.post(
            "/processes/remove-clouds/execution", json={"inputs": inputs}, headers={"Prefer": "respond-async"}
        )
        assert answer.status_code == 201, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def wait(
        self, job: str, *, seconds: float = 60, until: Callable[[dict[str, Any]], bool] | None = None
    ) -> dict[str, Any]:
        """Return the status of a job once it has ended (or `until` is true)."""
        end = time.monotonic() + seconds
        while True:
            said: dict[str, Any] = self.client.get(f"/jobs/{job}").json()
            if (until or (lambda status: status["status"] not in ("accepted", "running")))(said):
                return said
            assert time.monotonic() < end, f"job still {said}"
            time.sleep(0.05)


@contextmanager
def serving(settings: ServeSettings) -> Iterator[Running]:
    """Run a server in a thread of this process; its children are processes of their own."""
    import uvicorn

    from sader.viewer.app import build_app
    from sader.viewer.launch import bind, server_config

    listening = bind(settings.host, settings.port)
    port = listening.getsockname()[1]
    app = build_app(settings)
    config = server_config(app, settings)
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, timeout=120) as client:
            yield Running(url, settings.data, app.app.state.service, client)
    finally:
        server.should_exit = True
        thread.join(timeout=20)


def write_date(path: Path, seed: int, *, size: int = 64, cloud: bool = True, **changes: Any) -> Path:
    """Write one small date: texture of four bands with a bright block that is a cloud."""
    import rasterio

    path.parent.mkdir(parents=True, exist_ok=True)
    ground = np.random.default_rng(7).uniform(400, 1600, (4, size // 8, size // 8)).repeat(8, 1).repeat(8, 2)
    image = ground + np.random.default_rng(seed).normal(0, 20, ground.shape)
    if cloud:
        at = (seed * 13) % (size // 2)
        image[:, at : at + size // 3, at : at + size // 3] = 6500
    options: dict[str, Any] = {
        "driver": "GTiff", "count": 4, "height": image.shape[1], "width": image.shape[2], "dtype": "uint16",
        "crs": "EPSG:32632", "transform": rasterio.Affine(10, 0, 600000, 0, -10, 5100000), "nodata": 0, **changes,
    }  # fmt: skip
    with rasterio.open(path, "w", **options) as dataset:
        dataset.write(np.rint(image).clip(1, 12000).astype(np.uint16))
        dataset.descriptions = ("B02", "B03", "B04", "B08")
    return path


def write_scene(folder: Path, *, size: int = 64, dates: int = 3) -> list[Path]:
    """Write the dates of a scene."""
    return [write_date(folder / f"S2_2022-03-{10 + 5 * i}.tif", i + 1, size=size) for i in range(dates)]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The server most tests share."""
    data = tmp_path_factory.mktemp("served")
    write_scene(data / "small")
    write_scene(data / "wide", size=192)
    with serving(ServeSettings(data=data, port=0, limits=LIMITS)) as running:
        yield running


@pytest.fixture(scope="session")
def finished(server: Running) -> tuple[str, str]:
    """(scene, job) of a job that is done, shared by tests that only read it."""
    scene = server.scene("small")
    job = server.start(scene=scene, uncertainty=True, provenance=True, report=True)["jobID"]
    assert server.wait(job)["status"] == "successful"
    return scene, job


@dataclass
class Canary:
    """A web server that must receive no request."""

    url: str
    calls: list[str]


@pytest.fixture
def canary() -> Iterator[Canary]:
    """A local address that records every request."""
    calls: list[str] = []

    class Note(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            calls.append(self.path)
            self.send_response(404)
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Note)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield Canary(f"http://127.0.0.1:{listening.server_address[1]}", calls)
    listening.shutdown()
    listening.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, for the tests of one file; they are skipped, and say so, where there is none."""
    from .browsing import CHROMIUM, NO_CHROMIUM  # which itself needs what is above

    if CHROMIUM is None:
        pytest.skip(NO_CHROMIUM)
    api = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright: pip install playwright")
    with api.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()
