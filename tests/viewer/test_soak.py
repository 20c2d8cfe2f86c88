"""The soak benchmark runs, and a server does not grow over its jobs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
def test_memory_and_files_stay_flat(tmp_path):
    pytest.importorskip("rasterio")
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    soak = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(soak)
    found = soak.soak(tmp_path, 20, every=2)
    assert found["rows"][-1]["jobs"] == 20
    assert {"server", "reader", "finder", "worker"} <= set(found["rows"][-1])
    assert found["growth"]["mib"] < 100, "20 jobs fill the cache of open files, which is bounded"
    assert found["rows"][-1]["descriptors"] < 400
    assert found["growth"]["files"] == 0, "jobs and scenes are deleted with their files"
