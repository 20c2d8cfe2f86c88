"""Pretraining a guide on a tiny bank: it learns, it resumes, its file loads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from sader.bands import BANDS_13
from sader.data.bank import SeriesBank, SeriesMaker
from sader.data.plan import MakerSettings
from sader.errors import DataError, TrainingError
from sader.method.guides import load_guide
from sader.model.masked_autoencoder import MaskedAutoencoder, MaskedAutoencoderConfig
from sader.training.config import TrainConfig
from sader.training.guide import (
    GuideJob,
    GuideMaker,
    GuideObjective,
    GuideRunConfig,
    build_guide,
    pretrain_guide,
    resolve_guide,
    run_guide,
)
from sader.training.optim import split_parameters
from sader.training.processes import Process
from sader.training.record import read_log

TRAIN = TrainConfig(steps=6, batch_size=2, crop=16, log_every=1, checkpoint_every=3, device="cpu", warmup=0.2)


def little(config: GuideRunConfig) -> MaskedAutoencoder:
    shape = dataclasses.replace(MaskedAutoencoderConfig.small(), dim=16, heads=2, encoder=1, decoder=1)
    return MaskedAutoencoder(shape)


def config_of(shards: Path, **changes: object) -> GuideRunConfig:
    return GuideRunConfig(shards=(str(shards),), block=4, train=dataclasses.replace(TRAIN, **changes))


def losses(run: Path) -> list[float]:
    return [value for _, name, value in read_log(run / "metrics.csv") if name == "loss"]


def test_resumed_guide_has_the_same_losses(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    whole, halted = tmp_path / "whole", tmp_path / "halted"
    path = pretrain_guide(config_of(shards), whole, progress=False, build=little)

    honest, calls = GuideObjective.__call__, []

    def stop_at_five(self, network, batch, generator):
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("the machine went away")
        return honest(self, network, batch, generator)

    monkeypatch.setattr(GuideObjective, "__call__", stop_at_five)
    with pytest.raises(RuntimeError, match="went away"):
        pretrain_guide(config_of(shards), halted, progress=False, build=little)
    monkeypatch.undo()
    pretrain_guide(config_of(shards), halted, resume=True, progress=False, build=little)
    assert losses(halted) == losses(whole)
    guide = load_guide(path)
    assert guide.trained
    image, missing = torch.rand(1, 4, 16, 16), torch.zeros(1, 1, 16, 16, dtype=torch.bool)
    assert torch.equal(guide(image, missing, mean=image), image)


def test_holes_are_known_and_unknown_bands_have_no_loss(shards: Path) -> None:
    bank = SeriesBank.load(shards, bands=("B02", "B03", "B04", "B08"))
    maker = SeriesMaker(bank, MakerSettings(tasks=(0, 0, 1), band_dropout=((("B08",), 1.0),)), seed=0)
    batch = GuideMaker(maker, block=4, rates=(0.5,)).batch(0, 3, 1, 16)
    assert not (batch.hidden & ~batch.scored).any()
    assert 0.3 < batch.hidden.float().mean() < 0.7
    assert not batch.band_present[:, 3].any()

    class Wrong(torch.nn.Module):
        """Right but for the band that is not there."""

        def forward(self, image: torch.Tensor, missing: torch.Tensor) -> torch.Tensor:
            return batch.clear + torch.tensor([0.0, 0, 0, 9]).view(1, 4, 1, 1)

    _, terms = GuideObjective()(Wrong(), batch, torch.Generator())
    assert float(terms["mean_error"]) == 0


@pytest.mark.parametrize("kind", ["mae", "mae-paper", "conv"])
def test_every_kind_has_hidden_matrices_and_outer_layers(kind: str) -> None:
    from sader.training.guide import OUTER_LAYERS

    network = build_guide(GuideRunConfig(kind=kind))
    groups = split_parameters(network, outer=OUTER_LAYERS)
    assert sorted(groups.muon + groups.adam) == sorted(name for name, _ in network.named_parameters())
    assert groups.muon
    assert any(name.startswith(("embed.", "convs.0.")) for name in groups.adam)


def test_conv_guide_from_the_command_line_form(shards: Path, tmp_path: Path) -> None:
    run = tmp_path / "conv"
    overrides = ["train.steps=2", "train.batch_size=2", "train.crop=16", "train.log_every=1", "train.device=cpu"]
    path = run_guide([shards], run, kind="conv", overrides=overrides, progress=False)
    assert load_guide(path).network.config.bands == 4
    with pytest.raises(TrainingError, match="kind: conv -> mae"):
        run_guide([], run, kind="mae", resume=True, progress=False)
    with pytest.raises(TrainingError, match="no shards given"):
        run_guide([], tmp_path / "none", progress=False)


LEVELS = 100 * np.array([6, 7, 8, 9, 10, 11, 12, 13, 14, 1, 16, 17, 18])
"""Values of the bands in the order of the files of EuroSAT-MS."""


@pytest.fixture(scope="module")
def eurosat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """EuroSAT-MS in its layout: CLASS/CLASS_NUMBER.tif of 13 bands; B10 is dark, as over land."""
    rasterio = pytest.importorskip("rasterio")
    folder = tmp_path_factory.mktemp("EuroSAT_MS")
    for name in ("Forest", "River"):
        for number in (1, 2, 7):
            path = folder / name / f"{name}_{number}.tif"
            path.parent.mkdir(exist_ok=True)
            noise = np.random.default_rng(number).integers(0, 50, (13, 64, 64))
            counts = (LEVELS[:, None, None] + noise).astype(np.uint16)
            with rasterio.open(path, "w", driver="GTiff", count=13, height=64, width=64, dtype="uint16") as file:
                file.write(counts)
    return folder


@pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")
def test_eurosat_ms_is_packed_band_by_band(eurosat: Path, tmp_path: Path) -> None:
    from sader.data.pack import EUROSAT_BANDS, pack_sources
    from sader.data.shards import read_shards

    assert EUROSAT_BANDS[-1] == "B8A"
    assert sorted(EUROSAT_BANDS) == sorted(BANDS_13)
    packed = pack_sources([eurosat], tmp_path, bands=BANDS_13, step=1)  # the layout is recognised
    assert packed["train"].records + packed["val"].records == 6
    record = next(iter(read_shards(tmp_path / "train")))
    assert record.bands == BANDS_13
    assert record.dn.shape == (1, 13, 64, 64)
    found = record.dn[0].reshape(13, -1).min(axis=1) // 100 * 100
    assert dict(zip(BANDS_13, found, strict=True)) == dict(zip(EUROSAT_BANDS, LEVELS, strict=True))
    (tmp_path / "broken").mkdir()
    with pytest.raises(DataError, match=r"expected the layout of EuroSAT-MS"):
        pack_sources([f"eurosatms:{tmp_path / 'broken'}"], tmp_path / "out", bands=BANDS_13)


@pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")
def test_images_of_the_published_pretraining_are_those_of_the_files(eurosat: Path, tmp_path: Path) -> None:
    """No band is dropped, no colour changed, no image mirrored or made coarser."""
    from sader.data.pack import pack_sources
    from sader.data.shards import read_shards

    pack_sources([eurosat], tmp_path, bands=BANDS_13, step=1, split="none")
    files = {record.dn.tobytes() for record in read_shards(tmp_path)}
    changes = ["train.device=cpu", "size=null", "train.steps=1"]
    config = resolve_guide([tmp_path], tmp_path / "run", kind="mae-paper", bands=",".join(BANDS_13), overrides=changes)
    maker = GuideJob(config, little).make_trainer(Process(torch.device("cpu"))).feed.maker
    for step in range(4):
        batch = maker.batch(step, 8, 1, 64)
        assert batch.band_present.all()
        assert {(image * 10000).round().numpy().astype(np.uint16)[None].tobytes() for image in batch.clear} <= files


@pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")
@pytest.mark.slow
def test_the_published_pretraining_runs_on_eurosat_ms(eurosat: Path, tmp_path: Path) -> None:
    from sader.data.pack import pack_sources

    pack_sources([eurosat], tmp_path / "shards", bands=BANDS_13, step=1, split="none")
    config = resolve_guide([tmp_path / "shards"], tmp_path / "run", kind="mae-paper", bands="B04,B03,B02")
    train = config.train
    assert (train.epochs, train.batch_size, train.crop, config.size, config.block) == (100, 16, 64, 256, 8)
    assert (train.muon_lr, train.adam_lr, train.schedule, train.clip, train.precision) == (
        1e-3, 1e-3, "exponential", 0, "fp32",
    )  # fmt: skip
    assert config.rates == (0.5,)
    assert build_guide(config).config == MaskedAutoencoderConfig.paper(3)
    small = ["train.batch_size=2", "train.epochs=1", "train.device=cpu", "train.log_every=1", "size=64"]
    path = run_guide(
        [tmp_path / "shards"], tmp_path / "run", kind="mae-paper", bands="B04,B03,B02", overrides=small, progress=False
    )
    assert load_guide(path).network.config == MaskedAutoencoderConfig.paper(3)
    assert len(losses(tmp_path / "run")) == 3  # one epoch of six images in batches of two


def test_crops_are_resized_before_they_are_hidden(shards: Path) -> None:
    bank = SeriesBank.load(shards, bands=("B02", "B03", "B04", "B08"))
    maker = SeriesMaker(bank, MakerSettings(tasks=(0, 0, 1)), seed=0)
    plain = maker.batch(0, 2, 1, 16)
    batch = GuideMaker(maker, block=8, rates=(0.5,), size=64).batch(0, 2, 1, 16)
    assert batch.clear.shape == (2, 4, 64, 64)
    assert torch.equal(batch.clear[..., 0, 0], plain.clear[..., 0, 0])  # the corner of a bilinear resize
    assert (torch.nn.functional.avg_pool2d(batch.clear, 4) - plain.clear).abs().mean() < 0.02
    assert set(batch.hidden.sum((1, 2)).tolist()) != {0}
