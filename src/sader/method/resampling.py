"""Resampling: a second prediction at the same noise level, fused with the first by a guide (paper, Algorithm 1).

At noise level sigma the prediction D_prev is given its mean and fresh noise again and denoised once more:
    x_t = D_prev + sigma (alpha mu_t + eps_t),   D_new = D(x; sigma).
At outliers, the candidate nearer to the guide's image G is taken; G is predicted from the pixels around the outliers.
Everywhere else D_prev is kept. The ODE continues from the last re-noised x with the fused image. Guides are in
`method/guides.py`, the ODE in `diffusion.py`.

The paper and the public code disagree (docs/method.md). `ResamplerConfig.named` returns each variant by its name, which
is that of `SamplingConfig.resampling` and `RemoverOptions.resampling`:

==================  ==============================  =====================================  ===========================
what                "default"                       "paper" (Algorithm 1)                  "public_code"
==================  ==============================  =====================================  ===========================
outliers            |D_prev - D_new|, min-max       the top `fraction` of                  as the default, 0.2
(criterion)         normalised, above 0.2           |D_prev - mean of mu|                  (Sen2_MTC_New) or 0.5 (TS)
size of the set     by the threshold                mean cloud cover ratio                 by the threshold
fusion              whole pixels                    whole pixels ("the corresponding       band by band: may mix two
                                                    pixel is replaced")                    candidates in one pixel
the guide sees      s D + (1 - s) mean mu, which    D + alpha sigma mu, clamped (the       D + alpha sigma mu, clamped
(guide_input)       stays in range                  paper does not say how it is fed)      to the range of an image
first step          not resampled                   resampled                              not resampled
agreement           differences up to 1e-3 of       any difference counts                  any difference counts
(floor)             [-1, 1] are agreement
compared with       the fused image                 the previous candidate (the same with  the fused image
(previous)                                          one resampling)
==================  ==============================  =====================================  ===========================

with s = 1/(1 + alpha sigma). Two differences have no setting:

* The public code never calls eval(), so its guide runs with dropout and hides 25 % of the visible patches at random.
  Guides are deterministic here, and noise comes from the caller's source: the same inputs and seed give the same bits.
* The public code carries T identical copies of D; Algorithm 1 writes x_t^f with an index t for one image and compares
  it with mu_t. Here everything is (B, C, H, W), and mu is averaged over its frames.

Without a guide D_new is taken everywhere ("w/o correction" in the paper, Table 6). All statistics are per sample, so
that the batch size has no influence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self

import torch
from torch import Tensor

from sader.errors import ConfigError, ShapeError, check_known, did_you_mean
from sader.method.diffusion import Denoise, NoiseSource

Criterion = Literal["disagreement", "top-fraction"]
Fusion = Literal["pixel", "band"]
GuideInput = Literal["in-range", "denoised", "reference-code"]
Resampling = Literal["default", "paper", "public_code"]
"""Names of the variants in the module's table."""

CHOICES = {
    "criterion": ("disagreement", "top-fraction"),
    "fusion": ("pixel", "band"),
    "guide_input": ("in-range", "denoised", "reference-code"),
    "previous": ("fused", "candidate"),
}
RESAMPLINGS: tuple[Resampling, ...] = ("default", "paper", "public_code")
DEFAULT_FRACTION = 0.3
"""Cloud cover where no mask is known."""
MAX_DRAWS = 63  # `sampling.sample` keeps 64 draw numbers for each step


class Guide(Protocol):
    """Predicts the unreliable pixels of an image from the others; see `method.guides.make_guide`."""

    def __call__(self, image: Tensor, missing: Tensor, *, mean: Tensor) -> Tensor:
        """Return the reference image (B, C, H, W) in [-1, 1]; its values at `missing` decide.

        image: (B, C, H, W) in [-1, 1]; missing: bool (B, 1, H, W), True = unreliable; mean: what the process reverts
        to, averaged over its frames, (B, C, H, W).
        """


@dataclass(frozen=True)
class ResamplerConfig:
    """How resampling chooses and fuses; the defaults are the module's first column."""

    steps: int = 1
    """Resamplings at each noise level, N^r in the paper; 1 to 63. For none, sample without a correction."""
    criterion: Criterion = "disagreement"
    """"disagreement" (public code) or "top-fraction" (paper)."""
    threshold: float = 0.2
    """Disagreement: outlier above this share of the largest difference, 0 to 1."""
    fraction: float | None = None
    """Top-fraction: share of pixels, 0 to 1; None = the cloud cover given to the `Resampler`, else 0.3."""
    fusion: Fusion = "pixel"
    """"pixel" decides for all bands together, "band" for each band alone."""
    guide_input: GuideInput = "in-range"
    """"in-range": s D + (1 - s) mean mu; "denoised": D; "reference-code": D + alpha sigma mean mu, clamped."""
    skip_first: bool = True
    """Do not resample the first step, whose prediction comes from noise only."""
    floor: float = 1e-3
    """Differences up to this, on the [-1, 1] scale, are agreement: nothing changes there. 1e-3 = 5 digital numbers."""
    previous: Literal["fused", "candidate"] = "fused"
    """What the new candidate is compared with: the fused image, or the candidate before it (paper)."""

    def __post_init__(self) -> None:
        for field, known in CHOICES.items():
            value = getattr(self, field)
            if value not in known:
                raise ConfigError(f"resampling {field} is {value!r}{did_you_mean(str(value), known)}")
        if not 1 <= self.steps <= MAX_DRAWS:
            raise ConfigError(
                f"resampling steps is {self.steps}; expected 1 to {MAX_DRAWS}. To sample without resampling pass no "
                "correction."
            )
        if not 0 <= self.threshold <= 1:
            raise ConfigError(f"resampling threshold is {self.threshold}; expected 0 to 1 (0.2 is the usual value).")
        if self.fraction is not None and not 0 <= self.fraction <= 1:
            raise ConfigError(f"resampling fraction is {self.fraction}; expected 0 to 1, or None for the cloud cover.")
        if self.floor < 0:
            raise ConfigError(f"resampling floor is {self.floor}; expected 0 or more (1e-3 is the usual value).")

    @classmethod
    def named(cls, name: str, *, threshold: float = 0.2) -> Self:
        """Return the variant called `name` (the columns of the module's table).

        threshold: of "default" and "public_code"; published are 0.2 (Sen2_MTC_New) and 0.5 (SEN12MS-CR-TS).
        """
        check_known("resampling", name, RESAMPLINGS)
        if name == "paper":
            literal = cls(criterion="top-fraction", guide_input="reference-code", skip_first=False, floor=0.0)
            return replace(literal, previous="candidate")
        if name == "public_code":
            return cls(threshold=threshold, fusion="band", guide_input="reference-code", floor=0.0)
        return cls(threshold=threshold)

    def evaluations(self, steps: int) -> int:
        """Return how many resamplings a sampling of `steps` steps has: 3 for 4 + 1 (paper: 4)."""
        return self.steps * (steps - self.skip_first)


def min_max_normalised(value: Tensor) -> Tensor:
    """Return `value` (B, C, H, W) mapped to [0, 1] over space, for each sample and channel."""
    low, high = value.amin(dim=(-2, -1), keepdim=True), value.amax(dim=(-2, -1), keepdim=True)
    return (value - low) / (high - low + 1e-8)


def top_fraction(score: Tensor, fraction: float | Tensor) -> Tensor:
    """Return a mask of the highest `fraction` of the pixels of each sample and channel, exactly that many.

    score: (B, C, H, W); fraction: a number or one per sample (B,). Equal scores are taken in reading order, so the
    count is exact and the choice repeatable.
    """
    batch, _, height, width = score.shape
    pixels = height * width
    share = torch.as_tensor(fraction, dtype=torch.float64, device=score.device).expand(batch)
    count = torch.round(share * pixels).long()[:, None, None]
    order = score.flatten(-2).argsort(dim=-1, descending=True, stable=True)
    place = torch.arange(pixels, device=score.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, place)
    return (rank < count).unflatten(-1, (height, width))


def outlier_mask(
    previous: Tensor,
    candidate: Tensor,
    mean: Tensor,
    *,
    criterion: Criterion = "disagreement",
    threshold: float = 0.2,
    fraction: float | Tensor = DEFAULT_FRACTION,
    fusion: Fusion = "pixel",
    floor: float = 1e-3,
) -> Tensor:
    """Return where the prediction may be replaced: bool (B, 1, H, W) for "pixel", (B, C, H, W) for "band".

    previous, candidate: the two predictions; mean: the average mu; all (B, C, H, W) in [-1, 1] (paper, Algorithm 1,
    line 8). Pixels where the candidates agree within `floor` are never
    outliers. In pixel mode the bands' scores are summed; the normalised disagreement is then normalised again,
    which is how the public code finds the pixels it hides from its guide.
    """
    difference = (previous - candidate).abs()
    score = min_max_normalised(difference) if criterion == "disagreement" else (previous - mean).abs()
    if fusion == "pixel":
        score = score.sum(dim=1, keepdim=True)
        score = min_max_normalised(score) if criterion == "disagreement" else score
        difference = difference.amax(dim=1, keepdim=True)
    selected = score > threshold if criterion == "disagreement" else top_fraction(score, fraction)
    return selected & (difference > floor)


def guided_correction(
    previous: Tensor, candidate: Tensor, guide_image: Tensor, outliers: Tensor, *, fusion: Fusion = "pixel"
) -> Tensor:
    """Return the fused prediction (B, C, H, W): at outliers the candidate if it is nearer to the guide, else previous.

    Paper, Algorithm 1, lines 9 and 11. Distances are absolute, summed over the bands for "pixel".
    """
    new, old = (candidate - guide_image).abs(), (previous - guide_image).abs()
    if fusion == "pixel":
        new, old = new.sum(dim=1, keepdim=True), old.sum(dim=1, keepdim=True)
    return torch.where(outliers & (new < old), candidate, previous)


def mean_over_frames(mean: Tensor, present: Tensor | None = None) -> Tensor:
    """Return the average (B, C, H, W) of the frames (B, S, C, H, W) that are `present` (bool (B, S), None = all).

    Absent frames may hold anything, NaN included. Summed frame by frame, so that padding a series changes no bit.
    """
    if present is None:
        present = torch.ones(mean.shape[:2], dtype=torch.bool, device=mean.device)
    if present.shape != mean.shape[:2]:
        raise ShapeError(
            f"present has shape {tuple(present.shape)}; expected (B, S) = {tuple(mean.shape[:2])}, one per frame."
        )
    total = torch.zeros_like(mean[:, 0])
    for frame, there in zip(mean.unbind(dim=1), present.unbind(dim=1), strict=True):
        total = total + torch.where(there[:, None, None, None], frame, 0)
    return total / present.sum(dim=1).clamp(min=1).to(mean.dtype)[:, None, None, None]


def cloud_cover(cloud: Tensor, valid: Tensor) -> Tensor:
    """Return T_h (B,), the mean share of cloudy pixels of the dates (paper, "Resampling Procedure").

    cloud: (B, T, H, W), 1 cloud or shadow, 0 clear, NaN unknown; valid: bool (B, T, H, W). 0.3 where no mask is known.
    """
    known = valid & ~cloud.isnan()
    count = known.sum(dim=(1, 2, 3))
    share = torch.where(known, cloud, 0.0).sum(dim=(1, 2, 3)) / count.clamp(min=1)
    return torch.where(count > 0, share, DEFAULT_FRACTION)


def guide_view(denoised: Tensor, mean: Tensor, *, noise_mean: float, kind: GuideInput = "in-range") -> Tensor:
    """Return the image (B, C, H, W) in [-1, 1] that is shown to the guide; noise_mean is alpha sigma.

    "in-range" is the unscaled state without its noise, between the prediction and the mean whatever sigma is.
    "reference-code" leaves that range: at sigma 4.9 land saturates to black and cloud to white.
    """
    if kind == "in-range":
        share = 1 / (1 + noise_mean)
        image = share * denoised + (1 - share) * mean
    elif kind == "reference-code":
        image = denoised + noise_mean * mean
    else:
        image = denoised
    return image.clamp(-1, 1)


def fuse(
    previous: Tensor,
    candidate: Tensor,
    mean: Tensor,
    *,
    config: ResamplerConfig,
    guide: Guide,
    fraction: float | Tensor,
    noise_mean: float,
    fused: Tensor,
) -> Tensor:
    """Return one correction of `previous` (B, C, H, W): find the outliers, compute the guide's image, choose.

    candidate: the new prediction; mean: the average mu (B, C, H, W); noise_mean: alpha sigma; fused: the image that
    was noised again, from which the input of the guide is computed.
    """

    def find(fusion: Fusion) -> Tensor:
        return outlier_mask(
            previous,
            candidate,
            mean,
            criterion=config.criterion,
            threshold=config.threshold,
            fraction=fraction,
            fusion=fusion,
            floor=config.floor,
        )

    # A guide fills whole pixels, never single bands, so its mask is per pixel in both modes.
    outliers = pixels = find("pixel")
    if config.fusion == "band":
        outliers = find("band")
    view = guide_view(fused, mean, noise_mean=noise_mean, kind=config.guide_input)
    guide_image = guide(view, pixels, mean=mean).clamp(-1, 1)
    return guided_correction(previous, candidate, guide_image, outliers, fusion=config.fusion)


class Resampler:
    """The `Correction` of `sampling.sample` that resamples and fuses (paper, Algorithm 1).

    guide: chooses between the candidates; None = always the new one ("w/o correction" in the paper).
    present: bool (B, S), which state frames exist; None = all. Absent ones have no influence.
    cloud_cover: mean share of cloudy pixels, a number or (B,): the paper's T_h where `config.fraction` is None.
    fuse: the function of that name, or a compiled version of it.
    """

    def __init__(
        self,
        config: ResamplerConfig | None = None,
        guide: Guide | None = None,
        *,
        present: Tensor | None = None,
        cloud_cover: float | Tensor | None = None,
        fuse: Callable[..., Tensor] = fuse,
    ) -> None:
        self.config = config or ResamplerConfig()
        self.guide = guide
        self.present = present
        self.cloud_cover = cloud_cover
        self.fuse = fuse

    @property
    def fraction(self) -> float | Tensor:
        """The share of pixels of the top-fraction criterion: the config's, else the cloud cover, else 0.3."""
        if self.config.fraction is not None:
            return self.config.fraction
        return DEFAULT_FRACTION if self.cloud_cover is None else self.cloud_cover

    @torch.no_grad()
    def __call__(
        self,
        denoise: Denoise,
        denoised: Tensor,
        *,
        mean: Tensor,
        sigma: float,
        alpha: float,
        step: int,
        noise: NoiseSource,
    ) -> tuple[Tensor, Tensor] | None:
        """Return (fused denoised (B, C, H, W), last re-noised state (B, S, C, H, W)), or None to change nothing.

        denoised: D at this step; mean: (B, S, C, H, W); noise: draws 1 to `config.steps` are this step's.
        """
        if step == 0 and self.config.skip_first:
            return None
        level = torch.full((mean.shape[0],), sigma, dtype=mean.dtype, device=mean.device)
        average = mean_over_frames(mean, self.present)
        previous = denoised
        for j in range(1, self.config.steps + 1):
            noised = denoised[:, None] + sigma * (alpha * mean + noise(j))
            candidate = denoise(noised, level)
            if self.guide is None:
                denoised = candidate
                continue
            denoised = self.fuse(
                previous,
                candidate,
                average,
                config=self.config,
                guide=self.guide,
                fraction=self.fraction,
                noise_mean=alpha * sigma,
                fused=denoised,
            )
            previous = denoised if self.config.previous == "fused" else candidate
        return denoised, noised
