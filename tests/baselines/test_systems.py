"""All baseline systems through the same commands: train, killed and resumed, loaded, scored, described."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sader.baselines.baseline import Baseline, BaselineConfig, BaselineModelConfig, inputs_of
from sader.checkpoint import load_checkpoint, save_checkpoint
from sader.config import to_dict
from sader.data.shards import SeriesRecord, write_shard
from sader.errors import BandError, CheckpointError, ConfigError, ShapeError, TrainingError
from sader.evaluation.costs import describe, list_models
from sader.evaluation.evaluate import parse_model, run_evaluation
from sader.evaluation.request import DataRequest, EvaluationRequest
from sader.inference.remover import CloudRemover, RemoverOptions
from sader.models import (
    BASELINES,
    baseline_config,
    build_baseline,
    build_model,
    find_config,
    get_system,
    model_from_dict,
)
from sader.training.config import load_run_config, resolve, save_run_config
from sader.training.optim import rate_factor
from sader.training.record import load_state, read_log, state_files
from sader.training.run import run_training
from sader.training.trainer import PhasedTrainer, Trainer

RGBN = ("B02", "B03", "B04", "B08")
JUDGE = "judge_widths=[4,4]"
TINY = {
    "mcgan": ["width=4", "widths=[4,8,8]", "judge_stem=4", "judge_widths=[4,8]"],
    "pix2pix": ["width=4", "blocks=1", JUDGE],
    "ae": ["widths=[4,8]"],
    "cyclegan": ["width=4", "blocks=1", JUDGE, "pool=3"],
    "stgan": ["width=4", "blocks=1", JUDGE],
    "ctgan": ["size=32", "width=4", "hidden=4", "heads=2", "head_width=8", "kernel=3", "reach=8", "judge_widths=[4,4]"],
    "pmaa": ["width=4", "hidden=4", "block_width=8", "blocks=2", "scales=2", "kernel=3", "groups=4", JUDGE],
    "crtsnet": ["width=8", "date_blocks=1", "series_blocks=1"],
    "uncrtaints": ["width=16", "decoder_blocks=1", "heads=4", "model_width=16"],
    "ddpmcr": ["extractor.width=8", "extractor.multipliers=[1,2]", "extractor.emb_width=16", "head_blocks=[1,1]"],
    "diffcr": ["width=8", "levels=2", "emb_width=16", "sampling_steps=2"],
    "seqdms": ["unet.width=8", "unet.multipliers=[1,2]", "unet.blocks=1", "unet.emb_width=16", "sampling_steps=2"],
    "emrdm": [
        "widths=[16,32]", "depths=[1,1]", "feed_widths=[16,32]", "head_width=16", "kernel=3", "mapping_width=16",
        "mapping_feed=32", "fusion_heads=4", "fusion_key_width=8", "diffusion.steps=2",
    ],
}  # fmt: skip
"""Overrides of each system's network that make it tiny."""
BANDS = ["bands=[B02,B03,B04,B08]", "aux_bands=[]"]
OWN = ("mcgan", "pix2pix", "ae", "cyclegan", "stgan", "ctgan", "pmaa")
GANS = ("mcgan", "pix2pix", "cyclegan", "stgan", "ctgan", "pmaa")
LARGE = ("cyclegan", "stgan", "ctgan", "pmaa")
"""Systems whose training step takes seconds even when tiny."""


def tiny_config(name: str, *more: str) -> BaselineModelConfig:
    model = resolve(name, [f"model.network.{text}" for text in (*BANDS, *TINY[name], *more)]).model
    assert isinstance(model, BaselineModelConfig)
    return model


def tiny(name: str, *more: str, seed: int = 0) -> Baseline:
    torch.manual_seed(seed)
    return build_baseline(tiny_config(name, *more))


def training(name: str, *more: str) -> list[str]:
    """Overrides of a tiny run: four steps on crops of 32 pixels."""
    network = [f"model.network.{text}" for text in (*BANDS, *TINY[name])]
    run = ["device=cpu", "batch_size=2", "dates=3", "crop=32", "steps=4", "log_every=1", "checkpoint_every=2"]
    return [*network, *(f"train.{text}" for text in run), "train.validate_every=0", *more]


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one shard of two places of four dates: the first two clear, bright bars on the others."""
    records = []
    for seed in (1, 2):
        rng = np.random.default_rng(seed)
        ground = np.clip(rng.normal(1500, 250, (1, 4, 48, 56)), 200, 4000)
        dn = (ground * np.linspace(0.95, 1.05, 4)[:, None, None, None]).astype(np.uint16)
        labels = np.zeros((4, 48, 56), np.uint8)
        for k in (2, 3):
            labels[k, 10 * k - 10 : 10 * k + 4] = 1 + k % 3
            dn[k][:, labels[k] > 0] = 7000
        records.append(SeriesRecord(dn, f"place_{seed}", "cloudsen12", RGBN, labels, group=f"val/place_{seed}"))
    folder = tmp_path_factory.mktemp("shards")
    write_shard(folder / "val-000.shard", records)
    return folder


def losses(run_dir: Path) -> dict[int, float]:
    return {step: value for step, name, value in read_log(run_dir / "metrics.csv") if name == "loss"}


def logged(run_dir: Path) -> list[tuple[int, str, float]]:
    """All logged values but the clock."""
    return [row for row in read_log(run_dir / "metrics.csv") if row[1] != "seconds"]


def test_every_system_has_a_tiny_case():
    assert list(TINY) == list(BASELINES)


# ------------------------------------------------------------------------------------------------ counts


EXACT = {
    "mcgan": 54_422_788, "pix2pix": 11_414_788, "ae": 6_501_444, "cyclegan": 11_409_540, "stgan": 231_934_596,
    "ctgan": 642_916_969, "pmaa": 3_476_204,
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_parameters_are_those_of_the_papers_table(name):
    info, system = describe(name), get_system(name)
    assert info.cost.parameters == EXACT[name]
    assert abs(info.cost.parameters / 1e6 / system.printed[0] - 1) < 0.02
    assert info.publication.sizes_assumed == (name in ("ae", "pmaa"))
    assert ("sizes assumed" in dict(info.rows())["model"]) == info.publication.sizes_assumed
    assert info.as_dict()["gmacs_sample"] == info.cost.gmacs_forward > 0


def test_the_autoencoder_has_the_printed_cost():
    assert describe("ae").cost.gmacs_forward == pytest.approx(get_system("ae").printed[1], rel=0.005)


PUBLISHED = {
    # system: (epochs, series a step, optimiser, rate, schedule)
    "mcgan": (300, 1, "adam", 2e-4, "linear"),
    "pix2pix": (200, 1, "adam", 2e-4, "linear"),
    "cyclegan": (200, 1, "adam", 2e-4, "linear"),
    "stgan": (200, 4, "adam", 2e-4, "linear"),
    "ctgan": (100, 4, "adamw", 5e-4, "cosine"),
    "pmaa": (100, 4, "adamw", 5e-4, "cosine"),
    "crtsnet": (200, 1, "adam", 2e-4, "linear"),
    "uncrtaints": (20, 4, "adam", 1e-3, "constant"),
    "diffcr": (3000, 8, "adam", 5e-5, "constant"),
    "emrdm": (1000, 4, "adamw", 1e-4, "constant"),
}


@pytest.mark.parametrize("name", BASELINES)
def test_training_is_as_published(name):
    train = resolve(name).train
    assert (train.precision, train.clip, train.warmup) == ("fp32", 0, 0)
    assert train.epochs is not None  # where it is not published, an assumption, but never a number of steps
    if name in PUBLISHED:
        found = (train.epochs, train.batch_size * train.accumulate, train.optimizer, train.adam_lr, train.schedule)
        assert found == PUBLISHED[name]
    else:
        assert get_system(name).assumed


@pytest.mark.parametrize(
    ("name", "text"),
    [("seqdms", "sampling averages the estimates from all dates"), ("ddpmcr", "Published: first the diffusion model")],
)
def test_what_a_simplified_method_differs_in_is_said(name, text):
    rows = dict(describe(name).rows())
    assert "(method simplified, sizes assumed)" in rows["model"]
    assert text in rows["note"]


def test_counts_with_three_bands_out_and_nir_beside_them():
    with torch.device("meta"):
        config = replace(baseline_config("mcgan").network, bands=("B02", "B03", "B04"), aux_bands=("B08",))
        network = build_baseline(BaselineModelConfig("mcgan", config))
    assert sum(p.numel() for p in network.counted.parameters()) == 54_421_635


def test_the_list_of_models_names_every_baseline():
    baselines = [entry for entry in list_models(baselines=True) if entry.kind == "baseline"]
    assert [entry.name for entry in baselines] == list(BASELINES)
    assert {entry.name: entry.parameters for entry in baselines}["stgan"] == EXACT["stgan"]


# ------------------------------------------------------------------------------------------------ predict


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("dates", [1, 2, 3, 5])
def test_any_number_of_dates_and_any_size(name, dates, series, noise_for):
    network, inputs = tiny(name).eval(), series(dates, 4, 33, 47)
    with torch.inference_mode():
        image = network.predict(inputs, noise_for(inputs))
        again = network.predict(inputs, noise_for(inputs))
        one = network.predict(
            replace(inputs, **{k: v[:1] for k, v in vars(inputs).items() if v is not None}), noise_for
        )
    assert image.shape == (2, 4, 33, 47)
    assert torch.isfinite(image).all()
    assert torch.equal(image, again)
    assert torch.allclose(one, image[:1], atol=1e-5)


@pytest.mark.parametrize("name", OWN)
def test_one_pixel_and_missing_pixels(name, series, noise_for):
    network = tiny(name).eval()
    for inputs in (series(3, 4, 1, 1), series(3, 4, 16, 16)):
        gone = replace(
            inputs, observed=torch.zeros_like(inputs.observed), cloud=torch.full_like(inputs.cloud, torch.nan)
        )
        with torch.inference_mode():
            assert torch.isfinite(network.predict(gone, noise_for(gone))).all()


def test_a_fixed_size_is_worked_in_blocks(series, noise_for):
    network, inputs = tiny("ctgan").eval(), series(3, 4, 64, 32, batch=2)
    with torch.inference_mode():
        image = network.predict(inputs, noise_for(inputs))
        lower = inputs.map_images(lambda x: x[..., 32:, :])
        assert torch.allclose(image[..., 32:, :], network.predict(lower, noise_for(lower)), atol=1e-5)


def test_dates_are_chosen_by_clearness_and_the_reference_leads(series):
    inputs = series(5, 1, 8, 8, batch=2)
    cloud = torch.zeros_like(inputs.cloud)
    cloud[:, 1] = 1.0  # the cloudiest goes first
    cloud[:, 3, :2] = 1.0
    cloud[0, 4] = torch.nan  # unknown counts as clear
    inputs = replace(inputs, cloud=cloud, reference=torch.tensor([-1, 1]))
    chosen = inputs.arranged(3)
    dates = inputs.cloudy
    assert torch.equal(chosen.cloudy[0], dates[0, [0, 2, 4]])
    assert torch.equal(chosen.cloudy[1], dates[1, [1, 0, 2]])
    assert chosen.reference.tolist() == [-1, 0]
    present = torch.tensor([[True, False, True, False, False]] * 2)
    few = replace(inputs, present=present, reference=torch.tensor([2, -1])).arranged(5)
    assert torch.equal(few.cloudy[0], dates[0, [2, 0, 2, 0, 2]])
    assert torch.equal(few.cloudy[1], dates[1, [0, 2, 0, 2, 0]])
    assert few.present.all()


def test_wrong_inputs_are_named(series, noise_for):
    network = tiny("pix2pix")
    with pytest.raises(ShapeError, match=r"cloudy is \(2, 3, 3, 32, 32\); expected .* C = 4 bands"):
        network.predict(series(3, 3), noise_for)
    with pytest.raises(BandError, match="1 auxiliary bands were given; this model wants 0"):
        network.predict(series(3, 4, aux=1), noise_for)
    with pytest.raises(ConfigError, match="steps is 4, but this model runs in one pass"):
        network.predict(series(3, 4), noise_for, steps=4)
    with pytest.raises(ConfigError, match=r"network\.bands is empty"):
        BaselineConfig(bands=())
    for name in ("stgan", "ctgan"):
        with pytest.raises(ConfigError, match=r"dates is 1; .* needs 2 or more"):
            tiny_config(name, "dates=1")
    with pytest.raises(ConfigError, match="each autoencoder has one band as input"):
        tiny_config("ae", "aux_bands=[B11]")


def test_each_autoencoder_sees_its_own_band_alone(series, noise_for):
    network, inputs = tiny("ae").eval(), series(3, 4, 16, 16)
    changed = inputs.cloudy.clone()
    changed[:, :, 2] += 0.5
    with torch.inference_mode():
        before = network.predict(inputs, noise_for(inputs))
        after = network.predict(replace(inputs, cloudy=changed), noise_for(inputs))
    assert torch.equal(before[:, [0, 1, 3]], after[:, [0, 1, 3]])
    assert not torch.equal(before[:, 2], after[:, 2])


# ------------------------------------------------------------------------------------------------ losses


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.slow if one in LARGE else ()) for one in OWN])
def test_the_main_loss_falls_on_one_batch(name, batch):
    network, example = tiny(name).train(), batch()
    groups = network.parameter_groups()
    optimizers = {phase: torch.optim.Adam(parameters, 1e-3) for phase, parameters in groups.items()}
    seen = []
    for step in range(25):
        torch.manual_seed(step)
        names = []
        for phase in network.losses(example, torch.Generator().manual_seed(step)):
            names.append(phase.name)
            optimizers[phase.name].zero_grad()
            phase.loss.backward(inputs=groups[phase.name])
            optimizers[phase.name].step()
            if phase.name == "generator":
                seen.append(float(phase.terms.get("l1", phase.terms.get("cycle", phase.loss.detach()))))
        assert names == list(groups)
    assert np.mean(seen[-5:]) < 0.9 * np.mean(seen[:5])


WEIGHTS = {
    "mcgan": {"adversarial": 1, "l1": 100},
    "pix2pix": {"adversarial": 1, "l1": 100},
    "cyclegan": {"adversarial": 1, "cycle": 10, "identity": 5},
    "stgan": {"adversarial": 1, "l1": 100},
    "ctgan": {"adversarial": 1, "l1": 100, "mask": 1, "auxiliary": 50},
    "pmaa": {"adversarial": 1, "l1": 100, "mask": 1, "auxiliary": 50},
    "ddpmcr": {"denoising": 1, "low": 1, "high": 1, "cloudy": 1},
}
"""System -> weight of each logged term of its loss; `System.loss` states them in words."""


@pytest.mark.parametrize("name", WEIGHTS)
def test_terms_of_the_losses_have_the_published_weights(name, batch):
    phases = tiny(name).eval().losses(batch(), torch.Generator().manual_seed(1))
    phase = next(phase for phase in phases if phase.name == "generator")
    assert set(phase.terms) == set(WEIGHTS[name])
    total = sum(weight * float(phase.terms[term]) for term, weight in WEIGHTS[name].items())
    assert float(phase.loss.detach()) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize(("name", "power"), [("ae", 2), ("crtsnet", 1)])
def test_losses_of_one_term_are_their_definition(name, power, batch):
    network, example = tiny(name).eval(), batch()
    known = example.scored[:, None].expand_as(example.clear)
    (phase,) = network.losses(example, torch.Generator())
    inputs = inputs_of(example, network.config)
    image = network.clear_image(inputs.arranged(3), lambda draw, channels: None)
    error = (image - (2 * example.clear - 1)).abs()[known] ** power
    assert float(phase.loss.detach()) == pytest.approx(float(error.mean().detach()), rel=1e-5)


@pytest.mark.parametrize("name", OWN)
def test_unknown_pixels_teach_nothing(name, batch):
    example = batch()
    other = replace(example, clear=torch.where(example.scored[:, None], example.clear, 0.7))
    for phase, again in zip(
        tiny(name).eval().losses(example, torch.Generator().manual_seed(0)),
        tiny(name).eval().losses(other, torch.Generator().manual_seed(0)),
        strict=True,
    ):
        assert torch.equal(phase.loss, again.loss)


@pytest.mark.parametrize("name", GANS)
def test_a_step_moves_only_its_own_parameters(name, shards, tmp_path, monkeypatch):
    """The trainer, not the system, keeps the phases apart: look at what has moved when each phase is over."""
    moved: list[tuple[str, set[str]]] = []
    honest = Trainer.move

    def move(self, optimizers, terms, *, norm):
        before = {key: value.detach().clone() for key, value in self.model.named_parameters()}
        honest(self, optimizers, terms, norm=norm)
        after = dict(self.model.named_parameters())
        phase = norm.removesuffix("gradient_norm").removesuffix("_") or "generator"
        moved.append((phase, {key for key in before if not torch.equal(before[key], after[key])}))

    monkeypatch.setattr(Trainer, "move", move)
    run_training(name, tmp_path / "run", data=[shards], overrides=training(name, "train.steps=1"), progress=False)
    network = tiny(name)
    names = {id(p): key for key, p in network.named_parameters()}
    own = {phase: {names[id(p)] for p in parameters} for phase, parameters in network.parameter_groups().items()}
    assert [phase for phase, _ in moved] == list(own)
    for phase, found in moved:
        assert found
        assert found <= own[phase]
    assert not set.intersection(*own.values())
    assert set.union(*own.values()) == set(names.values())


@pytest.mark.parametrize("name", BASELINES)
def test_losses_and_gradients_in_bf16(name, batch):
    """As on a GPU: no mix of types stops a step, and every parameter that is trained gets a finite gradient."""
    network = tiny(name).train()
    groups = network.parameter_groups()
    with torch.autocast("cpu", torch.bfloat16):
        for phase in network.losses(batch(), torch.Generator().manual_seed(0)):
            phase.loss.backward(inputs=groups[phase.name])
            assert phase.loss.dtype == torch.float32
            assert all(p.grad is None or torch.isfinite(p.grad).all() for p in groups[phase.name])
            assert any(p.grad is not None and p.grad.any() for p in groups[phase.name])


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_date_without_variation_does_not_blow_up_a_stack_of_instance_norms(value):
    """33 norms in a row, each with a derivative of 316 where a map is constant: the gradient of PMAA was NaN."""
    from sader.baselines.parts.adversarial import normal_init
    from sader.baselines.systems.pmaa import PmaaConfig, PmaaGenerator

    torch.manual_seed(0)
    config = PmaaConfig(width=8, hidden=8, block_width=16, drop_path=0.0)
    generator = PmaaGenerator(config)
    normal_init(generator)
    dates = torch.rand(2, config.dates, config.date_channels, 64, 64)
    alone = generator(generator.extractor(dates[1:].flatten(0, 1)).maps[None])
    dates[0] = value
    found = generator.extractor(dates.flatten(0, 1))
    image = generator(found.maps.unflatten(0, dates.shape[:2]))
    (image - 0.3).abs().mean().backward()
    norms = [float(p.grad.norm()) for p in generator.parameters() if p.grad is not None]
    assert max(norms) < 100, "NaN is not below 100 either"
    torch.testing.assert_close(image[1:], alone, rtol=0, atol=1e-6)


def test_instance_norm_is_pytorchs_where_there_is_variation():
    from sader.baselines.parts.adversarial import InstanceNorm

    torch.manual_seed(0)
    x = (torch.randn(2, 3, 8, 8) * torch.tensor([1e-3, 1.0, 100.0])[:, None, None] + 5).requires_grad_()
    weight = torch.randn(2, 3, 8, 8)
    (ours,) = torch.autograd.grad((InstanceNorm()(x) * weight).sum(), x)
    (theirs,) = torch.autograd.grad((torch.nn.functional.instance_norm(x) * weight).sum(), x)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


def test_the_pool_is_the_plain_one_and_never_asks_the_device_for_a_value(monkeypatch):
    """The same images as a list would give, several at a time, going on from a state; no value leaves the device."""
    from sader.baselines.systems.cyclegan import ImagePool

    def asked(*given):
        raise AssertionError("a recorded step cannot wait for a value")

    size, batch = 5, 4
    pool, generator, same = ImagePool(size), torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    kept: list[float] = []
    for number in range(9):
        fakes = torch.arange(float(batch)).view(batch, 1, 1, 1) + batch * number
        with monkeypatch.context() as patched:
            for name in ("tolist", "item", "__int__", "__float__", "__bool__", "__index__"):
                patched.setattr(torch.Tensor, name, asked)
            shown = pool.exchanged(fakes, generator)
        wanted = []
        for value, (swap, which) in zip(fakes.flatten().tolist(), torch.rand(batch, 2, generator=same), strict=True):
            place = int(float(which) * size)
            if len(kept) < size:
                kept.append(value)
                wanted.append(value)
            elif swap < 0.5:
                wanted.append(kept[place])
                kept[place] = value
            else:
                wanted.append(value)
        assert shown.flatten().tolist() == wanted
        assert pool.images is not None
        assert pool.images.flatten().tolist() == kept
        again = ImagePool(size)
        again.images, pool = pool.images, again


def test_the_pool_shows_older_images():
    from sader.baselines.systems.cyclegan import ImagePool

    pool, generator = ImagePool(3), torch.Generator().manual_seed(0)
    images = torch.arange(40.0).view(40, 1, 1, 1)
    shown = [float(pool.exchanged(images[k : k + 1], generator)) for k in range(40)]
    assert shown[:3] == [0.0, 1.0, 2.0]
    older = [k for k in range(40) if shown[k] != k]
    assert 8 < len(older) < 30
    assert all(shown[k] < k for k in older)
    assert pool.images is not None
    assert len(pool.images) == 3
    assert torch.equal(ImagePool(0).exchanged(images, generator), images)


def test_small_images_are_refused_with_a_remedy(batch):
    with pytest.raises(ShapeError, match=r"12x12; this discriminator needs at least 24 pixels. Use train\.crop=32"):
        list(tiny("pix2pix", "judge_widths=[4,4,4]").losses(batch(size=12), torch.Generator()))
    with pytest.raises(ShapeError, match="too few pixels for this discriminator"):
        list(tiny("pmaa", "judge_widths=[4,4,4,4,4]").train().losses(batch(size=32, count=1), torch.Generator()))
    with pytest.raises(ShapeError, match=r"batch norm cannot take. Use train\.batch_size=2 or train\.crop=16"):
        list(tiny("mcgan").train().losses(batch(size=8, count=1), torch.Generator()))
    with pytest.raises(ShapeError, match=r"48x48; this network learns on at most 32x32. Use train\.crop=32"):
        list(tiny("ctgan").losses(batch(size=48), torch.Generator()))


# ------------------------------------------------------------------------------------------------ the commands


QUICK = ("ae", "pix2pix", "crtsnet", "diffcr")
"""One system of each kind: one loss, an adversary, several dates, diffusion."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in BASELINES]
)
def test_train_stop_resume_and_score(name, shards, tmp_path, monkeypatch):
    """A run that dies and goes on gives the losses of one that did not; its weights are scored by `evaluate`."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    overrides = training(name, "train.accumulate=2", "train.half=false")
    path = run_training(name, whole, data=[shards], overrides=overrides, progress=False)

    class Killed(Exception):
        pass

    honest = Trainer.step

    def step(self):
        if self.steps_done == 3:
            raise Killed
        honest(self)

    monkeypatch.setattr(Trainer, "step", step)
    with pytest.raises(Killed):
        run_training(name, broken, data=[shards], overrides=overrides, progress=False)
    monkeypatch.undo()
    assert int(state_files(broken)[-1].stem.removeprefix("step-")) == 2
    run_training(None, broken, resume=True, progress=False)
    assert logged(broken) == logged(whole)
    assert list(losses(whole)) == [1, 2, 3, 4]
    first, second = (load_checkpoint(run / "model.safetensors").model for run in (whole, broken))
    assert isinstance(first, Baseline)
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )

    for task in ("clean", "paper"):
        data = DataRequest((shards,), limit=1)
        (result,) = run_evaluation(EvaluationRequest((str(path),), data, (task,), lpips=False, pictures=0))
        scored = [row for row in result.report.results.rows if row.method == parse_model(str(path))[0]]
        assert scored
        assert all(np.isfinite(row.scores["psnr"]) for row in scored)
        if task == "clean":
            assert all(row.scores["unchanged"] == 1.0 for row in scored)


@pytest.mark.slow
def test_killed_by_the_system_and_resumed(shards, tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    overrides = training("cyclegan", "train.steps=14", "train.checkpoint_every=3")
    command = [
        sys.executable,
        "-m",
        "sader",
        "train",
        "cyclegan",
        "--data",
        str(shards),
        "--run",
        str(killed),
        "--quiet",
    ]
    process = subprocess.Popen(
        [*command, *(word for text in overrides for word in ("--set", text))], env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    deadline = time.monotonic() + 120
    while process.poll() is None and max(losses(killed), default=0) < 7 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert process.poll() is None, "the run ended before it could be killed"
    process.send_signal(signal.SIGKILL)
    process.wait()
    state = load_state(killed)
    assert state is not None
    assert len(state["memory"]["clear"]) == 3, "the pools are part of the state"
    run_training(None, killed, resume=True, progress=False)
    run_training("cyclegan", whole, data=[shards], overrides=overrides, progress=False)
    assert logged(killed) == logged(whole)


def test_validation_panels_and_info_of_a_trained_baseline(shards, tmp_path):
    more = ("train.steps=2", "train.validate_every=1", "train.validate_batches=1")
    path = run_training("pix2pix", tmp_path / "a", data=[shards], overrides=training("pix2pix", *more), progress=False)
    names = {name for _, name, _ in read_log(tmp_path / "a" / "metrics.csv")}
    assert {"loss", "l1", "discriminator_loss", "discriminator_gradient_norm", "validation_psnr"} <= names
    assert len(list((tmp_path / "a" / "panels").glob("*.png"))) == 2
    run_training(
        "pix2pix", tmp_path / "b", data=[shards], overrides=training("pix2pix", "train.steps=2"), progress=False
    )
    assert losses(tmp_path / "a") == losses(tmp_path / "b"), "validation changes nothing"
    info = describe(str(path))
    assert (info.kind, info.trained, info.card["steps"]) == ("weights", True, 2)
    json.dumps(info.as_dict())
    tuned = run_training(
        None, tmp_path / "tuned", data=[shards], init=str(path), progress=False,
        overrides=[text for text in training("pix2pix", "train.steps=1") if text.startswith("train.")],
    )  # fmt: skip
    assert load_checkpoint(tuned).config == load_checkpoint(path).config


def test_configs_bring_the_published_settings(tmp_path):
    config = resolve("pix2pix", ["train.adam_lr=1e-4"])
    assert (config.train.optimizer, config.train.betas, config.train.schedule) == ("adam", (0.5, 0.999), "linear")
    assert (config.train.adam_lr, config.train.ema_decay, config.train.dates) == (1e-4, 0.0, 3)
    (tmp_path / "run.yaml").write_text("base: ctgan\ntrain: {steps: 7}\nmodel: {network: {size: 64}}\n")
    config = resolve(tmp_path / "run.yaml")
    assert (config.model.system, config.model.network.size, config.train.optimizer) == ("ctgan", 64, "adamw")
    (tmp_path / "again.yaml").write_bytes(save_run_config(config))
    assert load_run_config(tmp_path / "again.yaml") == config
    with pytest.raises(ConfigError, match=r"unknown key model\.network\.widht; did you mean width"):
        resolve("pix2pix", ["model.network.widht=3"])
    with pytest.raises(ConfigError, match=r"unknown preset 'pixpix'; did you mean pix2pix"):
        find_config("pixpix")
    with pytest.raises(ConfigError, match=r"unknown system 'stgann'; did you mean stgan"):
        get_system("stgann")
    with pytest.raises(ConfigError, match="ctgan was given a Pix2PixConfig; expected CtGanConfig"):
        build_baseline(BaselineModelConfig("ctgan", baseline_config("pix2pix").network))


def test_schedules_of_the_baselines():
    linear = [rate_factor(at, warmup=0.0, schedule="linear") for at in (0.0, 0.5, 0.75, 1.0, 1.2)]
    assert linear == [1.0, 1.0, 0.5, 0.0, 0.0]
    constant = [rate_factor(at, warmup=0.2, schedule="constant") for at in (0.0, 0.1, 0.2, 1.0)]
    assert constant == [0.0, 0.5, 1.0, 1.0]


def test_sader_trains_with_adam_alone(shards, tmp_path):
    network = ["widths=[8,16]", "blocks=[1,1]", "fusion_width=8", "key_width=8", "head_width=8", "kernel=3"]
    network += ["emb_width=16", "cloud_widths=[8,8]", "refinement_widths=[8]"]
    overrides = [f"model.network.{text}" for text in network]
    overrides += [text for text in training("ae") if text.startswith("train.")]
    run_training(
        "small", tmp_path / "run", data=[shards], overrides=[*overrides, "train.optimizer=adamw"], progress=False
    )
    state = load_state(tmp_path / "run")
    assert state is not None
    assert len(state["optimizers"]) == 1


def test_mistakes_in_a_run_are_named(shards, tmp_path):
    with pytest.raises(ConfigError, match=r"train\.optimizer is muon, which is for SADER's own networks"):
        run_training(
            "ae", tmp_path / "a", data=[shards], overrides=training("ae", "train.optimizer=muon"), progress=False
        )
    weights = tmp_path / "model.safetensors"
    save_checkpoint(weights, tiny("stgan"), tiny_config("stgan"))
    with pytest.raises(TrainingError, match=r"another network: .*model\.system: stgan -> pix2pix"):
        run_training(
            "pix2pix", tmp_path / "b", data=[shards], init=str(weights), overrides=training("pix2pix"), progress=False
        )


# ------------------------------------------------------------------------------------------------ checkpoint, pipeline


@pytest.mark.parametrize("name", OWN)
def test_checkpoint_round_trip(name, tmp_path, series, noise_for):
    network, config = tiny(name, seed=3).eval(), tiny_config(name)
    path = tmp_path / "model.safetensors"
    save_checkpoint(path, network, config, card={"note": "x"})
    loaded = load_checkpoint(path)
    assert (loaded.config, loaded.card) == (config, {"note": "x"})
    assert model_from_dict(json.loads(json.dumps(to_dict(config)))) == config
    inputs = series()
    with torch.inference_mode():
        assert torch.equal(loaded.model.predict(inputs, noise_for(inputs)), network.predict(inputs, noise_for(inputs)))
    save_checkpoint(path, network, tiny_config(name, "bands=[B02,B03,B04]"))
    with pytest.raises(CheckpointError, match="does not fit its own config"):
        load_checkpoint(path)


def test_a_checkpoint_of_an_unknown_system(tmp_path):
    from safetensors.torch import save_file

    header = {"format": 1, "config": {"system": "newgan", "network": {}}, "card": {}}
    save_file({"x": torch.zeros(1)}, tmp_path / "m.safetensors", metadata={"sader": json.dumps(header)})
    with pytest.raises(ConfigError, match="unknown system 'newgan'"):
        load_checkpoint(tmp_path / "m.safetensors")


@pytest.mark.parametrize("name", ["pix2pix", "ctgan", "diffcr"])
def test_remover_of_a_baseline(name, tmp_path):
    path = tmp_path / "model.safetensors"
    torch.manual_seed(0)
    save_checkpoint(path, build_model(tiny_config(name)), tiny_config(name))
    remover = CloudRemover.from_pretrained(path, device="cpu", options=RemoverOptions(tile=64, overlap=8))
    rng = np.random.default_rng(0)
    cloudy = rng.uniform(0.05, 0.4, (4, 4, 75, 90)).astype(np.float32)
    mask = np.zeros((4, 75, 90), bool)
    mask[:, 20:40, 30:60] = True
    ticks = []
    result = remover.predict(cloudy, reference=1, cloud_mask=mask, progress=lambda *at: ticks.append(at))
    assert result.clear.shape == (4, 75, 90)
    assert np.isfinite(result.clear).all()
    assert np.array_equal(result.kept, ~mask[1])
    assert np.array_equal(result.clear[:, ~mask[1]], cloudy[1][:, ~mask[1]])
    assert result.cloud is None
    assert ticks[-1][0] == ticks[-1][1]
    again = remover.predict(cloudy, reference=1, cloud_mask=mask)
    assert np.array_equal(result.clear, again.clear)
    assert remover(cloudy, reference=None).shape == (4, 75, 90)
    assert remover(cloudy, reference=1).shape == (4, 75, 90)
    with pytest.raises(ConfigError, match="takes no steps" if name != "diffcr" else "only SADER resamples"):
        remover(cloudy, steps="4+1")
    with pytest.raises(BandError, match="bands B08 are missing; this model needs all"):
        remover(cloudy[:, :3], bands=("B02", "B03", "B04"))


def test_other_bands_help_and_are_not_scored(shards, tmp_path):
    paths = []
    for name, more in (("pix2pix", ("bands=[B02,B03,B04]", "aux_bands=[B08]")), ("ae", ())):
        paths.append(tmp_path / f"{name}.safetensors")
        save_checkpoint(paths[-1], tiny(name, *more), tiny_config(name, *more))
    models = tuple(map(str, paths))
    request = EvaluationRequest(models, DataRequest((shards,), limit=1), ("paper",), lpips=False, pictures=0)
    rows = run_evaluation(request)[0].report.results.rows
    assert {parse_model(model)[0] for model in models} <= {row.method for row in rows}


def test_from_preset_is_untrained_and_repeats():
    first, second = (CloudRemover.from_preset("uncrtaints", device="cpu") for _ in range(2))
    assert first.card == {"trained": False}
    assert first.model is not None
    assert second.model is not None
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))


def has_dropout(name):
    return any(isinstance(m, torch.nn.modules.dropout._DropoutNd) and m.p > 0 for m in tiny(name).modules())


def test_capturable_are_those_measured_to_be_equal():
    """All passed `test_a_captured_step_is_an_eager_step` on an H200, dropout included. CycleGAN is left out: images of
    the warm-up of a capture would stay in its pool."""
    assert {name for name in BASELINES if not get_system(name).capturable} == {"cyclegan"}
    assert {name for name in BASELINES if has_dropout(name)} == {"mcgan", "pmaa", "stgan", "uncrtaints", "ctgan"}


@pytest.mark.parametrize("name", BASELINES)
def test_a_compiled_step_has_all_layers_in_whole_graphs(name, shards, tmp_path, monkeypatch):
    """The losses are those of eager steps and no step but the first traces anything. Traced without a compiler behind
    it: a graph break raises."""
    more, traced, eager = training(name), [], []
    run_training(name, tmp_path / "eager", data=[shards], overrides=more, progress=False)

    def whole(method, *, compile_=torch.compile, **options):
        def backend(graph, _):
            traced.append(steps[-1])
            return graph

        return compile_(method, **options, fullgraph=True, backend=backend)

    def noted(plain):
        def forward(self, x):
            if not torch.compiler.is_compiling():
                eager.append(self)
            return plain(self, x)

        return forward

    def step(self, *, plain=PhasedTrainer.step):
        steps.append(self.steps_done)
        plain(self)

    steps: list[int] = []
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", whole)
    monkeypatch.setattr(PhasedTrainer, "step", step)
    for layer in (torch.nn.Conv2d, torch.nn.Linear):
        monkeypatch.setattr(layer, "forward", noted(layer.forward))
    run = tmp_path / "compiled"
    weights = run_training(name, run, data=[shards], overrides=[*more, "train.compile=true"], progress=False)
    assert losses(run) == pytest.approx(losses(tmp_path / "eager"), rel=1e-5)
    assert eager == []
    assert steps == [0, 1, 2, 3]
    assert set(traced) == {0}
    assert load_checkpoint(weights).model.state_dict().keys() == tiny(name).state_dict().keys()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", BASELINES)
def test_a_captured_step_is_an_eager_step(name, shards, tmp_path, monkeypatch):
    """What may set `System.capturable`: the same losses, dropout included, whether steps are replayed as a CUDA graph
    or not, and where the graph is captured again by a resumed run."""
    more = training(name, "train.device=cuda", "train.precision=fp32")

    def seen(captured, *pause):
        monkeypatch.setattr(f"sader.baselines.systems.{name}.SYSTEM", replace(get_system(name), capturable=captured))
        run = tmp_path / f"{captured}{len(pause)}"
        run_training(name, run, data=[shards], overrides=[*more, *pause], progress=False)
        if pause:
            run_training(name, run, data=[shards], overrides=more, resume=True, progress=False)
        return losses(run)

    captured, close = seen(True), 1e-2 if name == "ctgan" else 2e-3  # two eager runs of CTGAN differed by 4.5e-3
    assert captured == pytest.approx(seen(False), rel=close)
    assert seen(True, "train.pause_seconds=0.001") == pytest.approx(captured, rel=close)
