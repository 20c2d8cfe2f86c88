"""Faults of a running server: killed processes, deleted scenes, incomplete requests, wrong tokens, models kept."""

from __future__ import annotations

import io
import os
import signal
import socket
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlparse

import httpx
import numpy as np
import pytest
from PIL import Image

from sader.errors import OutputError
from sader.viewer.problems import ConflictError, NotFoundError, WorkerError
from sader.viewer.scenes import SceneStore
from sader.viewer.security import guard
from sader.viewer.security.folder import DataFolder
from sader.viewer.security.guard import Sessions
from sader.viewer.settings import Limits, ServeSettings
from sader.viewer.worker import work
from sader.viewer.worker.process import _NotTaken

from ..geo.conftest import make_safe_fixture  # noqa: F401 - a fixture
from .conftest import LIMITS, serving, write_date, write_scene

TOKEN = "a-token-that-only-the-owner-has"


# ---------------------------------------------------------------- worker processes


def test_a_request_right_after_the_reader_was_killed_is_answered(server):
    """Without a pause: the server has not noticed the death when it writes the request."""
    scene = server.scene("small")
    os.kill(server.service.reader.pid, signal.SIGKILL)
    assert server.client.get(f"/scenes/{scene}").status_code == 200


def test_a_request_during_which_the_process_dies_is_not_repeated(server):
    """It may have been the request that ended the process."""
    reader = server.service.reader
    reader.call("models", {})  # it runs
    threading.Timer(0.3, reader.kill).start()
    with pytest.raises(WorkerError, match="SIGKILL"):
        reader.call("clouds", {"inputs": ["wide"], "reading": {}})  # loads the model, which takes longer


def test_a_process_that_cannot_start_is_an_error_and_no_endless_loop(server, monkeypatch):
    reader = server.service.reader
    reader.kill()
    attempts = []
    real = reader._attempt

    def attempt(*arguments):
        attempts.append(1)
        raise _NotTaken

    monkeypatch.setattr(reader, "_attempt", attempt)
    with pytest.raises(WorkerError, match="does not start"):
        reader.call("models", {})
    assert len(attempts) == 2
    monkeypatch.setattr(reader, "_attempt", real)
    assert server.client.get("/conformance").status_code == 200


class Loaded:
    """Counts how often weights are read."""

    def __init__(self, monkeypatch) -> None:
        from sader.geo import remove

        self.names: list[str | None] = []
        real = remove.load_remover

        def load(model, device=None):
            self.names.append(model)
            return real(model, device)

        monkeypatch.setattr(remove, "load_remover", load)


def operations(tmp_path, **changes):
    """The operations of a worker process, in this one."""
    settings = ServeSettings(data=tmp_path, limits=LIMITS, **changes).for_child()
    events: list[dict] = []
    return work.SceneWork(settings, events.append), events


def test_masks_of_products_are_drawn_as_they_are(tmp_path, make_safe):
    product = make_safe(cloud_rows=30)
    done, _ = operations(tmp_path)
    scene = {"inputs": [product.name], "reading": {}, "layer": "mask-0", "job": None}

    def mask(**square: object) -> np.ndarray:
        _, content = done.picture(**scene, square=square)
        return np.asarray(Image.open(io.BytesIO(content)))[..., 3] > 0

    given = mask()
    height, width = given.shape
    assert given[:30].all()  # the classes of cloud, in cells of 20 m
    assert not given[34 : height - 2].any()
    assert (mask(growth=20, threshold=0.9) == given).all()  # settings of estimated masks
    small = mask(factor="4")
    assert small.shape == (-(-height // 4), -(-width // 4))
    assert small[:7].all()


def test_the_model_is_loaded_once_for_all_jobs(tmp_path, monkeypatch):
    write_scene(tmp_path / "small")
    loaded = Loaded(monkeypatch)
    done, events = operations(tmp_path)
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        done.remove(inputs=["small"], reading={}, target=str(number), options={"reference": "auto"})
    assert len(loaded.names) == 1
    shares = [event["progress"] for event in events if event["event"] == "stage"]
    assert max(shares) == 96, "progress comes from the tiles"
    texts = [event["text"] for event in events if event["event"] == "stage"]
    assert texts[:4] == ["checking the files", "loading the model", "removing clouds", "writing the result"]


@pytest.mark.parametrize("name", ["ae", "uncrtaints"])
def test_a_server_with_the_weights_of_a_baseline(tmp_path, name):
    from sader.checkpoint import save_checkpoint
    from sader.inference.remover import CloudRemover

    write_scene(tmp_path / "small")
    (tmp_path / "out").mkdir()
    untrained = CloudRemover.from_preset(name)
    save_checkpoint(tmp_path / f"{name}.safetensors", untrained.model, untrained.config, card={})
    done, _ = operations(tmp_path, model=str(tmp_path / f"{name}.safetensors"))
    shares = done.clouds(inputs=["small"], reading={})
    assert len(shares) == 3
    found = done.remove(inputs=["small"], reading={}, target="out", options={"reference": "auto"})
    assert found["report"]["model"] == name
    assert (tmp_path / "out" / found["outputs"]["clear"]).exists()


def test_an_unknown_operation_ends_no_process(server):
    with pytest.raises(WorkerError, match="KeyError"):
        server.service.reader.call("__class__", {})
    assert server.client.get("/folder").status_code == 200


def test_an_error_of_the_listener_does_not_shift_the_answers(server):
    """The rest of an abandoned request must not be read as the answer to the next one."""
    worker = server.service.runner.worker
    (server.data / "listener").mkdir(exist_ok=True)
    arguments = {"inputs": ["small"], "reading": {}, "target": "listener", "options": {"reference": "auto"}}

    def fail(event):
        raise RuntimeError("listener")

    for _ in range(3):  # a job that another test cancelled may still end the process
        with pytest.raises((RuntimeError, WorkerError)) as caught:
            worker.call("remove", arguments, on_event=fail)
        if isinstance(caught.value, WorkerError):
            continue
        assert str(caught.value) == "listener"
        try:
            assert "sader-s2-rgbn" in worker.call("models", {})[0]
        except WorkerError:
            continue
        return
    pytest.fail("the process was ended three times")


def test_the_queue_survives_errors_of_its_table(server, monkeypatch, capfd):
    """A full disk: the thread that runs the jobs goes on, and the end of a job is stored later."""
    store = server.service.store
    real, failures = sqlite3.Connection.execute, {"UPDATE jobs SET status = ?": 2, "status = 'running', attempts": 2}

    class Database:
        def __init__(self, database):
            self.database = database

        def execute(self, statement, values=()):
            for start in failures:
                if start in statement and failures[start] > 0:
                    failures[start] -= 1
                    raise sqlite3.OperationalError("database or disk is full")
            return real(self.database, statement, values)

        def close(self):
            self.database.close()

    monkeypatch.setattr(store, "_db", Database(store._db))
    job = server.start(paths=["small"])["jobID"]
    assert server.wait(job)["status"] == "successful"
    assert set(failures.values()) == {0}
    assert "disk is full" in capfd.readouterr().err


def test_an_upload_on_a_full_disk_is_a_clear_error(tmp_path):
    scenes = SceneStore(DataFolder(tmp_path), Limits())
    scene = scenes.create("upload", "a")
    upload = scenes.begin_upload(scene.id, "a.tif", None)

    class Full:
        def write(self, chunk):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    upload.file = Full()
    with pytest.raises(OutputError, match="No space left on device"):
        scenes.receive(upload, b"x")
    scenes.end_upload(upload)
    assert list(scenes.files_folder(scene.id).iterdir()) == []


# ---------------------------------------------------------------- scenes that come and go


def test_scenes_deleted_during_uploads_are_not_found(server, tmp_path):
    """Every answer is 201, 404 or 409 whenever the deletion happens; nothing is left behind."""
    content = write_date(tmp_path / "a.tif", 1).read_bytes()

    def pieces(gap):
        for at in range(0, len(content), 4096):
            time.sleep(gap)
            yield content[at : at + 4096]

    def upload(scene, name, gap):
        return httpx.put(f"{server.url}/scenes/{scene}/files/{name}", content=pieces(gap), timeout=60).status_code

    for delay in (0.0, 0.02, 0.05, 0.1, 0.2):
        scene = server.client.post("/scenes", json={}).json()["id"]
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(upload, scene, f"{n}.tif", 0.002 * n) for n in range(4)]
            time.sleep(delay)
            deleted = server.client.delete(f"/scenes/{scene}").status_code
            found = {answer.result() for answer in answers}
        assert found <= {201, 404, 409}, found
        assert deleted == 204
        assert not server.service.scenes.files_folder(scene).parent.exists()


def test_uploads_while_other_scenes_come_and_go(server, tmp_path):
    content = write_date(tmp_path / "a.tif", 1).read_bytes()
    stop = threading.Event()

    def churn():
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while not stop.is_set():
                scene = client.post("/scenes", json={}).json()["id"]
                client.put(f"/scenes/{scene}/files/a.json", content=b"{}")
                assert client.delete(f"/scenes/{scene}").status_code == 204

    threads = [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        scene = server.client.post("/scenes", json={}).json()["id"]
        found = {server.client.put(f"/scenes/{scene}/files/{n}.tif", content=content).status_code for n in range(20)}
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert found == {201}


def test_a_file_that_disappears_while_sizes_are_summed(tmp_path, monkeypatch):
    """The race itself, without luck: a file is listed and gone when its size is read."""
    scenes = SceneStore(DataFolder(tmp_path), Limits())
    scene = scenes.create("upload", "a")
    gone = scenes.files_folder(scene.id) / "gone.tif"
    gone.write_bytes(b"x")
    real = os.stat

    def stat(path, *arguments, **options):
        if str(path).endswith("gone.tif"):
            raise FileNotFoundError(path)
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", stat)
    upload = scenes.begin_upload(scene.id, "b.tif", 10)
    scenes.receive(upload, b"0123456789")
    scenes.keep_upload(upload)
    scenes.end_upload(upload)
    assert (scenes.files_folder(scene.id) / "b.tif").read_bytes() == b"0123456789"


def test_a_scene_deleted_between_the_steps_of_an_upload(tmp_path):
    scenes = SceneStore(DataFolder(tmp_path), Limits())
    scene = scenes.create("upload", "a")
    upload = scenes.begin_upload(scene.id, "a.tif", None)
    scenes.receive(upload, b"x")
    scenes.delete(scene.id)
    scenes.receive(upload, b"y")
    with pytest.raises(NotFoundError):
        scenes.keep_upload(upload)
    scenes.end_upload(upload)
    for act in (lambda: scenes.begin_upload(scene.id, "b.tif", None), lambda: scenes.inputs(scene)):
        with pytest.raises(NotFoundError):
            act()
    other = scenes.create("upload", "b")
    twice = [scenes.begin_upload(other.id, "a.tif", None) for _ in range(2)]
    scenes.keep_upload(twice[0])
    with pytest.raises(ConflictError):
        scenes.keep_upload(twice[1])


def test_folders_that_are_no_scenes_are_swept_and_take_no_place(tmp_path):
    scenes = SceneStore(DataFolder(tmp_path), Limits(scenes=2))
    kept = scenes.create("upload", "a")
    for name in ("0" * 24, ".new-" + "1" * 24, ".deleted-1"):
        (scenes.home / name / "files").mkdir(parents=True)
    scenes.create("upload", "b")  # two scenes, as the limit allows
    scenes.expire(0.0, keep=())
    assert len(list(scenes.home.iterdir())) == 2
    assert scenes.get(kept.id) == kept


# ---------------------------------------------------------------- connections


def connect(server):
    where = urlparse(server.url)
    return socket.create_connection((where.hostname, where.port), timeout=60)


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"GET /conformance HTTP/1.1\r\nHost: localhost\r\n",
        b"GET /conformance HTTP/1.1\r\nHost: localhost\r\n\r\nGET /conf",
        b"POST /scenes HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n{",
    ],
    ids=["nothing", "header", "second header", "body"],
)
def test_an_incomplete_request_is_closed(server, start):
    begun = time.monotonic()
    with connect(server) as line:
        line.sendall(start)
        answer = b""
        while piece := line.recv(10_000):
            answer += piece
    assert time.monotonic() - begun < 15
    if b"POST" in start:
        assert answer.startswith(b"HTTP/1.1 408")
    assert server.client.get("/conformance").status_code == 200


def test_many_incomplete_requests_are_closed_while_others_are_answered(server):
    lines = [connect(server) for _ in range(300)]
    try:
        for line in lines:
            line.sendall(b"GET /conformance HTTP/1.1\r\nHost: localhost\r\nX: ")
        assert server.client.get("/conformance").status_code == 200
        end = time.monotonic() + 60
        for line in lines:
            line.settimeout(max(0.1, end - time.monotonic()))
            assert line.recv(100) == b""
    finally:
        for line in lines:
            line.close()


def test_an_upload_that_stops_is_refused_and_removed(server):
    scene = server.client.post("/scenes", json={}).json()["id"]
    with connect(server) as line:
        head = f"PUT /scenes/{scene}/files/a.tif HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
        line.sendall(head.encode() + b"II*\0")
        assert line.recv(1000).startswith(b"HTTP/1.1 408")
    assert list(server.service.scenes.files_folder(scene).iterdir()) == []


def test_an_upload_whose_client_disconnects_is_removed(server, capfd):
    scene = server.client.post("/scenes", json={}).json()["id"]
    folder = server.service.scenes.files_folder(scene)
    with connect(server) as line:
        head = f"PUT /scenes/{scene}/files/a.tif HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
        line.sendall(head.encode() + b"II*\0")
        end = time.monotonic() + 30
        while not list(folder.iterdir()):
            assert time.monotonic() < end
            time.sleep(0.01)
    while list(folder.iterdir()):
        assert time.monotonic() < end + 30
        time.sleep(0.01)
    assert "Traceback" not in capfd.readouterr().err


def test_wrong_tokens_are_slowed_down(tmp_path):
    with serving(ServeSettings(data=tmp_path, port=0, token=TOKEN, limits=LIMITS)) as server:
        begun = time.monotonic()
        answers = [
            server.client.get("/jobs", headers={"Authorization": f"Bearer wrong{n}"}).status_code for n in range(100)
        ]
        compared = answers.count(401)
        assert compared <= guard.WRONG_TOKENS + (time.monotonic() - begun) * guard.WRONG_TOKENS_PER_S + 1
        assert set(answers) == {401, 429}
        assert server.client.post("/session", json={"token": "wrong"}).status_code == 429
        # The owner gets in again after a moment.
        end = time.monotonic() + 30
        while server.client.get("/jobs", headers={"Authorization": f"Bearer {TOKEN}"}).status_code != 200:
            assert time.monotonic() < end
            time.sleep(0.2)


def test_wrong_tokens_of_one_address_do_not_lock_out_another(monkeypatch):
    sessions = Sessions(TOKEN)
    for _ in range(guard.WRONG_TOKENS):
        assert sessions.accepts("wrong", "attacker") is False
    assert sessions.accepts(TOKEN, "attacker") is None
    assert sessions.accepts(TOKEN, "owner") is True
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 5)
    assert sessions.accepts(TOKEN, "attacker") is True
    for number in range(guard.MOST_SESSIONS + 10):
        sessions.accepts("wrong", f"address {number}")
    assert len(sessions._wrong) <= guard.MOST_SESSIONS
