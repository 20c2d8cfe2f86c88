"""`pretrain_guide`: teach a guide of the resampler to fill holes in clear images (paper, MAE-guided prior; METHOD 5).

The same steps, checkpoints and logs as `run.fit`; only the objective, the holes and the export differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from sader.bands import BANDS_RGBN
from sader.config import merge, parse_override
from sader.data.bank import SeriesBank, SeriesMaker
from sader.data.batch import SeriesBatch, keyed_generator
from sader.data.plan import MakerSettings
from sader.method.guides import (
    ConvGuide,
    ConvGuideConfig,
    MaskedAutoencoder,
    MaskedAutoencoderConfig,
    masked_autoencoder_loss,
    random_block_mask,
    save_guide,
)
from sader.training.card import count_sources, make_card
from sader.training.config import TrainConfig, read_yaml
from sader.training.feed import Maker
from sader.training.module import TrainingModule
from sader.training.run import (
    CONFIG_FILE,
    check_shards,
    choose_device,
    is_main_process,
    prepare_folder,
    run_module,
    uses_bf16,
)
from sader.training.state import save_state

GUIDE_FILE = "guide.safetensors"
OUTER_LAYERS = ("embed.", "head.", "table", "mask_token", "convs.0.")
"""First and last layers of both guides, and the positions."""


@dataclass(frozen=True)
class GuideRunConfig:
    """A pretraining run of a guide."""

    kind: Literal["mae", "mae-paper", "conv"] = "mae"
    """"mae": the small one that ships; "mae-paper": 9.3 M parameters; "conv": partial convolutions."""
    bands: tuple[str, ...] = BANDS_RGBN
    """Bands of the images. Where a source lacks one, that band has no loss there."""
    shards: tuple[str, ...] = ()
    """Shard files or folders of them."""
    block: int = 8
    """Edge of the square holes in pixels (METHOD 5: 8)."""
    rates: tuple[float, ...] = (0.25, 0.5, 0.75)
    """Hidden shares of an image, in turn from batch to batch (METHOD 5: 0.5 only)."""
    train: TrainConfig = field(default_factory=lambda: TrainConfig(batch_size=64, steps=20_000))
    """Steps, rates and so on; `dates`, `validate_every` and `panels` are not used."""


class GuideObjective:
    """The loss of a filling network on the clear images of a batch; `hidden` marks the holes."""

    def __call__(
        self, network: nn.Module, batch: SeriesBatch, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (loss, terms). Pixels that are not truly clear are holes as well, without a loss."""
        holes = batch.hidden[:, None]
        prediction = network(batch.clear, holes | ~batch.scored[:, None]).float()
        bands = batch.band_present[:, :, None, None].to(prediction.dtype)
        prediction = prediction * bands
        # Beside a hole an unknown pixel may lie; there the prediction stands in for the truth, and nothing is learned.
        target = torch.where(batch.scored[:, None], batch.clear, prediction.detach())
        loss = masked_autoencoder_loss(prediction, target, holes)
        error = ((prediction - target).abs() * holes).detach().sum() / (holes * bands).sum().clamp(min=1)
        return loss, {"mean_error": error}


class GuideMaker:
    """Clear images with holes: the targets of a `SeriesMaker` with one date."""

    def __init__(self, maker: SeriesMaker, *, block: int, rates: Sequence[float]) -> None:
        self.maker, self.block, self.rates = maker, block, tuple(rates)

    def batch(self, step: int, batch_size: int, dates: int, crop: int) -> SeriesBatch:
        """Return batch number `step` with its holes as `hidden`."""
        series = self.maker.batch(step, batch_size, dates, crop)
        seed = int(keyed_generator(self.maker.seed, step, 3).integers(2**62))
        generator = torch.Generator(series.clear.device).manual_seed(seed)
        rate = self.rates[step % len(self.rates)]
        holes = random_block_mask(batch_size, crop, crop, block=self.block, rate=rate, generator=generator)
        return dataclasses.replace(series, hidden=holes[:, 0] & series.scored)


def build_guide(config: GuideRunConfig) -> MaskedAutoencoder | ConvGuide:
    """Return the untrained guide that the config asks for."""
    bands = len(config.bands)
    if config.kind == "conv":
        return ConvGuide(ConvGuideConfig(bands=bands))
    shape = MaskedAutoencoderConfig.paper if config.kind == "mae-paper" else MaskedAutoencoderConfig.small
    return MaskedAutoencoder(shape(bands))


def pretrain_guide(
    config: GuideRunConfig,
    run_dir: str | Path,
    *,
    resume: bool = False,
    progress: bool = True,
    build: Callable[[GuideRunConfig], MaskedAutoencoder | ConvGuide] = build_guide,
) -> Path:
    """Train a guide and return the path of its weights, run_dir/guide.safetensors."""
    run_dir = Path(run_dir)
    # One date is enough: the target is the image.
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, dates=1))
    device = choose_device(config.train)
    check_shards(config.shards)
    if is_main_process():
        prepare_folder(config, run_dir, resume=resume, load=load_guide_config)
    sources: dict[str, int] = {}

    def make_maker(where: torch.device) -> Maker:
        bank = SeriesBank.load(config.shards, bands=config.bands, device=where)
        sources.update(count_sources(bank))
        settings = MakerSettings(tasks=(0.0, 0.0, 1.0), wanted_clear=0.7)
        return GuideMaker(SeriesMaker(bank, settings, config.train.seed), block=config.block, rates=config.rates)

    def after_step(module: TrainingModule, step: int, over: bool) -> None:
        if is_main_process() and (step % config.train.checkpoint_every == 0 or over):
            module.write_log()
            save_state(run_dir, module.state())
            with module.ema.applied():
                card = make_card(module, sources) | {"bands": list(config.bands), "kind": config.kind}
                save_guide(run_dir / GUIDE_FILE, module.denoiser, half=config.train.half, card=card)  # type: ignore[arg-type]

    torch.manual_seed(config.train.seed)
    network = build(config).train()
    if config.train.compile:
        network.compile()
    module = TrainingModule(
        network,
        GuideObjective(),
        config.train,
        make_maker=make_maker,
        bf16=uses_bf16(config.train, device),
        outer=OUTER_LAYERS,
        after_step=after_step,
    )
    run_module(module, run_dir, device=device, resume=resume, progress=progress)
    return run_dir / GUIDE_FILE


def load_guide_config(path: Path) -> GuideRunConfig:
    """Return the config a guide's run folder was started with."""
    return merge(GuideRunConfig(), read_yaml(path))


def run_guide(
    data: Sequence[str | Path],
    run_dir: str | Path,
    *,
    kind: str | None = None,
    bands: str | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    progress: bool = True,
) -> Path:
    """Resolve the config of a guide from what is typed and train it."""
    saved = Path(run_dir) / CONFIG_FILE
    config = load_guide_config(saved) if resume and saved.is_file() else GuideRunConfig()
    given = {
        "kind": kind,
        "bands": None if bands is None else bands.split(","),
        "shards": [str(d) for d in data] or None,
    }
    config = merge(config, {key: value for key, value in given.items() if value is not None})
    for text in overrides:
        config = merge(config, parse_override(text))
    return pretrain_guide(config, run_dir, resume=resume, progress=progress)
