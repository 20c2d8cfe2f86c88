"""Paired tests against values computed by hand, costs and figures, and the command from shards to files."""

from __future__ import annotations

import csv
import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from sader.checkpoint import save_checkpoint
from sader.cli.main import app, main
from sader.data.items import Item, clean_this_date, paper_task
from sader.data.shards import SeriesRecord, write_shard
from sader.errors import BandError, ConfigError, DataError
from sader.evaluation.costs import describe, model_cost, peak_memory
from sader.evaluation.data import open_data
from sader.evaluation.evaluate import cost_of, named_methods, parse_model, run_evaluation, score_methods, shared_bands
from sader.evaluation.figures import Point, choose_examples, draw_pareto, label_boxes, pareto_front
from sader.evaluation.methods import RemoverMethod, StoredMethod, store_predictions
from sader.evaluation.request import DataRequest, EvaluationRequest
from sader.evaluation.scoring import Row, load, merge, regions, save, score, score_items
from sader.evaluation.statistics import compare_rows, holm, permutation, wilcoxon
from sader.inference.remover import RemoverOptions
from sader.method.guides import save_guide
from sader.model.masked_autoencoder import MaskedAutoencoder, MaskedAutoencoderConfig
from sader.models import get_preset

RGBN = ("B02", "B03", "B04", "B08")


def place(name: str, seed: int) -> SeriesRecord:
    rng = np.random.default_rng(seed)
    ground = rng.integers(900, 1600, (1, 4, 48, 48))
    dn = (ground + rng.integers(0, 60, (4, 4, 48, 48))).astype("u2")
    labels = np.zeros((4, 48, 48), np.uint8)
    for k in range(1, 4):
        labels[k, 8 * k : 8 * k + 18, 4:44] = 1
        dn[k][:, labels[k] > 0] = 8000
    return SeriesRecord(dn, name, "cloudsen12", RGBN, labels, group=f"val/{name}")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    write_shard(folder / "val-000.shard", [place("place_16", 1), place("place_17", 2)])
    return folder


@pytest.fixture(scope="module")
def items() -> list[Item]:
    return list(clean_this_date([place("place_16", 1), place("place_17", 2)], limit=2))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained, tiny pix2pix in a run folder."""
    from sader.models import build_model
    from sader.training.config import resolve

    tiny = ["width=4", "blocks=1", "judge_widths=[4,4]"]
    config = resolve("pix2pix", [f"model.network.{text}" for text in tiny]).model
    path = tmp_path_factory.mktemp("runs") / "my-run" / "model.safetensors"
    path.parent.mkdir()
    save_checkpoint(path, build_model(config), config)
    return path


# ------------------------------------------------------------------------------------------------ tests


def test_wilcoxon_equals_counting_by_hand_and_scipy():
    # Ranks 1 2 3, all positive: 2 of the 8 sign patterns are as extreme.
    assert wilcoxon([0.1, 0.2, 0.3]) == pytest.approx(2 / 8)
    assert wilcoxon([0.0, 0.0]) == 1
    assert np.isnan(wilcoxon([]))
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    for count, kind in ((9, "exact"), (40, "approx")):
        values = rng.normal(0.3, 1, count)
        theirs = stats.wilcoxon(values, method=kind, correction=True).pvalue
        assert wilcoxon(values) == pytest.approx(theirs, rel=1e-6)
    tied = np.round(rng.normal(0.4, 1, 30), 1)
    tied = tied[tied != 0]
    assert wilcoxon(tied) == pytest.approx(stats.wilcoxon(tied, method="approx", correction=True).pvalue, rel=1e-6)


def test_permutation_is_exact_for_few_values_and_seeded_for_many():
    values = [1.0, 2.0, -0.5, 3.0]
    sums = [abs(sum(s * v for s, v in zip(signs, values, strict=True))) for signs in product((-1, 1), repeat=4)]
    assert permutation(values) == pytest.approx(np.mean([s >= 5.5 for s in sums]))
    many = np.random.default_rng(1).normal(0, 1, 50)
    assert permutation(many, seed=3) == permutation(many, seed=3)
    assert permutation(many + 2) < 0.001 < 0.05 < permutation(many - many.mean())


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    corrected = holm([0.5, float("nan"), 0.9])
    assert corrected[0] == 1.0
    assert np.isnan(corrected[1])


def rows_of(method: str, values: list[float], metric: str = "psnr") -> list[Row]:
    return [Row(f"i{k}", f"g{k % 3}", "clean", method, 3, 0.5, 99, {metric: v}) for k, v in enumerate(values)]


def test_verdicts_follow_the_direction_of_the_metric():
    base = list(np.random.default_rng(2).normal(30, 3, 20))
    better = [value + 0.5 + 0.01 * k for k, value in enumerate(base)]
    found = compare_rows([*rows_of("a", base), *rows_of("b", better)], against="a")
    assert len(found) == 1
    assert found[0].verdict == "better"
    assert found[0].wins == 1
    assert found[0].difference.low > 0.4
    assert found[0].p_places == pytest.approx(2 / 8)  # three places can show no more
    lower = compare_rows([*rows_of("a", base, "mae"), *rows_of("b", better, "mae")], against="a", metrics=["mae"])
    assert lower[0].verdict == "worse"
    assert lower[0].wins == 0
    same = compare_rows([*rows_of("a", base), *rows_of("b", base)], against="a")
    assert same[0].verdict == "no difference shown"
    with pytest.raises(ConfigError, match="nothing called 'c'"):
        compare_rows(rows_of("a", base), against="c")


# ------------------------------------------------------------------------------------------------ regions


def test_regions_split_what_is_scored(items: list[Item]):
    item = items[0]
    parts = regions(item)
    assert not (parts["cloudy"] & parts["clear"]).any()
    assert (parts["cloudy"] == item.scored).all()  # in this task only hidden pixels are asked for
    assert (parts["clear"] == item.kept).all()
    other = next(iter(paper_task([place("place_16", 1)])))
    parts = regions(other)
    assert ((parts["cloudy"] | parts["clear"]) == other.scored).all()
    assert parts["cloudy"].any()
    assert parts["clear"].any()


def test_region_scores_are_those_of_the_region_alone():
    item = next(iter(paper_task([place("place_16", 1)])))
    part = regions(item)
    image = np.where(part["cloudy"], item.clear + np.float32(0.1), item.clear + np.float32(0.01))
    row = score_items([item], {"m": lambda _: image}, ("psnr", "mae"))[0]
    assert row.scores["psnr_cloudy"] == pytest.approx(20, abs=1e-3)
    assert row.scores["psnr_clear"] == pytest.approx(40, abs=1e-2)
    assert row.scores["mae_clear"] == pytest.approx(0.01, rel=1e-3)
    assert 20 < row.scores["psnr"] < 40
    assert row.scores["seconds_per_megapixel"] == pytest.approx(row.scores["seconds"] * 1e6 / item.scored.size)
    assert score(item, image, ("psnr",))["psnr"] == row.scores["psnr"]


# ------------------------------------------------------------------------------------------------ cost and figures


def test_costs_are_those_of_sader_info_and_grow_with_steps(tmp_path: Path):
    from sader.evaluation.reproduce.setting import tiny_overrides
    from sader.models import build_model
    from sader.training.config import resolve

    config = resolve("sen2_mtc_new", tiny_overrides("sen2_mtc_new")).model
    save_checkpoint(tmp_path / "m.safetensors", build_model(config), config)
    own, told = model_cost(config), describe(str(tmp_path / "m.safetensors"))
    assert (own.parameters, own.gmacs_sample) == (told.cost.parameters, told.as_dict()["gmacs_sample"])
    more = model_cost(config, steps="5+1")
    assert (own.evaluations, more.evaluations) == (8, 10)  # Algorithm 1 resamples every step
    assert model_cost(config, options=RemoverOptions(resampling="default")).evaluations == 7
    assert more.gmacs_sample > own.gmacs_sample
    assert more.gmacs_forward == own.gmacs_forward


def test_costs_count_the_guide_that_is_used(tmp_path: Path):
    config = get_preset("sen2_mtc_new")
    large, conv = model_cost(config), model_cost(config, options=RemoverOptions(guide="conv"))
    assert large.evaluations == conv.evaluations == 8
    assert 0 < large.gmacs_guide != conv.gmacs_guide > 0
    assert large.gmacs_sample - conv.gmacs_sample == pytest.approx(4 * (large.gmacs_guide - conv.gmacs_guide))
    assert model_cost(config, steps="4").gmacs_guide is None
    file = tmp_path / "guide.safetensors"
    for form, equal in ((MaskedAutoencoderConfig.paper(3), True), (MaskedAutoencoderConfig.small(3), False)):
        save_guide(file.with_stem(str(equal)), MaskedAutoencoder(form))
        options = RemoverOptions(guide_weights=str(file.with_stem(str(equal))))
        cost = cost_of(RemoverMethod(SimpleNamespace(config=config, options=options)))
        assert (cost.gmacs_guide == large.gmacs_guide) is equal


def test_peak_memory_sees_an_array():
    grown = peak_memory(lambda: np.ones(40 * 2**17).sum())  # 40 MiB
    assert grown is None or 30 < grown < 120


def test_pareto_front_leaves_out_what_is_beaten():
    points = [Point("a", 30, 1, 10), Point("b", 29, 2, 5), Point("c", 31, 3, 50), Point("d", 28, 0, 0)]
    assert [p.name for p in pareto_front(points)] == ["d", "a", "c"]
    assert [p.name for p in pareto_front(points, cost="gmacs")] == ["d", "b", "a", "c"]
    figure = np.asarray(draw_pareto([*points, Point("e", 30.5, 400, 9000, published=True)], title="t"))
    assert len(np.unique(figure.reshape(-1, 3), axis=0)) > 5
    with pytest.raises(DataError, match="no method has a finite quality"):
        draw_pareto([Point("x", float("nan"), 1, 1)], title="t")


def test_labels_of_marks_at_one_place_do_not_overlap():
    marks = [(180.0, 50.0 + k, 6.0) for k in range(5)]
    taken = [(x - r, y - r, x + r, y + r) for x, y, r in marks]
    boxes = label_boxes(marks, [60.0] * 5, (0.0, 0.0, 200.0, 200.0), taken)
    assert all(left >= 0 and top >= 0 and right <= 200 and below <= 200 for left, top, right, below in boxes)
    for number, (left, top, right, below) in enumerate(boxes):
        for a, b, c, d in [*boxes[:number], *taken]:
            assert right <= a or c <= left or below <= b or d <= top


def test_examples_are_spread_and_the_same_for_every_method(items: list[Item]):
    assert choose_examples([items[0]] * 10, 2) == [2, 7]
    assert choose_examples(items[:1], 3) == [0]
    assert choose_examples(items, 0) == []


def test_results_of_other_processes_merge_only_on_the_same_items(items: list[Item], tmp_path: Path):
    one = score_methods(items, {"truth": lambda i: i.clear}, ("psnr",), examples=1, costs=True)
    two = score_methods(items, {"off": lambda i: i.clear + np.float32(0.01)}, ("psnr",), examples=1)
    save(one, tmp_path / "one")
    back = load(tmp_path / "one")
    assert back is not None
    assert [row.scores["psnr"] for row in back.rows] == [row.scores["psnr"] for row in one.rows]
    assert back.costs == one.costs
    np.testing.assert_array_equal(back.predictions["truth"][0], one.predictions["truth"][0])
    merged = merge([back, two])
    assert merged.methods == ["truth", "off"]
    fewer = score_methods(items[:1], {"less": lambda i: i.clear}, ("psnr",), examples=1)
    with pytest.raises(DataError, match="less was scored on 1 items"):
        merge([one, fewer])
    assert load(tmp_path / "nothing") is None
    (tmp_path / "one" / "scores.json").write_text('{"rows": [', encoding="utf-8")
    assert load(tmp_path / "one") is None


# ------------------------------------------------------------------------------------------------ the command


def test_compare_writes_tables_figures_and_every_item(shards: Path, weights: Path, tmp_path: Path):
    arguments = ["compare", f"mine={weights}", "mosaic", "--data", str(shards), "--limit", "1", "--no-lpips"]
    result = CliRunner().invoke(app, [*arguments, "--pictures", "1", "--examples", "1", "-o", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "paired by item" in result.output
    for task in ("clean", "paper"):
        folder = tmp_path / "out" / task
        names = {path.name for path in folder.iterdir()}
        assert names == {"table.md", "summary.json", "items.csv", "pareto.png", "qualitative.png", "pictures"}
        content = json.loads((folder / "summary.json").read_text())
        assert content["against"] == "mine"
        assert content["costs"]["mine"]["gmacs_sample"] > 0
        assert content["costs"]["mine"]["seconds_per_megapixel"] > 0
        assert {each["method"] for each in content["comparisons"]} >= {"mosaic", "ridge_blend"}
        with (folder / "items.csv").open() as file:
            rows = list(csv.DictReader(file))
        mine = [row for row in rows if row["method"] == "mine"]
        assert len(mine) == content["items"] == 2
        assert "psnr_cloudy" in mine[0]
        mean = np.mean([float(row["psnr"]) for row in mine])
        told = next(m for m in content["methods"] if m["method"] == "mine")
        assert told["overall"]["psnr"]["mean"] == pytest.approx(mean, rel=1e-4)
    assert (tmp_path / "out" / "clean" / "pictures" / "mine-best1.png").is_file()


def test_data_for_one_task_only_is_compared_on_that(shards: Path, tmp_path: Path):
    rng = np.random.default_rng(5)
    dn = rng.integers(900, 1600, (2, 4, 48, 48)).astype("u2")
    labels = np.zeros((2, 48, 48), np.uint8)
    labels[1] = 255  # a pair: the other date's clouds are not known, so it cannot be a target
    pair = SeriesRecord(dn, "ROIs1158_39_p1", "pairs", RGBN, labels)
    write_shard(tmp_path / "pairs.shard", [pair])
    data = DataRequest((tmp_path / "pairs.shard",), clouds=(shards,), limit=1)
    request = EvaluationRequest(("mosaic",), data, ("clean", "paper"), compare=True, examples=0, lpips=False)
    with pytest.warns(UserWarning, match="no item for task paper"):
        found = run_evaluation(request)
    assert [each.task for each in found] == ["clean"]


def test_models_are_named_by_what_they_are(weights: Path, tmp_path: Path):
    assert parse_model(str(weights)) == ("my-run", str(weights), None)
    assert parse_model(str(weights.parent)) == ("my-run", str(weights), None)
    assert parse_model(f"a={weights}@4+1") == ("a", str(weights), "4+1")
    assert parse_model("ridge_blend") == ("ridge_blend", "ridge_blend", None)
    with pytest.raises(ConfigError, match=r"holds no model\.safetensors"):
        parse_model(str(tmp_path))
    request = EvaluationRequest((str(weights), str(weights.parent)), DataRequest(()))
    with pytest.raises(ConfigError, match="two models are called my-run"):
        named_methods(request)


def test_predictions_of_another_program_are_scored_as_its_own(shards: Path, tmp_path: Path):
    data = DataRequest((shards,), limit=1)
    items = open_data(data).items("paper", None)
    store_predictions(tmp_path / "theirs.npz", {item.name: item.clear + np.float32(0.01) for item in items})
    options = {"data": data, "tasks": ("paper",), "compare": True, "examples": 1, "lpips": False}
    (found,) = run_evaluation(EvaluationRequest((f"theirs={tmp_path / 'theirs.npz'}",), **options))
    scores = [row.scores for row in found.report.results.rows if row.method == "theirs"]
    assert len(scores) == len(items)
    assert [score["psnr"] for score in scores] == pytest.approx([40.0] * len(items), abs=0.05)  # 0.01 everywhere
    gap = np.where(np.arange(48) < 8, np.nan, items[0].clear)
    store_predictions(tmp_path / "gap.npz", {items[0].name: gap})
    np.testing.assert_allclose(StoredMethod(tmp_path / "gap.npz")(items[0]), gap, atol=1e-5)
    store_predictions(tmp_path / "fewer.npz", {"another item": items[0].clear})
    with pytest.raises(DataError, match="holds no prediction of"):
        run_evaluation(EvaluationRequest((str(tmp_path / "fewer.npz"),), **options))
    (tmp_path / "broken.npz").write_bytes(b"PK")
    with pytest.raises(DataError, match="cannot read"):
        run_evaluation(EvaluationRequest((str(tmp_path / "broken.npz"),), **options))


def test_rule_based_masks_are_named_once() -> None:
    request = EvaluationRequest(models=("median", "mosaic (rules)"), data=DataRequest((Path("x"),)), mask="own")
    assert list(named_methods(request)) == ["median (own masks)", "mosaic (rules)"]


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"tasks": ("cleen",)}, ConfigError, "did you mean clean"),
        ({"metric": "psnrr"}, ConfigError, "did you mean psnr"),
        ({"against": "ridge_blent"}, ConfigError, "did you mean ridge_blend"),
        ({"models": ()}, ConfigError, "no model given"),
    ],
)
def test_mistakes_are_named_before_anything_slow(shards: Path, changes: dict, error: type, text: str):
    options = {"models": ("mosaic",), "data": DataRequest((shards,)), "compare": True, **changes}
    with pytest.raises(error, match=text):
        run_evaluation(EvaluationRequest(**options))


def test_models_without_a_shared_band_cannot_be_compared(shards: Path):
    class Fake:
        def __init__(self, *bands: str) -> None:
            self.bands = bands

    methods = {name: RemoverMethod(Fake(name)) for name in ("B02", "B08")}  # type: ignore[arg-type]
    with pytest.raises(BandError, match="share no band"):
        shared_bands(methods)  # type: ignore[arg-type]


def test_a_wrong_folder_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as status:
        main(["compare", "mosaic", "--data", str(tmp_path / "nowhere")])
    assert status.value.code == 2
    assert "does not exist" in capsys.readouterr().err
