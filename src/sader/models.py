"""Models by name: `ModelConfig` with the presets of SADER, and the baseline systems.

One function per preset returns network, diffusion and sampling settings; an ablation is one `replace` on its result. A
baseline system is one module of `sader.baselines.systems` that defines `SYSTEM`. It is imported when it is first
needed, so that SADER's own models load without any baseline.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

from sader.bands import BANDS_13, BANDS_RGBN
from sader.config import from_dict, merge
from sader.errors import ConfigError, check_known, did_you_mean
from sader.method.diffusion import Denoiser, DiffusionConfig
from sader.method.resampling import ResamplerConfig, Resampling
from sader.model.mtcdn import MTCDN, MTCDNConfig

if TYPE_CHECKING:
    from sader.baselines.baseline import Baseline, BaselineModelConfig, System


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
    preset.__name__: preset for preset in (sen2_mtc_new, sen12mscrts_ea, small, small_msi)
}


def get_preset(name: str) -> ModelConfig:
    """Return the preset called `name`, or raise with the nearest known name."""
    check_known("preset", name, PRESETS)
    return PRESETS[name]()


if TYPE_CHECKING:
    AnyModelConfig = ModelConfig | BaselineModelConfig
    """Configs that a checkpoint can hold: SADER's own networks or a baseline."""
    AnyModel = Denoiser | Baseline
else:  # names for annotations only: importing baselines here would load them with every model
    AnyModelConfig = AnyModel = object

BASELINES = (
    *("mcgan", "pix2pix", "ae", "cyclegan", "stgan", "ctgan", "pmaa", "crtsnet", "uncrtaints"),
    *("ddpmcr", "diffcr", "seqdms", "emrdm"),
)
"""Names of the baseline systems, in the order of the paper's tables."""


def get_system(name: str) -> System:
    """Return the baseline system called `name`, or raise with the nearest known name."""
    check_known("system", name, BASELINES)
    system: System = importlib.import_module(f"sader.baselines.systems.{name}").SYSTEM
    return system


def baseline_config(name: str) -> BaselineModelConfig:
    """Return the model config of a system at the sizes of the paper's table."""
    from sader.baselines.baseline import BaselineModelConfig

    return BaselineModelConfig(name, get_system(name).config())


def find_config(name: str) -> AnyModelConfig:
    """Return the preset or the baseline system called `name`, or raise with the nearest known name."""
    check_known("preset", name, [*PRESETS, *BASELINES])
    return baseline_config(name) if name in BASELINES else get_preset(name)


def model_from_dict(values: dict[str, Any], *, where: str = "") -> AnyModelConfig:
    """Return the model config from the dictionary of `config.to_dict`; only those of baselines have a `system`."""
    if "system" in values:
        return merge(baseline_config(str(values["system"])), values, where=where)
    return from_dict(ModelConfig, values, where=where)


@overload
def build_model(config: ModelConfig) -> Denoiser: ...
@overload
def build_model(config: BaselineModelConfig) -> Baseline: ...
@overload
def build_model(config: AnyModelConfig) -> AnyModel: ...
def build_model(config: AnyModelConfig) -> AnyModel:
    """Return the untrained model of a config: SADER's `Denoiser`, or a `Baseline`."""
    if isinstance(config, ModelConfig):
        return Denoiser(MTCDN(config.network), config.diffusion)
    return build_baseline(config)


def build_baseline(config: BaselineModelConfig) -> Baseline:
    """Return the untrained network of a baseline's config."""
    system = get_system(config.system)
    if not isinstance(config.network, system.config):
        raise ConfigError(
            f"{config.system} was given a {type(config.network).__name__}; expected {system.config.__name__}. "
            f"Start from baseline_config({config.system!r})."
        )
    baseline = system.network(config.network)
    baseline.capturable = system.capturable
    return baseline
