"""`--scenes`: scenes of lists, folders and catalogues; failures, retries, object storage, killed workers.

The cluster of most tests is one of threads in this process; processes and the S3 server are real in two of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sader
from sader.cli.main import main
from sader.errors import ConfigError, DataError, OutputError
from sader.geo.batch import task as worker_side
from sader.geo.batch.catalogue import SceneInputs, find_scenes
from sader.geo.batch.report import BatchReport, SceneOutcome
from sader.geo.batch.run import BatchSettings
from sader.geo.batch.task import may_pass, stored_bytes
from sader.geo.read.geotiff import open_geotiff
from sader.geo.scene.resume import describe_source
from sader.geo.scene.run import check_output

rasterio = pytest.importorskip("rasterio")
copyfiles = pytest.importorskip("rasterio.shutil").copyfiles
pytest.importorskip("distributed")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "batch.py"
DAYS = ("2022-03-10", "2022-04-10")


@pytest.fixture
def scenes(tmp_path, write_date, land) -> Path:
    """Three folders of two dates."""
    for number in range(3):
        for date, day in enumerate(DAYS):
            counts = land(date + number, size=(40, 50))
            counts[:, 5:20, 10 * date : 10 * date + 9] = 9000
            write_date(tmp_path / "scenes" / f"place_{number}" / f"S2_{day}.tif", counts)
    return tmp_path / "scenes"


@pytest.fixture
def run(tiny_file, monkeypatch):
    """Run many scenes with the tiny model on threads of this process."""
    monkeypatch.setattr("sader.geo.batch.run.RETRY_SECONDS", 0.01)

    def call(scenes: Path, out: Path | str, **options: Any) -> BatchReport:
        given = {"dask": "local", "model": str(tiny_file), "device": "cpu", "tile": 32, "threads": 1, **options}
        return sader.remove_scenes(scenes, out, **given)

    return call


def read(path: Any) -> np.ndarray:
    with rasterio.open(path) as dataset:
        return dataset.read()


# ------------------------------------------------------------------------------------------------ catalogues


def test_each_folder_is_a_scene(tmp_path):
    for name in ("b", "a", ".hidden"):
        (tmp_path / name).mkdir()
    (tmp_path / "note.txt").touch()
    assert find_scenes(tmp_path) == [SceneInputs(name, (str(tmp_path / name),)) for name in "ab"]


def test_safe_products_are_grouped_by_tile(tmp_path, make_safe):
    first = make_safe(day="20220310", folder=tmp_path, bands=("B02",))
    second = make_safe(day="20220410", folder=tmp_path, bands=("B02",))
    assert find_scenes(tmp_path) == [SceneInputs("T32TMS", (str(first), str(second)))]


def test_a_list_holds_one_scene_a_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one").mkdir()
    file = tmp_path / "list.txt"
    file.write_text("# places\none\n\nfarm = 'my files/a.tif' s3://bucket/b.tif\n/vsis3/x/c.tif\n", encoding="utf-8")
    found = find_scenes(file)
    assert [one.name for one in found] == ["one", "farm", "c"]
    assert found[0].inputs == (str(tmp_path / "one"),)
    assert found[1].inputs == (str(tmp_path / "my files" / "a.tif"), "s3://bucket/b.tif")
    assert [one.is_remote for one in found] == [False, True, True]
    file.write_text("a/2022.tif\nb/2022.tif\n", encoding="utf-8")
    assert [one.name for one in find_scenes(file)] == ["a_2022", "b_2022"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = \n", "line 1"),
        ("'a\n", "line 1"),
        ("x = a\nx = b\n", "several scenes with the name x"),
        ("#\n", "no scene"),
    ],
)
def test_a_list_that_cannot_be_used_is_refused(tmp_path, text, message):
    (tmp_path / "list.txt").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        find_scenes(tmp_path / "list.txt")
    with pytest.raises(DataError, match="there is no"):
        find_scenes(tmp_path / "nowhere")


@pytest.mark.parametrize("key", ["grid:code", "s2:mgrs_tile", None])
def test_items_are_grouped_by_place(tmp_path, make_item, key):
    files = []
    for tile, day in (("32TMS", "20220310"), ("32TMT", "20220310"), ("32TMS", "20220410")):
        properties = {} if key is None else {key: f"MGRS-{tile}" if key == "grid:code" else tile}
        files.append(make_item(day, tile=tile, bands=("B02", "B04"), folder=tmp_path, properties=properties))
    items = [json.loads(file.read_text()) for file in files]
    if key is None:
        items[1]["bbox"] = [8, 46, 8.02, 46.02]
    (tmp_path / "all.json").write_text(json.dumps({"type": "FeatureCollection", "features": items}))
    found = find_scenes(tmp_path / "all.json")
    assert [[item["id"][4:] for item in one.items["features"]] for one in found] == [
        ["32TMS_20220310_0_L2A", "32TMS_20220410_0_L2A"],
        ["32TMT_20220310_0_L2A"],
    ]
    assert key is None or [one.name for one in found] == ["32TMS", "32TMT"]
    assert found[0].items["features"][0]["assets"]["blue"]["href"] == str(tmp_path / "S2A_32TMS_20220310_0_L2A/B02.tif")


def test_a_catalogue_of_results_is_one_scene_for_each_collection(tmp_path, scenes, run):
    pystac = pytest.importorskip("pystac")
    run(scenes, tmp_path / "out", series=True)
    catalog = pystac.Catalog("all", "two places")
    for name in ("place_0", "place_1"):
        catalog.add_child(pystac.Collection.from_file(str(tmp_path / "out" / name / "collection.json")))
    catalog.normalize_and_save(str(tmp_path / "catalogue"), catalog_type="SELF_CONTAINED")
    found = find_scenes(tmp_path / "catalogue")
    assert [(one.name, len(one.items["features"])) for one in found] == [("place_0", 2), ("place_1", 2)]


# ------------------------------------------------------------------------------------------------ runs


def test_each_scene_equals_its_own_run(tmp_path, scenes, run, tiny):
    report = run(scenes, tmp_path / "out", provenance=True, price=3600.0)
    assert [one.status for one in report.scenes] == ["done"] * 3, report.as_text()
    for number in range(3):
        folder = scenes / f"place_{number}"
        with warnings.catch_warnings(action="ignore"):
            sader.remove_files(tiny, [folder], tmp_path / f"{number}.tif", provenance=True, tile=32, threads=1)
        assert np.array_equal(read(tmp_path / f"{number}.tif"), read(tmp_path / "out" / f"place_{number}.tif"))
    stored = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (stored["done"], stored["failed"], stored["open"]) == (3, 0, 0)
    assert stored["cost"] == pytest.approx(stored["core_seconds"], rel=1e-3)
    assert stored["bytes_in"] == sum(path.stat().st_size for path in scenes.rglob("*.tif"))
    written = [path for path in (tmp_path / "out").glob("place*") if ".aux." not in path.name]
    assert stored["bytes_out"] == sum(path.stat().st_size for path in written)
    assert (tmp_path / "out" / "run.txt").read_text().startswith("3 scenes: 3 done; ")
    collection = json.loads((tmp_path / "out" / "collection.json").read_text())
    assert sorted(link["href"] for link in collection["links"] if link["rel"] == "item")[0] == "./place_0.json"


def test_a_second_run_computes_what_is_missing_or_changed(tmp_path, scenes, run, write_date, land):
    first = run(scenes, tmp_path / "out")
    (tmp_path / "out" / "place_0.tif").unlink()
    (tmp_path / "out" / "place_0.json").unlink()
    write_date(scenes / "place_1" / f"S2_{DAYS[0]}.tif", land(9, size=(40, 50)))
    again = run(scenes, tmp_path / "out")
    assert [one.status for one in first.scenes] == ["done"] * 3
    assert [one.status for one in again.scenes] == ["done", "failed", "unchanged"]
    assert "exists" in again.scenes[1].reason
    assert again.scenes[1].attempts == 1
    last = run(scenes, tmp_path / "out", overwrite=True)
    assert [one.status for one in last.scenes] == ["done"] * 3


def test_a_bad_scene_does_not_stop_the_others(tmp_path, scenes, tiny_file, capsys):
    (scenes / "place_1" / f"S2_{DAYS[0]}.tif").write_text("no image")
    (scenes / "empty").mkdir()
    words = f"remove --scenes {scenes} -o {tmp_path / 'out'} --dask local --model {tiny_file} --device cpu"
    with pytest.raises(SystemExit) as ended:
        main([*words.split(), "--tile", "32", "--threads", "1"])
    assert ended.value.code == 1
    out, err = capsys.readouterr()
    assert out.startswith("4 scenes: 2 done, 2 failed; ")
    assert "failed: place_1 (1 attempt): DataError: cannot read" in out
    assert "failed: empty (1 attempt): DataError:" in out
    assert "place_1 failed" in " ".join(err.split())
    stored = json.loads((tmp_path / "out" / "run.json").read_text())
    assert {one["name"]: one["status"] for one in stored["scenes"]} == {
        "empty": "failed",
        "place_0": "done",
        "place_1": "failed",
        "place_2": "done",
    }


def test_errors_that_may_pass_are_tried_again(tmp_path, scenes, run, monkeypatch):
    calls: dict[str, int] = {}
    real = worker_side.run_remove

    def sometimes(request: Any, **more: Any) -> Any:
        name = Path(request.out).stem
        calls[name] = calls.get(name, 0) + 1
        if name == "place_0" or (name == "place_1" and calls[name] < 3):
            raise MemoryError("no memory")
        return real(request, **more)

    monkeypatch.setattr(worker_side, "run_remove", sometimes)
    report = run(scenes, tmp_path / "out", retries=2)
    assert calls == {"place_0": 3, "place_1": 3, "place_2": 1}
    assert [(one.status, one.attempts) for one in report.scenes] == [("failed", 3), ("done", 3), ("done", 1)]
    assert report.scenes[0].reason == "MemoryError: no memory"
    assert "sometimes" in report.scenes[0].details


def test_which_errors_may_pass():
    local, remote = SceneInputs("a", ("/a.tif",)), SceneInputs("a", ("s3://b/a.tif",))
    assert not may_pass(DataError("damaged"), local)
    assert may_pass(DataError("no answer"), remote)
    assert not may_pass(ConfigError("wrong"), remote)
    assert not may_pass(OutputError("exists"), local)
    full = OutputError("cannot write")
    full.__cause__ = OSError("full")
    assert may_pass(full, local)


def test_a_series_of_each_scene(tmp_path, scenes, run):
    report = run(scenes, tmp_path / "out", series=True)
    assert [one.status for one in report.scenes] == ["done"] * 3, report.as_text()
    for number in range(3):
        names = sorted(path.name for path in (tmp_path / "out" / f"place_{number}").glob("*"))
        assert names == ["2022-03-10.json", "2022-03-10.tif", "2022-04-10.json", "2022-04-10.tif", "collection.json"]
    assert [one.status for one in run(scenes, tmp_path / "out", series=True).scenes] == ["unchanged"] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preview": "a.png"}, "--preview"),
        ({"inputs": ["a.tif"]}, "no other input"),
        ({"workers": 2}, "--workers"),
        ({"workers": 0, "dask": None}, "workers is 0"),
        ({"retries": -1}, "retries is -1"),
        ({"modle": "x"}, "did you mean model"),
        ({"out": "clear.tif"}, "needs a folder"),
        ({"out": "https://host/x"}, "s3://"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, scenes, run, options, message):
    out = options.pop("out", tmp_path / "out")
    with pytest.raises((ConfigError, OutputError), match=message):
        run(scenes, out, **options)


def test_the_text_lists_failures_and_cost():
    failed = [SceneOutcome(f"s{n}", "failed", reason="broken", attempts=3, seconds=36.0, cores=0) for n in range(25)]
    report = BatchReport("out", (*failed, SceneOutcome("t", "done", seconds=10, cores=4)), "", 60.0, price=2.0)
    assert (report.core_seconds, report.gpu_seconds) == (40, 900)
    text = report.as_text()
    assert text.splitlines()[:2] == [
        "26 scenes: 1 done, 25 failed; 60.0 s",
        "40.0 core seconds, 900.0 GPU seconds, 0.0 MB in, 0.0 MB out, cost 0.5222 at 2 an hour",
    ]
    assert text.count("failed: ") == 20
    assert text.endswith("and 5 more")
    assert BatchSettings("x").retries == 2


@pytest.mark.slow
def test_killed_workers_lose_nothing():
    command = [sys.executable, str(SCRIPT), "--scenes", "6", "--every", "3", "--model", "tiny"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "12 images equal in every byte, nothing lost" in done.stdout


# ------------------------------------------------------------------------------------------------ object storage


@pytest.fixture(scope="module")
def storage() -> Iterator[str]:
    """An S3 server in a process of its own; GDAL holds Python's lock while it writes. Yields its address."""
    pytest.importorskip("moto")
    pytest.importorskip("flask_cors")
    program = (
        "import sys; from moto.server import ThreadedMotoServer\n"
        "server = ThreadedMotoServer('127.0.0.1', 0, verbose=False); server.start()\n"
        "print(server.get_host_and_port()[1], flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", program], text=True, **pipes)
    assert process.stdout is not None
    address = f"127.0.0.1:{int(process.stdout.readline())}"
    try:
        yield address
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def bucket(storage, monkeypatch) -> str:
    """The name of a new bucket that GDAL can use."""
    settings = {
        "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1",
        "AWS_S3_ENDPOINT": storage, "AWS_HTTPS": "NO", "AWS_VIRTUAL_HOSTING": "FALSE",
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{time.monotonic_ns()}"
    urllib.request.urlopen(urllib.request.Request(f"http://{storage}/{name}", method="PUT"), timeout=30)
    return name


@pytest.mark.slow
def test_inputs_and_outputs_on_object_storage(tmp_path, scenes, run, bucket, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = []
    for folder in sorted(scenes.iterdir()):
        for file in folder.iterdir():
            copyfiles(str(file), f"/vsis3/{bucket}/in/{folder.name}/{file.name}")
        lines.append(" ".join([f"{folder.name} =", *(f"s3://{bucket}/in/{folder.name}/S2_{day}.tif" for day in DAYS)]))
    (tmp_path / "list.txt").write_text("\n".join([*lines, f"missing = s3://{bucket}/in/none.tif"]))
    out = f"s3://{bucket}/clear"
    report = run(tmp_path / "list.txt", out, provenance=True, retries=1)
    assert [one.status for one in report.scenes] == ["done", "done", "done", "failed"], report.as_text()
    assert report.scenes[3].attempts == 2
    local = run(scenes, tmp_path / "local", provenance=True)
    for one in local.scenes:
        for name in (f"{one.name}.tif", f"{one.name}_provenance.tif"):
            assert np.array_equal(read(tmp_path / "local" / name), read(f"/vsis3/{bucket}/clear/{name}"))
    item = json.loads((tmp_path / "clear" / "place_0.json").read_text())
    assert item["assets"]["data"]["href"] == f"{out}/place_0.tif"
    sources = [link["href"] for link in item["links"] if link["rel"] == "derived_from"]
    assert sources == [f"s3://{bucket}/in/place_0/S2_{day}.tif" for day in DAYS]
    assert (tmp_path / "clear" / "collection.json").is_file()
    sizes = [stored_bytes(f"/vsis3/{bucket}/in/place_0/S2_{day}.tif") for day in DAYS]
    whole = sum((scenes / "place_0" / f"S2_{day}.tif").stat().st_size for day in DAYS)
    assert 0.7 * whole < sum(sizes) < whole
    again = run(tmp_path / "list.txt", out, provenance=True, retries=0)
    assert [one.status for one in again.scenes] == ["unchanged", "unchanged", "unchanged", "failed"]
    other = run(tmp_path / "list.txt", out, provenance=True, retries=0, seed=1)
    assert [one.status for one in other.scenes] == ["done", "done", "done", "failed"]


@pytest.mark.parametrize("out", ["s3://bucket/clear.tif", "/vsis3/bucket/clear.tif"])
def test_one_scene_is_not_written_to_object_storage(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputError, match="--scenes"):
        check_output(out, overwrite=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_series_on_object_storage(tmp_path, scenes, run, bucket, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = run(scenes, f"s3://{bucket}/clean", series=True)
    assert [one.status for one in report.scenes] == ["done"] * 3, report.as_text()
    assert read(f"/vsis3/{bucket}/clean/place_2/{DAYS[1]}.tif").shape == (4, 40, 50)
    assert (tmp_path / "clean" / "place_2" / "collection.json").is_file()
    assert [one.status for one in run(scenes, f"s3://{bucket}/clean", series=True).scenes] == ["unchanged"] * 3


def test_a_remote_date_is_identified_by_its_address(scenes, bucket):
    found = []
    for name in ("a", "b"):
        copyfiles(str(scenes / "place_0" / f"S2_{DAYS[0]}.tif"), f"/vsis3/{bucket}/{name}/x.tif")
        found.append(describe_source(open_geotiff(f"/vsis3/{bucket}/{name}/x.tif", name="x.tif")[0]))
    assert found[0] != found[1]
