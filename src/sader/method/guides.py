"""Guides of the resampler: predictions of an image at its outliers (docs/method.md#guides).

`make_guide` builds one by name: "mae" (the paper's masked autoencoder), "conv" (a small partial-convolution network),
"mean" (one colour), "lowpass" (a smooth fill, no weights), "none". All follow the `Guide` protocol of
`resampling.py` on images in [-1, 1] and are deterministic. `training/guide.py` trains them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from sader.errors import BandError, CheckpointError, ConfigError, check_known
from sader.files import write_atomically
from sader.model.blocks import group_norm, zero_init
from sader.model.infill import check_holes, push_pull_fill, visible_mean
from sader.model.masked_autoencoder import TYPICAL_REFLECTANCE, MaskedAutoencoder, MaskedAutoencoderConfig

GUIDES = ("mae", "conv", "mean", "lowpass", "none")


class MeanGuide:
    """One colour per image: the band means of mu over the pixels that are not missing (paper: mean-guided)."""

    trained = True

    def __call__(self, image: Tensor, missing: Tensor, *, mean: Tensor) -> Tensor:
        """Return (B, C, H, W), constant over space; the mean over all pixels where every one is missing."""
        check_holes(image, missing)
        everywhere = mean.mean(dim=(-2, -1), keepdim=True)
        return visible_mean(mean, missing, fallback=everywhere).expand_as(image)


class LowPassGuide:
    """A smooth fill of the missing pixels from their surroundings; no weights."""

    trained = True

    def __call__(self, image: Tensor, missing: Tensor, *, mean: Tensor) -> Tensor:
        """Return `image` with its missing pixels filled; the mean colour of mu where nothing is visible."""
        check_holes(image, missing)
        return push_pull_fill(image, missing, fallback=mean.mean(dim=(-2, -1), keepdim=True))


@dataclass(frozen=True)
class ConvGuideConfig:
    """Shape of a `ConvGuide`; the defaults are the paper's convolutional guide (4 blocks of 64)."""

    bands: int = 3
    """Bands of the image, C."""
    width: int = 64
    """Features."""
    blocks: int = 4
    """Partial convolutions; the n-th looks 2^n pixels around, so 4 blocks see 15 pixels to each side."""

    def __post_init__(self) -> None:
        if min(self.bands, self.width, self.blocks) < 1:
            raise ConfigError(f"{self} has a size below 1; expected 1 or more of each.")


class PartialConv(nn.Module):
    """3x3 convolution over known pixels only, rescaled by their number; what lies beside them becomes known."""

    def __init__(self, channels_in: int, channels_out: int, dilation: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, 3, padding=dilation, dilation=dilation, bias=False)
        self.bias = nn.Parameter(torch.zeros(channels_out, 1, 1))
        self.dilation = dilation

    def forward(self, x: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Return features (B, D, H, W) and where they are known (B, 1, H, W), both 0 elsewhere; known is 1 or 0."""
        ones = torch.ones((1, 1, 3, 3), dtype=known.dtype, device=known.device)
        count = F.conv2d(known, ones, padding=self.dilation, dilation=self.dilation)
        reached = (count > 0).to(x.dtype)
        return (self.conv(x * known) * (9 / count.clamp(min=1)) + self.bias) * reached, reached


class ConvGuide(nn.Module):
    """Image with holes -> predicted reflectance, by a few partial convolutions (the paper's conv-guided correction).

    It learns what a smooth fill lacks. Wrap it in `LearnedGuide` to use it in the resampler; the loss is that of the
    masked autoencoder.
    """

    def __init__(self, config: ConvGuideConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or ConvGuideConfig()
        widths = [config.bands, *[config.width] * config.blocks]
        self.convs = nn.ModuleList(PartialConv(widths[n], widths[n + 1], 2**n) for n in range(config.blocks))
        self.norms = nn.ModuleList(group_norm(config.width) for _ in range(config.blocks))
        # The smooth fill is an input of the head: what to add depends on the colour it is added to.
        self.head = nn.Sequential(
            nn.Conv2d(config.width + config.bands, config.width, 1),
            nn.GELU(),
            zero_init(nn.Conv2d(config.width, config.bands, 1)),
        )

    def forward(self, image: Tensor, missing: Tensor) -> Tensor:
        """Return (B, C, H, W); image: reflectance (B, C, H, W) in [0, 1]; missing: bool (B, 1, H, W)."""
        check_holes(image, missing)
        offset = visible_mean(image, missing, fallback=TYPICAL_REFLECTANCE)
        base = push_pull_fill(image, missing, fallback=TYPICAL_REFLECTANCE)
        known = (~missing).to(image.dtype)
        x = torch.where(missing, 0, image - offset)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x, known = conv(x, known)
            x = F.gelu(norm(x))
        return base + self.head(torch.cat([x, base - offset], dim=1))


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Put `network` in evaluation mode for a while; every part gets back exactly the mode it had."""
    training = [module for module in network.modules() if module.training]
    network.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class LearnedGuide:
    """A trained filling network as a guide: [-1, 1] outside, reflectance inside, always in evaluation mode.

    network: `MaskedAutoencoder` or `ConvGuide`; it follows the image to its device.
    trained: whether the weights were learned; `note` describes it for users.
    """

    def __init__(self, network: MaskedAutoencoder | ConvGuide, *, trained: bool = True) -> None:
        self.network = network
        self.trained = trained

    @property
    def note(self) -> str:
        """Description of the guide for users."""
        kind, bands = type(self.network).__name__, self.network.config.bands
        if self.trained:
            return f"{kind} guide for {bands} bands with trained weights"
        return (
            f"{kind} guide for {bands} bands WITHOUT trained weights: its predictions carry no knowledge of land. "
            "Give weights=, or use the guide 'lowpass', which needs none."
        )

    @torch.no_grad()
    def __call__(self, image: Tensor, missing: Tensor, *, mean: Tensor) -> Tensor:
        """Return `image` (B, C, H, W) with the network's prediction at missing pixels; the others keep their bits."""
        check_holes(image, missing)
        parameter = next(self.network.parameters())
        if parameter.device != image.device:
            self.network.to(image.device)
        with evaluating(self.network), torch.autocast(image.device.type, enabled=False):
            prediction = self.network(((image + 1) / 2).to(parameter.dtype), missing)
        return torch.where(missing, (2 * prediction - 1).to(image.dtype), image)


NETWORKS: dict[str, tuple[type[nn.Module], type[Any]]] = {
    "mae": (MaskedAutoencoder, MaskedAutoencoderConfig),
    "conv": (ConvGuide, ConvGuideConfig),
}


def save_guide(
    path: str | Path, network: MaskedAutoencoder | ConvGuide, *, half: bool = True, card: dict[str, Any] | None = None
) -> None:
    """Write the network to one safetensors file with its kind and config inside, in half precision unless told not.

    card: anything JSON can hold about how it was trained. The file appears whole or not at all.
    """
    kind = next(name for name, (network_type, _) in NETWORKS.items() if isinstance(network, network_type))
    metadata = {"sader_guide": kind, "config": json.dumps(asdict(network.config)), "card": json.dumps(card or {})}
    dtype = torch.float16 if half else torch.float32
    tensors = {name: value.detach().cpu().to(dtype).contiguous() for name, value in network.state_dict().items()}
    write_atomically(Path(path), save(tensors, metadata=metadata))


def load_guide(path: str | Path) -> LearnedGuide:
    """Return the guide stored by `save_guide`, strictly: every weight of its config and no other, in float32."""
    advice = "Expected a file written by sader pretrain-guide (save_guide); fetch or train it again."
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 (no iteration here)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read guide weights {path}: {error}. {advice}") from error
    kind = metadata.get("sader_guide", "")
    if kind not in NETWORKS:
        raise CheckpointError(f"{path} holds {kind or 'no kind of'!r} guide. {advice}")
    network_type, config_type = NETWORKS[kind]
    try:
        network = network_type(config_type(**json.loads(metadata["config"])))
        network.load_state_dict(weights, strict=True)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"guide weights {path} do not fit their own config: {error}. {advice}") from error
    return LearnedGuide(network.eval(), trained=True)  # type: ignore[arg-type]


def make_guide(
    name: str, *, bands: int, weights: str | Path | None = None
) -> LearnedGuide | MeanGuide | LowPassGuide | None:
    """Return the guide called `name`: "mae", "conv", "mean", "lowpass", or None for "none".

    bands: bands of the images; weights: a `save_guide` file for "mae" and "conv". Without it these two are the paper's,
    untrained (`trained` is False, with a warning).
    """
    check_known("guide", name, GUIDES)
    if name not in NETWORKS:
        if weights is not None:
            raise ConfigError(
                f"guide {name!r} has no weights, but {weights} was given. Drop it, or use the guide 'mae'."
            )
        if name == "none":
            return None
        return MeanGuide() if name == "mean" else LowPassGuide()
    if weights is None:
        mae = name == "mae"
        network = MaskedAutoencoder(MaskedAutoencoderConfig(bands)) if mae else ConvGuide(ConvGuideConfig(bands))
        guide = LearnedGuide(network.eval(), trained=False)
        warnings.warn(guide.note, stacklevel=2)
        return guide
    guide = load_guide(weights)
    if not isinstance(guide.network, NETWORKS[name][0]):
        raise ConfigError(f"{weights} holds a {type(guide.network).__name__}; the guide {name!r} was asked for.")
    if guide.network.config.bands != bands:
        raise BandError(f"guide weights {weights} are for {guide.network.config.bands} bands; the model has {bands}.")
    return guide
