"""The seam detector finds steps at tile edges and nothing else; results of `sader remove` have none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sader.checkpoint import Checkpoint
from sader.data.synthetic.scene import make_place, make_series
from sader.geo.align import build_stack
from sader.geo.read.masks import with_masks
from sader.geo.read.sources import open_sources
from sader.geo.scene.run import SceneOptions, clear_scene
from sader.inference.remover import CloudRemover
from sader.inference.tiling import Window, plan_windows

BANDS = ("B02", "B03", "B04", "B08")
SQUARES = [Window(row, col, 96, 96) for row in (0, 96, 192) for col in (0, 96, 192)]


NEAR, FAR = 4, 28
"""Parallel lines this many pixels away are the measure; nearer ones would see the seam too."""
DEPTH = 2
"""Pixels averaged on each side of a line."""
FEWEST = 16
"""Pixels an edge must have on both sides to count."""
FLOOR = 2e-5
"""Smallest usual step, in reflectance: a fifth of a count of Sentinel-2."""
EXCESS_LIMIT, WORST_LIMIT = 1.3, 1.5
"""Where there is no seam the tile edges are lines like any other, and both figures stay near or below 1."""


@dataclass(frozen=True)
class Seams:
    """What the detector found."""

    excess: float
    """Root mean square step at the tile edges, over that of the same pattern of lines moved aside (its 95th
    percentile over the moves)."""
    worst: float
    """The largest step at one edge, over the largest at any line beside an edge."""
    edges: int
    """How many edges of tiles were looked at, each band for itself."""

    @property
    def found(self) -> bool:
        """Whether tiles show."""
        return self.edges > 0 and (self.excess > EXCESS_LIMIT or self.worst > WORST_LIMIT)


def find_seams(image: NDArray[np.floating], windows: Sequence[Window]) -> Seams:
    """Return the seams of an image (C, H, W) that was made in `windows`; NaN is left out."""
    found: list[NDArray[np.float64]] = []
    for window in windows:
        rows, cols = window.slices
        for line in (window.row, window.row + window.height):
            found += _scores(image[:, :, cols], line)
        for line in (window.col, window.col + window.width):
            found += _scores(np.swapaxes(image[:, rows], 1, 2), line)
    if not found:
        return Seams(0.0, 0.0, 0)
    scores = np.stack(found)  # (edges, lines); the middle line is the edge itself
    beside = np.abs(np.arange(-FAR, FAR + 1)) >= NEAR
    moved = np.sqrt(np.nanmean(scores[:, beside] ** 2, axis=0))
    excess = np.sqrt(np.mean(scores[:, FAR] ** 2)) / max(float(np.percentile(moved, 95)), 1.0)
    worst = np.abs(scores[:, FAR]).max() / max(float(np.nanmax(np.abs(scores[:, beside]))), 1.0)
    return Seams(float(excess), float(worst), len(scores))


def _scores(strip: NDArray[np.floating], line: int) -> list[NDArray[np.float64]]:
    """Return the steps across the lines around row `line` of a strip (C, H, w), in usual steps: one row per band."""
    height = strip.shape[1]
    if line - FAR - DEPTH < 0 or line + FAR + DEPTH > height:
        return []
    part = strip[:, line - FAR - DEPTH : line + FAR + DEPTH].astype(np.float64)
    steps = np.stack([_step(part, DEPTH + at) for at in range(2 * FAR + 1)], axis=1)  # (C, lines)
    made = []
    for one in steps:
        if not np.isfinite(one[FAR]) or np.isfinite(one).sum() < FAR:
            continue
        # Land that brightens evenly steps everywhere alike: what counts is how far a line differs from its like.
        usual = np.nanmedian(one)
        spread = 1.4826 * np.nanmedian(np.abs(one - usual))
        made.append((one - usual) / max(float(spread), FLOOR))
    return made


def _step(part: NDArray[np.float64], line: int) -> NDArray[np.float64]:
    """Return the mean step (C,) from the rows above a line to the rows below it; NaN where too few are known."""
    with np.errstate(invalid="ignore"):
        difference = part[:, line : line + DEPTH].mean(axis=1) - part[:, line - DEPTH : line].mean(axis=1)
    known = np.isfinite(difference)
    count = known.sum(axis=1)
    total = np.where(known, difference, 0.0).sum(axis=1)
    return np.where(count >= FEWEST, total / np.maximum(count, 1), np.nan)


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
    stack = build_stack(with_masks(open_sources(paths), masks), remover.config.network, notice=quiet)
    out = tmp_path / f"clear{remover.options.tile}.tif"
    clear_scene(stack, remover, out, SceneOptions(reference=0, overwrite=True), notice=quiet)
    with rasterio.open(out) as dataset:
        return dataset.read() * np.float32(1e-4)


def shipped(tile: int, overlap: int) -> CloudRemover:
    remover = CloudRemover.from_pretrained(device="cpu")
    options = replace(remover.options, tile=tile, overlap=overlap)
    return CloudRemover(Checkpoint(remover.denoiser, remover.config, remover.card), device="cpu", options=options)


@pytest.mark.slow
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


@pytest.mark.slow
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
