"""The plugin in a real QGIS: installed from its archive, run by `qgis_process` and by PyQGIS."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import sader
from sader.demo import CRS, TRANSFORM, demo_scene

# The script `qgis_process` of Debian 12 hands an option of the window on, with which the program fails.
QGIS_PROCESS = shutil.which("qgis_process.bin") or shutil.which("qgis_process")
PYTHON = "/usr/bin/python3"
"""The Python that Debian's QGIS uses."""
SIZE = 128
"""Rows and columns of the demo that are used."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(QGIS_PROCESS is None, reason="no QGIS found: its tests were not run (Debian: apt install qgis)"),
]


@pytest.fixture(scope="module")
def environment(archive, tmp_path_factory) -> dict[str, str]:
    """A new profile of QGIS with the plugin, and the tool of this source tree as its command."""
    profile = tmp_path_factory.mktemp("profile")
    plugins = profile / "profiles" / "default" / "python" / "plugins"
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(plugins)
    command = profile / "sader"
    source = Path(sader.__file__).parents[1]
    command.write_text(
        f'#!/bin/sh\nPYTHONPATH="{source}" OMP_NUM_THREADS=1 exec "{sys.executable}" -m sader "$@"\n', encoding="utf-8"
    )
    command.chmod(0o755)
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    settings = {
        "QGIS_CUSTOM_CONFIG_PATH": str(profile), "QT_QPA_PLATFORM": "offscreen", "XDG_RUNTIME_DIR": str(profile),
        "SADER_COMMAND": str(command), "PLUGINS": str(plugins),
    }  # fmt: skip
    made = {**own, **settings}
    enabled = subprocess.run(
        [str(QGIS_PROCESS), "plugins", "enable", "sader"], env=made, capture_output=True, text=True
    )
    assert "* sader" in enabled.stdout, enabled.stdout + enabled.stderr
    return made


@pytest.fixture(scope="module")
def dates(tmp_path_factory) -> Path:
    """Three dates of the demo as GeoTIFFs."""
    from sader.geo.read.raster import write_geotiff

    folder, scene = tmp_path_factory.mktemp("dates"), demo_scene()
    for day, image in zip(("2020-06-10", "2020-07-10", "2020-09-08"), scene.cloudy, strict=True):
        part = image[:, :SIZE, :SIZE]
        write_geotiff(folder / f"S2_{day}.tif", part, bands=scene.bands, crs=CRS, transform=TRANSFORM)
    return folder


def process(environment: dict[str, str], *words: str | Path) -> subprocess.CompletedProcess[str]:
    given = [str(QGIS_PROCESS), "--json", "run", *(str(word) for word in words)]
    return subprocess.run(given, env=environment, capture_output=True, text=True, check=False, timeout=300)


def test_remove_runs_in_qgis_process(environment, dates, tmp_path):
    out = tmp_path / "clear.tif"
    inputs = [f"INPUT={path}" for path in sorted(dates.glob("*.tif"))]
    done = process(
        environment,
        *("sader:remove", "--", *inputs, "REFERENCE=2020-06-10"),
        *("EXTENT=400000,401000,6699200,6700000 [EPSG:32635]", f"OUTPUT={out}"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout)["results"]
    assert results == {"OUTPUT": str(out), "LAYERS": [str(out), str(tmp_path / "clear_provenance.tif")]}
    import rasterio

    with rasterio.open(out) as file:
        assert file.descriptions == ("B02", "B03", "B04", "B08")
        assert file.crs.to_string() == CRS
        # 100 x 80 pixels, and what the box around them in degrees adds
        assert 100 <= file.width < 110
        assert 80 <= file.height < 90


def test_an_error_of_the_tool_is_that_of_the_algorithm(environment, dates, tmp_path):
    done = process(
        environment, "sader:remove", "--", f"FOLDER={dates}", "REFERENCE=1999-01-01", f"OUTPUT={tmp_path}/a.tif"
    )
    assert done.returncode != 0
    assert "reference is '1999-01-01', which fits none of the dates" in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


def _heed_interrupts() -> None:
    """Undo what a shell does to commands in the background: they ignore interrupts, and so do all they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def session(environment, dates, tmp_path_factory) -> dict:
    """What `session.py` saw."""
    if subprocess.run([PYTHON, "-c", "import qgis.core"], capture_output=True, env=environment).returncode:
        pytest.skip(f"{PYTHON} has no qgis module (Debian: apt install python3-qgis)")
    out = tmp_path_factory.mktemp("out")
    words = [PYTHON, str(Path(__file__).with_name("session.py")), environment["PLUGINS"], str(dates), str(out)]
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, check=False, timeout=600, preexec_fn=_heed_interrupts
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_a_cancelled_run_is_continued(session):
    first, second = session["cancelled"], session["continued"]
    assert first["results"] == {}
    assert first["layers"] == {}
    assert first["files"] == [".late.tif.sader"]
    assert "continues from here" in first["log"]
    assert "note: resuming a previous run" in second["log"]
    assert second["results"]["OUTPUT"].endswith("late.tif")
    assert second["layers"].keys() == {"late.tif", "late_provenance.tif"}
    assert second["layers"]["late_provenance.tif"]["legend"] == ["observed", "reconstructed"]
    assert second["files"] == ["late.json", "late.tif", "late_provenance.tif", "late_provenance.tif.aux.xml"]


def test_layers_of_a_result_have_their_styles(session):
    seen = session["remove"]
    side = {f"clear_{name}.tif" for name in ("uncertainty", "count", "masks", "provenance", "source_date")}
    assert seen.keys() - {"S2_2020-06-10.tif"} == {"clear.tif", *side}
    assert [name for name in seen if name in side and seen[name]["visible"]] == []
    assert seen["clear.tif"]["visible"]
    assert seen["clear.tif"]["bands"] == [3, 2, 1]
    red, blue = seen["clear.tif"]["limits"]
    assert red == blue
    assert red[0] < red[1]
    assert seen["clear_provenance.tif"]["legend"] == ["observed", "reconstructed"]
    assert seen["clear_masks.tif"]["legend"] == ["clear", "cloud or shadow"]
    assert seen["clear_uncertainty.tif"]["renderer"] == "singlebandpseudocolor"
    assert seen["clear_uncertainty.tif"]["legend"][-1] == "0.08 reflectance"
    dates = [text for text in seen["clear_source_date.tif"]["legend"] if text.startswith("2020-")]  # of the file itself
    assert dates == ["2020-06-10", "2020-07-10"]
    assert seen["clear_count.tif"]["legend"][0] == "0: no clear date"


def test_dates_of_a_series_have_their_days_and_one_stretch(session):
    seen = session["series"]
    days = ["2020-06-10", "2020-07-10", "2020-09-08"]
    assert sorted(seen) == [f"{day}.tif" for day in days]
    assert [seen[f"{day}.tif"]["day"] for day in days] == days
    assert len({tuple(seen[name]["limits"][0]) for name in seen}) == 1


def test_masks_are_loaded_with_their_classes(session):
    seen = session["mask"]
    assert len(seen) == 3
    for name, layer in seen.items():
        assert name.endswith("_mask.tif")
        assert layer["legend"][:2] == ["clear land", "thick cloud"]
        assert len(layer["legend"]) == 6
