"""A class mask for every date of a series: land, thick cloud, thin cloud, shadow, water, snow.

The network is a U-Net that runs on each date and exchanges features between the dates at every scale: each date sees
the weighted mean of the other dates, with weights that the network estimates per pixel (how clear a date is there).
One date alone works too, as does any subset of the bands. Normalisation uses fixed statistics, so a pixel's result
depends on its surroundings within the receptive field and not on the extent of the tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MASK_CLASSES = ("land", "thick cloud", "thin cloud", "shadow", "water", "snow")
HIDDEN_CLASSES = (1, 2, 3)
"""Classes under which the ground is not visible as it is: thick cloud, thin cloud and shadow."""
MASK_BANDS = ("B01", "B02", "B03", "B04", "B08", "B09", "B10", "B11", "B12")
"""Bands the network uses where they are present. The red-edge bands add nothing for clouds beside B04 and B08."""
SUBSTITUTES = {"B08": ("B8A", "B07")}
"""Bands that stand in for a missing one."""


@dataclass(frozen=True)
class MaskNetworkConfig:
    """Size of the network."""

    widths: tuple[int, ...] = (32, 56, 88, 128, 160)
    """Channels per level; the first level has half of the image's resolution, each further one half of the last."""
    blocks: tuple[int, ...] = (1, 1, 2, 2, 2)
    """Residual blocks per level of the encoder; the decoder has one per level."""
    heads: int = 4
    """Independent weightings of the other dates per exchange; divides every width."""

    @property
    def multiple(self) -> int:
        """Height and width of the input are multiples of this number of pixels."""
        return 2 ** len(self.widths)


class ConvBlock(nn.Module):
    """Two 3x3 convolutions with batch normalisation, and a skip connection."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm_in = nn.BatchNorm2d(outputs)
        self.conv_out = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm_out = nn.BatchNorm2d(outputs)
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm_in(self.conv_in(x)))
        return F.relu(self.norm_out(self.conv_out(h)) + self.skip(x))


class DateExchange(nn.Module):
    """Add to each date what the other dates show: their mean, weighted per pixel, and the sum of the weights."""

    def __init__(self, width: int, query: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.weight = nn.Conv2d(query, heads, 1)
        self.mix = nn.Conv2d(2 * width + heads, width, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, values: Tensor, query: Tensor, seen: Tensor, links: Tensor) -> Tensor:
        """values: (N, C, h, w); query: (N, Q, h, w); seen: (N, 1, h, w), 0 to 1; links: (N, N), 1 where j informs i."""
        n, c, h, w = values.shape
        weight = self.weight(query).float().clamp(-6, 6).exp() * seen.float()
        weighted = weight[:, :, None] * values.float().reshape(n, self.heads, c // self.heads, h, w)
        packed = torch.cat([weighted.flatten(1, 2), weight], dim=1).to(values.dtype)
        sums = (links.to(packed.dtype) @ packed.flatten(1)).reshape(n, c + self.heads, h, w)
        total = sums[:, c:].float()
        mean = sums[:, :c].reshape(n, self.heads, c // self.heads, h, w) / (total[:, :, None] + 1e-3)
        evidence = torch.log1p(total)
        shown = torch.cat([values, mean.flatten(1, 2).to(values.dtype), evidence.to(values.dtype)], dim=1)
        return F.relu(values + self.norm(self.mix(shown)))


class MaskNetwork(nn.Module):
    """Class scores per date and pixel from the bands of `MASK_BANDS`."""

    def __init__(self, config: MaskNetworkConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or MaskNetworkConfig()
        widths, bands = config.widths, len(MASK_BANDS)
        self.stem = nn.Conv2d((bands + 1) * 4, widths[0], 3, padding=1)
        self.bands = nn.Linear(bands, widths[0], bias=False)
        self.encoder, self.exchanges = nn.ModuleList(), nn.ModuleList()
        for level, width in enumerate(widths):
            inputs = widths[max(level - 1, 0)]
            steps = [ConvBlock(inputs if i == 0 else width, width) for i in range(config.blocks[level])]
            self.encoder.append(nn.Sequential(*steps))
            self.exchanges.append(DateExchange(width, width, config.heads))
        self.lift, self.compare, self.join = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for fine, coarse in pairwise(widths):
            self.lift.append(nn.Conv2d(coarse, fine, 1))
            self.compare.append(DateExchange(fine, 2 * fine, config.heads))
            self.join.append(ConvBlock(2 * fine, fine))
        self.coarse_out = nn.Conv2d(widths[1], len(MASK_CLASSES), 1)
        self.out = nn.Conv2d(widths[0], len(MASK_CLASSES) * 4, 3, padding=1)

    def forward(self, images: Tensor, seen: Tensor, present: Tensor) -> Tensor:
        """Return the class scores (B, T, 6, H, W).

        images: (B, T, 9, H, W) reflectance in the order of `MASK_BANDS`. seen: bool (B, T, H, W), False for nodata.
        present: bool (B, 9) or (B, T, 9), the bands there are. Values of absent bands and nodata do not matter.
        """
        b, t, _, height, width = images.shape
        if present.ndim == 2:
            present = present[:, None].expand(-1, t, -1)
        date = torch.arange(b * t, device=images.device)
        same_series = date[:, None] // t == date[None] // t
        links = (same_series & (date[:, None] != date[None])).to(images.dtype)
        scores, _ = self.scores(images.flatten(0, 1), seen.flatten(0, 1), present.flatten(0, 1), links)
        return scores.reshape(b, t, len(MASK_CLASSES), height, width)

    def scores(self, images: Tensor, seen: Tensor, present: Tensor, links: Tensor) -> tuple[Tensor, Tensor]:
        """Return the class scores (N, 6, H, W) and coarse ones (N, 6, H/4, W/4) for N dates of any series.

        links: (N, N), 1 where date j is another date of the series of date i, else 0.
        """
        use = seen[:, None] & present[:, :, None, None]
        # A square root spreads dark values, where shadow and water differ, and compresses the bright ones.
        values = images.clamp(min=0).masked_fill(~use, 0.0).clamp(max=1.5).sqrt()
        shown = seen[:, None].to(values.dtype)
        x = F.pixel_unshuffle(torch.cat([2 * values, shown - 1], dim=1), 2)
        h = self.stem(x) + self.bands(present.to(x.dtype))[:, :, None, None]
        cover = [F.avg_pool2d(shown, 2)]
        skips: list[Tensor] = []
        for level, (blocks, exchange) in enumerate(zip(self.encoder, self.exchanges, strict=True)):
            if level:
                h = F.avg_pool2d(h, 2)
                cover.append(F.avg_pool2d(cover[-1], 2))
            h = blocks(h)
            h = exchange(h, h, cover[level], links)
            skips.append(h)
        coarse = h
        for level in reversed(range(len(skips) - 1)):
            raised = F.interpolate(self.lift[level](h), scale_factor=2.0, mode="nearest")
            skip = skips[level]
            # The weights now come from the coarser levels' judgement, the values from the fine one.
            compared = self.compare[level](skip, torch.cat([raised, skip], dim=1), cover[level], links)
            h = self.join[level](torch.cat([raised, compared], dim=1))
            if level == 1:
                coarse = self.coarse_out(h)
        return F.pixel_shuffle(self.out(h), 2), coarse


def hidden_probability(scores: Tensor, *, dim: int, keep_haze: bool = False) -> Tensor:
    """Return the probability of thick cloud, thin cloud or shadow from class scores along `dim`, float32.

    keep_haze: thin cloud counts as clear.
    """
    thick, thin, shadow = scores.float().softmax(dim=dim).narrow(dim, HIDDEN_CLASSES[0], 3).unbind(dim)
    return thick + shadow if keep_haze else thick + thin + shadow


def band_sources(bands: Sequence[str]) -> list[int | None]:
    """Return, for each of `MASK_BANDS`, the position in `bands` that supplies it; None where none does."""
    found: list[int | None] = []
    for band in MASK_BANDS:
        names = (band, *SUBSTITUTES.get(band, ()))
        found.append(next((list(bands).index(name) for name in names if name in bands), None))
    return found
