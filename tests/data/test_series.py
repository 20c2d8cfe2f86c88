"""The batch and the seeded symmetries."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from sader.data.batch import SeriesBatch, keyed_generator, turn
from sader.errors import ShapeError
from sader.model.blocks import to_model_range, to_reflectance


def make_batch(b: int = 2, t: int = 3, c: int = 4, h: int = 5, w: int = 7) -> SeriesBatch:
    pixels = torch.arange(h * w).view(h, w)
    return SeriesBatch(
        cloudy=torch.rand(b, t, c, h, w),
        clear=torch.rand(b, c, h, w),
        scored=(pixels % 2 == 0).expand(b, h, w),
        hidden=(pixels % 3 == 0).expand(b, h, w),
        cloud_mask=torch.zeros(b, t, h, w, dtype=torch.bool),
        labels=torch.zeros(b, t, h, w, dtype=torch.uint8),
        valid=torch.ones(b, t, h, w, dtype=torch.bool),
        present=torch.ones(b, t, dtype=torch.bool),
        reference=torch.zeros(b, dtype=torch.long),
        days=None,
        band_present=torch.ones(b, c, dtype=torch.bool),
    )


def test_ranges_are_inverse_and_anchored() -> None:
    x = torch.tensor([0.0, 0.25, 1.0, 1.3])
    assert to_model_range(x).tolist() == pytest.approx([-1, -0.5, 1, 1.6])
    assert torch.allclose(to_reflectance(to_model_range(x)), x)
    assert isinstance(to_model_range(np.zeros(2)), np.ndarray)


def test_wrong_shapes_are_named() -> None:
    batch = make_batch()
    with pytest.raises(ShapeError, match=r"hidden is \(2, 4, 7\); expected \(2, 5, 7\)"):
        dataclasses.replace(batch, hidden=batch.hidden[:, :4])
    with pytest.raises(ShapeError, match=r"cloudy has 4 dimensions"):
        dataclasses.replace(batch, cloudy=batch.cloudy[:, 0])


def test_eight_symmetries_differ_and_turn_all_images_alike() -> None:
    image = torch.arange(9.0).view(3, 3)
    assert len({tuple(turn(image, k).flatten().tolist()) for k in range(8)}) == 8
    assert torch.equal(turn(image.expand(2, 3, 3), 5)[1], turn(image, 5))
    with pytest.raises(ShapeError, match="symmetry is 8"):
        turn(image, 8)


def test_keyed_generators_differ_by_the_whole_key() -> None:
    assert keyed_generator(1, 2).random() != keyed_generator(2, 1).random()
    assert keyed_generator(1, 2).random() == keyed_generator(1, 2).random()
