"""Attention over dates: which axis is time, what a missing date may do (nothing), and that places stay places."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sader.model.attention import (
    TemporalAttention,
    TemporalFusion,
    attend_over_dates,
    masked_mean,
    pool_available,
)


def randomise(module: nn.Module, seed: int = 0, scale: float = 0.2) -> nn.Module:
    """Return `module` with noise added to every parameter: a layer that starts at zero would hide what it does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return module


def without_norms(module: nn.Module) -> nn.Module:
    """Return `module` with its group norms replaced: they see the whole frame, and would hide who depends on whom."""
    for name, child in module.named_children():
        if isinstance(child, nn.GroupNorm):
            setattr(module, name, nn.Identity())
        else:
            without_norms(child)
    return module


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def everything(b: int, t: int, h: int, w: int) -> Tensor:
    return torch.ones(b, t, h, w, dtype=torch.bool)


def test_constant_per_date_stack_shows_which_axis_is_time():
    """Values that are t in every channel and place of date t: the result is the mean of t under the weights, in every
    channel. Any mix-up of time with channels or places would give something else."""
    b, t, d, h, w = 2, 4, 5, 3, 6
    values = torch.arange(float(t)).view(1, t, 1, 1, 1).expand(b, t, d, h, w)
    query, keys = draw(b, 7, h, w), draw(b, t, 7, h, w, seed=1)
    found = attend_over_dates(query, keys, values, everything(b, t, h, w))
    weights = torch.empty(b, t, h, w)
    for date in range(t):
        weights[:, date] = (query * keys[:, date]).sum(dim=1) / 7**0.5
    expected = (weights.softmax(dim=1) * torch.arange(float(t)).view(1, t, 1, 1)).sum(dim=1, keepdim=True)
    torch.testing.assert_close(found, expected.expand(b, d, h, w))
    assert expected.std() > 0.1


def test_attention_picks_the_date_whose_key_fits():
    keys = 100 * torch.eye(3).view(1, 3, 3, 1, 1).expand(1, 3, 3, 2, 2)
    values = draw(1, 3, 5, 2, 2)
    wanted = torch.tensor([[0, 1], [2, 1]])
    query = nn.functional.one_hot(wanted, 3).permute(2, 0, 1)[None].float()
    found = attend_over_dates(query, keys, values, everything(1, 3, 2, 2))
    for row in range(2):
        for col in range(2):
            torch.testing.assert_close(found[0, :, row, col], values[0, wanted[row, col], :, row, col])


@pytest.mark.parametrize("axis_size", [(3, 5), (7, 2)])
def test_one_changed_pixel_of_one_date_changes_that_pixel_only(axis_size):
    module = without_norms(randomise(TemporalAttention(16, key_width=8)))
    h, w = axis_size
    frames = draw(1, 3, 16, h, w)
    changed = frames.clone()
    changed[0, 1, :, 2, 1] += 1
    with torch.no_grad():
        before, keys, values = module(frames, everything(1, 3, h, w))
        after, keys_after, values_after = module(changed, everything(1, 3, h, w))
    moved = (after != before).any(dim=1)[0]
    assert moved.nonzero().tolist() == [[2, 1]]
    # Keys and values of the other dates are untouched: key t belongs to date t.
    for a, b in ((keys, keys_after), (values, values_after)):
        assert (a != b).any(dim=2)[0].nonzero().tolist() == [[1, 2, 1]]


def test_values_are_the_normalised_features_of_their_date():
    module = randomise(TemporalAttention(16, key_width=8))
    frames = draw(2, 3, 16, 4, 5)
    _, keys, values = module(frames, everything(2, 3, 4, 5))
    for date in range(3):
        normalised = module.norm(frames[:, date])
        torch.testing.assert_close(values[:, date], normalised)
        torch.testing.assert_close(keys[:, date], module.to_query_key(normalised)[:, 8:])


def fusion(patches: str = "depth") -> TemporalFusion:
    module = TemporalFusion(6, width=16, value_width=32, factor=4, emb_width=8, key_width=8, patches=patches)
    return randomise(module, 3)


def fusion_inputs(t: int = 4) -> dict[str, Tensor]:
    return {
        "frames": draw(2, t, 6, 8, 12),
        "keys": draw(2, t, 8, 2, 3, seed=1),
        "values": draw(2, t, 32, 2, 3, seed=2),
        "available": everything(2, t, 8, 12),
        "available_low": everything(2, t, 2, 3),
        "emb": draw(2, 8, seed=3),
    }


@pytest.mark.parametrize("patches", ["depth", "pool"])
def test_order_of_dates_does_not_matter_to_the_fusion(patches):
    inputs, order = fusion_inputs(), torch.tensor([2, 0, 3, 1])
    module = fusion(patches)
    permuted = {key: value if key == "emb" else value[:, order] for key, value in inputs.items()}
    with torch.no_grad():
        torch.testing.assert_close(module(**permuted), module(**inputs), rtol=1e-4, atol=1e-5)
        # Moving the keys without their frames is another series.
        half = {**inputs, "keys": inputs["keys"][:, order]}
        assert not torch.allclose(module(**half), module(**inputs), atol=1e-4)


@pytest.mark.parametrize("patches", ["depth", "pool"])
def test_masked_date_has_no_influence_on_the_fusion(patches):
    module, inputs = fusion(patches), fusion_inputs()
    inputs["available"][:, 2] = inputs["available_low"][:, 2] = False
    other = {key: value.clone() for key, value in inputs.items()}
    for key in ("frames", "keys", "values"):
        other[key][:, 2] = 1000.0
    keep = [0, 1, 3]
    without = {key: value if key == "emb" else value[:, keep] for key, value in inputs.items()}
    with torch.no_grad():
        expected = module(**inputs)
        assert torch.equal(module(**other), expected)
        torch.testing.assert_close(module(**without), expected, rtol=1e-5, atol=1e-5)
        everyone = {**inputs, "available": everything(2, 4, 8, 12), "available_low": everything(2, 4, 2, 3)}
        assert not torch.allclose(module(**everyone), expected, atol=1e-4)


def test_fusion_places_stay_in_place():
    """A change in one key cell reaches the output around that cell only (two 3x3 convolutions, no norm)."""
    module = without_norms(fusion())
    module.cross_norm.forward = lambda x, emb: x  # AdaLN sees the whole map
    inputs = fusion_inputs()
    changed = {key: value.clone() for key, value in inputs.items()}
    changed["values"][0, 1, :, 0, 0] += 1
    with torch.no_grad():
        moved = (module(**changed) != module(**inputs)).any(dim=1)
    assert moved[0, :4, :4].any()
    assert not moved[0, :, 8:].any()  # the third cell of the row is beyond the 3x3 neighbourhood of the first
    assert not moved[1].any()


def test_masked_mean_counts_available_dates_per_pixel():
    frames = torch.tensor([1.0, 2.0, 6.0]).view(1, 3, 1, 1, 1).expand(1, 3, 2, 1, 3)
    available = torch.tensor([[[[True, True, False]], [[True, False, False]], [[True, True, False]]]])
    assert masked_mean(frames, available)[0, 1, 0].tolist() == [3.0, 3.5, 0.0]


def test_pooled_availability_is_any_pixel_of_the_cell():
    available = torch.zeros(1, 2, 4, 8, dtype=torch.bool)
    available[0, 1, 3, 5] = True
    pooled = pool_available(available, 4)
    assert pooled.dtype == torch.bool
    assert pooled[0].tolist() == [[[False, False]], [[False, True]]]
    assert pool_available(available, 1) is available
