"""What a training step minimises: only what is known counts, and a dropped band is a band that was never given."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sader.data.batch import SeriesBatch
from sader.model.mtcdn import MTCDNConfig
from sader.models import ModelConfig, build_model, small
from sader.training.objective import Objective, ObjectiveConfig, network_masks, spatial_error, texture_error

SIDE = 32


def paper_model():
    torch.manual_seed(0)
    network = MTCDNConfig(widths=(16, 32), blocks=(1, 1), head_width=16, emb_width=32, date_input="none")
    return randomised(build_model(ModelConfig(network=network)))


def composite_model():
    torch.manual_seed(0)
    tiny = {
        "widths": (16, 32),
        "blocks": (1, 1),
        "emb_width": 32,
        "fusion_width": 16,
        "cloud_widths": (8, 16),
        "refinement_widths": (8,),
    }
    return randomised(build_model(small().replace(network=tiny)))


def randomised(model):
    """Zero-initialised layers would hide every influence."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return model


def batch(bands: int = 4) -> SeriesBatch:
    generator = torch.Generator().manual_seed(1)
    clear = 0.3 * torch.rand(2, bands, SIDE, SIDE, generator=generator)
    cloud = torch.rand(2, 3, SIDE, SIDE, generator=generator) > 0.7
    cloudy = torch.where(cloud[:, :, None], torch.tensor(0.8), clear[:, None] + 0.02)
    everywhere = torch.ones(2, SIDE, SIDE, dtype=torch.bool)
    return SeriesBatch(
        cloudy=cloudy,
        clear=clear,
        scored=everywhere.clone(),
        hidden=cloud[:, 0],
        cloud_mask=cloud,
        labels=cloud.to(torch.uint8),
        valid=torch.ones_like(cloud),
        present=torch.ones(2, 3, dtype=torch.bool),
        reference=torch.tensor([0, -1]),
        days=None,
        band_present=torch.ones(2, bands, dtype=torch.bool),
    )


def loss_of(model, given: SeriesBatch) -> float:
    return Objective()(model, given, torch.Generator().manual_seed(3))[0].item()


@pytest.mark.parametrize("make", [paper_model, composite_model])
def test_pixels_that_are_not_scored_have_no_influence(make):
    model, given = make(), batch()
    scored = given.scored.clone()
    scored[:, :, :8] = False
    changed = given.clear.clone()
    changed[:, :, :, :8] = 0.9
    first = loss_of(model, replace(given, scored=scored))
    second = loss_of(model, replace(given, scored=scored, clear=changed))
    assert first == second
    assert loss_of(model, given) != first


def test_a_dropped_auxiliary_band_is_one_that_was_never_given():
    model, given = paper_model(), batch()
    dropped = torch.tensor([True, True, True, False]).expand(2, -1)
    shown = replace(given, band_present=dropped)
    other = shown.cloudy.clone()
    other[:, :, 3] = 0.4
    assert loss_of(model, shown) == loss_of(model, replace(shown, cloudy=other))
    assert loss_of(model, shown) != loss_of(model, given)
    without = model.network.condition(given.cloudy[:, :, :3] * 2 - 1)
    zeros = model.network.condition(given.cloudy[:, :, :3] * 2 - 1, aux=torch.zeros(2, 3, 1, SIDE, SIDE))
    torch.testing.assert_close(without.features.keys, zeros.features.keys)


@pytest.mark.parametrize("make", [paper_model, composite_model])
def test_a_date_without_data_somewhere_gives_finite_gradients(make):
    model, given = make(), batch()
    valid = given.valid.clone()
    valid[:, 1, :, 16:] = False
    valid[1] = False
    valid[1, 0, :4, :4] = True
    loss, _ = Objective()(model, replace(given, valid=valid), torch.Generator().manual_seed(3))
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_spatial_error_by_hand():
    prediction, target = torch.zeros(1, 1, 2, 2), torch.tensor([[[[0.0, 0.2], [0.0, 0.0]]]])
    weight = torch.ones(1, 1, 2, 2)
    assert spatial_error(prediction, target, weight, gradient=0.0).item() == pytest.approx(0.05)
    # One pair in each direction differs by 0.2; both are divided by the four pixels.
    assert spatial_error(prediction, target, weight, gradient=1.0).item() == pytest.approx(0.05 + 0.05 + 0.05)
    weight[..., 0, 1] = 0
    assert spatial_error(prediction, target, weight, gradient=1.0).item() == 0


def test_texture_error_is_about_contrast_not_about_place() -> None:
    generator = torch.Generator().manual_seed(2)
    target = torch.rand(1, 3, 32, 32, generator=generator)
    weight = torch.ones_like(target)
    blurred = torch.nn.functional.avg_pool2d(target, 3, 1, 1, count_include_pad=False)
    assert texture_error(target, target, weight).item() == 0
    assert texture_error(target + 0.2, target, weight).item() < 1e-5  # brightness is another term's business
    assert texture_error(blurred, target, weight) > 5 * texture_error(target.roll(8, dims=-1), target, weight)
    hidden = weight.clone()
    hidden[..., 16:] = 0
    spoilt = torch.where(hidden > 0, target, torch.tensor(9.0))
    assert texture_error(spoilt, target, hidden).item() == 0


def test_masks_only_moves_the_mask_networks_alone() -> None:
    model = composite_model()
    loss, terms = Objective(ObjectiveConfig(masks_only=True))(model, batch(), torch.Generator().manual_seed(0))
    loss.backward()
    moved = {name.split(".")[1] for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved == {"cloud_head", "mask_refinement"}
    assert set(terms) == {"cloud_head", "mask_refinement"}
    torch.testing.assert_close(loss.detach(), terms["cloud_head"] + terms["mask_refinement"])


def test_the_mask_refinement_never_sees_the_true_mask_of_the_date_to_be_cleaned() -> None:
    """Otherwise it would learn to copy it, and fail where nobody gives one."""
    model, given = composite_model(), replace(batch(), reference=torch.tensor([0, 1]))
    config = ObjectiveConfig(masks_only=True, own_mask=0.0)
    _, terms = Objective(config)(model, given, torch.Generator().manual_seed(0))
    wrong = given.cloud_mask.clone()
    rows = torch.arange(len(wrong))
    wrong[rows, given.reference] = ~wrong[rows, given.reference]
    _, again = Objective(config)(model, replace(given, cloud_mask=wrong), torch.Generator().manual_seed(0))
    assert torch.equal(terms["mask_refinement"], again["mask_refinement"])


def test_masks_of_the_other_dates_come_from_the_mask_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate for a tile has them too: the cloud head decides on the reference date alone."""
    model, given = composite_model(), replace(batch(), reference=torch.tensor([0, 1]))
    config = ObjectiveConfig(masks_only=True, own_mask=1.0, mask_network=True)
    shown: list[torch.Tensor] = []
    refine = model.network.mask_refinement.forward

    def kept(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shown.append(inputs[4])
        return refine(*inputs)

    monkeypatch.setattr(model.network.mask_refinement, "forward", kept)
    for network in (True, False):
        Objective(replace(config, mask_network=network))(model, given, torch.Generator().manual_seed(0))
    found = network_masks(model.network.config.bands, given.cloudy, given.valid, given.band_present)
    assert set(found.unique().tolist()) <= {0.0, 1.0}
    for row, reference in enumerate((0, 1)):
        others = [date for date in range(3) if date != reference]
        assert torch.equal(shown[0][row, others], found[row, others])
        assert torch.equal(shown[0][row, reference], shown[1][row, reference])
        assert not torch.equal(shown[1][row, others], found[row, others])


def test_the_error_head_moves_nothing_but_itself() -> None:
    model = composite_model()
    nothing = {"composite": 0.0, "diffusion": 0.0, "regression": 0.0, "cloud_head": 0.0}
    loss, _ = Objective(ObjectiveConfig(**nothing))(model, batch(), torch.Generator().manual_seed(0))
    loss.backward()
    moved = {name.split(".")[1] for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved == {"error_head"}


@pytest.mark.parametrize("make", [paper_model, composite_model])
def test_days_reach_the_network_in_training(make):
    model, given = make(), batch()
    object.__setattr__(model.network.config, "date_input", "days")
    near, far = (torch.tensor([days] * 2) for days in ([0.0, 10, 20], [0.0, 100, 300]))
    assert loss_of(model, replace(given, days=near)) != loss_of(model, replace(given, days=far))
    unknown = torch.full((2, 3), float("nan"))
    assert loss_of(model, replace(given, days=unknown)) == loss_of(model, replace(given, days=torch.zeros(2, 3)))
