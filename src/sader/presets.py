"""`ModelConfig`, and named configs: one function per experiment returns network, diffusion and sampling settings.

An ablation is one `replace` on the result of such a function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sader.bands import BANDS_13, BANDS_RGBN
from sader.config import merge
from sader.errors import ConfigError, did_you_mean
from sader.method.diffusion import DiffusionConfig
from sader.method.resampling import ResamplerConfig, Resampling
from sader.model.mtcdn import MTCDNConfig


@dataclass(frozen=True)
class SamplingConfig:
    """Default sampling settings of a checkpoint."""

    solver: str = "euler"
    """"euler" (paper) or "heun"."""
    resample_steps: int = 0
    """Resamplings per step: 1 is the paper's "+1", 0 none."""
    resampling: Resampling = "default"
    """Variant of the resampling: "paper" (Algorithm 1 as printed), "public_code" or "default" (`method.resampling`)."""
    resample_threshold: float = 0.2
    """Normalised disagreement above which a pixel is an outlier: 0.2 Sen2_MTC_New, 0.5 SEN12MS-CR-TS."""
    guide: str = "lowpass"
    """Guide of the resampling: mae, conv, mean, lowpass or none."""

    def resampler(self, name: str | None = None) -> ResamplerConfig:
        """Return the settings of the resampling; name: another variant than that of the checkpoint."""
        return ResamplerConfig.named(name or self.resampling, threshold=self.resample_threshold)


@dataclass(frozen=True)
class ModelConfig:
    """Everything needed to rebuild a model; stored inside its checkpoint."""

    name: str = "sen2_mtc_new"
    network: MTCDNConfig = field(default_factory=MTCDNConfig)
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    @property
    def default_steps(self) -> tuple[int, int]:
        """Sampling steps and resamplings per step."""
        return self.diffusion.steps, self.sampling.resample_steps

    def replace(self, **changes: Any) -> ModelConfig:
        """Return a copy with changes; a dictionary changes only its own keys of a nested config."""
        full = {}
        for key, value in changes.items():
            if key not in {f.name for f in dataclasses.fields(self)}:
                raise ConfigError(f"unknown key {key}{did_you_mean(key, (f.name for f in dataclasses.fields(self)))}")
            current = getattr(self, key)
            full[key] = merge(current, value, where=key) if isinstance(value, dict) else value
        return dataclasses.replace(self, **full)


def sen2_mtc_new() -> ModelConfig:
    """The paper's network for Sen2_MTC_New: RGB with NIR as auxiliary band, 4 + 1 steps of Algorithm 1."""
    return ModelConfig(
        name="sen2_mtc_new",
        network=MTCDNConfig(),
        diffusion=DiffusionConfig(),
        sampling=SamplingConfig(resample_steps=1, resampling="paper", resample_threshold=0.2, guide="mae"),
    )


def sen12mscrts_ea() -> ModelConfig:
    """The paper's network for SEN12MS-CR-TS East Asia: 13 bands, four levels, 5 + 1 steps of Algorithm 1."""
    return ModelConfig(
        name="sen12mscrts_ea",
        network=MTCDNConfig(
            bands=BANDS_13,
            aux_bands=(),
            widths=(64, 128, 256, 512),
            blocks=(2, 2, 2, 2),
            kernel=7,
            dropout=0.1,
        ),
        diffusion=DiffusionConfig(alpha=3.0, sigma_max=100.0, steps=5),
        sampling=SamplingConfig(resample_steps=1, resampling="paper", resample_threshold=0.5, guide="mae"),
    )


def small() -> ModelConfig:
    """The product's network: B02 B03 B04 B08, reference date, composite, cloud head, space-to-depth stem."""
    return ModelConfig(
        name="small",
        network=MTCDNConfig(
            bands=BANDS_RGBN,
            aux_bands=(),
            widths=(48, 80, 112),
            blocks=(2, 2, 2),
            stem=2,
            fusion_width=48,
            fusion_patches="pool",
            kernel=5,
            emb_width=128,
            date_input="none",
            composite=True,
            cloud_widths=(24, 32, 48),
            refinement_widths=(24, 32, 48),
            error_head=True,
        ),
        # Residuals of the composite are about 0.02 in reflectance, 0.04 in the model's range.
        diffusion=DiffusionConfig(
            residual=0.04,
            sigma_min=0.002,
            sigma_max=1.0,
            # One step from the composite is the regression result; more steps of the shipped weights add grain.
            steps=1,
            log_sigma_mean=-3.2,
            log_sigma_std=1.2,
            wide_share=0.4,
            wide_low=0.002,
            wide_high=2.0,
        ),
        sampling=SamplingConfig(resample_steps=0),
    )


def small_msi() -> ModelConfig:
    """`small` for all 13 bands of L1C (12 in L2A; bands may be missing at run time)."""
    base = small()
    # Thirteen bands widen the first layers; a narrower mask refinement keeps the total below eight million.
    return base.replace(name="small_msi", network={"bands": BANDS_13, "refinement_widths": (20, 28, 40)})


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "sen2_mtc_new": sen2_mtc_new,
    "sen12mscrts_ea": sen12mscrts_ea,
    "small": small,
    "small_msi": small_msi,
}


def get_preset(name: str) -> ModelConfig:
    """Return the preset called `name`, or raise with the nearest known name."""
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}{did_you_mean(name, PRESETS)}")
    return PRESETS[name]()
