"""A second look at the date to be cleaned, beside what the other dates say it should look like (LESSONS 13).

The cloud head judges a date by its colours and calls bright land cloud; a wide mask costs dB, because matching then
loses the pixels it fits on. Here the other dates are matched to the anchor with that first mask, blended, and compared:
land that the other dates explain is clear, whatever its colour. No mask but the anchor's is changed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sader.model.cloudhead import CLASSES, MaskNet
from sader.model.composite import blend_of_others, prepare_dates

DOUBT = 0.9
"""Most that the first mask may hide of the anchor: where it hides all, matching still needs something to go by."""


class SecondLook(MaskNet):
    """Better class scores (B, 4, H, W) of the anchor date from the first ones; untrained, the first ones."""

    def __init__(self, bands: int, *, widths: tuple[int, ...], stem: int) -> None:
        super().__init__(2 * bands + len(CLASSES) + 3, bands, widths=widths, stem=stem)

    def forward(
        self, cloudy: Tensor, observed: Tensor, band_present: Tensor, logits: Tensor, cloud: Tensor, reference: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (anchor (B,), class scores (B, 4, H, W) of that date).

        logits: (B, T, 4, H, W), the cloud head's. cloud: (B, T, H, W), the masks so far. reference: (B,), -1 = none.
        """
        rows = torch.arange(cloudy.shape[0], device=cloudy.device)
        with torch.no_grad():
            asked = (torch.arange(cloudy.shape[1], device=cloudy.device) == reference[:, None])[:, :, None, None]
            doubted = torch.where(asked, cloud.clamp(max=DOUBT), cloud).masked_fill(~observed, 1.0)
            matched = prepare_dates(cloudy, cloud=doubted, observed=observed, reference=reference)
            others = blend_of_others(matched, observed)
            own, seen = matched.at_anchor(cloudy), matched.at_anchor(observed)[:, None]
            use = seen & band_present[:, :, None, None]
            shown = others.clear.masked_fill(matched.flag[:, :, None, None] > 0, 0.0).amax(dim=1, keepdim=True)
            first = logits[rows, matched.anchor].detach()
            difference = (own - others.image.to(own.dtype)).masked_fill(~use, 0.0)
            inputs = torch.cat(
                [own, 4 * difference, first, others.log_variance[:, None], shown, seen.to(own.dtype) - 1], dim=1
            )
        return matched.anchor, first.float() + self.scores(inputs, band_present).float()
