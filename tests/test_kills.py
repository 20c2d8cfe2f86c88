"""Commands that are killed at their file operations (benchmarks/kills.py) and run again: nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "kills.py"
slow = pytest.mark.slow


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("job", "every", "least"),
    [
        ("remove", 19, 40),
        pytest.param("remove", 1, 40, marks=slow),
        pytest.param("remove-zarr", 23, 100, marks=slow),
        ("series", 97, 90),
        pytest.param("series", 7, 90, marks=slow),
        ("train", 17, 40),
        pytest.param("train", 1, 40, marks=slow),
    ],
)
def test_killed_at_file_operations(job, every, least):
    pytest.importorskip("rasterio")
    pytest.importorskip("zarr")
    command = [sys.executable, str(SCRIPT), "--job", job, "--every", str(every)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    kills, operations = (int(word) for word in done.stdout.replace(",", "").split()[1:4:2])
    assert operations >= least
    assert kills >= operations // every
