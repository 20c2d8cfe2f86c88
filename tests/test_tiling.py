"""Tiles: they cover everything and blend to what was cut."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

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
    blend = Blend(3, height, width, overlap=overlap)
    for window in plan_windows(height, width, tile=tile, overlap=overlap):
        blend.add(window, image[(slice(None), *window.slices)])
    np.testing.assert_allclose(blend.result(), image, atol=1e-6)


def test_a_step_between_two_tiles_becomes_a_ramp_over_the_overlap():
    left, right = plan_windows(32, 48, tile=32, overlap=16)
    blend = Blend(1, 32, 48, overlap=16)
    blend.add(left, np.zeros((1, 32, 32), dtype=np.float32))
    blend.add(right, np.ones((1, 32, 32), dtype=np.float32))
    row = blend.result()[0, 10]
    assert (row[:16] == 0).all()
    assert (row[32:] == 1).all()
    np.testing.assert_allclose(np.diff(row[16:32]), 1 / 16, atol=1e-5)
