"""The seam detector finds steps at tile edges and nothing else; results of `sader remove` have none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sader.checkpoint import Checkpoint
from sader.data.synthetic.scene import make_place, make_series
from sader.geo.align import build_stack
from sader.geo.read.sources import open_sources
from sader.geo.scene.run import SceneOptions, clear_scene
from sader.geo.seams import find_seams
from sader.inference.remover import CloudRemover
from sader.inference.tiling import Window, plan_windows

BANDS = ("B02", "B03", "B04", "B08")
SQUARES = [Window(row, col, 96, 96) for row in (0, 96, 192) for col in (0, 96, 192)]


@pytest.fixture(scope="module")
def place() -> np.ndarray:
    """(4, 288, 288): fields, roads, a river, towns."""
    return make_place(3, size=(288, 288), bands=BANDS, dates=1).surface[0]


def test_nothing_on_flat_or_evenly_rising_ground():
    flat = np.full((4, 288, 288), 0.2, np.float32)
    slope = flat + np.linspace(0, 0.3, 288, dtype=np.float32)
    for image in (flat, slope, flat + np.random.default_rng(0).normal(0, 0.002, flat.shape)):
        found = find_seams(image, SQUARES)
        assert found.edges > 0
        assert not found.found, found


def test_nothing_on_land_that_was_never_tiled(place):
    found = find_seams(place, SQUARES)
    assert not found.found, found


@pytest.mark.parametrize("step", [0.004, 0.01])
def test_tiles_of_another_brightness_are_found(place, step):
    """A step of 0.004 is 40 counts: hardly visible."""
    shifted = place.copy()
    for number, window in enumerate(SQUARES):
        shifted[:, *window.slices] += step * (number % 2)
    assert find_seams(shifted, SQUARES).found


def test_one_bad_edge_is_enough(place):
    shifted = place.copy()
    shifted[:, 96:192, 96:192] += 0.02
    assert find_seams(shifted, SQUARES).found


def test_nodata_is_left_out(place):
    holed = place.copy()
    holed[:, 90:100] = np.nan
    assert not find_seams(holed, SQUARES).found
    assert find_seams(np.full((1, 288, 288), np.nan), SQUARES).edges == 0


# ------------------------------------------------------------------------------------------------ real results


def quiet(text: str) -> None:
    """Take a notice and do nothing with it."""


def cleared(tmp_path: Any, write_date: Any, cloudy: np.ndarray, mask: np.ndarray, remover: CloudRemover) -> np.ndarray:
    """Write the dates and masks, clear the first, return reflectance (C, H, W)."""
    rasterio = pytest.importorskip("rasterio")
    counts = np.clip(np.rint(cloudy * 10000), 1, 65535).astype(np.uint16)
    paths = [write_date(tmp_path / f"S2_2022-0{n + 3}-10.tif", array) for n, array in enumerate(counts)]
    masks = [
        write_date(tmp_path / f"m{n}.tif", one[None].astype(np.uint8), bands=None, nodata=None)
        for n, one in enumerate(mask)
    ]
    stack = build_stack(open_sources(paths, mask=masks), remover.config.network, notice=quiet)
    out = tmp_path / f"clear{remover.options.tile}.tif"
    clear_scene(stack, remover, out, SceneOptions(reference=0, overwrite=True), notice=quiet)
    with rasterio.open(out) as dataset:
        return dataset.read() * np.float32(1e-4)


def shipped(tile: int, overlap: int) -> CloudRemover:
    remover = CloudRemover.from_pretrained(device="cpu")
    options = replace(remover.options, tile=tile, overlap=overlap)
    return CloudRemover(Checkpoint(remover.denoiser, remover.config, remover.card), device="cpu", options=options)


def test_two_tile_sizes_agree_and_show_no_seam(tmp_path, write_date):
    """With the shipped weights, on a scene like a real one: below 0.005 RMSE; normalisation sees the tile."""
    series = make_series(21, size=(288, 288), dates=3, coverage=(0.35, 0.2, 0.2), reference=0)
    results = {
        tile: cleared(tmp_path, write_date, series.cloudy, series.cloud_mask, shipped(tile, 32)) for tile in (128, 192)
    }
    difference = results[128] - results[192]

    assert float(np.sqrt(np.mean(difference**2))) < 0.005
    hidden = series.cloud_mask[0]
    assert 0 < float(np.sqrt(np.mean(difference[:, hidden] ** 2))) < 0.01
    for tile, image in results.items():
        found = find_seams(image, plan_windows(288, 288, tile=tile, overlap=32))
        assert not found.found, (tile, found)


def test_a_cloud_larger_than_a_tile_shows_no_seam(tmp_path, write_date):
    """The middle tiles see nothing of the reference date: its light must come from the scene.

    Tile 96 and a cloud of 200 pixels stand for tile 512 and a cloud of 700, at a tenth of the time.
    """
    place = make_place(11, size=(320, 320), bands=BANDS, dates=3, days=(0, 10, 20), start=170).surface
    cloudy = np.stack([place[0], 0.85 * place[1] + 0.02, 1.1 * place[2]]).astype(np.float32)
    truth = cloudy[0].copy()
    rows, cols = np.mgrid[:320, :320]
    mask = np.zeros((3, 320, 320), bool)
    mask[0] = np.hypot(rows - 160, cols - 150) < 105
    cloudy[0][:, mask[0]] = 0.6
    made = cleared(tmp_path, write_date, cloudy, mask, shipped(96, 24))
    found = find_seams(made, plan_windows(320, 320, tile=96, overlap=24))
    assert not found.found, found
    # The middle is in the light of the reference, not in that of the dates it was made from.
    middle = np.hypot(rows - 160, cols - 150) < 60
    bias = (made - truth)[:, middle].mean(axis=1)
    unmatched = (0.5 * (cloudy[1] + cloudy[2]) - truth)[:, middle].mean(axis=1)
    assert np.abs(bias).max() < 0.012
    assert np.abs(bias).mean() < 0.7 * np.abs(unmatched).mean()
