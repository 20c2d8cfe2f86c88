"""The second look: untrained it changes nothing; it judges the date to be cleaned alone, by what other dates show."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sader.inference.remover import CloudRemover
from sader.model.heads import MaskRefinement, not_clear, with_anchor
from sader.model.mtcdn import MTCDN
from sader.models import build_model, small

SIDE, BANDS = 32, 4


def ground(dates: int = 3) -> tuple[Tensor, Tensor]:
    """One place under `dates` slightly different lights, the first with a bright square: (cloudy, cloud)."""
    generator = torch.Generator().manual_seed(3)
    land = torch.rand(1, 1, BANDS, SIDE, SIDE, generator=generator) * 0.3 - 0.8
    gain = 1 + 0.05 * torch.arange(dates).view(1, dates, 1, 1, 1)
    cloudy = (land + 1) * gain - 1
    cloud = torch.zeros(1, dates, SIDE, SIDE)
    cloud[:, 0, 8:20, 8:20] = 1.0
    return torch.where(cloud[:, :, None] > 0, torch.tensor(0.6), cloudy), cloud


def look(module: MaskRefinement, cloudy: Tensor, cloud: Tensor, reference: int, logits: Tensor | None = None):
    observed = torch.ones(cloud.shape, dtype=torch.bool)
    if logits is None:
        logits = torch.randn(1, cloudy.shape[1], 4, SIDE, SIDE, generator=torch.Generator().manual_seed(5))
    band_present = torch.ones(1, BANDS, dtype=torch.bool)
    return module(cloudy, observed, band_present, logits, cloud, torch.tensor([reference])), logits


def tiny_look(*, random: bool) -> MaskRefinement:
    torch.manual_seed(0)
    module = MaskRefinement(BANDS, widths=(8, 16), stem=2)
    if random:
        with torch.no_grad():
            module.out.weight.normal_(0, 0.1)
    return module.eval()


@pytest.mark.parametrize("reference", [0, 2])
def test_untrained_it_repeats_the_first_scores_of_the_reference(reference: int) -> None:
    cloudy, cloud = ground()
    (anchor, second), logits = look(tiny_look(random=False), cloudy, cloud, reference)
    assert anchor.tolist() == [reference]
    assert torch.equal(second, logits[:, reference])


def test_without_a_reference_it_looks_at_the_clearest_date() -> None:
    cloudy, cloud = ground()
    cloud[:, 1] = 0.4
    (anchor, _), _ = look(tiny_look(random=False), cloudy, cloud, -1)
    assert anchor.tolist() == [2]


def test_what_the_other_dates_show_changes_the_answer() -> None:
    module = tiny_look(random=True)
    cloudy, cloud = ground()
    (_, before), logits = look(module, cloudy, cloud, 0)
    changed = cloudy.clone()
    changed[:, 1:, :, 8:20, 8:20] += 0.3
    (_, after), _ = look(module, changed, cloud, 0, logits)
    assert (after - before)[..., 8:20, 8:20].abs().max() > 1e-3


def test_a_date_that_is_not_there_has_no_influence() -> None:
    module = tiny_look(random=True)
    cloudy, cloud = ground()
    (_, alone), logits = look(module, cloudy, cloud, 0)
    more = torch.cat([cloudy, torch.zeros_like(cloudy[:, :1])], dim=1)
    observed = torch.ones(1, 4, SIDE, SIDE, dtype=torch.bool)
    observed[:, 3] = False
    wider = torch.cat([cloud, torch.rand(1, 1, SIDE, SIDE)], dim=1)
    first = torch.cat([logits, torch.randn(1, 1, 4, SIDE, SIDE)], dim=1)
    _, padded = module(more, observed, torch.ones(1, BANDS, dtype=torch.bool), first, wider, torch.tensor([0]))
    torch.testing.assert_close(padded, alone, rtol=1e-4, atol=1e-5)


def test_only_the_anchor_is_changed_and_given_masks_stand() -> None:
    torch.manual_seed(0)
    tiny = {"widths": (16, 32), "blocks": (1, 1), "fusion_width": 16, "emb_width": 16, "cloud_widths": (8,)}
    network = build_model(small().replace(network=tiny | {"refinement_widths": (8,)})).network.eval()
    assert isinstance(network, MTCDN)
    with torch.no_grad():
        for module in (network.cloud_head, network.mask_refinement):
            module.out.weight.normal_(0, 0.2)
    cloudy, cloud = ground()
    observed, bands = torch.ones(1, 3, SIDE, SIDE, dtype=torch.bool), torch.ones(1, BANDS, dtype=torch.bool)
    found = network.cloud_estimate(cloudy, observed, bands, reference=torch.tensor([0]))
    first = not_clear(network.cloud_logits(cloudy, observed, bands), dim=2)
    assert torch.equal(found[:, 1:], first[:, 1:])
    assert (found[:, 0] - first[:, 0]).abs().max() > 1e-3
    given = torch.full_like(cloud, torch.nan)
    given[:, 0] = cloud[:, 0]
    kept = network.cloud_estimate(cloudy, observed, bands, given=given, reference=torch.tensor([0]))
    assert torch.equal(kept[:, 0], cloud[:, 0])
    assert torch.equal(kept[:, 1:], first[:, 1:])


def test_with_anchor_replaces_one_date() -> None:
    cloud, mask = torch.zeros(2, 3, 4, 5), torch.ones(2, 4, 5)
    found = with_anchor(cloud, torch.tensor([2, 0]), mask)
    assert found.sum(dim=(2, 3)).tolist() == [[0, 0, 20], [20, 0, 0]]


def test_shipped_weights_do_not_call_bright_land_cloud_that_other_dates_show_too() -> None:
    """Bare bright ground with texture, the same on four dates: what all dates show is land."""
    remover = CloudRemover.from_pretrained("sader-s2-rgbn")
    generator = torch.Generator().manual_seed(1)
    texture = torch.nn.functional.avg_pool2d(torch.rand(1, 1, 80, 80, generator=generator), 9, 1) * 0.15
    land = texture[0] + torch.tensor([0.22, 0.28, 0.36, 0.42]).view(4, 1, 1) - 0.07
    cloudy = torch.stack([land * gain for gain in (1.0, 0.97, 1.03, 0.95)])[..., :72, :72].numpy()
    assert remover.predict(cloudy, reference=0).kept.mean() > 0.9
