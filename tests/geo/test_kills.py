"""`sader remove`, killed at each of its file operations: the same command completes it, with the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rasterio")
SCRIPT = Path(__file__).with_name("kills.py")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("every", [19, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_each_file_operation(tmp_path, write_date, land, tiny_file, every):
    paths = []
    for number in range(2):
        counts = land(number, size=(50, 40))
        counts[:, :20, :20] = np.where(number == 0, 9000, counts[:, :20, :20])
        paths.append(write_date(tmp_path / "in" / f"S2_2022-0{number + 3}-10.tif", counts))
    command = [sys.executable, str(SCRIPT), str(tiny_file), str(tmp_path / "out"), *map(str, paths)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--every", str(every)], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    kills, operations = (int(word) for word in done.stdout.replace(",", "").split()[0:3:2])
    assert operations > 40
    assert kills >= operations // every - 1
