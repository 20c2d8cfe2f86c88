"""Burn scars in the batches of `tools/masks/train_head.py`."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

SERIES, DATES = 12, 3


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "masks"))
    try:
        import train_head
    finally:
        del sys.path[0]
    return train_head


def burnt(tool: ModuleType, reference: int, share: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return vegetation with a lake and a clouded corner, before and after the fire."""
    generator = torch.Generator().manual_seed(seed)
    land = torch.tensor([0.04, 0.06, 0.05, 0.30])[:, None, None] * (1 + 0.1 * torch.rand(64, 64, generator=generator))
    land[:, :16] = 0.03
    dates, clear = land.expand(SERIES, DATES, 4, 64, 64).clone(), torch.ones(SERIES, DATES, 64, 64, dtype=torch.bool)
    dates[..., 48:] = 0.7
    clear[..., 48:] = False
    anchor = torch.full((SERIES,), reference)
    return dates, tool.with_scars(dates, clear, anchor, share=share, generator=generator)


def test_near_infrared_falls_and_visible_bands_hardly_change(tool: ModuleType) -> None:
    before, after = burnt(tool, reference=0)
    change = after - before
    core = change[:, :, 3] < -0.1
    assert 0.02 < core.float().mean() < 0.4
    assert change[:, :, :3].abs().amax(2)[core].mean() < 0.2 * -change[:, :, 3][core].mean()
    edges = (change[:, :, 3] < -0.01) & (change[:, :, 3] > -0.1)
    assert edges.sum() > 0.05 * core.sum()


def test_water_and_clouds_stay(tool: ModuleType) -> None:
    before, after = burnt(tool, reference=0)
    assert torch.equal(before[..., :16, :], after[..., :16, :])
    assert torch.equal(before[..., 48:], after[..., 48:])


def test_a_scar_is_on_one_date_or_on_all_but_one(tool: ModuleType) -> None:
    before, after = burnt(tool, reference=1)
    scarred = (before != after).flatten(2).any(dim=2)
    count = scarred.sum(dim=1)
    assert set(count.tolist()) == {1, DATES - 1}
    single = scarred[count == 1].float().argmax(dim=1)
    assert (single == 1).float().mean() >= 0.5


def test_the_share_of_the_series_is_kept(tool: ModuleType) -> None:
    before, after = burnt(tool, reference=0, share=0.0)
    assert torch.equal(before, after)
