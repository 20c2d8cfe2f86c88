"""Radiometric matching: every date made to look as if taken under the light of one anchor date (LESSONS 2, 11).

For each date a linear map of all its bands onto the anchor's bands is fitted on pixels clear in both, once for the
whole image and once around each cell, the local fit shrinking to the global one, the global one to "no change", where
evidence is thin. Closed-form least squares, always float32, no learned parameter and no randomness.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from sader.model.blocks import full_precision, reflect_pad

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
SPREADS = (3.0, 6.0, 12.0, 24.0)
"""Standard deviations, in cells, of the Gaussians that add up to a heavy-tailed neighbourhood."""


OUTLIER = 50.0
"""Squared misfit, in usual ones, at which a pixel counts a quarter: land changes less, a missed cloud far more."""
SMALLEST_PIVOT = 1e-9
"""Rounding may turn the pivot of a nearly singular matrix negative; the ridges above are far larger."""
MOST_CHANGE = 1.0
"""Largest change of a value by matching, in model units: half of the whole range of reflectance."""


def solve_positive(matrix: Tensor, right: Tensor) -> Tensor:
    """Return X with matrix X = right for symmetric positive definite (..., n, n) and (..., n, m).

    Gauss-Jordan without pivoting, n fused steps: for thousands of tiny systems it beats a batched LU, needs no
    synchronisation on a GPU and can be exported.
    """
    n = matrix.shape[-1]
    joined = torch.cat([matrix, right], dim=-1)
    for k in range(n):
        row = joined[..., k : k + 1, :] / joined[..., k : k + 1, k : k + 1].clamp(min=SMALLEST_PIVOT)
        others = joined - joined[..., :, k : k + 1] * row
        joined = torch.cat([others[..., :k, :], row, others[..., k + 1 :, :]], dim=-2)
    return joined[..., n:]


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


def _to_pixels(x: Tensor, height: int, width: int) -> Tensor:
    """Return cell maps (N, D, h, w) as smooth pixel maps (N, D, H, W)."""
    full = F.interpolate(x, scale_factor=CELL, mode="bilinear", align_corners=False)
    return full[..., :height, :width]


def match_dates(cloudy: Tensor, clear: Tensor, anchor: Tensor) -> Tensor:
    """Return the dates (B, T, C, H, W) with the radiometry of the anchor date.

    cloudy: (B, T, C, H, W) in model units. clear: (B, T, H, W) in [0, 1], how surely a pixel is usable.
    anchor: (B,) index of the date to match; it comes back as it was.
    """
    with torch.no_grad(), full_precision(cloudy):
        return _match_dates(cloudy.float(), clear.float(), anchor)


def _match_dates(cloudy: Tensor, clear: Tensor, anchor: Tensor) -> Tensor:
    batch, _, bands, height, width = cloudy.shape
    coefficients, centre = fit_dates(cloudy, clear, anchor)
    smooth = _to_pixels(rearrange(coefficients, "b t i j h w -> (b t) (i j) h w"), height, width)
    smooth = rearrange(smooth, "(b t) (i j) h w -> b t i j h w", b=batch, j=bands)
    change, about = smooth[:, :, -1], cloudy - centre
    for band in range(bands):  # one after the other: all products at once would be C times an already large map
        change = change + about[:, :, band, None] * smooth[:, :, band]
    # A fit on dark ground says nothing about a cloud; without a bound its extrapolation could be anything.
    return cloudy + change.clamp(-MOST_CHANGE, MOST_CHANGE)


def fit_dates(cloudy: Tensor, clear: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maps of each date onto the anchor: coefficients (B, T, C + 1, C, h, w), centre (B, 1, C, 1, 1).

    One set per cell: change = (cloudy - centre) coefficients[:C] + coefficients[C], in model units. Arguments as in
    `match_dates`.
    """
    batch, _, bands, height, width = cloudy.shape
    ph, pw = (height + CELL - 1) // CELL * CELL, (width + CELL - 1) // CELL * CELL
    # Bottom and right cells are completed with weight zero, so that padding is no evidence.
    weight = F.pad(clear, (0, pw - width, 0, ph - height))
    x = reflect_pad(cloudy, ph, pw)
    pick = anchor.view(batch, 1, 1, 1, 1)
    target = x.gather(1, pick.expand(-1, 1, bands, ph, pw))
    own = weight.gather(1, pick[:, :, 0].expand(-1, 1, ph, pw))
    # Covariances are differences of moments: about the anchor's own mean little is left to cancel.
    centre = (target * own[:, :, None]).sum(dim=(-2, -1), keepdim=True) / own.sum(dim=(-2, -1)).clamp(min=1.0)[
        ..., None, None, None
    ]
    x, target, weight = x - centre, target - centre, weight * own

    # A cloud that the mask missed has leverage: it would bend a first fit towards itself. So the first is made where
    # the dates agree as they are, and what that fit cannot explain hardly counts in the second.
    agreeing = weight * inlier_weight((x - target).square().mean(dim=2), weight)
    everything = _moments(x, target, agreeing).sum(dim=(-2, -1), keepdim=True)
    slope, offset = _fit(everything, ridge=RIDGE_GLOBAL, half=PIXELS_GLOBAL)
    explained = (slope[..., 0, 0].transpose(-2, -1) @ x.flatten(-2)).view(x.shape)
    misfit = x + explained + offset - target
    weight = weight * inlier_weight(misfit.square().mean(dim=2), weight)
    moments = _moments(x, target, weight)
    slope, offset = _fit(moments.sum(dim=(-2, -1), keepdim=True), ridge=RIDGE_GLOBAL, half=PIXELS_GLOBAL)
    # The local fit explains what the global one leaves: E[x r] with r = d - x slope - offset, by linearity.
    first = moments[:, :, :, : 1 + bands]
    turned = slope[..., 0, 0].transpose(-2, -1)[:, :, None]
    explained = (turned @ first[:, :, :, 1:].flatten(-2)).view(first[:, :, :, 1:].shape)
    explained = explained + first[:, :, :, :1] * offset[:, :, None]
    remaining = torch.cat([first, moments[:, :, :, 1 + bands :] - explained], dim=3)
    flat = rearrange(remaining, "b t i j h w -> (b t) (i j) h w")
    near = rearrange(heavy_tailed_blur(flat), "(b t) (i j) h w -> b t i j h w", b=batch, i=1 + bands)
    local_slope, local_offset = _fit(near / CELL**2, ridge=RIDGE_LOCAL, half=WEIGHT_LOCAL)

    return torch.cat([slope + local_slope, (offset + local_offset)[:, :, None]], dim=2), centre


def _moments(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Return per cell the sums of weight [1, x]^T [1, x, target - x], (B, T, 1 + C, 1 + 2C, h, w)."""
    ones = torch.ones_like(x[:, :, :1])
    left = torch.cat([ones, x], dim=2) * weight[:, :, None]
    right = torch.cat([ones, x, target - x], dim=2)
    # One matrix product per cell, laid out for it in one move each.
    left = rearrange(left, "b t i (h p) (w q) -> b t h w i (p q)", p=CELL, q=CELL)
    right = rearrange(right, "b t j (h p) (w q) -> b t h w (p q) j", p=CELL, q=CELL)
    return rearrange(left @ right, "b t h w i j -> b t i j h w")


def inlier_weight(squared: Tensor, weight: Tensor, scale: Tensor | float | None = None) -> Tensor:
    """Return in (0, 1] how far each squared misfit (..., H, W) may count: 1 / (1 + m / (50 s))^2.

    scale: the usual squared misfit s; by default the weighted geometric mean, which a few huge values do not move.
    """
    if scale is None:
        logs = (squared + 1e-6).log()
        total = weight.sum(dim=(-2, -1), keepdim=True).clamp(min=1e-6)
        scale = ((weight * logs).sum(dim=(-2, -1), keepdim=True) / total).exp()
    return (1 + squared / (OUTLIER * scale + 1e-6)).pow(-2)


def _fit(moments: Tensor, *, ridge: float, half: float) -> tuple[Tensor, Tensor]:
    """Return slopes (B, T, C, C, h, w) and offsets (B, T, C, h, w) of the change d = x slope + offset.

    moments: (B, T, 1 + C, 1 + 2C, h, w), sums of w [1, x]^T [1, x, d]. Slopes shrink by the ridge, and everything by
    evidence / (evidence + half).
    """
    bands = moments.shape[2] - 1
    count = moments[:, :, :1, :1]
    mean = moments / count.clamp(min=1e-6)
    mean_x, mean_d = mean[:, :, 0, 1 : 1 + bands], mean[:, :, 0, 1 + bands :]
    cov_xx = mean[:, :, 1:, 1 : 1 + bands] - mean_x[:, :, :, None] * mean_x[:, :, None]
    cov_xd = mean[:, :, 1:, 1 + bands :] - mean_x[:, :, :, None] * mean_d[:, :, None]
    trust = count / (count + half)
    eye = torch.eye(bands, device=moments.device, dtype=moments.dtype)
    penalty = (ridge / trust.clamp(min=1e-3))[:, :, 0, 0, ..., None, None]
    slope = solve_positive(
        rearrange(cov_xx, "b t i j h w -> b t h w i j") + penalty * eye,
        rearrange(cov_xd, "b t i j h w -> b t h w i j"),
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
    return _to_pixels(blurred[:, :-1] / blurred[:, -1:].clamp(min=1e-8), height, width)
