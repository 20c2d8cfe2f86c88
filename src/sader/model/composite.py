"""The composite: dates matched to one date and weighted per pixel, the image that the diffusion then corrects.

Not from the paper. The weights select among dates instead of averaging features, so that detail that any date shows
sharply is kept. They start from the cloud masks alone: an untrained network already gives a usable mosaic.

These parts follow each other in `blend`: the weighted sum of the other dates, a joint correction by least squares
(`joint_correction`), the residual at the reference date's clear pixels carried into the hidden ones, the mean with a
second prediction (`ridge_prediction`), the reference date's own clear pixels, and the ground that thin cloud and shadow
let through where no date is clear (`hidden_ground`).
`contrast_gain` measures how much detail the prediction loses; `with_contrast` restores it in the final image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from sader.model.blocks import depth_to_space, full_precision, is_exporting, reflect_pad, zero_init
from sader.model.matching import (
    CELL,
    FARTHEST,
    NOISE_VARIANCE,
    PASSES,
    add_local_fit,
    box_mean,
    carried_inward,
    cell_moments,
    evaluate_whole,
    fit_whole,
    haze_weight,
    inlier_weight,
    match_dates,
    ridge_fit,
    spread_from_clear,
    support,
    to_cells,
    to_pixels,
    weighted_sum,
)


@dataclass(frozen=True)
class MatchedDates:
    """The dates in the anchor's radiometry, a fill for pixels that none of them shows, and the misfit of each."""

    dates: Tensor
    """(B, T, C, H, W)"""
    fill: Tensor
    """(B, C, H, W)"""
    clear: Tensor
    """(B, T, H, W) in [0, 1]: probability that a pixel is observed and clear."""
    variance: Tensor
    """(B, T + 1, H, W): mean squared difference from the anchor around a pixel, of each date and of the fill."""
    anchor: Tensor
    """(B,) the date that all others are matched to."""
    flag: Tensor
    """(B, T): 1 for the reference date, 0.5 for an anchor chosen without a reference date, else 0."""
    unmatched: Tensor
    """(B, T, C, H, W): the dates as given."""

    def log_variance(self) -> Tensor:
        """Return the variances scaled as a network input: about -1 (sensor noise) to 1 (no agreement)."""
        return (self.variance.log() + 8.0) / 4.0

    def at_anchor(self, x: Tensor) -> Tensor:
        """Return the anchor's slice (B, ...) of x (B, T, ...)."""
        return at_date(x, self.anchor)


VARIANCE_FLOOR = 1e-4
"""Weight of a hidden pixel in the variance of a date; it matters only far from pixels that are clear in both dates."""
SURE = 8
"""Power of the clear probability in the fill: 0.9 counts as 0.4, so that fringes of clouds have little weight."""
HOLE = 33
"""Edge in pixels of the window that measures how close a pixel is to known ones."""


def prepare_dates(
    cloudy: Tensor, *, cloud: Tensor, observed: Tensor, reference: Tensor, already_matched: bool = False
) -> MatchedDates:
    """Return the dates matched to the reference date, or to the clearest one where reference is -1.

    cloud: (B, T, H, W) in [0, 1]; observed: bool (B, T, H, W); reference: (B,) long. already_matched: as in
    `matching.fit_dates`.
    """
    with torch.no_grad(), full_precision(cloudy):
        clear = (1 - cloud.float()) * observed
        asked = reference >= 0
        anchor = torch.where(asked, reference.clamp(min=0), clearest_date(cloudy, clear, observed))
        clear = without_edges(clear, observed, anchor)
        dates = match_dates(cloudy, clear, anchor, observed=observed, already_matched=already_matched)
        squared, both = misfits(dates, clear, at_date(cloudy, anchor).float(), at_date(clear, anchor))
        variance = spread_from_clear(squared.flatten(0, 1)[:, None], both.flatten(0, 1), floor=VARIANCE_FLOOR)
        variance = variance.view(squared.shape) + NOISE_VARIANCE
        fill = fill_holes(dates, clear, variance[:, :-1], anchor)
        flag = is_date(anchor, cloudy.shape[1]).to(cloudy.dtype)
        flag = flag * torch.where(asked, 1.0, 0.5).to(cloudy.dtype)[:, None]
    return MatchedDates(dates, fill.to(cloudy.dtype), clear, variance, anchor, flag, cloudy)


def misfits(dates: Tensor, clear: Tensor, target: Tensor, target_clear: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared misfits of the dates and of the fill to the anchor, and their weights, both (B, T + 1, H, W).

    The anchor's own misfit is 0; `prefer_anchor` sets its weight instead. That of the fill is measured on a smooth
    version of the anchor. target: (B, C, H, W), the anchor; target_clear: (B, H, W).
    """
    smooth = spread_from_clear(target, target_clear)
    squared = (torch.cat([dates, smooth[:, None]], dim=1) - target[:, None]).square().mean(dim=2)
    both = torch.cat([clear, torch.ones_like(clear[:, :1])], dim=1) * target_clear[:, None]
    return squared, both * inlier_weight(squared, both)


EDGE = 3
"""Width in pixels of the edge of a footprint, whose values are often mixed with nodata."""


def without_edges(clear: Tensor, observed: Tensor, anchor: Tensor) -> Tensor:
    """Return `clear` (B, T, H, W), 0 at edges of footprints where another date is clear and not at its edge.

    observed: bool (B, T, H, W). The anchor does not change; single missing pixels are no edge of a footprint.
    """
    own = is_date(anchor, clear.shape[1])[:, :, None, None]
    closed = F.max_pool2d(observed.to(clear.dtype), 3, stride=1, padding=1)
    inside = 1 - F.max_pool2d(1 - closed, 2 * EDGE + 3, stride=1, padding=EDGE + 1)
    elsewhere = (clear * inside).masked_fill(own, 0.0).amax(dim=1, keepdim=True) > 0.5
    return torch.where(elsewhere & ~own, clear * inside, clear)


def is_date(index: Tensor, dates: int) -> Tensor:
    """Return bool (B, T), True at the date (B,). Unlike `F.one_hot` it reads no value, so that it can be exported."""
    return torch.arange(dates, device=index.device) == index[:, None]


def at_date(x: Tensor, index: Tensor) -> Tensor:
    """Return the slice (B, ...) of x (B, T, ...) at the date (B,) of each item."""
    return x[torch.arange(index.shape[0], device=x.device), index]


def fill_holes(dates: Tensor, clear: Tensor, variance: Tensor, anchor: Tensor) -> Tensor:
    """Return a full image (B, C, H, W) for pixels that no date shows, filled from pixels around them.

    Close to known pixels they are carried inward, which keeps the edges of fields; far inside a large hole that would
    only be streaks, and the wide local mean takes over.
    """
    sure = clear.pow(SURE)
    own = is_date(anchor, clear.shape[1])[:, :, None, None]
    # The anchor's misfit to itself is 0 and carries no information: its weight is a hundred times the best other.
    worth = torch.where(own, 0.0, 1 / variance)
    weight = sure * torch.where(own, 100 * worth.amax(dim=1, keepdim=True) + 1.0, worth)
    image = weighted_sum(weight / (weight.sum(dim=1, keepdim=True) + 1e-12), dates)
    known = sure.amax(dim=1)
    near = (2 * box_mean(known[:, None], HOLE)).clamp(max=1)
    return near * carried_inward(image, known[:, None]) + (1 - near) * spread_from_clear(image, known)


def clearest_date(cloudy: Tensor, clear: Tensor, observed: Tensor) -> Tensor:
    """Return (B,) the date with the most clear pixels, among dates that show any; of equals the darkest.

    Equals are common (all clear, all overcast), and must not be told apart by their order: the darkest has the
    thinnest cloud. Arguments as in `prepare_dates`.
    """
    seen = observed.sum(dim=(2, 3)).double()
    brightness = (cloudy.double().mean(dim=2) * observed).sum(dim=(2, 3)) / seen.clamp(min=1)
    # Less than half a pixel for any possible brightness, so that it only breaks ties.
    score = clear.double().sum(dim=(2, 3)) - 0.05 * brightness
    return score.masked_fill(seen == 0, -torch.inf).argmax(dim=1)


class Trust(NamedTuple):
    """The learned scalars of the blend: factors of the masks and of the misfit, preferences of anchor and fill."""

    mask: Tensor | float
    fit: Tensor | float
    anchor: Tensor | tuple[float, float]
    """Without and with a reference date."""
    fill: Tensor | float


CLASSICAL = Trust(mask=1.0, fit=2.0, anchor=(0.0, 8.0), fill=-4.0)
"""Their initial values, chosen on the training places of CloudSEN12."""


def classical_blend(matched: MatchedDates, available: Tensor) -> Tensor:
    """Return the composite (B, C, H, W) of the untrained head, without any learned part."""
    batch, dates, height, width = matched.clear.shape
    learned = matched.clear.new_zeros(batch, dates + 1, height, width)
    with full_precision(learned):
        return blend(matched, learned, available, CLASSICAL).image


class Blend(NamedTuple):
    """The composite with its weights."""

    image: Tensor
    """(B, C, H, W)"""
    weights: Tensor
    """(B, T + 1, H, W): of each date; the last is the smooth fill's."""
    contrast: Tensor
    """(B,): factor for the details of reconstructed pixels."""
    others: Tensor
    """(B, C, H, W): prediction of the anchor from the other dates alone."""


class CompositeHead(nn.Module):
    """Per-pixel weights over the matched dates and the smooth fill, from the condition network's finest features.

    Untrained, the weights are inverse squared variances of the clear candidates: a classical blend. Training adds to
    their logarithms.
    """

    def __init__(self, width: int, *, stem: int) -> None:
        super().__init__()
        self.stem = stem
        self.date = nn.Conv2d(width, width, 1)
        self.place = nn.Conv2d(width, width, 1)
        self.mix = nn.Conv2d(width, width, 3, padding=1)
        self.logit = zero_init(nn.Conv2d(width, stem**2, 3, padding=1))
        self.fill_logit = zero_init(nn.Conv2d(width, stem**2, 3, padding=1))
        scalars = (nn.Parameter(torch.tensor(value)) for value in CLASSICAL)
        self.trust_mask, self.trust_fit, self.prefer_anchor, self.prefer_fill = scalars

    def forward(self, matched: MatchedDates, dates_fine: Tensor, fused_fine: Tensor, available: Tensor) -> Blend:
        """Return the composite, from the matched dates and the condition network's finest features."""
        batch, dates = dates_fine.shape[:2]
        place = self.place(fused_fine)
        h = F.gelu(self.date(dates_fine.flatten(0, 1)) + place.repeat_interleave(dates, dim=0))
        h = F.gelu(self.mix(h))
        learned = depth_to_space(self.logit(h), self.stem).view(batch, dates, *matched.clear.shape[-2:])
        fill = depth_to_space(self.fill_logit(F.gelu(place)), self.stem)
        with full_precision(fill):
            trust = Trust(self.trust_mask, self.trust_fit, self.prefer_anchor, self.prefer_fill)
            return blend(matched, torch.cat([learned, fill], dim=1).float(), available, trust)


def blend(matched: MatchedDates, learned: Tensor, available: Tensor, trust: Trust) -> Blend:
    """Return the composite from learned logits (B, T + 1, H, W) added to the classical ones.

    The weights choose among the other dates first; what that choice gets wrong at the anchor's clear pixels is
    carried smoothly into the hidden ones; then the anchor's own pixels come in where they are clear.
    """
    dates = matched.dates.float()
    is_anchor = (matched.flag > 0)[:, :, None, None]
    certain = _certain(matched)
    prior, others = _logits_of_others(matched, learned, available, trust)
    weights, predicted = _prediction(matched, others, available)
    own, own_clear = matched.at_anchor(dates), matched.at_anchor(matched.clear)
    shown = matched.clear.float().masked_fill(is_anchor, 0.0).amax(dim=1)
    gain = contrast_gain(predicted.detach(), own, own_clear * shown)
    # Pixels beside a cloud are often not quite clear: their residual is not carried inward.
    safe = 1 - F.max_pool2d(1 - own_clear[:, None], 3, stride=1, padding=1)
    residual = own - predicted
    # Relative to sensor noise and not to the usual misfit, because the residual spreads over a whole hole: at 0.01 of
    # reflectance its weight is a quarter.
    squared = residual.detach().square().mean(dim=1, keepdim=True)
    supported = support(own_clear[:, None], matched.at_anchor(available)[:, None])
    safe = safe * inlier_weight(squared, safe, NOISE_VARIANCE, trust=supported)
    safe = safe * haze_weight(residual.detach(), own_clear)[:, None]
    image = predicted + carried_inward(residual, safe)
    with torch.no_grad():
        regressed, part = ridge_prediction(matched.unmatched.float(), matched.clear, matched.anchor, available)
    image = torch.lerp(image, regressed, part)
    # The anchor against all others together: their joint evidence is the log-sum of their logits.
    asked = (matched.flag.amax(dim=1) == 1).float()[:, None, None]
    preference = (trust.anchor[0] * (1 - asked) + trust.anchor[1] * asked) * own_clear
    own_logit = matched.at_anchor(learned[:, :-1]) + matched.at_anchor(prior[:, :-1]) + preference
    # Padding dates are excluded from the mean.
    seen = available.any(dim=(2, 3), keepdim=True).float()
    usual = (matched.variance[:, :-1] * seen).sum(dim=1) / seen.sum(dim=1).clamp(min=1)
    usual = usual.clamp(min=NOISE_VARIANCE)  # a series without a single pixel has none
    own_logit = own_logit - trust.fit * matched.at_anchor(certain[:, :-1]) * usual.log()
    share = (own_logit - others.logsumexp(dim=1)).sigmoid() * matched.at_anchor(available).float()
    composite = image + share[:, None] * (own - image)
    composite = composite + hidden_ground(composite.detach(), matched.unmatched.float(), matched.clear, available)
    spread = weights * (1 - share[:, None])
    weights = torch.cat([torch.where(is_anchor, share[:, None], spread[:, :-1]), spread[:, -1:]], dim=1)
    return Blend(composite, weights, gain, predicted)


def _certain(matched: MatchedDates) -> Tensor:
    """Return (B, T + 1, H, W): 0 where a date is surely cloud, 1 where it may be clear, and for the fill."""
    return torch.cat([(8 * matched.clear).clamp(max=1), torch.ones_like(matched.clear[:, :1])], dim=1)


def _logits_of_others(matched: MatchedDates, learned: Tensor, available: Tensor, trust: Trust) -> tuple[Tensor, Tensor]:
    """Return (logits of the masks alone, logits of all but the anchor), both (B, T + 1, H, W), the fill last."""
    # The floor is small: where no date is clear, a thousandth of each would add cloud to the fill.
    prior = trust.mask * (matched.clear + 1e-5).log()
    prior = torch.cat([prior, torch.zeros_like(prior[:, :1]) + trust.fill], dim=1)
    # The misfit counts unless a pixel is certainly cloud: a good fit must not give clouds more weight than the fill.
    logits = learned + prior - trust.fit * _certain(matched) * matched.variance.log()
    never = torch.zeros_like(available[:, :1])  # the fill is always there
    is_anchor = (matched.flag > 0)[:, :, None, None]
    return prior, logits.masked_fill(torch.cat([~available | is_anchor, never], dim=1), float("-inf"))


def _prediction(matched: MatchedDates, logits: Tensor, available: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights (B, T + 1, H, W) of logits, and the prediction of the anchor from the other dates."""
    weights, dates = logits.softmax(dim=1), matched.dates.float()
    image = weighted_sum(weights, torch.cat([dates, matched.fill[:, None].float()], dim=1))
    others = available.any(dim=3).any(dim=2) & (matched.flag == 0)
    with torch.no_grad():
        clear, variance = matched.clear.float(), matched.variance[:, :-1]
        correction = joint_correction(image.detach(), dates, clear, variance, matched.anchor, others=others)
    return weights, image + correction


def blend_of_others(matched: MatchedDates, available: Tensor) -> tuple[Tensor, Tensor]:
    """Return the classical prediction of the anchor from the other dates, (B, C, H, W), and their usual misfit nearby.

    The misfit is (B, H, W), on the scale of `MatchedDates.log_variance`.
    """
    with full_precision(matched.dates):
        _, logits = _logits_of_others(matched, torch.zeros_like(matched.variance), available, CLASSICAL)
        weights, image = _prediction(matched, logits, available)
        return image, (weights * matched.log_variance()).sum(dim=1)


# Joint correction

BEST_DATES = 2
"""Number of dates that enter with all their bands. The others contribute through the blend; a third gave 0.05 dB."""
PIXELS_JOINT = 500.0
"""Evidence, in clear pixels, at which the joint fit is trusted by half."""
FLAG_SCALE = 0.05
"""Size of the "is this date seen here" features, in model units: comparable to the other features' deviations."""
MOST_CORRECTION = 0.25
"""Largest correction, in model units."""


def joint_correction(
    image: Tensor, dates: Tensor, clear: Tensor, variance: Tensor, anchor: Tensor, *, others: Tensor
) -> Tensor:
    """Return the correction (B, C, H, W) of the blend of the other dates by a joint linear fit.

    image: (B, C, H, W), the blend. dates: (B, T, C, H, W), matched to the anchor. clear: (B, T, H, W) in [0, 1].
    variance: (B, T, H, W), mean squared misfit of each date around a pixel. anchor: (B,). others: bool (B, T), the
    dates that may be used: present, and not the anchor.
    """
    own, own_clear = at_date(dates, anchor), at_date(clear, anchor)
    best, seen = _best_dates(dates, clear * others[:, :, None, None], variance, own_clear)
    features = torch.cat(
        [rearrange((best - image[:, None]) * seen[:, :, None], "b k c h w -> b (k c) h w"), image, FLAG_SCALE * seen],
        dim=1,
    )
    some = (clear * others[:, :, None, None]).amax(dim=1)
    weight = own_clear * some
    residual = own - image
    return some[:, None] * _regressed(features, residual, weight).clamp(-MOST_CORRECTION, MOST_CORRECTION)


def _best_dates(dates: Tensor, clear: Tensor, variance: Tensor, own_clear: Tensor) -> tuple[Tensor, Tensor]:
    """Return the dates that best predict the hidden pixels of the anchor, (B, K, C, H, W), and where each is clear.

    Ranked once for the whole image, so that a feature means the same date at every pixel.
    """
    # An empty date at the end, because there may be fewer than `BEST_DATES`.
    dates = torch.cat([dates, torch.zeros_like(dates[:, :1])], dim=1)
    clear = torch.cat([clear, torch.zeros_like(clear[:, :1])], dim=1)
    worth = clear[:, :-1] / variance * (1.01 - own_clear)[:, None]
    worth = F.pad(worth.mean(dim=(-2, -1)), (0, 1), value=-1.0)
    pick = worth.topk(BEST_DATES, dim=1).indices
    at = pick[:, :, None, None].expand(-1, -1, *clear.shape[-2:])
    seen = clear.gather(1, at)
    return dates.gather(1, at[:, :, None].expand(-1, -1, dates.shape[2], -1, -1)), seen


def _regressed(features: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    """Return the prediction of `residual` (B, C, H, W) from `features` (B, D, H, W), fitted with `weight`."""
    height, width = residual.shape[-2:]
    total = weight.sum(dim=(-2, -1)).clamp(min=1.0)[:, None, None, None]
    near = weight[:, None]
    x = features - (features * near).sum(dim=(-2, -1), keepdim=True) / total
    spread = ((x.square() * near).sum(dim=(-2, -1), keepdim=True) / total).sqrt()
    x = torch.minimum(torch.maximum(x, -FARTHEST * spread), FARTHEST * spread)
    ph, pw = (height + CELL - 1) // CELL * CELL, (width + CELL - 1) // CELL * CELL
    padded = reflect_pad(x, ph, pw)[:, None]
    target = reflect_pad(residual, ph, pw)[:, None]
    counted = F.pad(near, (0, pw - width, 0, ph - height))
    cells = to_cells(padded, target)

    def fitted(misfit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kept = counted * inlier_weight(misfit.square().mean(dim=2), counted)
        moments = cell_moments(cells, kept, features=x.shape[1])
        return moments, *fit_whole(moments, half=PIXELS_JOINT)

    moments, slope, offset = fitted(target)
    for _ in range(PASSES - 1):  # again without what could not be explained: missed clouds, changed fields
        moments, slope, offset = fitted(target - evaluate_whole(padded, slope, offset))
    maps = add_local_fit(moments, slope, offset)[:, 0]
    # One band after the other: all maps of 13 bands at once would take gigabytes.
    made = [_applied(x, to_pixels(maps[:, :, band], height, width)) for band in range(maps.shape[2])]
    # With this many features, few pixels are not enough for a local fit.
    return torch.stack(made, dim=1) * (total / (total + PIXELS_JOINT))


def _applied(x: Tensor, maps: Tensor) -> Tensor:
    """Return (B, H, W) for features (B, D, H, W) and their maps (B, D + 1, H, W), the offset last."""
    return (x * maps[:, :-1]).sum(dim=1) + maps[:, -1]


# Ridge prediction

REGRESSED = 0.45
"""Largest share of the ridge prediction in the composite."""
LEAST_ERROR = 4e-6
"""Floor of a squared error, in squared model units."""
PIXELS_REGRESSED = 1000.0
"""Evidence, in clear pixels, at which the ridge prediction has half of its share."""


def ridge_prediction(dates: Tensor, clear: Tensor, anchor: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the anchor predicted from the other dates, (B, C, H, W), and its share in the composite, (B, 1, H, W).

    One ridge regression of all bands of a date onto the anchor for the whole image; the dates that are clear at a pixel
    are weighted by the inverse of their mean squared error, squared, band by band; what is wrong at clear pixels of the
    anchor is carried into the hidden ones. dates: (B, T, C, H, W); clear: (B, T, H, W) in [0, 1]; anchor: (B,);
    observed: bool (B, T, H, W).
    """
    own, own_clear = at_date(dates, anchor), at_date(clear, anchor)[:, None]
    others = clear.masked_fill(is_date(anchor, dates.shape[1])[:, :, None, None], 0.0)
    both = others * own_clear
    trust = support(both, observed & at_date(observed, anchor)[:, None])
    predicted, weight = ridge_fit(dates, own[:, None], both, trust=trust)
    squared = (predicted - own[:, None]).square()
    count = weight.sum(dim=(-2, -1), keepdim=True)
    error = (squared * weight[:, :, None]).sum(dim=(-2, -1), keepdim=True) / count.clamp(min=1.0)[:, :, None]
    worth = others[:, :, None] * (count > 0)[:, :, None] * (error + LEAST_ERROR).square().reciprocal()
    image = (worth * predicted).sum(dim=1) / worth.sum(dim=1).clamp(min=1e-9)
    residual, known = own - image, weight.amax(dim=1, keepdim=True)
    supported = support(own_clear, at_date(observed, anchor)[:, None])
    doubt = inlier_weight(residual.square().mean(dim=1, keepdim=True), known, NOISE_VARIANCE, trust=supported)
    known = known * torch.where(supported < 1, doubt, 1.0) * haze_weight(residual, own_clear[:, 0])[:, None]
    image = image + carried_inward(residual, known)
    evidence = count.amax(dim=1, keepdim=True)
    share = REGRESSED * others.amax(dim=1, keepdim=True) * evidence / (evidence + PIXELS_REGRESSED)
    return image, share


# Ground through thin cloud and shadow

THROUGH_CLOUD = 9
"""Edge of the window that separates detail, mostly ground, from slow changes, mostly cloud."""
EDGE_WEIGHT = 0.1
"""How well the level of the fill is known beside pixels that a date shows, relative to errors of its prediction."""
FAR_WEIGHT = 0.01
"""Weight of a pixel that the regression does not use in the local errors."""
MOST_RECOVERED = 0.25
"""Largest correction, in model units."""


@torch.no_grad()
def hidden_ground(image: Tensor, dates: Tensor, clear: Tensor, observed: Tensor) -> Tensor:
    """Return what thin cloud and shadow add to a composite (B, C, H, W): a correction where no date is clear, else 0.

    image: (B, C, H, W), the composite; dates: (B, T, C, H, W), as given; clear: (B, T, H, W) in [0, 1]; observed: bool
    (B, T, H, W). For each date the difference of the composite from a fill that does not know the hidden pixels of the
    date is regressed on its bands; what this prediction misses beside a gap is carried into it. Dates count by the
    inverse of their squared error nearby and by the share that the regression explains, and shrink by this share.
    """
    shown = observed & (clear > 0.5)
    hidden, seen = observed & ~shown, shown.any(dim=1)
    useful = (hidden & ~seen[:, None]).flatten(2).any(dim=2) & (hidden & seen[:, None]).flatten(2).any(dim=2)
    wide = (image[:, None].expand_as(dates), dates, hidden, seen[:, None].expand_as(hidden))
    series = [one.flatten(0, 1) for one in wide]
    # Reading values breaks a graph and makes a GPU wait: there all dates are computed.
    if is_exporting() or torch.compiler.is_compiling() or image.device.type != "cpu":
        part, worth = _recovered(*series)
        part, worth = part.view_as(dates) * useful[:, :, None, None, None], worth.view_as(dates[:, :, 0])
        worth = worth * useful[:, :, None, None]
    else:
        chosen = useful.flatten().nonzero()[:, 0]
        if not len(chosen):
            return torch.zeros_like(image)
        part, worth = dates.new_zeros(dates.shape), dates.new_zeros(hidden.shape)
        part.flatten(0, 1)[chosen], worth.flatten(0, 1)[chosen] = _recovered(*(one[chosen] for one in series))
    return part.sum(dim=1) / worth.sum(dim=1).clamp(min=1e-12)[:, None] * ~seen[:, None]


def _recovered(image: Tensor, date: Tensor, hidden: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted correction (N, C, H, W) by the hidden pixels of N dates, and the weights (N, H, W).

    image, date: (N, C, H, W); hidden, seen: bool (N, H, W), the pixels that the date hides and those that any shows.
    """
    both, elsewhere = (hidden & seen).to(image.dtype), (seen & ~hidden).to(image.dtype)[:, None]
    base, smooth = _coarse_fill(image, elsewhere), _mean_within(date, hidden[:, None].to(image.dtype))
    missing = image - base
    found, _ = ridge_fit(_clipped(torch.cat([date - smooth, smooth], dim=1), both), missing, both)
    found = found.clamp(-MOST_RECOVERED, MOST_RECOVERED)
    before, after = (_local_error(error, both) for error in (missing, missing - found))
    explained = (1 - after / before).clamp(0, 1).sqrt()
    worth = hidden * explained / after
    # The level is corrected by the error of the prediction beside the gap. Beside pixels that the date itself shows
    # there is none: there the fill has about the right level.
    change, gap = base + found - image, (hidden & ~seen)[:, None].to(image.dtype)
    edge = gap * (box_mean(elsewhere, THROUGH_CLOUD) > 0)
    level = torch.lerp(change, _mean_within(change, gap), edge)
    added = change - carried_inward(level, both[:, None] + EDGE_WEIGHT * edge)
    return (worth * explained)[:, None] * added, worth


def _clipped(features: Tensor, weight: Tensor) -> Tensor:
    """Return features (N, D, H, W) within `FARTHEST` standard deviations of those with weight (N, H, W)."""
    near = weight[:, None]
    total = near.sum(dim=(-2, -1), keepdim=True).clamp(min=1.0)
    mean = (features * near).sum(dim=(-2, -1), keepdim=True) / total
    reach = FARTHEST * (((features - mean).square() * near).sum(dim=(-2, -1), keepdim=True) / total).sqrt()
    return torch.minimum(torch.maximum(features, mean - reach), mean + reach)


def _mean_within(x: Tensor, inside: Tensor) -> Tensor:
    """Return the mean of x (N, C, H, W) over `THROUGH_CLOUD` pixels, of those inside (N, 1, H, W) alone."""
    return box_mean(x * inside, THROUGH_CLOUD) / box_mean(inside, THROUGH_CLOUD).clamp(min=1e-3)


def _coarse_fill(image: Tensor, known: Tensor) -> Tensor:
    """Return image (N, C, H, W) filled smoothly where known (N, 1, H, W) is 0, computed in cells."""
    height, width = image.shape[-2:]
    joined = F.avg_pool2d(torch.cat([image * known, known], dim=1), CELL, ceil_mode=True, count_include_pad=False)
    share = joined[:, -1:]
    cells = carried_inward(joined[:, :-1] / share.clamp(min=1e-6), (share > 0).to(image.dtype))
    return F.interpolate(cells, scale_factor=CELL, mode="bilinear", align_corners=False)[..., :height, :width]


def _local_error(error: Tensor, weight: Tensor) -> Tensor:
    """Return the mean squared error (N, H, W) of the bands around each pixel."""
    squared = error.square().mean(dim=1, keepdim=True)
    return spread_from_clear(squared, weight, floor=FAR_WEIGHT)[:, 0] + NOISE_VARIANCE


# Contrast

MOST_GAIN = 1.15
"""Largest factor for details. Up to this bound, sharpness rose by 0.06 to 0.07 on the training places and PSNR fell by
0.03 to 0.06 dB."""
PIXELS_CONTRAST = 2000.0
"""Evidence, in pairs of clear pixels, at which the measured contrast is trusted by half."""
DETAIL = 5
"""Edge of the window whose mean counts as "without detail"."""


def contrast_gain(predicted: Tensor, own: Tensor, known: Tensor) -> Tensor:
    """Return (B,) in [1, MOST_GAIN]: the factor by which the details of `predicted` are too weak.

    predicted, own: (B, C, H, W), the prediction from the other dates and the date itself; known: (B, H, W) in [0, 1],
    where both are reliable.
    """
    pairs = known[:, :-1, :-1] * known[:, 1:, :-1] * known[:, :-1, 1:]
    evidence = pairs.sum(dim=(1, 2))
    shown, said = ((_gradient(image) * pairs).sum(dim=(1, 2)) for image in (own, predicted))
    # Half of the measured factor, in logarithms, because details are only partly right.
    gain = (shown / said.clamp(min=1e-6)).clamp(min=1e-6).sqrt().clamp(1.0, MOST_GAIN)
    return 1 + (gain - 1) * evidence / (evidence + PIXELS_CONTRAST)


def with_contrast(image: Tensor, gain: Tensor) -> Tensor:
    """Return the image (B, C, H, W) with its details strengthened by gain (B,)."""
    smooth = F.avg_pool2d(image, DETAIL, stride=1, padding=DETAIL // 2, count_include_pad=False)
    return image + (gain - 1).view(-1, 1, 1, 1) * (image - smooth)


def _gradient(image: Tensor) -> Tensor:
    """Return (B, H - 1, W - 1): absolute differences to the right and below, summed over the bands."""
    right = (image[..., :-1, 1:] - image[..., :-1, :-1]).abs()
    below = (image[..., 1:, :-1] - image[..., :-1, :-1]).abs()
    return (right + below).sum(dim=1)
