"""`sader bench` reports what it measures; the benchmark scripts run."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from sader.cli.tools import BenchRow, measure, print_table
from sader.errors import ConfigError


def script(name):
    path = Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there for their annotations
    spec.loader.exec_module(module)
    return module


def test_rates_follow_from_the_time():
    row = BenchRow("m", "cpu", "torch", "1", 500, 3, 0.5, 0.0, 1.0)
    assert row.tiles_per_second == 2
    assert row.megapixels_per_second == 0.5


def test_the_table_has_a_row_per_backend_and_step_count(capsys):
    rows = measure(steps=["1", "2"], size=64, runs=1, backends=["torch", "accelerated"])
    assert [(row.backend, row.steps) for row in rows] == [
        ("torch", "1"), ("torch", "2"), ("accelerated", "1"), ("accelerated", "2"),
    ]  # fmt: skip
    assert all(row.seconds > 0 and row.memory_mb > 50 for row in rows)
    print_table(rows)
    assert "tiles / s" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="did you mean onnx"):
        measure(backends=["onxx"])


def test_paper_tile_runs_in_seconds(tmp_path):
    script("paper_tile").main(["--tiny", "--cpu", "--out", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["way"] for row in rows[:2]] == ["naive", "dates seen once"]
    assert rows[1]["rmse"] == 0.0  # the same bits
    assert all(row["milliseconds"] > 0 and row["rmse"] < 5e-3 for row in rows)


def test_scaling_finds_exponents():
    scaling = script("scaling")
    assert scaling.exponent([1, 2, 4], [3.0, 6.0, 12.0]) == pytest.approx(1.0)
    assert scaling.exponent([10, 20], [5.0, 20.0]) == pytest.approx(2.0)
