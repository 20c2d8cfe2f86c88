"""What every baseline's config holds, and what its checkpoint needs to rebuild it. No network here."""

from __future__ import annotations

from dataclasses import dataclass

from sader.bands import BANDS_RGBN
from sader.errors import ConfigError


@dataclass(frozen=True)
class BaselineConfig:
    """What every system's config holds; a subclass adds its sizes. Fields need defaults and one-line docstrings."""

    bands: tuple[str, ...] = BANDS_RGBN
    """Bands that come out, C of them; each date brings them in."""
    aux_bands: tuple[str, ...] = ()
    """Bands that only help, A of them, given for each date beside the others (NIR or SAR)."""
    dates: int | None = 3
    """Dates the network is built for; None = any number. Others are chosen or repeated (`BaselineInputs.arranged`)."""

    def __post_init__(self) -> None:
        if not self.bands:
            raise ConfigError("network.bands is empty; expected at least one band, such as [B02, B03, B04, B08].")
        if self.dates is not None and self.dates < 1:
            raise ConfigError(f"network.dates is {self.dates}; expected 1 or more.")

    @property
    def channels(self) -> int:
        """Channels C of the clear image."""
        return len(self.bands)

    @property
    def date_channels(self) -> int:
        """Channels C + A of one date."""
        return len(self.bands) + len(self.aux_bands)

    @property
    def multiple(self) -> int:
        """Height and width must be multiples of this; `Baseline` pads."""
        return 1

    @property
    def fixed_size(self) -> int | None:
        """The only height and width the network can take, or None. Then `multiple` must be the same number."""
        return None

    @property
    def steps(self) -> int | None:
        """Default number of sampling steps; None for a network that answers in one pass."""
        return None

    @property
    def composite(self) -> bool:
        """No baseline works about a composite: asked by what serves both families (`pipeline.py`)."""
        return False

    @property
    def error_head(self) -> bool:
        """No baseline states its own error to the pipeline: asked as `composite` is."""
        return False


@dataclass(frozen=True)
class BaselineModelConfig:
    """Everything needed to rebuild a baseline; stored in its checkpoint, as `config.ModelConfig` is for SADER."""

    system: str
    """Name in `registry.BASELINES`."""
    network: BaselineConfig

    @property
    def name(self) -> str:
        return self.system

    @property
    def default_steps(self) -> tuple[int, int]:
        """Sampling steps and resamplings per step."""
        return self.network.steps or 1, 0
