"""Two processes give the result of one process with the same micro-batches, that is with twice the batch of each.

The loss of a step is the mean over its micro-batches (each normalised by its own pixel counts), and processes share a
step's micro-batches. So `accumulate=2` on one process and on two are the same sum; halving and adding two numbers is
exact in floating point, so not even rounding differs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sader.checkpoint import load_checkpoint
from sader.training.record import read_log


@pytest.mark.slow
def test_two_processes_train_as_one(tiny: list[str], shards: Path, tmp_path: Path) -> None:
    overrides = [text.replace(" ", "") for text in tiny]
    common = ["train.accumulate=2", "train.steps=4", "train.half=false"]
    results = {}
    for devices in (1, 2):
        run = tmp_path / f"run{devices}"
        command = [sys.executable, "-m", "sader", "train", "small", "--data", str(shards), "--run", str(run), "--quiet"]
        changes = [word for text in (*overrides, *common, f"train.devices={devices}") for word in ("--set", text)]
        subprocess.run([*command, *changes], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, timeout=300)
        log = {(step, name): value for step, name, value in read_log(run / "metrics.csv") if name != "seconds"}
        results[devices] = (log, load_checkpoint(run / "model.safetensors").model.state_dict())
    one, two = results[1], results[2]
    assert one[0].keys() == two[0].keys()
    for key, value in one[0].items():
        assert two[0][key] == pytest.approx(value, rel=1e-6), key
    for name, weight in one[1].items():
        assert torch.allclose(weight, two[1][name], rtol=0, atol=1e-7), name


@pytest.mark.slow
def test_an_error_in_the_processes_is_one_error_of_the_command(tiny: list[str], shards: Path, tmp_path: Path) -> None:
    overrides = [text.replace(" ", "") for text in tiny]
    changes = ["train.accumulate=2", "train.devices=2", "train.adam_lr=1e30", "train.warmup=0", "train.clip=0"]
    command = [sys.executable, "-m", "sader", "train", "small", "--data", str(shards), "--run", str(tmp_path / "run")]
    words = [word for text in (*overrides, *changes) for word in ("--set", text)]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done.stderr
    assert re.search(r"TrainingError: \w+ is (nan|inf|-inf) at step \d", done.stderr)
