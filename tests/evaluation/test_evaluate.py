"""Scores equal to values computed by hand, masks given to the right methods, reports that can be read back."""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sader.bands import BANDS_13
from sader.cli.main import app
from sader.data.cloud_rules import estimate_cloud_mask
from sader.data.items import Item, clean_this_date
from sader.data.shards import SeriesRecord, write_shard
from sader.errors import BandError, ConfigError, DataError, ShapeError, ValueRangeError
from sader.evaluation.data import load_records
from sader.evaluation.diagnosis import evaluate_masks
from sader.evaluation.evaluate import run_evaluation, score_methods
from sader.evaluation.methods import (
    S2CLOUDLESS,
    ClassicalMethod,
    RemoverMethod,
    classical_methods,
    flat_colour_of_truth,
    make_method,
)
from sader.evaluation.report import Report, extreme_items, markdown, print_summary, write_panels, write_report
from sader.evaluation.request import DataRequest, EvaluationRequest
from sader.evaluation.scoring import Results, Row, score, score_items
from sader.evaluation.statistics import bootstrap, summarise
from sader.inference.remover import CloudRemover, Removal, RemoverOptions
from sader.method.metrics import PSNR_CEILING
from sader.model.heads import MASK_CLASSES

RGBN = ("B02", "B03", "B04", "B08")
FAST = ("psnr", "psnr_unbiased", "sharpness")


def place(name: str = "place_16", seed: int = 1) -> SeriesRecord:
    rng = np.random.default_rng(seed)
    ground = rng.integers(900, 1600, (1, 4, 64, 64))
    dn = (ground + rng.integers(0, 60, (4, 4, 64, 64))).astype("u2")
    labels = np.zeros((4, 64, 64), np.uint8)
    for k in range(1, 4):
        labels[k, 12 * k : 12 * k + 24, 8:50] = 1
        dn[k][:, labels[k] > 0] = 8000
    return SeriesRecord(dn, name, "cloudsen12", RGBN, labels, group=f"val/{name}")


@pytest.fixture(scope="module")
def items() -> list[Item]:
    return list(clean_this_date([place(), place("place_17", 2)], limit=3))


@pytest.fixture(scope="module")
def remover() -> CloudRemover:
    return CloudRemover.from_preset("small")


def truth(item: Item) -> np.ndarray:
    return item.clear


def off_by(amount: float):
    return lambda item: item.clear + np.float32(amount)


def row(method: str, item: str, value: float, group: str = "a") -> Row:
    return Row(item, group, "clean", method, 3, 0.5, 600, {"psnr": value, "lpips": 1 / value})


def test_the_truth_scores_the_ceiling_and_keeps_the_clear_pixels(items: list[Item]) -> None:
    rows = score_items(items[:1], {"truth": truth})
    assert rows[0].scores["psnr"] == PSNR_CEILING
    assert rows[0].scores["ssim"] == pytest.approx(1)
    assert rows[0].scores["sharpness"] == pytest.approx(1)
    assert rows[0].scores["unchanged"] == 1
    assert rows[0].scores["clear_mae"] == 0


def test_scores_equal_values_computed_by_hand(items: list[Item]) -> None:
    item = items[0]
    values = score(item, item.clear + np.float32(0.01), ("psnr", "psnr_unbiased", "mae", "rmse"))
    assert values["psnr"] == pytest.approx(40, abs=1e-3)
    assert values["psnr_unbiased"] == pytest.approx(PSNR_CEILING, abs=15)
    assert values["mae"] == pytest.approx(0.01, rel=1e-4)
    rows = score_items([item], {"off": off_by(0.01)}, FAST)
    assert rows[0].scores["unchanged"] == 0
    assert rows[0].scores["clear_mae"] == pytest.approx(0.01, rel=1e-3)
    flat = score(item, flat_colour_of_truth(item), ("psnr",))["psnr"]
    spread = item.clear[:, item.scored]
    variance = np.square(spread - spread.mean(1, keepdims=True)).mean()
    assert flat == pytest.approx(-10 * math.log10(variance), abs=1e-3)


def test_pixels_outside_the_scored_area_have_no_influence(items: list[Item]) -> None:
    item = items[0]
    image = np.where(item.scored, item.clear * 0.9, np.nan)
    other = np.where(item.scored, item.clear * 0.9, 1)
    assert score(item, image) == score(item, other)


def test_a_method_that_returns_wrong_images_is_named(items: list[Item]) -> None:
    with pytest.raises(ShapeError, match="bad returned"):
        score_items(items[:1], {"bad": lambda item: item.clear[:, 1:]}, FAST)
    with pytest.raises(ValueRangeError, match="bad returned NaN"):
        score_items(items[:1], {"bad": lambda item: item.clear * np.nan}, FAST)
    with pytest.raises(ConfigError, match="did you mean psnr"):
        score_items(items, {"truth": truth}, ("psnrr",))


def test_classical_methods_get_true_or_estimated_masks(items: list[Item], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(cloudy: np.ndarray, **facts: object) -> np.ndarray:
        seen.append(facts["cloud_mask"])
        return cloudy[0]

    monkeypatch.setattr("sader.evaluation.methods.get_classical", lambda name: spy)
    item = items[0]
    rules = estimate_cloud_mask(item.cloudy, item.bands, valid=item.valid)
    for mask in ("true", "own", "reference"):
        ClassicalMethod("mosaic", mask)(item)
    np.testing.assert_array_equal(seen[0], item.cloud_mask)
    np.testing.assert_array_equal(seen[1], rules)
    mixed = rules.copy()
    mixed[item.reference] = item.cloud_mask[item.reference]
    np.testing.assert_array_equal(seen[2], mixed)
    with pytest.raises(ConfigError, match="unknown mask"):
        ClassicalMethod("mosaic", "perfect")(item)


class SpyRemover:
    """A fake `CloudRemover` that records its arguments and returns the first date."""

    bands = RGBN

    def __init__(self) -> None:
        self.calls: list[dict] = []

    def predict(self, cloudy: np.ndarray, **facts: object) -> Removal:
        self.calls.append(facts)
        kept = np.zeros(cloudy.shape[2:], bool)
        return Removal(cloudy[0], None, kept, np.full(cloudy.shape[1:], 0.1, np.float32))


def test_removers_get_masks_reference_and_steps(items: list[Item]) -> None:
    spy = SpyRemover()
    item = items[0]
    assert item.reference is not None
    for mask in ("true", "reference", "own"):
        RemoverMethod(spy, mask=mask, steps=1, samples=2)(item)  # type: ignore[arg-type]
    full, one, none = (call["cloud_mask"] for call in spy.calls)
    np.testing.assert_array_equal(np.stack(full), item.cloud_mask)
    assert none is None
    assert [given is None for given in one] == [date != item.reference for date in range(len(item.cloudy))]
    assert all(call["reference"] == item.reference and call["steps"] == 1 for call in spy.calls)
    calls = len(spy.calls)
    facts = score_methods([item], {"spy": RemoverMethod(spy, samples=2)}, ("psnr",)).facts  # type: ignore[arg-type]
    assert len(spy.calls) == calls + 1  # the calibration needs no prediction of its own
    found = facts["calibration of spy"]
    error = np.abs(item.cloudy[0] - item.clear)[:, item.scored].mean(0)
    assert found["inside_one"] == pytest.approx((error <= 0.1).mean())
    assert found["ratio"] == pytest.approx(np.sqrt(np.square(error).mean()) / 0.1, rel=1e-5)


def test_the_report_compares_stated_and_true_errors(items: list[Item], capsys: pytest.CaptureFixture[str]) -> None:
    class Honest(SpyRemover):
        def predict(self, cloudy: np.ndarray, **facts: object) -> Removal:
            return replace(super().predict(cloudy), spread=np.abs(cloudy[0] - truth[cloudy.tobytes()]))

    truth = {item.cloudy.tobytes(): item.clear for item in items}
    methods = {"honest": RemoverMethod(Honest()), "spy": RemoverMethod(SpyRemover())}  # type: ignore[arg-type]
    results = score_methods(items, methods, ("psnr",))
    report = Report("", results, summarise(results.rows))
    print_summary(report)
    for text in (markdown(report), capsys.readouterr().out):
        lines = [line for line in text.splitlines() if line.startswith("| honest")]
        assert any(line.split("|")[2].strip() == "1.00" and line.split("|")[5].strip() == "1.00" for line in lines)
        assert "rank correlation over pixels" in text


def test_a_real_remover_beats_the_flat_colour_and_keeps_clear_pixels(items: list[Item], remover: CloudRemover) -> None:
    methods = {"net": RemoverMethod(remover, steps=1), **classical_methods("true", ("flat_colour", "ridge_blend"))}
    rows = score_items(items[:1], methods, FAST)
    values = {each.method: each.scores for each in rows}
    assert values["net"]["psnr"] > values["flat_colour"]["psnr"]
    assert values["net"]["unchanged"] == 1


def test_bootstrap_is_seeded_and_covers_the_mean() -> None:
    values = np.random.default_rng(0).normal(30, 2, 50)
    a, b, c = bootstrap(values, seed=1), bootstrap(values, seed=1), bootstrap(values, seed=2)
    assert a == b
    assert a != c
    assert a.mean == pytest.approx(values.mean())
    assert a.low < a.mean < a.high
    assert (a.high - a.low) / 2 == pytest.approx(1.96 * values.std() / math.sqrt(50), rel=0.15)
    assert bootstrap([5.0, math.nan]).mean == 5
    assert bootstrap([math.nan]).count == 0


def test_the_summary_averages_places_and_pairs_items() -> None:
    rows = [
        row("ridge_blend", "1", 30), row("ridge_blend", "2", 32), row("ridge_blend", "3", 40, "b"),
        row("median", "1", 20), row("median", "2", 22), row("median", "3", 24, "b"),
        row("net", "1", 31), row("net", "2", 33), row("net", "3", 41, "b"),
    ]  # fmt: skip
    found = summarise(rows)
    assert found.best_classical == "ridge_blend"
    assert (found.items, found.groups) == (3, 2)
    net = next(each for each in found.methods if each.method == "net")
    assert net.overall["psnr"].mean == pytest.approx(35)
    assert net.groups["a"]["psnr"] == pytest.approx(32)
    assert net.over_groups["psnr"] == pytest.approx((32 + 41) / 2)
    assert net.against["psnr"].mean == pytest.approx(1)
    assert (net.against["psnr"].low, net.against["psnr"].high) == pytest.approx((1, 1))
    text = markdown(Report("clean", Results(rows), found))
    assert "| net | 35.00 [31.00, 41.00]" in text
    assert "+1.00 [+1.00, +1.00]" in text
    assert "| net | 32.00 | 41.00 | 36.50 |" in text


def test_one_item_has_no_interval() -> None:
    rows = [row("ridge_blend", "1", 30), row("net", "1", 31)]
    text = markdown(Report("", Results(rows), summarise(rows)))
    assert "1 item in 1 place: too few for intervals" in text
    assert "| net | 31.00 |" in text
    assert "| net | +1.00 |" in text
    assert not re.search(r"\d \[", text)


def test_a_terminal_gets_one_narrow_table(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = [row(name, str(item), value + item) for name, value in (("ridge_blend", 30), ("net", 31)) for item in (1, 2)]
    print_summary(Report("clean", Results(rows), summarise(rows)))
    said = capsys.readouterr().out
    assert "clean: 2 items in 1 place; mean over items" in said
    assert "32.50" in said
    assert "+1.00 [+1.00, +1.00]" in said
    assert max(map(len, said.splitlines())) <= 80


def test_best_and_worst_cases() -> None:
    rows = [row("net", str(k), 30 + k) for k in range(5)]
    assert extreme_items(rows, "net", count=2) == {"best": ["4", "3"], "worst": ["0", "1"]}
    assert extreme_items(rows, "net", metric="lpips", count=1) == {"best": ["4"], "worst": ["0"]}
    assert extreme_items(rows[:1], "net", count=2) == {"best": ["0"], "worst": []}


def test_the_report_can_be_read_back(items: list[Item], tmp_path: Path) -> None:
    methods = classical_methods("true", ("mosaic", "median"))
    rows = score_items(items, methods, FAST)
    results = Results(rows, facts={"task": "clean"})
    table, plain, per_item = write_report(tmp_path, Report("test", results, summarise(rows)))
    assert "| mosaic |" in table.read_text(encoding="utf-8")
    content = json.loads(plain.read_text(encoding="utf-8"))
    assert content["task"] == "clean"
    assert content["best_classical"] == "mosaic"
    with per_item.open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(items) * 2
    assert float(lines[0]["psnr"]) == pytest.approx(rows[0].scores["psnr"], rel=1e-4)
    pictures = write_panels(tmp_path / "p", items, rows, methods, shown="mosaic", baseline="median", count=1)
    assert [path.name for path in pictures] == ["mosaic-best1.png", "mosaic-worst1.png"]


def test_the_masks_are_scored_on_labelled_places(remover: CloudRemover, monkeypatch: pytest.MonkeyPatch) -> None:
    record = place()
    perfect = np.zeros((len(record.labels), len(MASK_CLASSES), *record.labels.shape[1:]), np.float32)
    perfect[:, 1] = record.labels > 0
    monkeypatch.setattr(remover, "classify", lambda *_, **__: perfect)
    one, rules, together, _ = evaluate_masks(remover, [record])
    assert (one.iou, one.recall, one.precision, one.thick) == (1, 1, 1, 1)
    assert (rules.place, rules.method) == (one.place, "rules")
    assert (together.place, together.method) == ("all", "sader-masks")
    half = perfect.copy()
    half[:, :, ::2] = 0
    monkeypatch.setattr(remover, "classify", lambda *_, **__: half)
    one = evaluate_masks(remover, [record])[0]
    assert one.precision == 1
    assert one.recall == one.iou == pytest.approx(0.5)


def test_the_masks_are_estimated_on_odd_sizes(remover: CloudRemover) -> None:
    record = place()
    odd = SeriesRecord(record.dn[..., :61, :53], "odd", "cloudsen12", RGBN, record.labels[:, :61, :53], group="val/odd")
    one, _, together, _ = evaluate_masks(remover, [odd])
    assert 0 <= one.iou <= 1
    assert together.pixels == 4 * 61 * 53
    with pytest.raises(DataError, match="labelled"):
        evaluate_masks(remover, [])


def test_from_shards_to_files(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.shard", [place()], step=1)
    data = DataRequest((tmp_path,), limit=2)
    request = EvaluationRequest(("best_available_pixel",), data, lpips=False, out=tmp_path / "r")
    (result,) = run_evaluation(request)
    assert {path.name for path in result.files} >= {"table.md", "summary.json", "items.csv"}
    assert result.report.summary.items == 2
    assert "best_available_pixel" in {each.method for each in result.report.results.rows}
    data = DataRequest((tmp_path,), dates=2, limit=1)
    for found in run_evaluation(EvaluationRequest((), data, ("paper", "simulated"), lpips=False)):
        assert {each.dates for each in found.report.results.rows} == {2}


def test_masks_other_than_the_true_ones_are_part_of_the_label(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.shard", [place()], step=1)
    data = DataRequest((tmp_path,), limit=1)
    request = EvaluationRequest(("mosaic",), data, mask="own", rules=True, classical=False, lpips=False)
    (result,) = run_evaluation(request)
    assert {"mosaic (own masks)", "mosaic (rules)"} <= set(result.report.results.methods)
    assert not {"mosaic", "flat_colour_of_truth"} & set(result.report.results.methods)


def test_bad_data_is_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        list(load_records([tmp_path / "nowhere"]))
    write_shard(tmp_path / "a.shard", [place()], step=1)
    with pytest.raises(DataError, match="--split all"):
        list(load_records([tmp_path], split="train"))
    with pytest.raises(ConfigError, match="unknown task"):
        run_evaluation(EvaluationRequest((), DataRequest((tmp_path,)), ("clear",)))
    (tmp_path / "a.shard").write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match="no shard"):
        run_evaluation(EvaluationRequest((), DataRequest((tmp_path,))))


def test_the_command_prints_the_table_and_json(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.shard", [place()], step=1)
    arguments = ["evaluate", "mosaic", "--data", str(tmp_path), "--limit", "1", "--no-lpips"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "| mosaic |" in done.stdout
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert json.loads(done.stdout)["items"] == 1


def test_classical_methods_with_masks_of_s2cloudless(items: list[Item], monkeypatch: pytest.MonkeyPatch) -> None:
    method, item = ClassicalMethod("least_cloudy", "own", S2CLOUDLESS), items[0]
    with pytest.raises(BandError, match=r"s2cloudless needs bands that are missing: B01, .*B10.*Use a NAME \(rules\)"):
        method(item)
    images = np.full(
        (3, 13, 64, 64), 0.08, np.float32
    )  # dark ground; a bright, cold cloud with a signal in the cirrus band
    images[0, :, :32], images[1] = 0.7, 0.7
    images[:, BANDS_13.index("B10")] = np.where(images[:, 0] > 0.5, 0.05, 0.001)
    known = np.ones((3, 64, 64), bool)
    scene = replace(
        item, cloudy=images, clear=images[2], bands=BANDS_13, valid=known, cloud_mask=~known, scored=known[0], days=None
    )
    np.testing.assert_array_equal(method(replace(scene, reference=None)), images[2])


def test_models_are_found_by_name() -> None:
    assert make_method("ridge_blend", mask="own") == ClassicalMethod("ridge_blend", "own")
    assert make_method("ridge_blend (rules)", mask="true") == ClassicalMethod("ridge_blend", "own")
    assert make_method("ridge_blend (s2cloudless)") == ClassicalMethod("ridge_blend", "own", S2CLOUDLESS)
    assert make_method("flat_colour_of_truth") is flat_colour_of_truth
    shipped = make_method("sader-s2-rgbn", options=RemoverOptions(guide="mean"))
    assert isinstance(shipped, RemoverMethod)
    assert shipped.remover.options.guide == "mean"
