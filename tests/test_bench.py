"""`sader bench` reports what it measures; the benchmark scripts run."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from sader.bands import BANDS_RGBN
from sader.cli.tools import BenchRow, measure, print_table
from sader.data.shards import SeriesRecord, write_shard
from sader.errors import ConfigError
from sader.evaluation.methods import store_predictions
from sader.training.config import resolve


def script(name):
    path = Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there for their annotations
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("folder", ["benchmarks", "tools", "examples"])
def test_scripts_import_names_that_exist(folder):
    for path in (Path(__file__).parents[1] / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sader":
                module = importlib.import_module(node.module)
                for name in node.names:
                    exists = hasattr(module, name.name) or importlib.util.find_spec(f"{node.module}.{name.name}")
                    assert exists, f"{path.name} imports {name.name} from {node.module}"


@pytest.mark.parametrize(
    ("low", "high", "ticks"), [(33.1, 37.9, [33, 34, 35, 36, 37, 38]), (0, 0.39, [0, 0.1, 0.2, 0.3, 0.4])]
)
def test_ticks_are_round_and_enclose_the_range(low, high, ticks):
    assert script("steps_quality").round_ticks(low, high) == ticks


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


def test_every_system_has_settings_for_the_same_samples():
    systems = script("systems")
    for name in systems.names():
        config = resolve(systems.base_of(name), systems.run_settings(name, 1600))
        assert config.model.network.bands == BANDS_RGBN, name
        assert config.train.dates == 3, name
        assert config.train.steps * config.train.batch_size == 1600, name
        assert config.data.maker.fill, name
    assert resolve("pix2pix", systems.run_settings("pix2pix", 1600)).train.schedule == "linear"  # its own
    assert not resolve(systems.PAPER, systems.run_settings("small-no-tfblock", 16)).model.network.use_fusion
    with pytest.raises(ConfigError, match="did you mean emrdm"):
        systems.base_of("emrd")


@pytest.mark.slow
def test_the_page_of_results_is_made_from_predictions(tmp_path):
    results, out = script("results"), tmp_path / "out"
    rng = np.random.default_rng(0)
    records = []
    for place in ("a", "b"):
        ground = rng.integers(900, 1600, (1, 4, 48, 48)) + rng.integers(0, 60, (4, 4, 48, 48))
        labels = np.zeros((4, 48, 48), np.uint8)
        labels[1:, 8:24] = 1
        ground[1:, :, 8:24] = 8000
        records.append(SeriesRecord(ground.astype("u2"), place, "triclear", BANDS_RGBN, labels, extra={"target": 0}))
    write_shard(tmp_path / "triclear" / "test" / "paper-128" / "t-000.shard", records)
    items = results.SETS["paper-128"].items(tmp_path / "triclear", None)
    errors = {"sader-paper@4+1": 0.01, "sader-paper@4+0": 0.02, "sader-paper@8+0": 0.02, "emrdm": 0.03}
    for name, error in (errors | {"samples_0000016@4+1,zero": 0.05}).items():
        file = tmp_path / "work" / "predictions" / "paper-128" / f"{name}.npz"
        store_predictions(file, {item.name: item.clear + np.float32(error) for item in items})
    one = {items[0].name: items[0].clear}  # a guide that was tried on some items only
    store_predictions(file.with_name("sader-paper@4+1,mean.npz"), one)
    (out / "docs").mkdir(parents=True)
    (out / "docs" / "results.md").write_text("before\n<!-- paper -->\nold\n<!-- end -->\nafter\n")
    (out / "benchmarks" / "results").mkdir(parents=True)
    (out / "benchmarks" / "results" / "README.md").write_text("<!-- guides -->\n<!-- end -->\n")
    arguments = ["--data", str(tmp_path / "triclear"), "--work", str(tmp_path / "work"), "--out", str(out)]
    results.main(["page", *arguments])
    text = (out / "docs" / "results.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "old" not in text
    assert "| SADER 4+1 | **40.00** |" in text
    assert "| EMRDM | 30.4" in text
    assert "SADER 4+1, guide mean" not in text
    assert "| SADER 4+1, state after 16 samples, start 0, as printed | 26.0" in text
    assert "SADER 8+0" not in text
    assert "1 items in 1 places" in (out / "benchmarks" / "results" / "README.md").read_text()
    assert (out / "docs" / "images" / "results-quality.jpg").is_file()
    assert (out / "benchmarks" / "results" / "resampling.jpg").is_file()
    assert (out / "benchmarks" / "results" / "systems.jpg").is_file()
    (out / "docs" / "images" / "results-quality.jpg").unlink()
    stored_predictions = tmp_path / "work" / "predictions" / "paper-128"
    (stored_predictions / "emrdm.npz").unlink()
    better = {item.name: item.clear + np.float32(0.005) for item in items}
    store_predictions(stored_predictions / "sader-paper@4+1.npz", better)
    results.main(["page", *arguments])  # one model is scored again, the rows of another one are kept
    text = (out / "docs" / "results.md").read_text()
    assert "| SADER 4+1 | **46.02** |" in text
    assert "| EMRDM | 30.4" in text
    results.main(["page", "--out", str(out)])  # nothing is scored
    assert (out / "docs" / "results.md").read_text() == text
    assert (out / "docs" / "images" / "results-quality.jpg").is_file()
    assert len((out / "benchmarks" / "results" / "paper-128" / "items.csv").read_text().splitlines()) == 2 * 12 + 1
