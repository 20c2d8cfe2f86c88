"""A run that is stopped at any of its file operations: the same command finishes it with the same weights and log.

Stopping raises an exception that no code catches, and every later file operation raises it again, so that nothing is
cleaned up. A real SIGKILL is in `test_run.py`.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from sader.checkpoint import load_checkpoint
from sader.errors import OutputError, TrainingError
from sader.files import locked
from sader.training.record import read_log, state_files
from sader.training.run import LOCK_FILE, MODEL_FILE, run_training


class Stopped(BaseException):
    """The process would be dead from here on."""


@contextmanager
def file_operations(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, stop_at: int | None = None
) -> Iterator[list[str]]:
    """List the changes made to files; from number `stop_at` on they raise `Stopped` instead."""
    done: list[str] = []

    def watched(name: str, call: Callable[..., Any], counts: Callable[..., bool]) -> Callable[..., Any]:
        def watching(*given: Any, **named: Any) -> Any:
            if counts(*given, **named):
                if stop_at is not None and len(done) >= stop_at:
                    raise Stopped
                done.append(name)
            return call(*given, **named)

        return watching

    def inside(path: Any, *_: Any, **__: Any) -> bool:
        return str(folder) in str(path)

    def writes(path: Any, mode: str = "r", *_: Any, **__: Any) -> bool:
        return inside(path) and mode[0] in "wa" and Path(path).name != LOCK_FILE

    with monkeypatch.context() as patch:
        for name in ("replace", "unlink", "mkdir"):
            patch.setattr(os, name, watched(name, getattr(os, name), inside))
        patch.setattr(os, "fsync", watched("fsync", os.fsync, lambda descriptor: True))
        patch.setattr(builtins, "open", watched("open", builtins.open, writes))
        yield done


def outcome(run: Path) -> tuple[dict[str, torch.Tensor], list[tuple[int, str, float]]]:
    log = [row for row in read_log(run / "metrics.csv") if row[1] != "seconds"]
    return load_checkpoint(run / MODEL_FILE).model.state_dict(), log


def train(tiny: list[str], shards: Path, run: Path) -> None:
    overrides = [*tiny, "train.steps=3", "train.checkpoint_every=1", "train.crop=8", "train.half=false"]
    resume = (run / "config.yaml").is_file()
    run_training("small", run, data=[shards], overrides=overrides, resume=resume, progress=False)


@pytest.mark.slow
def test_stopped_at_each_file_operation(
    tiny: list[str], shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # writes in a thread of its own
    with file_operations(monkeypatch, tmp_path) as done:
        train(tiny, shards, tmp_path / "whole")
    weights, log = outcome(tmp_path / "whole")
    assert {"open", "fsync", "replace", "unlink", "mkdir"} <= set(done)
    for number in range(len(done)):
        run = tmp_path / f"stopped-{number}"
        with file_operations(monkeypatch, tmp_path, stop_at=number), pytest.raises(Stopped):
            train(tiny, shards, run)
        train(tiny, shards, run)
        found, lines = outcome(run)
        assert all(torch.equal(found[name], value) for name, value in weights.items()), (number, done[number])
        assert lines == log, (number, done[number])
        left = sorted(path.name for path in run.rglob("*") if path.is_file())
        assert left == [LOCK_FILE, "config.yaml", "metrics.csv", MODEL_FILE, "step-00000002.pt", "step-00000003.pt"]


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
