"""Jobs: they survive crashes of worker and server, wait in a bounded queue, can be dismissed, and expire."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest
from PIL import Image

from sader.viewer.jobs import JobStore
from sader.viewer.problems import NoSuchJobError, NotFoundError, QueueFullError, TooLargeError, WorkerError
from sader.viewer.scenes import SceneStore
from sader.viewer.security.folder import DataFolder
from sader.viewer.service import Service
from sader.viewer.settings import Limits, ServeSettings

from .conftest import Running, write_scene


def running(status):
    return status["status"] == "running" and status["progress"] > 5


def test_a_worker_that_is_killed_takes_only_its_job_with_it(server):
    job = server.start(paths=["wide"], tile=64)["jobID"]
    server.wait(job, until=running)
    os.kill(server.service.runner.worker.pid, signal.SIGKILL)
    done = server.wait(job)
    assert done["status"] == "failed"
    assert "SIGKILL" in done["message"]
    assert server.client.get(f"/jobs/{job}/results").status_code == 500
    assert not server.service.runner.folder_of(job).exists()
    again = server.start(paths=["small"])["jobID"]
    assert server.wait(again)["status"] == "successful"


def test_a_reader_that_is_killed_comes_back(server):
    scene = server.scene("small")
    assert server.client.get(f"/scenes/{scene}").status_code == 200
    os.kill(server.service.reader.pid, signal.SIGKILL)
    time.sleep(0.2)
    assert server.client.get(f"/scenes/{scene}").status_code == 200


def test_progress_is_real_and_a_running_job_can_be_stopped(server):
    job = server.start(paths=["wide"], tile=64)["jobID"]
    seen = set()

    def half_way(status):
        seen.add(status["progress"])
        return status["progress"] > 50  # on a busy machine several tiles are finished between two questions

    server.wait(job, until=half_way)
    assert len(seen) > 3, seen
    worker = server.service.runner.worker.pid
    assert server.client.delete(f"/jobs/{job}").json()["status"] == "dismissed"
    end = time.monotonic() + 30
    while server.service.runner.folder_of(job).exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    assert server.service.runner.worker.pid != worker
    assert server.client.get(f"/jobs/{job}").json()["status"] == "dismissed"
    assert server.client.delete(f"/jobs/{job}").status_code == 200


def test_the_queue_is_bounded_and_a_waiting_job_can_be_dismissed(server):
    jobs = [server.start(paths=["wide"], tile=64)["jobID"] for _ in range(3)]
    full = server.client.post("/processes/remove-clouds/execution", json={"inputs": {"paths": ["small"]}})
    assert full.status_code == 429
    assert int(full.headers["retry-after"]) > 0
    assert full.json()["title"] == "QueueFullError"
    waiting = server.client.delete(f"/jobs/{jobs[2]}").json()
    assert waiting["status"] == "dismissed"
    assert "started" not in waiting
    for job in jobs[:2]:
        server.client.delete(f"/jobs/{job}")
    assert server.wait(server.start(paths=["small"])["jobID"])["status"] == "successful"


def test_a_scene_in_use_is_not_deleted(server):
    scene = server.scene("wide")
    job = server.start(scene=scene, tile=64)["jobID"]
    assert server.client.delete(f"/scenes/{scene}").status_code == 409
    server.client.delete(f"/jobs/{job}")
    assert server.client.delete(f"/scenes/{scene}").status_code == 204
    assert server.client.get(f"/scenes/{scene}").status_code == 404


def test_reading_that_takes_too_long_is_stopped(server):
    scene = server.service.scenes.get(server.scene("wide"))
    asked = {"inputs": server.service.scenes.inputs(scene), "reading": {}}
    with pytest.raises(WorkerError, match=r"more than 0\.001 s"):
        server.service.reader.call("clouds", asked, timeout_s=0.001)
    assert server.client.get(f"/scenes/{scene.id}").status_code == 200


def test_results_expire_with_their_files(tmp_path):
    """A server that is not started: its clock is what is tested."""
    [own, *_] = write_scene(tmp_path / "small", dates=1)
    service = Service(ServeSettings(data=tmp_path, limits=Limits(keep_s=100)))
    try:
        scene = service.scenes.create("folder", "small", paths=("small",))
        unused = service.scenes.create("upload", "forgotten")
        job = service.store.add({"inputs": ["small"], "scene": scene.id}, most=8)
        waiting = service.store.add({"inputs": ["small"]}, most=8)
        place, orphan = service.runner.folder_of(job.id), service.runner.folder_of("unknown")
        for folder in (place, orphan):
            folder.mkdir(parents=True)
            (folder / "clear.tif").write_bytes(b"x")
        service.store.take()
        service.store.end(job.id, "successful", "done", {"outputs": {"clear": "clear.tif"}})
        service.runner.sweep()
        assert (place / "clear.tif").exists()
        assert not orphan.exists()

        before = time.time() - 1000
        service.store._db.execute("UPDATE jobs SET finished = ? WHERE id = ?", (before, job.id))
        for name in (scene.id, unused.id):
            place = service.scenes.files_folder(name).parent
            content = json.loads((place / "scene.json").read_text())
            (place / "scene.json").write_text(json.dumps({**content, "created": before}))
        service.runner.sweep()
        assert not place.exists()
        for name in (scene.id, unused.id):
            with pytest.raises(NotFoundError):
                service.scenes.get(name)
        with pytest.raises(NoSuchJobError):
            service.store.get(job.id)
        assert service.store.get(waiting.id).status == "accepted"
        assert own.exists()  # the user's own files stay
    finally:
        service.stop()


# ---------------------------------------------------------------- the program itself


@pytest.fixture
def program(tmp_path):
    """Starts `sader serve` as a process of its own; what still runs at the end is ended."""
    started = []

    def start():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-m", "sader", "serve", str(tmp_path / "data"), "--port", str(port), "--no-browser"],
            stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        started.append(process)
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        end = time.monotonic() + 30
        while True:
            try:
                client.get("/conformance")
                return process, client
            except httpx.TransportError:
                assert time.monotonic() < end
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.05)

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stderr.close()


def wait(client, job, until, seconds=60):
    end = time.monotonic() + seconds
    while not until(said := client.get(f"/jobs/{job}").json()):
        assert time.monotonic() < end, said
        time.sleep(0.05)
    return said


def children_of(process):
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=False
    )
    return [int(text) for text in found.stdout.split()]


@pytest.mark.slow
def test_a_job_survives_kill_9_of_the_server(tmp_path, program):
    write_scene(tmp_path / "data" / "wide", size=128)
    first, client = program()
    asked = {"inputs": {"paths": ["wide"], "tile": 64}}
    job = client.post("/processes/remove-clouds/execution", json=asked, headers={"Prefer": "respond-async"}).json()[
        "jobID"
    ]
    wait(client, job, lambda said: said["progress"] > 35)
    children = children_of(first)
    assert len(children) == 3  # reader, finder, worker
    first.kill()
    first.wait()
    end = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{child}/exe") for child in children):  # the processes end with the server
        assert time.monotonic() < end
        time.sleep(0.05)
    _, client = program()
    done = wait(client, job, lambda said: said["status"] not in ("accepted", "running"))
    assert done["status"] == "successful"
    assert any("resuming" in text for text in done["sader:notices"])  # finished rows of tiles are not computed again
    assert client.get(f"/jobs/{job}/results/clear").content[:2] in (b"II", b"MM")


def test_ctrl_c_ends_the_server_and_its_children(program):
    process, _ = program()
    children = children_of(process)
    assert children
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) in (0, 130, -signal.SIGINT)
    assert not any(os.path.exists(f"/proc/{child}/exe") for child in children)


def test_two_servers_in_one_folder_exclude_each_other(tmp_path, program):
    program()
    done = subprocess.run(
        [sys.executable, "-m", "sader", "serve", str(tmp_path / "data"), "--port", "0", "--no-browser"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "another server uses" in done.stderr


def test_a_port_in_use_and_an_unusable_folder_are_clear_errors(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "sader", "serve", str(tmp_path / "d"), "--port", port, "--no-browser"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert "--port" in done.stderr
    (tmp_path / "file").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "sader", "serve", str(tmp_path / "file"), "--port", "0", "--no-browser"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------- the tables


def test_the_store_keeps_jobs_and_gives_up_in_the_end(tmp_path):
    store = JobStore(tmp_path / "jobs.sqlite")
    job = store.add({"inputs": []}, most=2)
    store.add({"inputs": []}, most=2)
    with pytest.raises(QueueFullError, match="2 jobs"):
        store.add({"inputs": []}, most=2)
    assert store.take().id == job.id
    store.advance(job.id, 40, "half")
    store.advance(job.id, 20, "back?")
    assert store.get(job.id).progress == 40
    for _ in range(2):
        store.close()
        store = JobStore(tmp_path / "jobs.sqlite")
        store.restart(most_attempts=3)
        assert store.get(job.id).status == "accepted"
        assert store.take().id == job.id
    store.restart(most_attempts=3)
    gone = store.get(job.id)
    assert gone.status == "failed"
    assert "3 times" in gone.message
    assert not store.end(job.id, "successful", "late")
    assert store.expire(time.time() + 1) == [job.id]
    with pytest.raises(NoSuchJobError):
        store.get(job.id)
    store.close()


def test_scenes_are_limited_and_their_names_are_checked(tmp_path):
    scenes = SceneStore(DataFolder(tmp_path), Limits(scenes=2))
    first = scenes.create("upload", "a")
    scenes.create("upload", "b")
    with pytest.raises(TooLargeError, match="2 scenes"):
        scenes.create("upload", "c")
    assert scenes.get(first.id) == first
    for name in ("..", "../x", "", "A" * 24, "0" * 24):
        with pytest.raises(NotFoundError):
            scenes.get(name)
    scenes.delete(first.id)
    assert len(scenes.all()) == 1


def drawn(server: Running, scene: str, layer: str, **query: object) -> np.ndarray:
    answer = server.client.get(f"/scenes/{scene}/layers/{layer}", params=query)
    assert answer.status_code == 200, answer.text
    return np.asarray(Image.open(io.BytesIO(answer.content)).convert("RGBA"))


@pytest.fixture(scope="module")
def land(server: Running) -> str:
    """A scene of procedural land, 128 x 128 pixels, on three dates."""
    from sader.data.synthetic.scene import make_series
    from sader.geo.read.raster import write_geotiff

    series = make_series(5, size=(128, 128), coverage=0.2)
    place = {"bands": series.bands, "crs": "EPSG:32632", "transform": (10.0, 0.0, 600_000.0, 0.0, -10.0, 5_100_000.0)}
    (server.data / "land").mkdir()
    for day, image in zip((10, 15, 20), series.cloudy, strict=True):
        write_geotiff(server.data / "land" / f"S2_2022-07-{day}.tif", image, **place)
    return server.scene("land")


def test_masks_of_dates_follow_threshold_growth_and_haze(server, land):
    scene = land
    shares = server.client.get(f"/scenes/{scene}/clouds").json()
    hidden = [drawn(server, scene, f"mask-{date}")[..., 3] > 0 for date in range(3)]
    assert [mask.mean() for mask in hidden] == pytest.approx(shares, abs=1e-4)
    assert hidden[0].shape == (128, 128)
    narrow, wide = (drawn(server, scene, "mask-0", growth=growth)[..., 3] > 0 for growth in (0, 12))
    assert narrow.sum() < hidden[0].sum() < wide.sum()
    assert not (narrow & ~wide).any()
    strict, loose = (drawn(server, scene, "mask-0", threshold=at)[..., 3] > 0 for at in (0.95, 0.05))
    assert strict.sum() < loose.sum()
    thick = drawn(server, scene, "mask-0", haze="keep")[..., 3] > 0
    assert 0 < thick.sum() < hidden[0].sum()
    half = drawn(server, scene, "mask-0", factor="2")[..., 3] > 0
    assert half.shape == (64, 64)
    assert (half == hidden[0][1::2, 1::2]).all()
    assert server.client.get(f"/scenes/{scene}/layers/mask-9").status_code == 404
    for wrong in ({"threshold": 1}, {"growth": 65}, {"growth": -1}, {"haze": "some"}):
        assert server.client.get(f"/scenes/{scene}/layers/mask-0", params=wrong).status_code == 400


def test_a_job_uses_threshold_growth_and_haze(server, land):
    reports = [
        server.wait(server.start(scene=land, reference="2022-07-10", **settings)["jobID"])
        for settings in ({"mask_growth": 0, "cloud_threshold": 0.95}, {"haze": "keep"}, {"haze": "remove"})
    ]
    strict, kept, removed = (report["sader:report"]["pixels"]["reconstructed"] for report in reports)
    assert strict < removed
    assert kept != removed  # the masks of all dates change, and with them the refined one


def test_files_are_named_after_the_date_and_the_report_is_downloaded(server, finished):
    _, job = finished
    date = server.wait(job)["sader:report"]["date"]
    assert date in ("2022-03-10", "2022-03-15", "2022-03-20")
    for output, suffix in (("clear", "tif"), ("uncertainty", "tif"), ("report", "html")):
        answer = server.client.get(f"/jobs/{job}/results/{output}")
        assert answer.headers["content-disposition"] == f'attachment; filename="sader_{date}_{output}.{suffix}"'
    assert answer.headers["content-type"].startswith("text/html")
    assert "Cloud removal" in answer.text
    # No page of another origin's content is shown by this server: the browser stores it.
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
