"""`pretrain_guide`: train a guide of the resampler to fill holes in clear images (paper, MAE-guided prior).

Steps, checkpoints and logs are those of `run.fit`; the objective, the batches and the export differ.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from sader.bands import BANDS_RGBN
from sader.config import merge, parse_override
from sader.data.bank import SeriesBank, SeriesMaker
from sader.data.batch import SeriesBatch, keyed_torch
from sader.data.plan import MakerSettings
from sader.data.shards import count_records
from sader.method.guides import ConvGuide, ConvGuideConfig, save_guide
from sader.model.infill import masked_autoencoder_loss, random_block_mask
from sader.model.masked_autoencoder import MaskedAutoencoder, MaskedAutoencoderConfig
from sader.training.config import TrainConfig, in_steps, read_yaml
from sader.training.processes import Process
from sader.training.record import make_card
from sader.training.run import CONFIG_FILE, Job, check_shards, run_job
from sader.training.trainer import Trainer

GuideNetwork = MaskedAutoencoder | ConvGuide
GUIDE_FILE = "guide.safetensors"
OUTER_LAYERS = ("embed.", "head.", "table", "mask_token", "convs.0.")
"""First and last layers of both guides, and the positions."""


@dataclass(frozen=True)
class GuideRunConfig:
    """A pretraining run of a guide."""

    kind: Literal["mae", "mae-paper", "conv"] = "mae"
    """"mae": the small one that ships; "mae-paper": 9.3 M parameters, trained as published (`recipe_of`); "conv":
    partial convolutions."""
    bands: tuple[str, ...] = BANDS_RGBN
    """Bands of the images. Where a source lacks one, that band has no loss there."""
    shards: tuple[str, ...] = ()
    """Shard files or folders of them."""
    block: int = 8
    """Edge of the square holes in pixels."""
    rates: tuple[float, ...] = (0.25, 0.5, 0.75)
    """Hidden shares of an image, in turn from batch to batch; the public code uses 0.5 only."""
    size: int | None = None
    """Pixels a side to which crops are resized; None: the crop itself. The paper's guide takes 64 resized to 256."""
    altered: bool = True
    """Change season, colours and bands of the images at random; the published pretraining takes them as they are."""
    train: TrainConfig = field(default_factory=lambda: TrainConfig(batch_size=64, steps=20_000))
    """Training settings; `dates`, `validate_every` and `panels` are not used."""


def recipe_of(kind: str) -> GuideRunConfig:
    """Return the default run of a kind of guide.

    "mae-paper" is the published pretraining on EuroSAT-MS: images of 64 pixels resized to 256, half of each hidden by
    blocks of 8, 100 epochs of batches of 16, both rates 1e-3 times 0.95 in every epoch, float32, nothing augmented. The
    public code also stops where the validation loss has not improved for 4 epochs; its first Muon rate is 5e-3.
    """
    if kind != "mae-paper":
        return merge(GuideRunConfig(), {"kind": kind})
    train = TrainConfig(seed=2025, epochs=100.0, batch_size=16, crop=64, muon_lr=1e-3, schedule="exponential")
    train = dataclasses.replace(train, adam_lr=1e-3, warmup=0.0, clip=0.0, ema_decay=0.0, precision="fp32")
    return GuideRunConfig(kind="mae-paper", rates=(0.5,), size=256, altered=False, train=train)


class GuideObjective:
    """The loss of a network that fills holes in the clear images of a batch; `hidden` marks the holes."""

    def __call__(
        self, network: nn.Module, batch: SeriesBatch, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (loss, terms). Pixels that are not known to be clear are holes as well, without a loss."""
        holes = batch.hidden[:, None]
        prediction = network(batch.clear, holes | ~batch.scored[:, None]).float()
        bands = batch.band_present[:, :, None, None].to(prediction.dtype)
        prediction = prediction * bands
        # At an unknown pixel beside a hole the prediction replaces the target, so that it has no gradient.
        target = torch.where(batch.scored[:, None], batch.clear, prediction.detach())
        loss = masked_autoencoder_loss(prediction, target, holes)
        error = ((prediction - target).abs() * holes).detach().sum() / (holes * bands).sum().clamp(min=1)
        return loss, {"mean_error": error}


class GuideMaker:
    """Clear images with holes: the targets of a `SeriesMaker` with one date, resized to `size` pixels a side."""

    def __init__(self, maker: SeriesMaker, *, block: int, rates: Sequence[float], size: int | None = None) -> None:
        self.maker, self.block, self.rates, self.size = maker, block, tuple(rates), size

    def batch(self, step: int, batch_size: int, dates: int, crop: int) -> SeriesBatch:
        """Return batch number `step` with its holes as `hidden`."""
        series = self.maker.batch(step, batch_size, dates, crop)
        if self.size is not None:
            series, crop = resized(series, self.size), self.size
        generator = keyed_torch(series.clear.device, self.maker.seed, step, 3)
        rate = self.rates[step % len(self.rates)]
        holes = random_block_mask(batch_size, crop, crop, block=self.block, rate=rate, generator=generator)
        return dataclasses.replace(series, hidden=holes[:, 0] & series.scored)


def resized(series: SeriesBatch, size: int) -> SeriesBatch:
    """Return the batch with `size` pixels a side: images bilinear, masks and labels by the nearest pixel."""

    def change(x: Tensor, mode: str) -> Tensor:
        flat = x.flatten(0, -3)[:, None].float()
        smooth = {"align_corners": False} if mode == "bilinear" else {}
        return F.interpolate(flat, (size, size), mode=mode, **smooth).view(*x.shape[:-2], size, size).to(x.dtype)

    images = {name: change(getattr(series, name), "bilinear") for name in ("cloudy", "clear")}
    masks = {n: change(getattr(series, n), "nearest") for n in ("scored", "hidden", "cloud_mask", "labels", "valid")}
    return dataclasses.replace(series, **images, **masks)


def build_guide(config: GuideRunConfig) -> GuideNetwork:
    """Return the untrained guide of the config."""
    bands = len(config.bands)
    if config.kind == "conv":
        return ConvGuide(ConvGuideConfig(bands=bands))
    shape = MaskedAutoencoderConfig.paper if config.kind == "mae-paper" else MaskedAutoencoderConfig.small
    return MaskedAutoencoder(shape(bands))


def load_guide_config(path: Path) -> GuideRunConfig:
    """Return the config a guide's run folder was started with."""
    return merge(GuideRunConfig(), read_yaml(path))


class GuideJob(Job):
    """Pretraining of a guide, which is not validated."""

    file = GUIDE_FILE
    load_config = staticmethod(load_guide_config)
    config: GuideRunConfig

    def __init__(self, config: GuideRunConfig, build: Callable[[GuideRunConfig], GuideNetwork]) -> None:
        super().__init__(config)
        self.build = build

    @property
    def shards(self) -> tuple[str, ...]:
        return self.config.shards

    def make_trainer(self, process: Process) -> Trainer[GuideNetwork]:
        config = self.config
        torch.manual_seed(config.train.seed)
        network = self.build(config).train()
        if config.train.compile:
            network.compile()
        bank = SeriesBank.load(config.shards, bands=config.bands, device=process.device)
        self.sources = bank.sources
        settings = MakerSettings(tasks=(0.0, 0.0, 1.0), wanted_clear=0.7)
        if not config.altered:  # a target of the paper's task is not changed
            plain = MakerSettings.paper(symmetries=False)
            settings = dataclasses.replace(plain, fill=True, real_sources=settings.single_sources)
        series = SeriesMaker(bank, settings, config.train.seed)
        maker = GuideMaker(series, block=config.block, rates=config.rates, size=config.size)
        return Trainer(network, GuideObjective(), config.train, maker, process, outer=OUTER_LAYERS)

    def export(self, trainer: Trainer[GuideNetwork], path: Path) -> None:
        card = make_card(trainer, self.sources) | {"bands": list(self.config.bands), "kind": self.config.kind}
        with trainer.ema.applied():
            save_guide(path, trainer.model, half=self.config.train.half, card=card)

    def read_card(self, path: Path) -> dict[str, Any]:
        with safe_open(path, framework="pt") as file:
            return dict(json.loads(file.metadata()["card"]))


def pretrain_guide(
    config: GuideRunConfig,
    run_dir: str | Path,
    *,
    resume: bool = False,
    progress: bool = True,
    build: Callable[[GuideRunConfig], GuideNetwork] = build_guide,
) -> Path:
    """Train a guide and return the path of its weights, run_dir/guide.safetensors."""
    check_shards(config.shards)
    # One date is enough: the target is the image.
    train = dataclasses.replace(in_steps(config.train, count_records(config.shards)), dates=1, validate_every=0)
    job = GuideJob(dataclasses.replace(config, train=train), build)
    return run_job(job, Path(run_dir), resume=resume, progress=progress)


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
    """Resolve the config of a guide from the words of the command line and train it."""
    config = resolve_guide(data, run_dir, kind=kind, bands=bands, overrides=overrides, resume=resume)
    return pretrain_guide(config, run_dir, resume=resume, progress=progress)


def resolve_guide(
    data: Sequence[str | Path],
    run_dir: str | Path,
    *,
    kind: str | None = None,
    bands: str | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
) -> GuideRunConfig:
    """Return the config of a guide: that of the folder to resume or of the kind, with the changes."""
    saved = Path(run_dir) / CONFIG_FILE
    config = load_guide_config(saved) if resume and saved.is_file() else recipe_of(kind or "mae")
    given = {
        "kind": kind,
        "bands": None if bands is None else bands.split(","),
        "shards": [str(d) for d in data] or None,
    }
    config = merge(config, {key: value for key, value in given.items() if value is not None})
    for text in overrides:
        config = merge(config, parse_override(text))
        if text.startswith("train.steps="):  # instead of the epochs
            config = merge(config, {"train": {"epochs": None}})
    return config
