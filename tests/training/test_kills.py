"""Stopped and resumed training: the export, two runs in one folder, changed shards. `tests/test_kills.py` kills it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sader.checkpoint import load_checkpoint
from sader.errors import OutputError, TrainingError
from sader.files import locked
from sader.training.record import state_files
from sader.training.run import LOCK_FILE, MODEL_FILE, run_training


def train(tiny: list[str], shards: Path, run: Path) -> None:
    overrides = [*tiny, "train.steps=3", "train.checkpoint_every=1", "train.crop=8", "train.half=false"]
    resume = (run / "config.yaml").is_file()
    run_training("small", run, data=[shards], overrides=overrides, resume=resume, progress=False)


def test_stopped_before_the_export_it_exports_on_resume(tiny: list[str], shards: Path, tmp_path: Path) -> None:
    train(tiny, shards, tmp_path / "whole")
    train(tiny, shards, tmp_path / "run")
    (tmp_path / "run" / MODEL_FILE).unlink()
    train(tiny, shards, tmp_path / "run")
    first, second = (load_checkpoint(tmp_path / name / MODEL_FILE) for name in ("whole", "run"))
    assert all(torch.equal(value, second.model.state_dict()[name]) for name, value in first.model.state_dict().items())
    assert {k: v for k, v in first.card["last"].items() if k != "seconds"} == {
        k: v for k, v in second.card["last"].items() if k != "seconds"
    }


def test_two_runs_in_one_folder_exclude_each_other(tiny: list[str], shards: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with locked(run / LOCK_FILE), pytest.raises(OutputError, match="another process is training in"):
        train(tiny, shards, run)
    assert [path.name for path in run.iterdir()] == [LOCK_FILE]
    train(tiny, shards, run)


def test_changed_shards_are_not_resumed(tiny: list[str], shards: Path, tmp_path: Path) -> None:
    copy, run = tmp_path / "shards", tmp_path / "run"
    copy.mkdir()
    content = bytearray((shards / "train-000.shard").read_bytes())
    (copy / "train-000.shard").write_bytes(content)
    train(tiny, copy, run)
    state_files(run)[-1].unlink()
    content[-1] ^= 1
    (copy / "train-000.shard").write_bytes(content)
    with pytest.raises(TrainingError, match=r"the shards of .* have changed since its last checkpoint\. Restore them"):
        train(tiny, copy, run)
