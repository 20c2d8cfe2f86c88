"""Radiometric matching: every date is mapped to the radiometry of one anchor date (docs/method.md#composite).

For each date a linear map of all its bands onto the anchor's bands is fitted on pixels clear in both, once for the
whole image and once around each cell, the local fit shrinking to the global one, the global one to the same mean level,
where evidence is thin. Closed-form least squares, always float32, no learned parameter and no randomness.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from sader.model.blocks import full_precision, is_exporting, reflect_pad

CELL = 8
"""Edge of a statistics cell in pixels."""
RIDGE_GLOBAL = 1e-5
RIDGE_LOCAL = 3e-5
"""Ridge on the slopes, in squared model units (bands vary by about 0.1, squared 0.01). This and the constants below
were chosen on the training places of CloudSEN12: wide neighbourhoods win, because labels miss the fringes of clouds."""
PIXELS_GLOBAL = 64.0
"""Evidence, in clear pixels, at which the global fit is trusted by half."""
WEIGHT_LOCAL = 0.005
"""Share of clear pixels nearby at which the local fit is trusted by half."""
LIGHT = 0.06
"""Usual difference of the mean levels of two dates, in model units."""
LAND_PIXELS = 1000.0
"""Pixels of land that vary together: this many count as one observation of a date's mean level."""
SPREADS = (3.0, 6.0, 12.0, 24.0)
"""Standard deviations, in cells, of the Gaussians that add up to a heavy-tailed neighbourhood."""


RIDGE = 1e-4
"""Ridge on the slopes of `ridge_fit`, relative to the mean variance of the bands."""
FEW_PIXELS = 8.0
"""Pixels at which these slopes shrink by half."""
FARTHEST = 4.0
"""Features are clipped at this many standard deviations of the fitted pixels, beyond which a fit extrapolates."""
PASSES = 2
"""Fits, each again without what the one before could not explain: missed clouds, changed fields."""
OUTLIER = 50.0
"""Squared misfit, in usual ones, at which a pixel has a quarter of its weight: land changes less, clouds more."""
SUPPORT = 9
"""Edge in cells of the window in which clear pixels support each other."""
STRIP_SHARE, LAND_SHARE = 0.36, 0.5
"""Clear share of that window up to which a pixel beside nodata belongs to a strip, and from which on it is land."""
LEAST_SUPPORT = 0.1
"""Factor on the usual squared misfit of strips: their misfits count as outliers ten times earlier."""
HAZE, HAZE_SEEN = 0.004, 0.006
"""Excess in all bands, in model units, at which a pixel near hidden ones has a quarter of its weight; and from which on
it counts as haze. Only where most pixels beside hidden ones are haze does the first apply."""
HAZE_WINDOW, HAZE_REACH = 5, 20
"""Edge in pixels of the window of that excess; greatest distance in pixels from a hidden pixel."""
NOISE_VARIANCE = 1e-5
"""Floor of the variance, about 0.0016 of reflectance: the noise of the sensors."""
SMALLEST_PIVOT = 1e-9
"""Rounding may turn the pivot of a nearly singular matrix negative; the ridges above are far larger."""
MOST_CHANGE = 1.0
"""Largest change of a value by matching, in model units: half of the whole range of reflectance."""
EXPORTED_LEVELS = 11
"""Halvings in an exported graph, whose depth is fixed: one pixel is left of up to 2048, and halving it again changes
nothing."""
RELAXATIONS = 4  # at every level; enough to take out the blocks of the coarser one


def solve_positive(matrix: Tensor, right: Tensor) -> Tensor:
    """Return X with matrix X = right for symmetric positive definite (..., n, n) and (..., n, m).

    Gauss-Jordan without pivoting, n fused steps: for thousands of tiny systems it beats a batched LU, needs no
    synchronisation on a GPU and can be exported.
    """
    joined = torch.cat([matrix, right], dim=-1)
    for _ in range(matrix.shape[-1]):
        # The pivot is always the first element: its column is dropped and its row moved to the end, so that after n
        # steps the rows are in their original order.
        row = joined[..., :1, 1:] / joined[..., :1, :1].clamp(min=SMALLEST_PIVOT)
        others = joined[..., 1:, 1:] - joined[..., 1:, :1] * row
        joined = torch.cat([others, row], dim=-2)
    return joined


def box_mean(x: Tensor, edge: int) -> Tensor:
    """Return the mean of x (B, C, H, W) over a square window of odd `edge`, zero outside; one axis after the other."""
    rows = F.avg_pool2d(x, (edge, 1), stride=1, padding=(edge // 2, 0))
    return F.avg_pool2d(rows, (1, edge), stride=1, padding=(0, edge // 2))


def heavy_tailed_blur(x: Tensor) -> Tensor:
    """Return (N, D, h, w) blurred with a sum of ever wider, ever weaker Gaussians (zero outside the image).

    Near data dominates where there is any; far data decides where there is none. Dividing two results of this
    function gives a weighted mean that reaches across holes of any size.
    """
    height, width = x.shape[-2:]
    total = torch.zeros_like(x)
    for order, spread in enumerate(SPREADS):
        total = total + 4.0**-order * _gaussian(_gaussian(x, spread, height, 2), spread, width, 3)
    return total


def _gaussian(x: Tensor, spread: float, size: int, dim: int) -> Tensor:
    """Return x blurred along one axis as a product with a small, symmetric (size, size) matrix."""
    position = torch.arange(size, device=x.device, dtype=x.dtype)
    kernel = torch.exp(-0.5 * ((position[:, None] - position[None, :]) / spread) ** 2) / (spread * 2.5066)
    return kernel @ x if dim == 2 else x @ kernel


def weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Return sum_k weights_k values_k over axis 1, (B, K, H, W) and (B, K, C, H, W) -> (B, C, H, W).

    Products and sums: as an einsum it would be one tiny matrix product per pixel, several times slower.
    """
    return (weights[:, :, None] * values).sum(dim=1)


def to_pixels(x: Tensor, height: int, width: int) -> Tensor:
    """Return cell maps (N, D, h, w) as smooth pixel maps (N, D, H, W)."""
    full = F.interpolate(x, scale_factor=CELL, mode="bilinear", align_corners=False)
    return full[..., :height, :width]


def support(clear: Tensor, observed: Tensor) -> Tensor:
    """Return (B, T, H, W), from LEAST_SUPPORT to 1: less in narrow strips of clear pixels (B, T, H, W) beside nodata.

    Such strips often are shadow or haze that the mask missed, or the edge of a footprint. Where they alone border a gap
    of the anchor they would decide the radiometry of all of it. observed: bool (B, T, H, W).
    """
    both = torch.cat([clear, 1 - observed.to(clear.dtype)], dim=1)
    cells = F.avg_pool2d(both, CELL, ceil_mode=True, count_include_pad=False)
    near = F.avg_pool2d(cells, SUPPORT, stride=1, padding=SUPPORT // 2, count_include_pad=False)
    shares = to_pixels(near, *clear.shape[-2:])
    dates = clear.shape[1]  # slices, because `chunk` would fix the number of dates of an exported graph
    land, nodata = shares[:, :dates], shares[:, dates:]
    narrow = ((LAND_SHARE - land) / (LAND_SHARE - STRIP_SHARE)).clamp(0, 1)
    return 1 - (1 - LEAST_SUPPORT) * narrow * (10 * nodata).clamp(max=1)


def haze_weight(misfit: Tensor, clear: Tensor) -> Tensor:
    """Return (B, H, W) in (0, 1]: low near hidden pixels where all bands are brighter than predicted.

    Such pixels are haze around a cloud that the mask does not reach. Where haze encloses the holes, its misfit would be
    carried over all of them. The weights are 1 if less than half of the pixels beside hidden ones are haze. misfit:
    (B, C, H, W), 0 in missing bands; clear: (B, H, W) in [0, 1].
    """
    joined = torch.cat([misfit * clear[:, None], clear[:, None]], dim=1)
    near = F.avg_pool2d(joined, HAZE_WINDOW, stride=1, padding=HAZE_WINDOW // 2)
    largest = misfit.abs().amax(dim=(2, 3), keepdim=True)
    missing = (largest == 0) & (largest.amax(dim=1, keepdim=True) > 0)
    veil = (near[:, :-1] / near[:, -1:].clamp(min=1e-3)).masked_fill(missing, 1.0).amin(dim=1).clamp(min=0)
    edge = 2 * HAZE_REACH + 1
    hidden = F.max_pool2d(1 - clear[:, None], (edge, 1), stride=1, padding=(HAZE_REACH, 0))
    hidden = F.max_pool2d(hidden, (1, edge), stride=1, padding=(0, HAZE_REACH))[:, 0]
    rim = F.max_pool2d(1 - clear[:, None], HAZE_WINDOW, stride=1, padding=HAZE_WINDOW // 2)[:, 0] * clear
    share = (rim * (veil > HAZE_SEEN)).sum(dim=(1, 2), keepdim=True) / rim.sum(dim=(1, 2), keepdim=True).clamp(min=1.0)
    enclosed = (4 * share - 2).clamp(0, 1)
    return (1 + enclosed * hidden * (veil / HAZE).square()).pow(-2)


def match_dates(
    cloudy: Tensor, clear: Tensor, anchor: Tensor, *, observed: Tensor | None = None, already_matched: bool = False
) -> Tensor:
    """Return the dates (B, T, C, H, W) with the radiometry of the anchor date.

    cloudy: (B, T, C, H, W) in model units. clear: (B, T, H, W) in [0, 1], how surely a pixel is usable.
    anchor: (B,) index of the date to match; it comes back as it was. observed, already_matched: as in `fit_dates`.
    """
    batch, dates, bands, height, width = cloudy.shape
    with torch.no_grad(), full_precision(cloudy):
        cloudy, clear = cloudy.float(), clear.float()
        coefficients, centre = fit_dates(cloudy, clear, anchor, observed=observed, already_matched=already_matched)

        def smooth(feature: int) -> Tensor:
            maps = coefficients[:, :, feature].flatten(0, 1)
            return to_pixels(maps, height, width).view(batch, dates, bands, height, width)

        change, about = smooth(bands), cloudy - centre
        for band in range(bands):  # one after the other: all at once would be C times an already large map
            change = change + about[:, :, band, None] * smooth(band)
        # Bounded, because a fit on dark ground extrapolates without limit to bright clouds.
        return cloudy + change.clamp(-MOST_CHANGE, MOST_CHANGE)


def fit_dates(
    cloudy: Tensor, clear: Tensor, anchor: Tensor, *, observed: Tensor | None = None, already_matched: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the maps of each date onto the anchor: coefficients (B, T, C + 1, C, h, w), centre (B, 1, C, 1, 1).

    One set per cell: change = (cloudy - centre) coefficients[:C] + coefficients[C], in model units. Arguments as in
    `match_dates`. observed: bool (B, T, H, W), for `support`; None: all pixels are. already_matched: the dates have the
    same radiometry already. Dates without pixels in common with the anchor are then left as they are; otherwise their
    mean level is shifted to that of the anchor.
    """
    batch, _, bands, height, width = cloudy.shape
    ph, pw = (height + CELL - 1) // CELL * CELL, (width + CELL - 1) // CELL * CELL
    # Bottom and right cells are completed with weight zero, so that padding has no weight.
    weight = F.pad(clear, (0, pw - width, 0, ph - height))
    x = reflect_pad(cloudy, ph, pw)
    pick = anchor.view(batch, 1, 1, 1, 1)
    target = x.gather(1, pick.expand(-1, 1, bands, ph, pw))
    own = weight.gather(1, pick[:, :, 0].expand(-1, 1, ph, pw))
    # Covariances are differences of moments: centring on the anchor's mean avoids cancellation.
    centre = (target * own[:, :, None]).sum(dim=(-2, -1), keepdim=True) / own.sum(dim=(-2, -1)).clamp(min=1.0)[
        ..., None, None, None
    ]
    x, target, alone, weight = x - centre, target - centre, weight, weight * own
    shift = torch.zeros_like(x[..., :1, :1]) if already_matched else level_shift(x, alone, anchor)
    x = x + shift

    trust = None
    if observed is not None:
        pair = observed & observed.gather(1, pick[:, :, 0].expand(-1, 1, height, width))
        trust = F.pad(support(weight[..., :height, :width], pair), (0, pw - width, 0, ph - height), value=1.0)
    # A cloud that the mask missed has leverage on the fit. So the first fit weighs pixels by their agreement without
    # any fit, and the second by their agreement with the first.
    change = target - x
    cells = to_cells(x, change)
    agreeing = weight * inlier_weight(change.square().mean(dim=2), weight, trust=trust)
    slope, offset = fit_whole(cell_moments(cells, agreeing, features=bands))
    misfit = change - evaluate_whole(x, slope, offset)
    weight = weight * inlier_weight(misfit.square().mean(dim=2), weight, trust=trust)
    moments = cell_moments(cells, weight, features=bands)
    maps = add_local_fit(moments, *fit_whole(moments))
    # The maps are those of shifted values: shift + (x + shift) slope + offset.
    moved = shift + (shift[:, :, :, None] * maps[:, :, :-1]).sum(dim=2)
    return torch.cat([maps[:, :, :-1], maps[:, :, -1:] + moved[:, :, None]], dim=2), centre


def level_shift(x: Tensor, clear: Tensor, anchor: Tensor) -> Tensor:
    """Return the shift (B, T, C, 1, 1) of each date (B, T, C, H, W) towards the mean level of the anchor.

    For dates that share no pixel, or hardly one, with the anchor: each shows other land, but land of one place differs
    less than light does. The less both show, the less is shifted.
    """
    counts = clear.sum(dim=(-2, -1))[:, :, None, None, None]
    seen = clear[:, :, None]
    mean = (x * seen).sum(dim=(-2, -1), keepdim=True) / counts.clamp(min=1.0)
    squares = ((x - mean).square() * seen).sum(dim=(-2, -1), keepdim=True)
    variance = squares.sum(dim=1, keepdim=True) / counts.sum(dim=1, keepdim=True).clamp(min=1.0)
    doubt = variance * LAND_PIXELS / counts.clamp(min=1.0)
    pick = anchor.view(-1, 1, 1, 1, 1)
    own = mean.gather(1, pick.expand(-1, 1, *mean.shape[2:]))
    trust = LIGHT**2 / (LIGHT**2 + doubt + doubt.gather(1, pick.expand(-1, 1, *doubt.shape[2:])))
    # A date without clear pixels has no level. The anchor's distance to itself is exactly 0.
    return (own - mean) * trust * ((counts > 0) & (counts.gather(1, pick) > 0))


def fit_whole(moments: Tensor, *, half: float = PIXELS_GLOBAL) -> tuple[Tensor, Tensor]:
    """Return one map for the whole image: slopes (B, T, D, C, 1, 1), offsets (B, T, C, 1, 1).

    moments: as from `cell_moments`. half: evidence, in pixels, at which the fit is trusted by half.
    """
    return _fit(moments.sum(dim=(-2, -1), keepdim=True), ridge=RIDGE_GLOBAL, half=half)


def evaluate_whole(x: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
    """Return the map of `fit_whole` applied to features (B, T, D, H, W): (B, T, C, H, W)."""
    linear = slope[..., 0, 0].transpose(-2, -1) @ x.flatten(-2)
    return linear.view(*linear.shape[:3], *x.shape[-2:]) + offset


def add_local_fit(moments: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
    """Return maps per cell (B, T, D + 1, C, h, w), the offset last: the whole image's plus a local fit of the rest."""
    features = moments.shape[2]
    # The local fit explains what the global one leaves: E[x r] with r = d - x slope - offset, by linearity.
    first = moments[:, :, :, :features]
    turned = slope[..., 0, 0].transpose(-2, -1)[:, :, None]
    explained = turned @ first[:, :, :, 1:].flatten(-2)
    explained = explained.view(*explained.shape[:4], *moments.shape[-2:]) + first[:, :, :, :1] * offset[:, :, None]
    remaining = torch.cat([first, moments[:, :, :, features:] - explained], dim=3)
    flat = rearrange(remaining, "b t i j h w -> (b t) (i j) h w")
    near = rearrange(heavy_tailed_blur(flat), "(b t) (i j) h w -> b t i j h w", b=moments.shape[0], i=features)
    local_slope, local_offset = _fit(near / CELL**2, ridge=RIDGE_LOCAL, half=WEIGHT_LOCAL)
    return torch.cat([slope + local_slope, (offset + local_offset)[:, :, None]], dim=2)


def to_cells(x: Tensor, target: Tensor) -> Tensor:
    """Return [1, x, target] with the pixels of a cell beside each other, (B, T, h, w, 1 + D + C, CELL^2).

    x: (B, T, D, H, W); target: (B, T, C, H, W); H and W are multiples of `CELL`.
    """
    joined = torch.cat([torch.ones_like(x[:, :, :1]), x, target], dim=2)
    return rearrange(joined, "b t j (h p) (w q) -> b t h w j (p q)", p=CELL, q=CELL)


def cell_moments(cells: Tensor, weight: Tensor, *, features: int) -> Tensor:
    """Return per cell the sums of weight [1, x]^T [1, x, target], (B, T, 1 + D, 1 + D + C, h, w).

    cells: as from `to_cells`, laid out once for all weights; weight: (B, T, H, W); features: D.
    """
    weights = rearrange(weight, "b t (h p) (w q) -> b t h w 1 (p q)", p=CELL, q=CELL)
    left = cells[..., : 1 + features, :] * weights
    return rearrange(left @ cells.transpose(-2, -1), "b t h w i j -> b t i j h w")


def inlier_weight(
    squared: Tensor, weight: Tensor, scale: Tensor | float | None = None, *, trust: Tensor | None = None
) -> Tensor:
    """Return in (0, 1] the weight of each squared misfit (..., H, W): 1 / (1 + m / (50 s))^2.

    scale: the usual squared misfit s; by default the weighted geometric mean, which a few huge values do not move.
    trust: factor on it for each pixel, such as `support`.
    """
    if scale is None:
        logs = (squared + 1e-6).log()
        total = weight.sum(dim=(-2, -1), keepdim=True).clamp(min=1e-6)
        scale = ((weight * logs).sum(dim=(-2, -1), keepdim=True) / total).exp()
    scale = scale if trust is None else scale * trust
    return (1 + squared / (OUTLIER * scale + 1e-6)).pow(-2)


def ridge_fit(
    features: Tensor, target: Tensor, weight: Tensor, *, trust: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return `target` predicted from `features` by one ridge regression of the whole image, and the pixels it fits.

    features: (..., D, H, W); target: (..., C, H, W); weight: (..., H, W), the pixels that are fitted. The prediction is
    (..., C, H, W), the second result `weight` without outliers. trust: as in `inlier_weight`.
    """
    flat, wanted = features.flatten(-2), target.flatten(-2)
    used, eye = weight, torch.eye(features.shape[-3], device=features.device)
    for _ in range(PASSES):
        near = used.flatten(-2)[..., None, :]
        total = near.sum(dim=-1, keepdim=True).clamp(min=1.0)
        centre, level = ((z * near).sum(dim=-1, keepdim=True) / total for z in (flat, wanted))
        x, y = flat - centre, wanted - level
        left = x * near / total
        gram = left @ x.transpose(-2, -1)
        scale = (gram * eye).sum(dim=(-2, -1), keepdim=True) / len(eye)
        ridge = (RIDGE + (FEW_PIXELS / total).square()) * scale.clamp(min=1e-12)
        slope = solve_positive(gram + ridge * eye, left @ y.transpose(-2, -1))
        predicted = slope.transpose(-2, -1) @ x + level
        predicted = predicted.view(*features.shape[:-3], target.shape[-3], *features.shape[-2:])
        used = weight * inlier_weight((predicted - target).square().mean(dim=-3), weight, trust=trust)
    return predicted, used


def _fit(moments: Tensor, *, ridge: float, half: float) -> tuple[Tensor, Tensor]:
    """Return slopes (B, T, D, C, h, w) and offsets (B, T, C, h, w) of d = x slope + offset.

    moments: (B, T, 1 + D, 1 + D + C, h, w), sums of w [1, x]^T [1, x, d]. Slopes shrink by the ridge, and everything by
    evidence / (evidence + half).
    """
    features = moments.shape[2] - 1
    count = moments[:, :, :1, :1]
    mean = moments / count.clamp(min=1e-6)
    mean_x, mean_d = mean[:, :, 0, 1 : 1 + features], mean[:, :, 0, 1 + features :]
    cov_xx = mean[:, :, 1:, 1 : 1 + features] - mean_x[:, :, :, None] * mean_x[:, :, None]
    cov_xd = mean[:, :, 1:, 1 + features :] - mean_x[:, :, :, None] * mean_d[:, :, None]
    trust = count / (count + half)
    eye = torch.eye(features, device=moments.device, dtype=moments.dtype)
    penalty = (ridge / trust.clamp(min=1e-3))[:, :, 0, 0, ..., None, None]
    slope = solve_positive(
        rearrange(cov_xx, "b t i j h w -> b t h w i j") + penalty * eye, rearrange(cov_xd, "b t i j h w -> b t h w i j")
    )
    slope = rearrange(slope, "b t h w i j -> b t i j h w") * trust
    offset = trust[:, :, 0] * mean_d - (mean_x[:, :, :, None] * slope).sum(dim=2)
    return slope, offset


def spread_from_clear(values: Tensor, clear: Tensor, *, floor: float = 1e-5) -> Tensor:
    """Return (N, D, H, W) smooth: the local mean of `values` over clear pixels, carried across what is hidden.

    values: (N, D, H, W); clear: (N, H, W) in [0, 1]. floor: the weight of a hidden pixel; it decides only where no
    clear pixel is near. Differentiable.
    """
    height, width = values.shape[-2:]
    ph, pw = (height + CELL - 1) // CELL * CELL, (width + CELL - 1) // CELL * CELL
    weight = F.pad(clear.float() + floor, (0, pw - width, 0, ph - height))[:, None]
    padded = F.pad(values.float(), (0, pw - width, 0, ph - height))
    blurred = heavy_tailed_blur(F.avg_pool2d(torch.cat([padded * weight, weight], dim=1), CELL))
    return to_pixels(blurred[:, :-1] / blurred[:, -1:].clamp(min=1e-8), height, width)


def carried_inward(values: Tensor, known: Tensor, level: int = 0) -> Tensor:
    """Return values (B, C, H, W) carried smoothly from where they are known to where they are not.

    known: (B, 1, H, W) in [0, 1]; what is half known is half kept. Pull: halve the size until one pixel is left, each
    coarse pixel the mean of its children by how well they are known. Push: back up, what is unknown takes the bilinear
    value of the coarser level and is relaxed a few times towards the mean of its neighbours, which comes near the
    harmonic fill. 0 where nothing is known at all. Differentiable.
    """
    height, width = values.shape[-2:]
    if level == EXPORTED_LEVELS if is_exporting() else height == 1 and width == 1:
        return values
    even = (0, 1, 0, 1)  # an odd size gets its partner; an even one too, and pooling leaves it out
    children = 4 * F.avg_pool2d(F.pad(known, even), 2)
    coarse = 4 * F.avg_pool2d(F.pad(values * known, even), 2) / children.clamp(min=1e-6)
    coarse = carried_inward(coarse, children.clamp(max=1), level + 1)
    filled = F.interpolate(coarse, scale_factor=2, mode="bilinear", align_corners=False)[..., :height, :width]
    kept, open_ = known * values, 1 - known
    filled = kept + open_ * filled
    quarter = open_ / 4
    neighbours = _gathered_neighbours(height, width, values.device) if is_exporting() else _padded_neighbours
    for _ in range(RELAXATIONS):
        filled = torch.addcmul(kept, quarter, neighbours(filled))
    return filled


def _padded_neighbours(x: Tensor) -> Tensor:
    """Return the sum of the four neighbours of each pixel; at the edge a pixel is its own neighbour."""
    edged = F.pad(x, (1, 1, 1, 1), mode="replicate")
    vertical = edged[..., :-2, 1:-1] + edged[..., 2:, 1:-1]
    horizontal = edged[..., 1:-1, :-2] + edged[..., 1:-1, 2:]
    return vertical + horizontal


def _gathered_neighbours(height: int, width: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return the same function for an exported graph, in which padding and slicing free sizes takes 60 nodes."""
    rows, columns = torch.arange(height, device=device), torch.arange(width, device=device)
    up, down = (rows - 1).clamp(min=0), (rows + 1).clamp(max=height - 1)
    left, right = (columns - 1).clamp(min=0), (columns + 1).clamp(max=width - 1)

    def neighbours(x: Tensor) -> Tensor:
        vertical = x.index_select(-2, up) + x.index_select(-2, down)
        return vertical + (x.index_select(-1, left) + x.index_select(-1, right))

    return neighbours
