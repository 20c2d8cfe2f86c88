"""Commands that are killed at their file operations (benchmarks/kills.py) and run again: nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "kills.py"
JOBS = ("remove", "remove-zarr", "series", "train")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.slow  # without processes: tests/geo/test_resume.py and tests/training/test_kills.py
@pytest.mark.parametrize(("jobs", "every"), [(("remove", "train"), 101), (JOBS, 5)])
def test_killed_at_file_operations(jobs, every):
    pytest.importorskip("rasterio")
    pytest.importorskip("zarr")
    command = [sys.executable, str(SCRIPT), "--every", str(every), *(f"--job={job}" for job in jobs)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    lines = [line.replace(":", "").replace(",", "").split() for line in done.stdout.splitlines()]
    assert [words[0] for words in lines] == list(jobs)
    for name, kills, _, operations, *_ in lines:
        assert int(operations) >= 40, name
        assert int(kills) >= max(1, int(operations) // every), name
