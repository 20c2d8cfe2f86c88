"""Single parts: names to paths, statuses of errors, pictures."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import sader
from sader import errors
from sader.errors import BandError, DataError, OutputError
from sader.geo.grid import Grid
from sader.viewer import problems
from sader.viewer.problems import (
    STATUS,
    ForbiddenError,
    NotFoundError,
    RequestError,
    error_named,
    for_clients,
    problem,
    status_of,
)
from sader.viewer.schema import Square
from sader.viewer.security.folder import DataFolder, upload_name
from sader.viewer.worker import pictures

from .conftest import write_date


def test_every_error_of_the_package_has_a_status():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.SaderError)]
    for kind in kinds:
        assert kind in STATUS, kind
    assert status_of(BandError("x")) == 422
    assert status_of(problems.NoSuchJobError("x")) == 404
    assert status_of(ZeroDivisionError("x")) == 500


def test_messages_of_unexpected_errors_are_not_sent():
    said = problem(OSError("/home/someone/secret"))
    assert said["status"] == 500
    assert "secret" not in said["detail"]
    assert isinstance(error_named("DataError", "x"), DataError)
    assert isinstance(error_named("SystemExit", "x"), problems.WorkerError)


def test_the_data_folder(tmp_path):
    folder = DataFolder(tmp_path / "data")
    (folder.root / "a").mkdir()
    (folder.root / "a" / "b.tif").write_bytes(b"")
    assert folder.find("a/b.tif") == folder.root / "a" / "b.tif"
    assert folder.relative(folder.find("a")) == "a"
    with pytest.raises(NotFoundError):
        folder.find("a/c.tif")
    (folder.root / "loop").symlink_to(folder.root / "loop")
    for name in ("../data/a", "a/../../data", ".sader", "", ".", "/", "loop"):
        with pytest.raises((ForbiddenError, NotFoundError)):
            folder.find(name)
    # A linked folder is followed, as readers do: what it holds must lie inside, and not be the server's.
    (folder.root / "c").mkdir()
    (folder.root / "c" / "linked").symlink_to(folder.root / "a")
    assert list(folder.files_below(folder.root / "c")) == [folder.root / "a" / "b.tif"]
    (tmp_path / "outside.json").write_text("{}")
    (folder.state / "jobs").write_text("")
    for target, text in ((tmp_path, "outside the data folder"), (folder.state, "own files")):
        (folder.root / "a" / "more").symlink_to(target)
        with pytest.raises(ForbiddenError, match=text):
            list(folder.files_below(folder.root / "c"))
        (folder.root / "a" / "more").unlink()
    other = tmp_path / "other"
    other.mkdir()
    (other / ".sader").symlink_to(tmp_path)
    with pytest.raises(OutputError, match="symbolic link"):
        DataFolder(other)
    # A folder whose name merely begins like the data folder's is another one.
    (tmp_path / "data2").mkdir()
    with pytest.raises(ForbiddenError):
        folder.inside(tmp_path / "data2")


def test_names_of_uploads():
    assert upload_name("S2A 2022-03-10 (1).tif") == "S2A 2022-03-10 (1).tif"
    for name in ("", "a/b.tif", "..tif", ".tif", "a\n.tif", "é.tif"):
        with pytest.raises((RequestError, ForbiddenError)):
            upload_name(name)


def test_squares_cover_the_scene_and_no_more():
    grid = Grid("EPSG:32632", (10.0, 0.0, 0.0, 0.0, -10.0, 0.0), 1100, 600)
    seen = np.zeros((600, 1100), int)
    for row in range(2):
        for column in range(3):
            small, window = pictures.window_of(Square(column=column, row=row), grid)
            assert small is grid
            seen[window.row : window.row + window.height, window.col : window.col + window.width] += 1
    assert (seen == 1).all()
    with pytest.raises(NotFoundError):
        pictures.window_of(Square(column=3), grid)
    assert pictures.window_of(Square(factor="4"), grid)[1].width == 275


def test_colours_show_what_they_say():
    values = np.array([[[0.05, 0.4, 0.2]], [[0.05, 0.05, 0.2]]], np.float32)  # NIR, red: water, forest, bare
    valid = np.array([[True, True, False]])
    shown = pictures.colours(values, valid, "ndvi", pictures.NDVI_RANGE)
    assert shown[0, :, 3].tolist() == [255, 255, 0]
    assert shown[0, 1, 1] > shown[0, 1, 0]  # forest is green
    codes = pictures.provenance_colours(np.array([[0, 1, 2]]))
    assert codes[0, :, 3].tolist() == [0, 0, 150]
    spread = pictures.spread_colours(np.array([[0.0, 0.03, np.nan]], np.float32))
    assert spread[0, 0, 3] == 0
    assert spread[0, 1, 3] > 200
    assert spread[0, 2, 3] == 0
    with pytest.raises(BandError, match="B08"):
        pictures.combination(("B02", "B03", "B04"), "false")
    assert pictures.possible(("B02", "B03", "B04")) == ["true"]


def test_the_numbers_of_the_page_are_those_of_the_files(server, finished):
    """The values of the API equal those read with rasterio."""
    import rasterio

    scene, job = finished
    said = server.client.get(f"/scenes/{scene}/values", params={"column": 40, "row": 9, "job": job}).json()
    with rasterio.open(server.data / "small" / "S2_2022-03-15.tif") as dataset:
        expected = dataset.read()[:, 9, 40] * 1e-4
    assert said["dates"][1] == pytest.approx(expected.tolist(), abs=1e-4)
    with rasterio.open(server.service.runner.folder_of(job) / "clear.tif") as dataset:
        assert said["result"] == pytest.approx((dataset.read()[:, 9, 40] * 1e-4).tolist(), abs=1e-4)
        x, y = dataset.xy(9, 40)
    assert (said["place"]["x"], said["place"]["y"]) == (x, y)
    assert server.client.get(f"/scenes/{scene}/values", params={"column": 64, "row": 0}).status_code == 404


def test_a_scene_with_a_band_that_the_model_lacks(server):
    """The result may lack the band; the API states and draws the bands it has."""
    import rasterio

    for day in (10, 15):
        path = write_date(server.data / "more" / f"S2_2022-03-{day}.tif", day)
        with rasterio.open(path) as dataset:
            image, profile = dataset.read(), dataset.profile
        with rasterio.open(path, "w", **{**profile, "count": 5}) as dataset:
            dataset.write(np.concatenate([image, image[:1]]))
            dataset.descriptions = ("B02", "B03", "B04", "B08", "B11")
    scene = server.scene("more")
    assert server.client.get(f"/scenes/{scene}").json()["bands"][-1] == "B11"
    job = server.start(scene=scene)["jobID"]
    done = server.wait(job)
    assert done["status"] == "successful"
    has = done["sader:report"]["bands"]
    said = server.client.get(f"/scenes/{scene}/values", params={"column": 3, "row": 3, "job": job}).json()
    assert said["bands"] == [band for band in ("B02", "B03", "B04", "B08", "B11") if band in has]
    assert len(said["result"]) == len(said["dates"][0]) == len(has)
    assert server.client.get(f"/scenes/{scene}/layers/result", params={"job": job}).status_code == 200


def test_the_server_itself_is_light_and_opens_no_raster():
    """Torch and rasterio are loaded by the worker processes only."""
    program = (
        "import sys, sader.viewer.app; print([name for name in ('torch', 'rasterio', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def messages(files: str) -> list[str]:
    """The texts in source files, without docstrings."""
    found = []
    for path in Path(sader.__file__).parent.glob(files):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        stated = [id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)]
        texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
        found += [node.value for node in texts if id(node) not in stated]
    return found


@pytest.mark.parametrize("files", ["geo/*.py", "geo/read/*.py", "geo/scene/*.py", "geo/stac/*.py", "inference/*.py"])
def test_messages_for_clients_have_no_words_of_the_command_line(files):
    texts = [for_clients(text) for text in messages(files)]
    assert len(texts) > 100
    wrong = [text for text in texts if re.search(r"(?<![\w-])--[a-z]|\brio |\bcommand", text)]
    assert wrong == []


def test_options_become_inputs_of_that_name():
    assert for_clients("Give --offset none or --offset -1000.") == "Give offset none or offset -1000."
    assert for_clients("a--b, 1 -- 2") == "a--b, 1 -- 2"
    assert for_clients("filled. --min-count 1 writes nodata instead, --count shows where.") == "filled."
