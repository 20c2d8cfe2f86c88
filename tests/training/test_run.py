"""Whole runs on a tiny bank: killed and resumed, wrong folders, values that are not finite, full disks."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sader.checkpoint import load_checkpoint
from sader.data.bank import SeriesMaker
from sader.errors import ConfigError, SaderError, TrainingError
from sader.training.config import (
    RunConfig,
    TrainConfig,
    differing_keys,
    load_run_config,
    resolve,
    save_run_config,
    with_steps,
)
from sader.training.objective import Objective
from sader.training.optim import progress_of, rate_factor
from sader.training.record import load_state, parent_card, read_log, save_state, state_files
from sader.training.run import choose_device, fit, fit_together, maker_settings, run_training


def losses(run_dir: Path) -> dict[int, float]:
    return {step: value for step, name, value in read_log(run_dir / "metrics.csv") if name == "loss"}


def config_of(tiny: list[str], shards: Path, *more: str) -> RunConfig:
    config = resolve("small", [*tiny, *more])
    return dataclasses.replace(config, data=dataclasses.replace(config.data, shards=(str(shards),)))


def poisoned(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Make the loss of step number `step` (from 1) not a number."""
    honest, calls = Objective.__call__, []

    def call(self, denoiser, batch, generator):
        loss, terms = honest(self, denoiser, batch, generator)
        calls.append(loss)
        return (loss * float("nan") if len(calls) == step else loss), terms

    monkeypatch.setattr(Objective, "__call__", call)


@pytest.mark.slow  # tests/test_kills.py ends forks of a run, which start faster
def test_killed_run_goes_on_with_the_same_losses(tiny: list[str], shards: Path, tmp_path: Path) -> None:
    more = ("train.steps=14", "train.checkpoint_every=3", "train.accumulate=2", "model.network.dropout=0.1")
    killed = tmp_path / "killed"
    overrides = [text.replace(" ", "") for text in (*tiny, *more)]
    command = [sys.executable, "-m", "sader", "train", "small", "--data", str(shards), "--run", str(killed), "--quiet"]
    process = subprocess.Popen(
        [*command, *(word for text in overrides for word in ("--set", text))], env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    deadline = time.monotonic() + 120
    while process.poll() is None and max(losses(killed), default=0) < 7 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert process.poll() is None, "the run ended before it could be killed"
    process.send_signal(signal.SIGKILL)
    process.wait()
    reached = max(losses(killed))
    saved = int(state_files(killed)[-1].stem.removeprefix("step-"))
    assert 6 <= saved <= reached < 14

    whole = tmp_path / "whole"
    fit(config_of(tiny, shards, *more), whole, progress=False)
    run_training(None, killed, resume=True, progress=False)
    assert losses(killed) == losses(whole)
    assert list(losses(killed)) == list(range(1, 15))
    first, second = (load_checkpoint(run / "model.safetensors").model.state_dict() for run in (killed, whole))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_finished_run_holds_everything(tiny: list[str], shards: Path, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    run = tmp_path / "run"
    more = ("train.steps=4", "train.validate_every=2", "train.validate_batches=1", "train.half=false")
    path = fit(config_of(tiny, shards, *more), run, progress=False)
    checkpoint = load_checkpoint(path)
    assert checkpoint.card["steps"] == 4
    assert checkpoint.card["data"] == {"cloudsen12": 2}
    assert checkpoint.card["series_seen"] == 8
    state = load_state(run)
    assert state is not None
    # What ships is the average, and that is not what the optimiser moves.
    weights = checkpoint.model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in state["ema"]["shadow"].items())
    assert any(not torch.equal(weights[name], value) for name, value in state["model"].items())
    assert [file.name for file in state_files(run)] == ["step-00000002.pt", "step-00000004.pt"]
    assert sorted(file.name for file in (run / "panels").iterdir()) == ["step-00000002.png", "step-00000004.png"]
    names = {name for _, name, _ in read_log(run / "metrics.csv")}
    assert {"loss", "gradient_norm", "validation_loss", "validation_psnr"} <= names
    assert load_run_config(run / "config.yaml") == config_of(tiny, shards, *more)
    # A finished run has nothing left to do.
    before = path.stat().st_mtime_ns
    assert fit(config_of(tiny, shards, *more), run, resume=True, progress=False) == path
    assert path.stat().st_mtime_ns == before


def test_validation_does_not_change_the_training(tiny: list[str], shards: Path, tmp_path: Path) -> None:
    fit(config_of(tiny, shards, "train.steps=3"), tmp_path / "a", progress=False)
    more = ("train.steps=3", "train.validate_every=1", "train.validate_batches=1", "train.panels=0")
    fit(config_of(tiny, shards, *more), tmp_path / "b", progress=False)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_time_limit_ends_the_run_and_its_schedule(tiny: list[str], shards: Path, tmp_path: Path) -> None:
    config = config_of(tiny, shards, "train.steps=100000", "train.max_seconds=3")
    fit(config, tmp_path / "run", progress=False)
    rows = read_log(tmp_path / "run" / "metrics.csv")
    last = rows[-1][0]
    assert 1 < last < 1000
    assert load_checkpoint(tmp_path / "run" / "model.safetensors").card["steps"] == last
    seconds = {step: value for step, name, value in rows if name == "seconds"}
    assert seconds[last] >= 3
    for step, name, value in rows:
        if name == "lr_factor" and step > 1:
            assert value == rate_factor(progress_of(config.train, step - 1, seconds[step - 1]), warmup=0.2)


def test_a_paused_run_is_resumed_with_the_same_result(tiny: list[str], shards: Path, tmp_path: Path) -> None:
    more = ("train.steps=3", "train.checkpoint_every=100", "train.log_every=100")
    paused, whole = tmp_path / "paused", tmp_path / "whole"
    weights = fit(config_of(tiny, shards, *more, "train.pause_seconds=0.001"), paused, progress=False)
    assert load_checkpoint(weights).card["steps"] == 1
    assert [file.name for file in state_files(paused)] == ["step-00000001.pt"]
    run_training(None, paused, overrides=["train.pause_seconds=null"], resume=True, progress=False)
    fit(config_of(tiny, shards, *more), whole, progress=False)
    first, second = (load_checkpoint(run / "model.safetensors").model.state_dict() for run in (paused, whole))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_runs_that_take_turns_give_the_same_weights_as_alone(
    tiny: list[str], shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ("train.steps=6", "train.checkpoint_every=2", "train.validate_every=0")
    configs = {
        tmp_path / "a": config_of(tiny, shards, *steps),
        tmp_path / "b": config_of(tiny, shards, *steps, "train.adam_lr=1e-4"),  # the same batches
        tmp_path / "c": config_of(tiny, shards, *steps, "train.seed=1"),
    }
    composed: list[tuple[int, int]] = []
    compose = SeriesMaker.batch

    def batch(self, step, *shape):
        composed.append((self.seed, step))
        return compose(self, step, *shape)

    monkeypatch.setattr(SeriesMaker, "batch", batch)
    stopped = {name: dataclasses.replace(config) for name, config in configs.items()}
    stopped[tmp_path / "a"] = config_of(tiny, shards, *steps, "train.pause_seconds=1e-9")
    weights = fit_together(stopped, progress=False)
    assert sorted(composed) == [(seed, step) for seed in (0, 1) for step in range(6)]
    assert load_state(tmp_path / "a")["step"] == 1  # paused alone; the others went on
    assert fit_together(configs, resume=True, progress=False) == weights
    assert fit_together(configs, resume=True, progress=False) == weights  # nothing is left to do
    for folder, config in configs.items():
        alone = fit(config, tmp_path / f"{folder.name}-alone", progress=False)
        first, second = (load_checkpoint(path).model.state_dict() for path in (folder / "model.safetensors", alone))
        assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(TrainingError, match=r"train\.devices=1"):
        fit_together({tmp_path / "d": config_of(tiny, shards, "train.devices=2", "train.accumulate=2")})


@pytest.mark.parametrize("log_every", [1, 50])
def test_nan_stops_the_run_and_keeps_the_last_good_checkpoint(
    tiny: list[str], shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_every: int
) -> None:
    poisoned(monkeypatch, 3)
    with pytest.raises(TrainingError, match=r"loss is nan at step 3; .* Lower train\.muon_lr"):
        fit(config_of(tiny, shards, f"train.log_every={log_every}"), tmp_path / "run", progress=False)
    state = load_state(tmp_path / "run")
    assert state is not None
    assert state["step"] == 2
    assert all(torch.isfinite(value).all() for value in state["model"].values())


def test_full_disk_is_an_error_and_the_old_checkpoint_stays(
    tiny: list[str], shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, honest = tmp_path / "run", os.replace

    def replace(source, target):
        if Path(target).name == "step-00000004.pt":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return honest(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(TrainingError, match=r"step 4 could not be written.*disk is full.*step-00000002.pt.*--resume"):
        fit(config_of(tiny, shards), run, progress=False)
    assert [file.name for file in (run / "checkpoints").iterdir()] == ["step-00000002.pt"]
    monkeypatch.undo()
    fit(config_of(tiny, shards), run, resume=True, progress=False)
    assert list(losses(run)) == [1, 2, 3, 4, 5, 6]


def test_a_disk_that_is_really_full(tiny: list[str], shards: Path, disk, monkeypatch: pytest.MonkeyPatch) -> None:
    run, replace = disk.folder / "run", os.replace

    def then_full(source, target):
        replace(source, target)
        if Path(target).name == "step-00000002.pt":
            disk.fill()

    monkeypatch.setattr(os, "replace", then_full)
    with pytest.raises(SaderError, match="the disk is full"):
        fit(config_of(tiny, shards), run, progress=False)
    disk.free()
    monkeypatch.undo()
    fit(config_of(tiny, shards), run, resume=True, progress=False)
    assert list(losses(run)) == [1, 2, 3, 4, 5, 6]


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_state(tmp_path, {"step": step})
    newest = state_files(tmp_path)[-1]
    newest.write_bytes(newest.read_bytes()[:50])
    with pytest.warns(UserWarning, match="cannot be read"):
        state = load_state(tmp_path)
    assert state is not None
    assert state["step"] == 2


def test_folders_of_other_runs_are_refused(tiny: list[str], shards: Path, tmp_path: Path) -> None:
    config, run = config_of(tiny, shards, "train.steps=2"), tmp_path / "run"
    fit(config, run, progress=False)
    with pytest.raises(TrainingError, match=r"exists and is not empty\. Go on with --resume"):
        fit(config, run, progress=False)
    other = config_of(tiny, shards, "train.steps=3", "model.network.kernel=5", "train.log_every=7")
    with pytest.raises(TrainingError, match=r"model\.network\.kernel: 3 -> 5; train\.steps: 2 -> 3\. Go on") as caught:
        fit(other, run, resume=True, progress=False)
    assert "log_every" not in str(caught.value)
    with pytest.raises(TrainingError, match=r"holds no config\.yaml"):
        fit(config, tmp_path / "nothing", resume=True, progress=False)


def test_fine_tuning_starts_from_the_given_weights(tiny: list[str], shards: Path, tmp_path: Path) -> None:
    weights = fit(config_of(tiny, shards, "train.steps=2", "train.half=false"), tmp_path / "first", progress=False)
    train = [text for text in tiny if text.startswith("train.")]
    more = ["train.steps=1", "train.half=false", "train.adam_lr=0", "train.muon_lr=0"]
    tuned = run_training(
        None, tmp_path / "tuned", data=[shards], overrides=[*train, *more], init=str(weights), progress=False
    )
    first, second = load_checkpoint(weights).model.state_dict(), load_checkpoint(tuned).model.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert load_checkpoint(tuned).card["parent"].startswith(f"{weights} (SHA-256 ")
    assert "parent" not in load_checkpoint(weights).card
    other = config_of(tiny, shards, "model.network.emb_width=32")
    with pytest.raises(TrainingError, match=r"another network: model\.network\.emb_width: 16 -> 32"):
        fit(other, tmp_path / "other", init_from=str(weights), progress=False)


def test_another_network_may_take_what_fits(tiny: list[str], shards: Path, tmp_path: Path) -> None:
    weights = fit(config_of(tiny, shards, "train.steps=1", "train.half=false"), tmp_path / "first", progress=False)
    still = ("train.steps=1", "train.half=false", "train.adam_lr=0", "train.muon_lr=0", "train.init_anew=true")
    other = config_of(tiny, shards, *still, "model.network.refinement_widths=[16]")
    tuned = fit(other, tmp_path / "other", init_from=str(weights), progress=False)
    first, second = load_checkpoint(weights).model.state_dict(), load_checkpoint(tuned).model.state_dict()
    same = {name for name in second if name in first and torch.equal(first[name], second[name])}
    assert {name for name in first if not name.startswith("network.mask_refinement.")} <= same
    assert any(name.startswith("network.mask_refinement.") for name in second.keys() - same)


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TrainingError, match=r"torch finds no GPU. Use train\.device=cpu"):
        choose_device(TrainConfig(device="cuda"))
    assert choose_device(TrainConfig()) == "cpu"
    monkeypatch.setattr("sader.training.run.has_bfloat16", lambda: True)
    assert choose_device(TrainConfig(precision="bf16")) == "cpu"
    monkeypatch.setattr("sader.training.run.has_bfloat16", lambda: False)
    with pytest.raises(TrainingError, match="bf16, which needs a GPU"):
        choose_device(TrainConfig(precision="bf16"))


def test_config_files_bases_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("base: small\ntrain: {steps: 7, muon_lr: 2e-4}\ndata: {maker: {band_dropout: [[[B08], 0.5]]}}\n")
    config = resolve(path, ["train.crop=64", "data.maker.paste=0.1"])
    assert config.model.name == "small"
    assert (config.train.steps, config.train.muon_lr, config.train.crop) == (7, 2e-4, 64)
    assert config.data.maker.band_dropout == ((("B08",), 0.5),)
    assert config.data.maker.paste == 0.1
    (tmp_path / "again.yaml").write_bytes(save_run_config(config))
    assert load_run_config(tmp_path / "again.yaml") == config
    assert differing_keys(config, resolve(path, ["train.crop=32"])) == [
        "data.maker.paste: 0.1 -> 0.6",
        "train.crop: 64 -> 32",
    ]
    with pytest.raises(ConfigError, match=r"unknown key train\.stepz; did you mean steps"):
        resolve("small", ["train.stepz=3"])
    with pytest.raises(ConfigError, match="use a multiple of 2"):
        resolve("small", ["train.devices=2"])
    path.write_text("a: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        resolve(path)
    with pytest.raises(ConfigError, match="no preset given"):
        run_training(None, tmp_path / "x")


def test_weights_trained_further_say_what_they_come_from() -> None:
    parent = parent_card("sader-s2-rgbn")
    assert parent["parent"].startswith("sader-s2-rgbn (SHA-256 ")
    assert "CloudSEN12" in parent["parent_training_data"]
    assert parent["parent_licence"] == "Apache-2.0"
    assert "Copernicus" in parent["attribution"]


def test_a_grandchild_still_names_the_first_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tmp_path / "tuned.safetensors"
    weights.write_bytes(b"weights")
    header = {"card": {"parent_training_data": "places", "parent_licence": "Apache-2.0"}}
    monkeypatch.setattr("sader.training.record.read_header", lambda path: header)
    parent = parent_card(str(weights))
    assert (parent["parent_training_data"], parent["parent_licence"]) == ("places", "Apache-2.0")


def test_resuming_what_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"there is no run at .*nowhere .*leave out --resume"):
        run_training(None, tmp_path / "nowhere", resume=True)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("preset", "muon_lr", "batch", "accumulate", "epochs", "symmetries", "dropout"),
    [("sen2_mtc_new", 1e-3, 8, 2, 200, True, 0.0), ("sen12mscrts_ea", 1e-4, 1, 1, 500, False, 0.1)],
)
def test_presets_of_the_paper_carry_its_training(preset, muon_lr, batch, accumulate, epochs, symmetries, dropout):
    config = resolve(preset)
    train, maker, loss = config.train, config.data.maker, config.objective.cloud_aware
    assert (train.optimizer, train.muon_lr, train.adam_lr, train.betas) == ("muon", muon_lr, 3e-4, (0.9, 0.95))
    assert (train.batch_size, train.accumulate, train.epochs, train.dates, train.crop) == (
        batch,
        accumulate,
        epochs,
        3,
        256,
    )
    assert train.warmup * train.schedule_steps == 500
    assert (train.schedule, train.schedule_steps) == ("cosine", 50_000)
    assert (train.clip, train.ema_decay, train.precision, train.weight_decay) == (0, 0.9999, "fp32", 0)
    assert (loss.cloud, loss.clear, loss.brightness, loss.threshold, loss.weight_form) == (3, 1, 2, 0.95, "linear")
    assert maker.tasks == (0, 1, 0)
    assert (maker.fewer_dates, maker.extra_clouds, maker.rescale, maker.jitter, maker.band_dropout) == (0, 0, 0, 0, ())
    assert maker.symmetries == symmetries
    assert maker_settings(config).time_order
    assert config.model.network.dropout == dropout
    assert resolve(preset, ["train.steps=7"]).train.epochs is None
    assert resolve("small").train == TrainConfig()


def test_epochs_count_the_series_of_the_shards(tiny: list[str], shards: Path) -> None:
    config = config_of(tiny, shards, "train.epochs=5", "train.accumulate=1")
    assert with_steps(config).train.steps == 5  # two series, two in a step
    assert with_steps(config_of(tiny, shards, "train.epochs=5", "train.batch_size=1")).train.steps == 10
    assert with_steps(config_of(tiny, shards)).train.steps == 6


def test_checkpoints_wait_for_the_time_between_them(tiny: list[str], shards: Path, tmp_path: Path) -> None:
    fit(config_of(tiny, shards, "train.steps=3", "train.checkpoint_seconds=1000"), tmp_path / "run", progress=False)
    assert [file.name for file in state_files(tmp_path / "run")] == ["step-00000003.pt"]


def test_the_schedule_may_be_longer_than_the_run(tiny: list[str], shards: Path, tmp_path: Path) -> None:
    more = ("train.steps=3", "train.schedule_steps=30", "train.warmup=0.1")
    fit(config_of(tiny, shards, *more), tmp_path / "run", progress=False)
    rates = [value for _, name, value in read_log(tmp_path / "run" / "metrics.csv") if name == "lr_factor"]
    assert rates == pytest.approx([0, 1 / 3, 2 / 3])


def test_progress_counts_samples_and_states_the_time_left() -> None:
    from types import SimpleNamespace

    from sader.training.record import ProgressLine

    def at(step: int, share: float, **changes: object) -> SimpleNamespace:
        config = SimpleNamespace(**({"batch_size": 8, "accumulate": 2, "steps": 1000, "max_seconds": None} | changes))
        return SimpleNamespace(config=config, steps_done=step, progress=share, latest={"loss": 0.5})

    resumed = ProgressLine(at(100, 0.1))
    assert resumed.text(at(100, 0.1), 0.0) == "step 100 of 1,000 (10%), 1,600 of 16,000 samples, loss 0.5"
    text = resumed.text(at(200, 0.2), 60.0)
    assert text == "step 200 of 1,000 (20%), 3,200 of 16,000 samples, 0:08:00 left, loss 0.5"
    # Half of the seconds are over after 200 steps: about 400 will be done.
    assert "step 200 of 400 (50%), 3,200 of 6,400 samples" in resumed.text(at(200, 0.5, max_seconds=60.0), 60.0)
