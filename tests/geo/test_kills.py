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


def run_kills(tmp_path, model, inputs, every):
    """Return the kills and the file operations of a run of `kills.py`."""
    command = [sys.executable, str(SCRIPT), str(model), str(tmp_path / "out"), *map(str, inputs), "--every", str(every)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    kills, operations = (int(word) for word in done.stdout.replace(",", "").split()[0:3:2])
    assert kills >= operations // every - 1
    return operations


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("every", [19, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_each_file_operation(tmp_path, write_date, land, tiny_file, every):
    paths = []
    for number in range(2):
        counts = land(number, size=(50, 40))
        counts[:, :20, :20] = np.where(number == 0, 9000, counts[:, :20, :20])
        paths.append(write_date(tmp_path / "in" / f"S2_2022-0{number + 3}-10.tif", counts))
    assert run_kills(tmp_path, tiny_file, paths, every) > 40


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every", [41, pytest.param(3, marks=pytest.mark.slow)])
def test_killed_at_each_file_operation_of_a_store(tmp_path, land, tiny_file, every):
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("zarr")
    numbers = np.stack([land(number, size=(50, 40)) for number in range(2)])
    numbers[0, :, :20, :20] = 9000
    attributes = {"scale_factor": 1e-4, "add_offset": 0.0, "_FillValue": np.uint16(0)}
    coords = {"band": ["B02", "B03", "B04", "B08"]}
    cube = xarray.DataArray(numbers, dims=("time", "band", "y", "x"), coords=coords, attrs=attributes)
    cube.to_dataset(name="reflectance").to_zarr(tmp_path / "in.zarr", consolidated=False)
    assert run_kills(tmp_path, tiny_file, [tmp_path / "in.zarr"], every) > 60
