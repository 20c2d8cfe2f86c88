"""Networks that find what hides the ground, and the head of the expected error. Not from the paper.

`MaskNetwork` classifies every date of a series: land, thick cloud, thin cloud, shadow, water, snow. It is a U-Net that
runs on each date and exchanges features between the dates at every scale: each date gets the weighted mean of the other
dates, with weights that the network estimates per pixel (how clear a date is there). One date alone works too, as does
any subset of the bands. Normalisation uses fixed statistics, so that a pixel's result depends on its surroundings
within the receptive field and not on the extent of the tile.

The heads belong to `MTCDN`. `CloudHead` classifies each date beside the minimum and the median of its series.
`MaskRefinement` compares the reference date with its prediction from the other dates. `ErrorHead` predicts the absolute
error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from sader.model.blocks import ResBlock, depth_to_space, space_to_depth, zero_init
from sader.model.composite import (
    VARIANCE_FLOOR,
    MatchedDates,
    at_date,
    blend_of_others,
    is_date,
    misfits,
    prepare_dates,
)
from sader.model.matching import LIGHT, NOISE_VARIANCE, box_mean, solve_positive, spread_from_clear

CLASSES = ("clear", "thick cloud", "thin cloud", "shadow")


def series_statistics(cloudy: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the minimum and the lower median over the observed dates, each (B, C, H, W); 0 where none is.

    cloudy: (B, T, C, H, W); observed: bool (B, T, H, W).
    """
    ordered = cloudy.masked_fill(~observed[:, :, None], torch.inf).sort(dim=1).values
    count = observed.sum(dim=1)
    middle = ((count - 1) // 2).clamp(min=0)
    index = middle[:, None, None].expand(-1, 1, cloudy.shape[2], -1, -1)
    seen = (count > 0)[:, None]
    zero = torch.zeros((), dtype=cloudy.dtype, device=cloudy.device)
    lowest = torch.where(seen, ordered[:, 0], zero)
    median = torch.where(seen, ordered.gather(1, index)[:, 0], zero)
    return lowest, median


class MaskNet(nn.Module):
    """A small U-Net from maps (N, F, H, W) to class scores (N, 4, H, W), classes as in `CLASSES`.

    Height and width are multiples of stem * 2^(levels - 1).
    """

    def __init__(self, inputs: int, bands: int, *, widths: tuple[int, ...], stem: int) -> None:
        super().__init__()
        self.stem = stem
        self.lift = nn.Conv2d(inputs * stem**2, widths[0], 3, padding=1)
        self.bands = nn.Linear(bands, widths[0])
        self.down = nn.ModuleList()
        self.up = nn.ModuleList()
        for fine, coarse in pairwise(widths):
            down = [ResBlock(fine, fine), ResBlock(fine, fine, resample="down"), ResBlock(fine, coarse)]
            self.down.append(nn.ModuleList(down))
            self.up.append(nn.ModuleList([ResBlock(coarse, coarse, resample="up"), ResBlock(coarse + fine, fine)]))
        self.middle = ResBlock(widths[-1], widths[-1])
        self.out = zero_init(nn.Conv2d(widths[0], len(CLASSES) * stem**2, 3, padding=1))

    def scores(self, inputs: Tensor, band_present: Tensor) -> Tensor:
        """Return the class scores; band_present: bool (N, C)."""
        flags = self.bands(band_present.to(inputs.dtype))[:, :, None, None]
        h = self.lift(space_to_depth(inputs, self.stem)) + flags
        skips = []
        for level in self.down:
            keep, halve, widen = cast(Iterable[nn.Module], level)
            h = keep(h)
            skips.append(h)
            h = widen(halve(h))
        h = self.middle(h)
        for level, skip in zip(reversed(self.up), reversed(skips), strict=True):
            double, join = cast(Iterable[nn.Module], level)
            h = join(torch.cat([double(h), skip], dim=1))
        return depth_to_space(self.out(h), self.stem)


class CloudHead(MaskNet):
    """Class scores per date and pixel: (B, T, C, H, W) -> (B, T, 4, H, W)."""

    def __init__(self, bands: int, *, widths: tuple[int, ...], stem: int) -> None:
        super().__init__(3 * bands + 1, bands, widths=widths, stem=stem)

    def forward(self, cloudy: Tensor, observed: Tensor, band_present: Tensor, *, date: Tensor | None = None) -> Tensor:
        """Return logits; missing pixels of `cloudy` are 0. date: (B,), only this one, as (B, 1, 4, H, W)."""
        lowest, median = series_statistics(cloudy, observed)
        if date is not None:
            cloudy, observed = at_date(cloudy, date)[:, None], at_date(observed, date)[:, None]
        dates = cloudy.shape[1]
        seen = observed[:, :, None].to(cloudy.dtype)
        inputs = torch.cat(
            [cloudy, (cloudy - lowest[:, None]) * seen, (cloudy - median[:, None]) * seen, seen - 1], dim=2
        )
        if date is not None:
            return self.scores(inputs[:, 0], band_present)[:, None]
        logits = self.scores(
            rearrange(inputs, "b t c h w -> (b t) c h w"), band_present.repeat_interleave(dates, dim=0)
        )
        return rearrange(logits, "(b t) k h w -> b t k h w", t=dates)


def not_clear(logits: Tensor, *, dim: int, keep_haze: bool = False) -> Tensor:
    """Return the probability of anything but clear from class scores along `dim`, float32.

    keep_haze: thin cloud counts as clear.
    """
    probability = logits.float().softmax(dim=dim)
    clear = probability.select(dim, 0)
    return 1 - (clear + probability.select(dim, 2) if keep_haze else clear)


DOUBT = 0.9
"""Largest probability of the first mask of the anchor: where it hides every pixel, matching still needs some weight."""


class MaskRefinement(MaskNet):
    """Refined class scores (B, 4, H, W) of the anchor date; untrained, those of the cloud head.

    The other dates are matched to the anchor with the first mask and blended; land that they explain is clear, whatever
    its colour. Only the mask of the anchor changes.
    """

    def __init__(self, bands: int, *, widths: tuple[int, ...], stem: int) -> None:
        super().__init__(2 * bands + len(CLASSES) + 3, bands, widths=widths, stem=stem)

    def forward(
        self,
        cloudy: Tensor,
        observed: Tensor,
        band_present: Tensor,
        logits: Tensor,
        cloud: Tensor,
        reference: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return (anchor (B,), class scores (B, 4, H, W) of that date).

        logits: (B, T, 4, H, W), the cloud head's. cloud: (B, T, H, W), the masks so far. reference: (B,), -1 = none.
        """
        with torch.no_grad():
            asked = is_date(reference, cloudy.shape[1])[:, :, None, None]
            doubted = torch.where(asked, cloud.clamp(max=DOUBT), cloud).masked_fill(~observed, 1.0)
            matched = prepare_dates(cloudy, cloud=doubted, observed=observed, reference=reference)
            others, log_variance = blend_of_others(matched, observed)
            own, seen = matched.at_anchor(cloudy), matched.at_anchor(observed)[:, None]
            use = seen & band_present[:, :, None, None]
            shown = matched.clear.masked_fill(matched.flag[:, :, None, None] > 0, 0.0).amax(dim=1, keepdim=True)
            first = matched.at_anchor(logits).detach()
            difference = (own - others.to(own.dtype)).masked_fill(~use, 0.0)
            inputs = torch.cat(
                [own, 4 * difference, first, log_variance[:, None], shown, seen.to(own.dtype) - 1], dim=1
            )
        return matched.anchor, first.float() + self.scores(inputs, band_present).float()


class DateHeads(nn.Module):
    """The two networks that find what hides the ground on the reference date; see `estimated_masks` for the call."""

    def __init__(
        self,
        bands: int,
        *,
        cloud_widths: tuple[int, ...],
        refinement_widths: tuple[int, ...],
        stem: int,
    ) -> None:
        super().__init__()
        self.cloud_head = CloudHead(bands, widths=cloud_widths, stem=stem)
        self.mask_refinement = MaskRefinement(bands, widths=refinement_widths, stem=stem)

    def forward(self, cloudy: Tensor, observed: Tensor, band_present: Tensor, **known: Any) -> Tensor:
        return estimated_masks(self.cloud_head, self.mask_refinement, cloudy, observed, band_present, **known)


@torch.no_grad()
def estimated_masks(
    head: CloudHead,
    refinement: MaskRefinement | None,
    cloudy: Tensor,
    observed: Tensor,
    band_present: Tensor,
    *,
    given: Tensor | None = None,
    reference: Tensor | None = None,
    only_reference: bool = False,
    keep_haze: bool = False,
) -> Tensor:
    """Return the probability (B, T, H, W) that a pixel is not clear, without gradient.

    cloudy: (B, T, C, H, W) in the model's range, missing pixels 0. observed: bool (B, T, H, W). band_present: bool
    (B, C). given: (B, T, H, W) known masks, NaN where the mask is to be estimated. reference: (B,), -1 = none.
    only_reference: the masks of all other dates are given. keep_haze: thin cloud counts as clear.
    """
    date = reference.clamp(min=0) if only_reference and reference is not None else None
    logits = head(cloudy, observed, band_present, date=date).expand(-1, cloudy.shape[1], -1, -1, -1)
    cloud = not_clear(logits, dim=2, keep_haze=keep_haze)
    if given is not None:
        cloud = torch.where(given.isnan(), cloud, given)
    if refinement is None:
        return cloud
    if reference is None:
        reference = torch.full((cloudy.shape[0],), -1, device=cloudy.device)
    anchor, second = refinement(cloudy, observed, band_present, logits, cloud, reference)
    refined = not_clear(second, dim=1, keep_haze=keep_haze)
    if given is not None:
        known = at_date(given, anchor)
        refined = torch.where(known.isnan(), refined, known)
    return with_anchor(cloud, anchor, refined)


def with_anchor(cloud: Tensor, anchor: Tensor, mask: Tensor) -> Tensor:
    """Return cloud (B, T, H, W) with the anchor's date, (B,), replaced by mask (B, H, W)."""
    at = anchor.view(-1, 1, 1, 1).expand(-1, 1, *mask.shape[-2:])
    return cloud.scatter(1, at, mask[:, None].to(cloud.dtype))


LARGEST_FACTOR = 5.0
"""Bound on the logarithm of the learned factor on the classical estimate."""

SEEN_WELL = 0.6
"""Clear share of the anchor in a tile from which the predicted error is not corrected."""
EXCESS = 0.4
"""Share of the excess, in logarithms, that is removed where the anchor shows almost nothing. Set on one synthetic scene
with a cloud larger than a tile: for nearly the same true error, tiles that see 11, 17 and 30 % of the reference date
state 0.012, 0.013 and 0.013, and without the correction 0.012, 0.028 and 0.021 (benchmarks/log/speed.md)."""


class ErrorHead(nn.Module):
    """Logarithm of the usual absolute error (B, C, H, W) in the model's range.

    Untrained it is what the composite's candidates got wrong nearby, weighted as they are blended.
    """

    def __init__(self, width: int, bands: int, *, stem: int) -> None:
        super().__init__()
        self.stem = stem
        self.hidden = nn.Conv2d(width, width, 3, padding=1)
        self.out = zero_init(nn.Conv2d(width, bands * stem**2, 3, padding=1))

    def forward(self, features: Tensor, matched: MatchedDates, weights: Tensor) -> Tensor:
        """Return log scales; features (B, width, H/stem, W/stem) receive no gradient."""
        learned = depth_to_space(self.out(F.gelu(self.hidden(features.detach()))), self.stem).float()
        usual = 0.5 * (weights.detach().float() * matched.variance).sum(dim=1, keepdim=True).log()
        return usual + learned.clamp(-LARGEST_FACTOR, LARGEST_FACTOR)


KNOTS = 6
"""Piecewise linear functions of each spectral feature in the fit of the visible errors."""
SPECTRAL = ("B02", "B04", "B08")
"""Bands in that fit, where the network has them; the difference of the last two is added."""
SMOOTHING = 3e-3
"""Ridge of that fit, relative to the mean of the squared features."""
EVIDENCE = 500.0
"""Clear pixels at which that fit is trusted by half, beyond its mean."""
UNSEEN, UNSEEN_PIXELS = 0.12, 50.0
"""Error, in model units, where the dates have no clear pixel in common, and the number of pixels it counts as."""
LEAST_COMMON = 0.01
"""Share of pixels clear on two dates from which on their difference counts in `level_spread`."""
NEARBY = 65
"""Edge in pixels of the window that measures how close a pixel is to clear ones of the anchor."""
ERROR_TERMS = (0.190, 0.191, -0.249, 0.422, 0.169, 0.039, 0.503)
"""Factors of the `error_terms`, and the constant, from 98 items of training places (benchmarks/stated_error.py)."""


def seen_error(stated: Tensor, terms: Tensor) -> Tensor:
    """Return the logarithm of the expected error (B, C, H, W), corrected by the errors that can be seen.

    stated: (B, C, H, W), the network's estimate; its proportions of the bands stay. terms: those of `error_terms`.
    """
    *factors, constant = ERROR_TERMS
    joined = sum(factor * term for factor, term in zip(factors, terms.split(1, dim=1), strict=True)) + constant
    return stated + joined - terms[:, :1]


def error_terms(
    stated: Tensor,
    matched: MatchedDates,
    weights: Tensor,
    others: Tensor,
    images: tuple[Tensor, Tensor],
    bands: Sequence[str],
    correction: Tensor | float = 0.0,
) -> Tensor:
    """Return what the error of a pixel depends on, (B, 6, H, W): mostly logarithms of errors, of all bands together.

    The network's estimate; the usual misfit nearby; the share of clear pixels of the anchor nearby; the visible errors
    of similar land; how much the network changed the composite; the contrast of the composite within 3 x 3 pixels.

    At clear pixels of the anchor the error of the prediction from the other dates, `others` (B, C, H, W), is known. Its
    logarithm is fitted as a sum of functions of the spectrum: fields that changed elsewhere in the tile are likely to
    have changed under the cloud. Where the anchor shows nothing, the other dates cannot be matched to it, and the error
    is large.

    images: composite and result (B, C, H, W), in the model's range. bands: names of the C bands. correction: that of
    `steady_correction`, 0 outside scenes.
    """
    own, own_clear = matched.at_anchor(matched.dates).float(), matched.at_anchor(matched.clear).float()
    is_anchor = (matched.flag > 0)[:, :, None, None]
    known = (own_clear * matched.clear.float().masked_fill(is_anchor, 0.0).amax(dim=1))[:, None]
    count = known.sum(dim=(-2, -1), keepdim=True)
    given = (own != 0).any(dim=3, keepdim=True).any(dim=2, keepdim=True).to(own.dtype)  # a missing band is 0
    number = given.sum(dim=1, keepdim=True).clamp(min=1.0)

    def over_bands(x: Tensor) -> Tensor:
        return (x * given).sum(dim=1, keepdim=True) / number

    def centred(x: Tensor) -> Tensor:
        return x - (x * known).sum(dim=(-2, -1), keepdim=True) / count.clamp(min=1.0)

    places = [bands.index(name) for name in SPECTRAL if name in bands] or range(min(3, len(bands)))
    chosen = [others[:, place] for place in places]
    spectrum = centred(torch.stack(chosen + [chosen[-1] - one for one in chosen[-2:-1]], dim=1))
    scale = ((spectrum.square() * known).sum(dim=(-2, -1), keepdim=True) / count.clamp(min=1.0)).sqrt()
    knots = torch.linspace(-2.0, 2.0, KNOTS, device=others.device)[:, None, None]
    distance = ((spectrum / (scale + 1e-6)).clamp(-2.5, 2.5)[:, :, None] - knots).abs()
    features = centred((1 - distance * (KNOTS - 1) / 4).clamp(min=0.0).flatten(1, 2))
    seen = (over_bands((own - others).abs()) + 1e-3).log()
    total = (seen * known).sum(dim=(-2, -1), keepdim=True) + UNSEEN_PIXELS * math.log(UNSEEN)
    mean = total / (count + UNSEEN_PIXELS)
    x = features.flatten(2)
    left = (x * known.flatten(2)) / count.flatten(2).clamp(min=1.0)
    moments = left @ x.transpose(1, 2) + SMOOTHING * torch.eye(x.shape[1], device=x.device)
    slopes = solve_positive(moments, left @ (seen - mean).flatten(2).transpose(1, 2))
    similar = mean + count / (count + EVIDENCE) * (slopes.transpose(1, 2) @ x).view(seen.shape)
    network = over_bands((stated + correction).exp()).log()
    usual = 0.5 * (weights.float() * matched.variance).sum(dim=1, keepdim=True).log() + correction
    composite, result = images[0].float(), images[1].float()
    corrected = (over_bands((result - composite).abs()) + 1e-3).log()
    around, (height, width) = F.pad(composite, (1, 1, 1, 1), mode="replicate"), composite.shape[-2:]
    near = [around[..., y : y + height, x : x + width] for y in range(3) for x in range(3)]
    middle = F.avg_pool2d(around, 3, stride=1)
    squares = sum(((one - middle).square() for one in near), start=torch.zeros_like(middle))  # E[x^2] - E[x]^2 cancels
    contrast = 0.5 * (over_bands(squares / len(near)) + 1e-6).log()
    return torch.cat([network, usual, box_mean(own_clear[:, None], NEARBY), similar, corrected, contrast], dim=1)


def steady_correction(matched: MatchedDates, weights: Tensor) -> Tensor:
    """Return the correction (B, 1, H, W) of `Condition.log_error` for tiles in a large hole of the anchor.

    `MatchedDates.variance` is carried into a hole from the anchor's clear pixels. Far from any of them its floor
    decides, and that compares the dates with the anchor's cloud: a tile that sees a fifth of the reference date would
    state more than twice the error of its neighbour that sees a tenth and goes by another date. With the tile's usual
    variance as the floor that excess is known; it is taken off the more, the less of the anchor is seen, and not at all
    from `SEEN_WELL` on, where the network learned what to make of it. Its inputs stay as they were trained, and the
    image does not change.
    """
    dates, target_clear = matched.dates.float(), matched.at_anchor(matched.clear)
    squared, both = misfits(dates, matched.clear, matched.at_anchor(dates), target_clear)
    evidence = both.sum(dim=(-2, -1), keepdim=True)
    usual = (both * squared).sum(dim=(-2, -1), keepdim=True) / evidence.clamp(min=1.0)
    values = (both * squared + VARIANCE_FLOOR * usual) / (both + VARIANCE_FLOOR)
    steady = spread_from_clear(values.flatten(0, 1)[:, None], both.flatten(0, 1), floor=VARIANCE_FLOOR)
    steady = steady.view(squared.shape) + NOISE_VARIANCE
    # A date without clear pixels in common with the anchor has no usual variance: its own floor is kept.
    steady = torch.where(evidence > 1.0, torch.minimum(steady, matched.variance), matched.variance)
    share = weights.float()
    excess = (share * matched.variance).sum(dim=1, keepdim=True) / (share * steady).sum(dim=1, keepdim=True)
    seen = target_clear.mean(dim=(-2, -1))[:, None, None, None]
    return -0.5 * EXCESS * (1 - seen / SEEN_WELL).clamp(min=0) * excess.log()


def level_spread(dates: Tensor, clear: Tensor, anchor: Tensor) -> Tensor:
    """Return how far a date that shows nothing may be from the anchor, (B, C), root mean square in the model's range.

    As far as the other dates are before they are matched, at pixels clear in both; `LIGHT` counts as one date more.
    Without such pixels it is 0, because `error_terms` then contain no visible error. dates: (B, T, C, H, W); clear:
    (B, T, H, W), 0 to 1.
    """
    both = clear * at_date(clear, anchor)[:, None]
    squared = ((dates - at_date(dates, anchor)[:, None]).square() * both[:, :, None]).sum(dim=(-2, -1))
    share = both.mean(dim=(-2, -1)) * ~is_date(anchor, dates.shape[1])
    counts = (share > LEAST_COMMON).to(dates.dtype)[:, :, None]
    squared = counts * squared / both.sum(dim=(-2, -1)).clamp(min=1.0)[:, :, None]
    number = counts.sum(dim=1)
    return ((squared.sum(dim=1) + LIGHT**2) * number.clamp(max=1) / (number + 1)).sqrt()


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
