"""Tiles: they cover everything and blend to what was cut."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from sader.errors import ConfigError
from sader.inference.tiling import Blend, Window, blend_weights, plan_windows

SIZES = [(100, 130, 32, 8), (33, 32, 32, 16), (64, 64, 32, 0), (5, 90, 32, 16), (32, 32, 32, 16), (97, 31, 16, 7)]


@pytest.mark.parametrize(("height", "width", "tile", "overlap"), SIZES)
def test_windows_cover_everything_and_stay_inside(height, width, tile, overlap):
    windows = plan_windows(height, width, tile=tile, overlap=overlap)
    seen = np.zeros((height, width), dtype=int)
    for window in windows:
        assert window.row >= 0
        assert window.col >= 0
        assert window.row + window.height <= height
        assert window.col + window.width <= width
        assert (window.height, window.width) == (min(tile, height), min(tile, width))
        seen[window.slices] += 1
    assert seen.min() >= 1
    assert len({(w.row, w.col) for w in windows}) == len(windows)
    # Neighbours share at least `overlap` pixels along each axis.
    for starts in (sorted({w.row for w in windows}), sorted({w.col for w in windows})):
        assert all(b - a <= tile - overlap for a, b in itertools.pairwise(starts))


def test_an_image_no_larger_than_a_tile_is_one_tile():
    assert plan_windows(20, 32, tile=32, overlap=16) == [Window(0, 0, 20, 32)]


@pytest.mark.parametrize("overlap", [-1, 17])
def test_impossible_overlap_is_refused(overlap):
    with pytest.raises(ConfigError, match=rf"overlap {overlap} with tile 32; expected 0 <= overlap <= tile / 2"):
        plan_windows(64, 64, tile=32, overlap=overlap)


@pytest.mark.parametrize(("height", "width", "tile", "overlap"), SIZES)
def test_weights_are_positive_and_fall_only_towards_neighbours(height, width, tile, overlap):
    for window in plan_windows(height, width, tile=tile, overlap=overlap):
        weight = blend_weights(window, height=height, width=width, overlap=overlap)
        assert weight.shape == (window.height, window.width)
        assert weight.min() > 0
        assert weight.max() <= 1
        rows, cols = weight.max(axis=1), weight.max(axis=0)
        first, last = window.row == 0, window.row + window.height == height
        assert (rows[0] == rows.max()) == (first or overlap == 0)
        assert (rows[-1] == rows.max()) == (last or overlap == 0)
        first, last = window.col == 0, window.col + window.width == width
        assert (cols[0] == cols.max()) == (first or overlap == 0)
        assert (cols[-1] == cols.max()) == (last or overlap == 0)


@pytest.mark.parametrize(("height", "width", "tile", "overlap"), SIZES)
def test_an_image_cut_in_tiles_is_given_back(height, width, tile, overlap):
    rows, cols = np.mgrid[:height, :width].astype(np.float32)
    image = np.stack([np.full_like(rows, 0.25), rows / 100, 0.3 - cols / 77]).astype(np.float32)
    blend = Blend(3, Window(0, 0, height, width), shape=(height, width), overlap=overlap)
    for window in plan_windows(height, width, tile=tile, overlap=overlap):
        blend.add(window, torch.from_numpy(image[(slice(None), *window.slices)]))
    np.testing.assert_allclose(blend.result(), image, atol=1e-6)


def test_a_step_between_two_tiles_becomes_a_ramp_over_the_overlap():
    left, right = plan_windows(32, 48, tile=32, overlap=16)
    blend = Blend(1, Window(0, 0, 32, 48), shape=(32, 48), overlap=16)
    blend.add(left, torch.zeros((1, 32, 32)))
    blend.add(right, torch.ones((1, 32, 32)))
    row = blend.result()[0, 10].numpy()
    assert (row[:16] == 0).all()
    assert (row[32:] == 1).all()
    np.testing.assert_allclose(np.diff(row[16:32]), 1 / 16, atol=1e-5)


def test_rolling_rows_and_chunks_have_the_bits_of_the_whole():
    shape, tile, overlap = (70, 90), 32, 8
    windows = plan_windows(*shape, tile=tile, overlap=overlap)
    planes = {
        window: torch.randn((2, 32, 32), generator=torch.Generator().manual_seed(n)) for n, window in enumerate(windows)
    }
    whole = Blend(2, Window(0, 0, *shape), shape=shape, overlap=overlap)
    for window in windows:
        whole.add(window, planes[window])
    chunk = Window(20, 31, 17, 40)
    part = Blend(2, chunk, shape=shape, overlap=overlap)
    rolling, rows = Blend(2, Window(0, 0, tile, 90), shape=shape, overlap=overlap), []
    starts = sorted({window.row for window in windows})
    for start, end in zip(starts, [*starts[1:], 70], strict=True):
        for window in windows:
            if window.row == start:
                rolling.add(window, planes[window])
        rows.append(rolling.result(end - start))
        rolling.advance(end - start)
        resumed = Blend(2, rolling.area, shape=shape, overlap=overlap)
        resumed.restore(rolling.total, rolling.weight)
        rolling = resumed
    for window in windows:
        part.add(window, planes[window])
    assert torch.equal(torch.cat(rows, dim=1), whole.result())
    assert torch.equal(part.result(), whole.result()[:, *chunk.slices])
