"""The example scripts and the full demo, run in their own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(script, tmp_path):
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.slow
def test_full_demo_takes_less_than_a_minute_of_processor_time(tmp_path):
    # Processor time, because the wall time depends on what else the machine does.
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", "sader", "demo"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    after = os.times()
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "clear.tif").exists()
    assert (tmp_path / "before_after.png").exists()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert used < 60
