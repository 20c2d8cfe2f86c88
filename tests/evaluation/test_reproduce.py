"""Every table of the paper end to end on synthetic data, resuming after kill -9, and messages for wrong input."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sader.bands import BANDS_RGBN
from sader.cli.main import main
from sader.data.shards import count_records, fingerprint, read_shards
from sader.errors import BandError, ConfigError, DataError, SaderError
from sader.evaluation.costs import Cost
from sader.evaluation.reproduce import published as paper
from sader.evaluation.reproduce.plans import COMPLEXITY, HERE, LOSS_MASKS, TABLES, get_tables
from sader.evaluation.reproduce.run import (
    MEASURED,
    REMARKS,
    dry_run,
    find_settings,
    list_plans,
    run_reproduce,
    run_row,
    training_speed,
)
from sader.evaluation.reproduce.setting import EUROSAT, digest, write_data
from sader.evaluation.reproduce.tables import improvement, row_folder
from sader.evaluation.reproduce.training import (
    guide_changes,
    guide_shards,
    here_recipe,
    needed_guide,
    run_overrides,
    training_shards,
)
from sader.evaluation.request import ReproduceRequest
from sader.evaluation.scoring import load
from sader.method.losses import CloudAwareLoss
from sader.models import BASELINES, build_baseline, get_system
from sader.training.config import resolve, with_steps
from sader.training.guide import resolve_guide

pytest.importorskip("rasterio")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all tables: later ones find the rows of earlier ones done."""
    return tmp_path_factory.mktemp("reproduce")


def tiny(out: Path, *tables: str, **more: object) -> ReproduceRequest:
    options = {"tiny": True, "lpips": False, "examples": 1, **more}
    return ReproduceRequest(tables=tables, out=out, **options)  # type: ignore[arg-type]


@pytest.mark.slow  # `test_what_is_done_is_not_done_again` trains and scores one row of Table 3
@pytest.mark.parametrize("name", [name for name in TABLES if name not in (COMPLEXITY, LOSS_MASKS, HERE)])
def test_every_table_runs_and_shows_ours_beside_the_published(out: Path, name: str):
    outcome = run_reproduce(tiny(out, name))
    assert outcome.failed == {}
    if name == "table1":
        text = (out / name / paper.SEN2 / "table.md").read_text()
        assert "- DDPM-CR: Method simplified: the diffusion model and the removal head are trained at once" in text
    for dataset, rows in TABLES[name].rows.items():
        folder = out / name / dataset
        text = (folder / "table.md").read_text()
        assert "these scores mean nothing" in text
        assert "2 steps for each system" in text
        assert "not run" not in text.lower()
        content = json.loads((folder / "summary.json").read_text())
        scored = {each["method"]: each["overall"] for each in content["methods"]}
        for row in rows:
            if row.run is None:
                continue
            assert scored[row.title]["psnr"]["count"] > 0
            assert content["rows"][row.name]["trained_steps"] == 2
            for value in TABLES[name].published[dataset].get(row.name, ()):
                assert f"{value:.3f}" in text
        if dataset == paper.SEN2:  # both protocols stand side by side
            assert "PSNR, mtc_stretch" in text
            assert "PSNR, reflectance" in text
            one = next(iter(scored.values()))
            assert one["mtc_psnr"]["mean"] != one["psnr"]["mean"]
        assert ("improvement over the best baseline" in text) == (name in ("table1", "table2"))
        for figure in ("pareto.png", "qualitative.png"):
            assert (folder / figure).stat().st_size > 1000


def test_what_is_done_is_not_done_again(out: Path):
    request = tiny(out, "table3", only=("no-tfblock",))
    assert run_reproduce(request).failed == {}
    for dataset, published in TABLES["table3"].published.items():
        text = (out / "table3" / dataset / "table.md").read_text()
        assert all(f"{value:.3f}" in text for value in published["no-tfblock"])
        assert ("PSNR, mtc_stretch" in text) == (dataset == paper.SEN2)
    files = [*out.glob("runs/*/sader-no-tfblock/model.safetensors"), *out.glob("rows/*/*/no-tfblock/scores.json")]
    assert len(files) == 4
    before = [file.stat().st_mtime_ns for file in files]
    run_reproduce(request)
    assert [file.stat().st_mtime_ns for file in files] == before
    setting = find_settings(request, get_tables(["table3"]))[paper.SEN2]
    row = next(row for row in TABLES["table3"].rows[paper.SEN2] if row.name == "no-tfblock")
    assert run_row(setting, row) is False
    scores = files[2] if "sen2" in str(files[2]) else files[3]
    scores.write_text(scores.read_text()[:100])  # a truncated file is scored again
    assert run_row(setting, row) is True
    assert load(row_folder(setting, row, "paper")) is not None


def test_another_budget_in_the_same_folder_is_refused(out: Path):
    run_reproduce(tiny(out, "table3", only=("no-tfblock",)))
    outcome = run_reproduce(tiny(out, "table3", only=("no-tfblock",), steps=3))
    assert len(outcome.failed) == 2
    assert "trained with another budget" in outcome.failed[f"{paper.SEN2}/no-tfblock"]


def test_another_cloud_cover_changes_every_key(tmp_path: Path):
    """A coverage table that moves the target packs other shards, and neither runs nor scores of the old one stay."""
    folder = write_data(paper.TS, tmp_path / "data")
    names = ("ROIs1868_114_patch_0", "ROIs2017_117_patch_0", "ROIs1868_73_patch_0")
    table = tmp_path / "cover.json"

    def cover(target: int) -> None:
        values = {name: [0.0 if date == target else 0.5 for date in range(30)] for name in names}
        table.write_text(json.dumps({"coverage": values}))

    def packed(request: ReproduceRequest) -> tuple[str, str, dict]:
        setting = find_settings(request, get_tables(["table2"]))[paper.TS]
        record = next(iter(read_shards(training_shards(setting))))
        return fingerprint(training_shards(setting)), digest(setting.scored_key), record.extra

    options = {"tables": ("table2",), "data": (f"{paper.TS}:{folder}",), "out": tmp_path / "out", "partial": True}
    cover(9)
    first = packed(ReproduceRequest(coverage=str(table), sampler="published", **options))
    assert first[2]["sampler"] == "published_random"
    cover(15)
    second = packed(ReproduceRequest(coverage=str(table), sampler="published", **options))
    masks = packed(ReproduceRequest(sampler="published", **options))
    shutil.copytree(folder / "ROIs1868" / "114", folder / "ROIs1868" / "126")
    larger = packed(ReproduceRequest(sampler="published", **options))
    assert len({first[0], second[0], larger[0]}) == 3
    assert len({first[1], second[1], masks[1]}) == 3


def test_baselines_of_table1_have_their_own_inputs_and_epochs(tmp_path: Path):
    request = ReproduceRequest(("table1",), data=(f"{paper.SEN2}:{write_data(paper.SEN2, tmp_path)}",), partial=True)
    setting = find_settings(request, get_tables(["table1"]))[paper.SEN2]
    configs = {row.name: resolve(row.run.base, run_overrides(setting, row.run))
               for row in TABLES["table1"].rows[paper.SEN2] if row.run is not None}  # fmt: skip
    rgb = ("B04", "B03", "B02")
    inputs = {name: (config.model.network.bands, config.model.network.aux_bands) for name, config in configs.items()}
    assert inputs["emrdm"] == inputs["mcgan"] == (rgb, ("B08",))
    assert inputs["diffcr"] == (rgb, ())
    assert inputs["stgan"] == (BANDS_RGBN, ())
    with torch.device("meta"):
        emrdm = build_baseline(configs["emrdm"].model)
    assert sum(p.numel() for p in emrdm.parameters()) == 148_878_322
    texts = {text.split("(")[0].split()[-1]: text for text in dry_run(replace(request, only=("diffcr", "uncrtaints")))}
    assert "samples: 12000\nepochs: 3000.0 of 4 series" in texts["diffcr"]
    assert "samples: 80\nepochs: 20.0 of 4 series" in texts["uncrtaints"]
    assert setting.budget == "each system's own number of epochs"
    here = resolve("diffcr", here_recipe("diffcr")).train
    assert (here.epochs, here.precision) == (None, "auto")


def test_epochs_count_one_draw_of_each_patch(tmp_path: Path):
    folder = write_data(paper.TS, tmp_path / "data")
    options = {"data": (f"{paper.TS}:{folder}",), "out": tmp_path, "partial": True, "only": ("sader",)}
    texts = {draws: dry_run(ReproduceRequest(("table2",), draws=draws, **options))[0] for draws in (1, 3)}
    assert "epochs: 500.0 of 1 series" in texts[1]
    assert "epochs: 500.0 of 1 series" in texts[3]
    setting = find_settings(ReproduceRequest(("table2",), draws=3, **options), get_tables(["table2"]))[paper.TS]
    shards = training_shards(setting)
    assert count_records(shards) == 3
    changes = [f"data.shards={json.dumps(shards)}", "data.draws=3", "train.batch_size=1", "train.accumulate=1"]
    assert with_steps(resolve("sen12mscrts_ea", changes)).train.steps == 500


def test_ablations_change_what_they_say(out: Path):
    setting = find_settings(tiny(out, "table1"), get_tables(["table1"]))[paper.SEN2]
    configs = {}
    for table in ("table3", "table4"):
        for row in TABLES[table].rows[paper.SEN2]:
            assert row.run is not None
            configs[row.name] = resolve(row.run.base, run_overrides(setting, row.run))
    full = configs.pop("sader-5+0")
    assert not configs["no-tfblock"].model.network.use_fusion
    assert not configs["no-hablock"].model.network.use_hybrid
    assert configs["no-cloud-free"].objective.cloud_aware.clear == 0
    assert configs["no-brightness"].objective.cloud_aware.brightness == 0
    assert (full.objective.cloud_aware.cloud, full.objective.cloud_aware.clear) == (3, 1)
    # The row "MSE" is the plain mean squared error, wherever clouds are.
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(2, 3, 8, 8, generator=generator) * 1.6 - 0.8 for _ in range(2))
    cloudy = torch.rand(2, 3, 3, 8, 8, generator=generator) * 2 - 1
    loss = CloudAwareLoss(configs["mse"].objective.cloud_aware)(a, b, cloudy, torch.ones(2)).total
    assert float(loss) == pytest.approx(float((a - b).square().mean()), rel=1e-4)


def test_published_numbers_agree_with_each_other():
    for dataset, main_table, own in ((paper.SEN2, paper.TABLE_1, "4+1"), (paper.TS, paper.TABLE_2, "5+1")):
        chosen = paper.TABLE_5[dataset][own]
        assert chosen == paper.TABLE_6[dataset]["mae-guided"]
        assert (chosen[0], chosen[3], chosen[4]) == main_table["sader"]
        full = paper.TABLE_3[dataset]["sader-5+0"]
        assert full == paper.TABLE_4[dataset]["sader-5+0"] == paper.TABLE_5[dataset]["5+0"]
    for name, column in paper.TABLE_7.items():
        if name != "crtsnet":  # printed with another PSNR than in Table 1
            assert column.psnr == paper.TABLE_1[name][0]
    for table in TABLES.values():
        for dataset, rows in table.rows.items():
            trained = {row.name for row in rows if row.run is not None}
            if table.name not in ("qualitative", "loss-weights", HERE):
                assert trained == set(table.published.get(dataset, {}))
            assert len({row.title for row in rows}) == len(rows)


@pytest.mark.slow
def test_complexity_stands_beside_the_published(tmp_path: Path):
    outcome = run_reproduce(tiny(tmp_path, "table7"))
    content = json.loads((tmp_path / "table7" / "summary.json").read_text())["systems"]
    assert [each["system"] for each in content] == list(paper.TABLE_7)
    for each in content:
        assert each["ours"]["parameters"] / 1e6 == pytest.approx(each["published"]["parameters"], rel=0.04)
    rows = {line.split(" | ")[0].strip("| "): line for line in outcome.texts[0].splitlines() if line.startswith("| ")}
    sader = next(line for name, line in rows.items() if name.startswith("SADER"))
    assert "346.56" in sader
    assert "+4.3%" in sader
    assert sader.rstrip("| ").endswith("20.941")  # within 5 %: no note
    assert "703.2 + 391.4 = 1094.6" in rows["STGAN"]
    assert "not explained" in rows["Pix2Pix"]


# ------------------------------------------------------------------------------------------------ the plan here


@pytest.mark.slow
def test_rows_of_the_plan_here_run_separately_and_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    common = ["reproduce", "here", "--tiny", "--no-lpips", "--examples", "1", "-o", str(tmp_path)]
    for row in ("classical", "small", "paper-guide-mean"):
        with pytest.raises(SystemExit) as status:
            main([*common, "--only", row])
        assert status.value.code == 0
    text = capsys.readouterr().out
    assert "SADER small" in text
    for task in ("clean", "paper"):
        content = json.loads((tmp_path / "here" / "here" / task / "summary.json").read_text())
        methods = {each["method"] for each in content["methods"]}
        assert {"SADER small", "matched_mosaic", "ridge_blend", "flat_colour", "flat_colour_of_truth"} <= methods
        assert "emrdm" in content["not_run"]
        assert content["against"] == "SADER small"
    names = [row.name for row in TABLES[HERE].rows[HERE]]
    assert {"small", "small-no-tfblock", "paper-mse", "paper-4+0", "paper-5+1", "emrdm", "diffcr"} <= set(names)


def test_a_row_that_diverges_is_in_the_table_as_failed(tmp_path: Path):
    broken = {"overrides": ("train.adam_lr=1e30", "train.clip=0"), "steps": 4}
    outcome = run_reproduce(tiny(tmp_path, HERE, only=("classical", "uncrtaints"), **broken))
    assert list(outcome.failed) == [f"{HERE}/uncrtaints"]
    text = (tmp_path / HERE / HERE / "clean" / "table.md").read_text()
    assert "Failed:" in text
    assert "- uncrtaints: " in text
    assert "nan" in text
    assert "ridge_blend" in text
    content = json.loads((tmp_path / HERE / HERE / "clean" / "summary.json").read_text())
    assert list(content["failed"]) == ["uncrtaints"]
    assert "uncrtaints" not in content["not_run"]


def test_a_guide_is_trained_where_none_is_shipped(tmp_path: Path):
    setting = find_settings(tiny(tmp_path, HERE), get_tables([HERE]))[HERE]
    rows = {row.name: row for row in TABLES[HERE].rows[HERE]}
    assert needed_guide(setting, rows["classical"]) is None
    assert needed_guide(setting, rows["small-4+1"]) is None  # shipped
    assert needed_guide(setting, rows["paper-guide-conv"]) == ("conv", ("B02", "B03", "B04", "B08"))


def test_guides_of_the_papers_tables_are_pretrained_as_published(tmp_path: Path):
    setting = find_settings(tiny(tmp_path, "table6"), get_tables(["table6"]))[paper.SEN2]
    assert setting.guide_root is not None
    assert count_records(guide_shards(setting)) == 4  # the images of EuroSAT-MS, not the series
    added = setting.guide_root / "River" / "River_3.tif"
    shutil.copyfile(setting.guide_root / "River" / "River_1.tif", added)
    assert count_records(guide_shards(setting)) == 5  # packed again
    added.unlink()
    data = (f"{paper.SEN2}:{setting.root}", f"{EUROSAT}:{setting.guide_root}")
    changes = ("guide.train.batch_size=4", "train.batch_size=3")
    request = ReproduceRequest(("table6",), data=data, overrides=changes, partial=True, out=tmp_path / "out")
    setting = find_settings(request, get_tables(["table6"]))[paper.SEN2]
    form, own = guide_changes(setting, "mae")
    config = resolve_guide([], tmp_path, kind=form, overrides=own)
    assert (form, config.train.batch_size, config.train.epochs, config.size) == ("mae-paper", 4, 100, 256)
    row = TABLES["table6"].rows[paper.SEN2][-1]
    assert row.run is not None
    assert resolve(row.run.base, run_overrides(setting, row.run)).train.batch_size == 3
    with pytest.raises(DataError, match="expected EuroSAT-MS"):
        find_settings(ReproduceRequest(("table6",), data=(f"{EUROSAT}:{tmp_path}",)), get_tables(["table6"]))


def test_a_dry_run_prints_every_setting_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as status:
        main(["reproduce", "table1", "--dry-run", "--steps", "100", "--only", "pix2pix", "--out", str(out)])
    assert status.value.code == 0
    text = capsys.readouterr().out
    config = resolve("pix2pix", ["train.steps=100"])
    for line in ("pix2pix (pix2pix)", f"samples: {100 * config.train.batch_size}", "epochs: 0.0 of 2380 series"):
        assert line in text
    assert f"train.adam_lr={config.train.adam_lr}" in text
    assert not out.exists()
    data = write_data(paper.SEN2, tmp_path / "Sen2_MTC_New")
    request = ReproduceRequest(("table1",), data=(str(data),), only=("sader",), steps=10, partial=True, out=out)
    text, guide = dry_run(request)
    assert "of 4 series" in text
    assert "guide-mae (mae-paper)" in guide
    assert "data: the targets of the training series" in guide
    assert not out.exists()


def test_the_dry_run_of_sader_prints_the_papers_settings():
    """Samples, epochs and hours, and the training table of docs/method.md line by line."""
    common = ["train.adam_lr=0.0003", "train.schedule_steps=50000", "train.warmup=0.01", "train.clip=0.0",
              "train.ema_decay=0.9999", 'train.precision="fp32"', "train.crop=256", "train.dates=3",
              "objective.cloud_aware.cloud=3.0", "objective.cloud_aware.clear=1.0",
              "objective.cloud_aware.brightness=2.0", "objective.cloud_aware.threshold=0.95",
              'objective.cloud_aware.weight_form="linear"', 'objective.cloud_aware.masks="pixel"',
              'model.sampling.resampling="paper"', 'model.sampling.guide="mae"', "model.sampling.resample_steps=1",
              "data.maker.tasks=[0.0, 1.0, 0.0]"]  # fmt: skip
    first, guide = dry_run(ReproduceRequest(("table1",), only=("sader",)))
    own = ["samples: 476000", "epochs: 200.0 of 2380 series",
           "hours: 3.1 (43 samples/s measured on one H200, 256 px in bf16; float32 is slower)",
           "train.muon_lr=0.001", "train.batch_size=8", "train.accumulate=2", "model.network.kernel=5",
           "model.diffusion.alpha=1.0", "model.diffusion.sigma_max=40.0", "model.diffusion.steps=4",
           "model.network.dropout=0.0", "data.maker.symmetries=true", "rows: sader (4+1 steps, guide mae)"]  # fmt: skip
    assert set([*common, *own]) <= set(first.splitlines())
    assert {"data: eurosat_ms", "samples: 2700000", "size=256", "train.crop=64", "rates=[0.5]"} <= set(
        guide.splitlines()
    )
    second, _ = dry_run(ReproduceRequest(("table2",), only=("sader",)))
    own = ["epochs: 500", "train.muon_lr=0.0001", "train.batch_size=1", "train.accumulate=1", "model.network.kernel=7",
           "model.diffusion.alpha=3.0", "model.diffusion.sigma_max=100.0", "model.diffusion.steps=5",
           "model.network.dropout=0.1", "data.maker.symmetries=false",
           "rows: sader (5+1 steps, guide mae)"]  # fmt: skip
    assert set([*common, *own]) <= set(second.splitlines())
    assert "hours: not known without --data; 7.6 samples/s measured on one H200, 256 px" in second


def test_the_page_has_the_measured_speeds_of_table_1():
    """Samples, batch, rate, seconds and hours of each system in docs/reproduce.md are those of the dry run."""
    page = (Path(__file__).parents[2] / "docs/reproduce.md").read_text()
    lines = page.partition("Table 1, 2,380 training series")[2].partition("\n\n|")[2].partition("\n\n")[0].splitlines()
    found = {cells[0]: cells[1:] for cells in ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:])}
    titles = {get_system(name).title: name for name in BASELINES} | {"SADER": "sen2_mtc_new"}
    runs = {row.run.base for row in TABLES["table1"].rows[paper.SEN2] if row.run is not None}
    assert {titles[title] for title in found} == runs
    for title, (samples, epochs, batch, rate, seconds, hours) in found.items():
        base, train = titles[title], resolve(titles[title]).train
        assert (float(epochs), int(batch)) == (train.epochs, train.batch_size * train.accumulate)
        assert int(samples.replace(",", "")) == train.epochs * paper.TRAINING_SERIES[paper.SEN2]
        assert ("estimate" in rate) == (base not in MEASURED)
        if base in MEASURED:
            speed = MEASURED[base]
            assert (float(rate.split()[0]), "(" in rate) == (speed, base in REMARKS)
            assert float(seconds.replace(",", "")) == round(1000 / speed)
            exact = int(samples.replace(",", "")) / speed / 3600
            assert float(hours) == round(exact, 0 if exact >= 10 else 1)


def test_a_speed_that_was_not_measured_is_called_estimated(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sader.evaluation.reproduce.run.model_cost", lambda model: Cost(gmacs_forward=723.2))
    twice_the_cost = "21.5 samples/s on one H200, 256 px ESTIMATED from the GMACs of one forward, not measured"
    assert training_speed("ddpmcr", resolve("ddpmcr").model, 8) == (pytest.approx(21.5), twice_the_cost)
    [text] = dry_run(ReproduceRequest(("table1",), only=("mcgan",)))
    assert "38.6 samples/s measured on one H200, 256 px with the network of the preset; this run has" in text
    bound = "1.8 samples/s measured on one H200, 256 px with its memory full: a lower bound"
    assert training_speed("stgan", resolve("stgan").model, 4) == (1.8, bound)


SYSTEMS_OF_ALL = ("table1", "table2", "pareto", "qualitative")  # the costs of all baselines are counted


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SYSTEMS_OF_ALL else ()) for n in TABLES if n != HERE]
)
def test_every_table_has_a_dry_run_without_data(name: str):
    texts = dry_run(ReproduceRequest((name,)))
    rows = [(dataset, row) for dataset, each in TABLES[name].rows.items() for row in each]
    runs = {(dataset, row.run) for dataset, row in rows if row.run is not None}
    assert sum("guide-" not in text.splitlines()[0] for text in texts) == len(runs)
    assert all("\nhours: " in text and "\ntrain.batch_size=" in text for text in texts)


def test_improvement_is_relative_to_the_best_baseline():
    found = improvement(paper.TABLE_1, paper.METRICS[paper.SEN2]), improvement(paper.TABLE_2, paper.METRICS[paper.TS])
    printed = ((3.41, 3.85, 6.56), (6.53, 1.19, 0.81))
    for cells, values in zip(found, printed, strict=True):
        assert [float(cell.rstrip("%")) for cell in cells] == pytest.approx(values, abs=0.011)
    assert improvement({"sader": (1.0,)}, ("psnr",)) == ["-"]


def test_the_figure_of_the_loss_needs_no_training(tmp_path: Path):
    outcome = run_reproduce(tiny(tmp_path, LOSS_MASKS))
    assert sorted(path.parent.name for path in outcome.files) == [paper.TS, paper.SEN2]
    assert all(path.stat().st_size > 1000 for path in outcome.files)
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "shards").exists()


def test_weights_of_the_loss_are_those_of_the_row(tmp_path: Path):
    setting = find_settings(tiny(tmp_path, "loss-weights"), get_tables(["loss-weights"]))[paper.SEN2]
    for row in TABLES["loss-weights"].rows[paper.SEN2][1:]:
        assert row.run is not None
        loss = resolve(row.run.base, run_overrides(setting, row.run)).objective.cloud_aware
        assert f"{loss.cloud:g}:{loss.clear:g}:{loss.brightness:g}" == row.name


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_weights(tmp_path: Path):
    def command(out: Path) -> list[str]:
        arguments = ["here", "--tiny", "--steps", "40", "--only", "pix2pix", "--no-lpips", "--out", str(out)]
        return [sys.executable, "-m", "sader", "reproduce", *arguments]

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = subprocess.Popen(command(killed), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    states = killed / "runs" / HERE / "pix2pix" / "checkpoints"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None and len(list(states.glob("step-*.pt"))) < 2:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "runs" / HERE / "pix2pix" / "done.json").exists()
    for out in (killed, whole):
        run_reproduce(tiny(out, HERE, steps=40, only=("pix2pix",)))
    weights = [(out / "runs" / HERE / "pix2pix" / "model.safetensors") for out in (killed, whole)]
    from sader.checkpoint import load_checkpoint

    first, second = (load_checkpoint(path).model.state_dict() for path in weights)
    assert all(torch.equal(first[name], second[name]) for name in first)


# ------------------------------------------------------------------------------------------------ mistakes


@pytest.fixture(scope="module")
def sen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(paper.SEN2, tmp_path_factory.mktemp("data") / "Sen2_MTC_New")


def spoiled(sen2: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sen2, tmp_path / "copy"))


def ask(tmp_path: Path, *tables: str, **more: object) -> None:
    run_reproduce(ReproduceRequest(tables=tables, out=tmp_path / "out", steps=1, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tables", "more", "text"),
    [
        (("table8",), {"tiny": True}, "unknown table 'table8'; did you mean table"),
        ((), {"tiny": True}, "no table given"),
        (("table5",), {"tiny": True, "only": ("5+3",)}, "no row '5\\+3' in table5"),
        (("table1",), {}, "no data given, but table1 needs sen2_mtc_new"),
        (("table1",), {"data": ("nowhere",)}, "nowhere is no folder"),
        (("table1",), {"data": ("sen2_mtc_neu:x",)}, "did you mean sen2_mtc_new"),
        (("table1",), {"data": ("rice1:x",)}, "in none of the paper's tables"),
        (("table1",), {"tiny": True, "data": ("x",)}, "--tiny has its own data"),
        (("here",), {"data": ("x",)}, "no --validation given"),
        (("here", "table1"), {"data": ("x",)}, "run here alone"),
        (("table1",), {"data": ("sen2_mtc_new:x",), "seconds": 0.0}, "seconds is 0"),
    ],
)
def test_mistakes_in_what_is_asked(tmp_path: Path, tables: tuple[str, ...], more: dict, text: str):
    with pytest.raises(SaderError, match=text):
        ask(tmp_path, *tables, **more)


def test_a_folder_of_something_else(tmp_path: Path):
    (tmp_path / "photos").mkdir()
    with pytest.raises(DataError, match="layout of no known dataset"):
        ask(tmp_path, "table1", data=(str(tmp_path / "photos"),))
    with pytest.raises(DataError):
        ask(tmp_path, "table1", data=(f"sen2_mtc_new:{tmp_path / 'photos'}",))


def test_a_missing_split_file_is_named(sen2: Path, tmp_path: Path):
    copy = spoiled(sen2, tmp_path)
    (copy / "train.txt").unlink()
    with pytest.raises(DataError, match=r"train"):
        ask(tmp_path, "table1", data=(str(copy),), lists="folder")


def test_an_unreadable_image_is_named_before_training(sen2: Path, tmp_path: Path):
    copy = spoiled(sen2, tmp_path)
    broken = sorted(copy.glob("Sen2_MTC/T02AAA/cloud/*.tif"))[-1]
    broken.write_bytes(b"no image")
    with pytest.raises(DataError, match=broken.name):
        ask(tmp_path, "table1", data=(str(copy),))
    assert not (tmp_path / "out" / "runs").exists()


def test_mixed_band_counts_are_named(sen2: Path, tmp_path: Path):
    import rasterio

    copy = spoiled(sen2, tmp_path)
    odd = sorted(copy.glob("Sen2_MTC/T01AAA/cloud/*.tif"))[0]
    with rasterio.open(odd, "w", driver="GTiff", count=3, height=32, width=32, dtype="uint16") as file:
        file.write(np.full((3, 32, 32), 900, np.uint16))
    with pytest.raises(BandError, match=f"{odd.name} has 3 bands; expected 4"):
        ask(tmp_path, "table1", data=(str(copy),))


def test_places_on_both_sides_are_refused(tmp_path: Path):
    folder = write_data(HERE, tmp_path / "data")
    shards = str(folder / "train")
    with pytest.raises(DataError, match="2 places are in both"):
        ask(tmp_path, "here", data=(shards,), validation=(shards,))


def test_the_list_names_every_table_and_row():
    listed = {name: rows for name, _, rows in list_plans()}
    assert set(listed) == set(TABLES)
    assert "mae-guided" in listed["table6"]
    with pytest.raises(ConfigError, match="unknown table"):
        get_tables(["tables"])
    assert [table.name for table in get_tables(["all"])] == [name for name in TABLES if name != HERE]
