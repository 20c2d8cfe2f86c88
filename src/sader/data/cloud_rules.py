"""Rule-based cloud and shadow masks, from brightness, whiteness, haze and outliers in time, and filling of holes.

The rule-based masks are a fallback: a trained mask or the product's own is far more accurate. The default thresholds
were chosen on CloudSEN12 training places of five dates (top-of-atmosphere reflectance; intersection over union .62
there, .66 on four other places). `detect_s2cloudless` calls the optional package of that name instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sader.bands import BANDS_10, BANDS_12, BANDS_13, BANDS_RGBN, RGB
from sader.errors import BandError, ShapeError, require

SWEEPS = 8
S2CLOUDLESS_BANDS = ("B01", "B02", "B04", "B05", "B08", "B8A", "B09", "B10", "B11", "B12")


def detect_s2cloudless(values: np.ndarray) -> np.ndarray:
    """Return clouds, bool (H, W), in reflectance (10, H, W) of an L1C scene, bands as above; shadows are not found."""
    package = require("s2cloudless", extra="s2cloudless", purpose="the cloud detector s2cloudless")
    detector = package.S2PixelCloudDetector(threshold=0.4, average_over=4, dilation_size=2, all_bands=False)
    found = detector.get_cloud_masks(np.ascontiguousarray(np.moveaxis(values, 0, -1))[None])
    return np.asarray(found[0]).astype(bool)


def fill_smoothly(image: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return `image` (C, H, W) with the pixels outside `known` (H, W) interpolated from known neighbours.

    A coarse-to-fine solution of the Laplace equation: holes are filled at half the size first, then relaxed by `SWEEPS`
    averages of the four neighbours. Known pixels are unchanged; values at unknown pixels are never read. Without any
    known pixel the result is zero.
    """
    filled = torch.from_numpy(np.where(known, image, 0).astype(np.float32))[None]
    return _filled(filled, torch.from_numpy(np.ascontiguousarray(known)))[0].numpy()


def _filled(image: Tensor, known: Tensor) -> Tensor:
    """Return the image (1, C, H, W), zero outside `known` (H, W), with its holes filled."""
    height, width = known.shape
    if bool(known.all()) or not bool(known.any()):
        return image
    if min(known.shape) > 1 or max(known.shape) > 2:
        joined = torch.cat([image, known[None, None].float()], dim=1)
        # An odd last row or column counts as if zeros followed.
        coarse, share = F.avg_pool2d(F.pad(joined, (0, width % 2, 0, height % 2)), 2).split((image.shape[1], 1), dim=1)
        coarse = _filled(coarse / share.clamp(min=1e-6), share[0, 0] > 0)
        whole = F.interpolate(coarse, scale_factor=2, mode="bilinear", align_corners=False)
        filled = torch.where(known, image, whole[..., :height, :width])
    else:
        filled = torch.where(known, image, image[..., known].mean(-1)[..., None, None])
    for _ in range(SWEEPS):
        padded = F.pad(filled, (1, 1, 1, 1), mode="replicate")
        around = padded[..., :-2, 1:-1] + padded[..., 2:, 1:-1] + padded[..., 1:-1, :-2] + padded[..., 1:-1, 2:]
        filled = torch.where(known, filled, around / 4)
    return filled


def local_share(mask: np.ndarray, radius: int) -> np.ndarray:
    """Return the share of True in the square window of `radius` around each pixel, (..., H, W) in [0, 1]."""
    return _window_sum(mask.astype(np.float64), radius) / _window_sum(np.ones(mask.shape[-2:]), radius)


def _window_sum(values: np.ndarray, radius: int) -> np.ndarray:
    """Return sums over the square window of `radius`, cut at the border."""
    for axis in (-2, -1):
        size = values.shape[axis]
        total = np.cumsum(values, axis=axis)
        total = np.concatenate([np.zeros_like(np.take(total, [0], axis=axis)), total], axis=axis)
        index = np.arange(size)
        upper, lower = np.minimum(index + radius + 1, size), np.maximum(index - radius, 0)
        values = np.take(total, upper, axis=axis) - np.take(total, lower, axis=axis)
    return values


USUAL_BANDS: dict[int, tuple[str, ...]] = {
    len(bands): bands for bands in (RGB, BANDS_RGBN, BANDS_10, BANDS_12, BANDS_13)
}
"""Bands assumed from their number when no names are given."""


RISE, HAZE, CIRRUS, BRIGHT, THICK, WHITE, SHADOW, SMOOTH = 0.012, 0.008, 0.012, 0.35, 0.45, 0.15, 0.85, 4
"""Thresholds of `estimate_cloud_mask`, which describes them."""


def estimate_cloud_mask(
    cloudy: np.ndarray, bands: Sequence[str] | None = None, *, valid: np.ndarray | None = None
) -> np.ndarray:
    """Return an estimate of clouds and shadows, bool (T, H, W), True = cloud or shadow.

    cloudy: (T, C, H, W) reflectance; bands: their names (None: guessed from the number of bands); valid: bool
    (T, H, W), False where a date has no data. All thresholds are reflectance unless stated otherwise:

    - cloud: the visible bands are brighter than in the darkest dates by `RISE`, and the haze index B02 - B04 / 2 is
      higher by `HAZE` (clouds and haze are bluer than bare ground); or brighter than `BRIGHT` with half that haze; or
      the cirrus band, if given, higher by `CIRRUS`; or, regardless of the other dates, brighter than `THICK` and white:
      the visible bands differ by less than `WHITE` times their mean (snow is classified as cloud).
    - shadow: near infrared below `SHADOW` times, and red below `SHADOW` + 0.1 times, the usual value of
      the pixel (40 % quantile over the dates, corrected for the brightness of the whole date).
    - `SMOOTH`: radius of the majority filter, pixels.

    With one date, or where only one has data, only bright white pixels are found.
    """
    if cloudy.ndim != 4:
        raise ShapeError(f"cloudy has {cloudy.ndim} dimensions {cloudy.shape}; expected (T, C, H, W)")
    names = _band_names(cloudy.shape[1], bands)
    blue, green, red = (cloudy[:, names.index(band)] for band in ("B02", "B03", "B04"))
    infrared = next((cloudy[:, names.index(band)] for band in ("B08", "B8A") if band in names), red)
    valid = np.ones(blue.shape, bool) if valid is None else valid

    visible = (blue + green + red) / 3
    spread = np.maximum(np.maximum(blue, green), red) - np.minimum(np.minimum(blue, green), red)
    is_white = spread < WHITE * visible
    compared = valid.sum(0) > 1

    # A shadowed date would make the others appear bright, so it is left out of the darkest dates, but only where the
    # pixel is usually dark ground: under frequent clouds the one clear date is the dark outlier.
    usual = _quantile(visible, valid, 0.4)
    shaded = (visible < 0.75 * usual) & (infrared < 0.75 * _quantile(infrared, valid, 0.4)) & (usual < 0.15)
    lit = valid & ~shaded
    rises = visible - _quantile(visible, lit, 0.1)
    hazes = (blue - red / 2) - (_quantile(blue, lit, 0.1) - _quantile(red, lit, 0.1) / 2)
    cloud = ((rises > RISE) & (hazes > HAZE)) | ((visible > BRIGHT) & (hazes > HAZE / 2))
    if "B10" in names:
        high = cloudy[:, names.index("B10")]
        cloud |= high - _quantile(high, valid, 0.1) > CIRRUS
    cloud = (cloud & compared) | (is_white & (visible > np.where(compared, THICK, BRIGHT)))

    dark = np.ones_like(cloud)
    for band, least in ((infrared, SHADOW), (red, SHADOW + 0.1)):
        ratio = band / np.maximum(_quantile(band, valid, 0.4), 0.01)
        for date, clear in enumerate(valid & ~cloud):
            # The whole date may be darker (season, sun): its brightest clear pixels give the factor.
            level = float(np.clip(np.quantile(ratio[date][clear], 0.9), 0.7, 1.1)) if clear.any() else 1.0
            dark[date] &= ratio[date] < least * level
    mask = (cloud | (dark & compared)) & valid
    return (local_share(mask, SMOOTH) > 0.5 * local_share(valid, SMOOTH)) & valid


def _band_names(count: int, bands: Sequence[str] | None) -> list[str]:
    """Return the band names, given or guessed; raise if the visible bands are not among them."""
    names = list(USUAL_BANDS.get(count, ()) if bands is None else bands)
    if len(names) != count:
        found = f"{count} bands" if bands is None else f"{count} bands and {len(names)} names"
        raise BandError(
            f"cannot estimate clouds from {found}; expected one name per band. Pass bands=('B02', 'B03', ...) "
            "or a known cloud_mask."
        )
    missing = [band for band in ("B02", "B03", "B04") if band not in names]
    if missing:
        raise BandError(
            f"cannot estimate clouds without {', '.join(missing)}; expected the visible bands among "
            f"{', '.join(names)}. Pass a known cloud_mask."
        )
    return names


def _quantile(values: np.ndarray, valid: np.ndarray, share: float) -> np.ndarray:
    """Return the quantile over the valid dates, (T, H, W) -> (H, W): one of the values; zero without a valid date."""
    count = valid.sum(0)
    ordered = np.sort(np.where(valid, values, np.inf), axis=0)
    rank = np.round(share * np.maximum(count - 1, 0)).astype(int)
    return np.where(count > 0, np.take_along_axis(ordered, rank[None], axis=0)[0], 0)
