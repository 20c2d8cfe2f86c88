"""The dry runs of the tables against the published settings, which are written here as numbers, system by system."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sader.bands import BANDS_13
from sader.evaluation.costs import Cost
from sader.evaluation.reproduce import published as paper
from sader.evaluation.reproduce.plans import COMPLEXITY, HERE, LOSS_MASKS, TABLES
from sader.evaluation.reproduce.run import dry_run
from sader.evaluation.request import ReproduceRequest
from sader.models import BASELINES, get_system

Values = dict[str, Any]
RGB, RGBN = ["B04", "B03", "B02"], ["B02", "B03", "B04", "B08"]

ALL = {
    "train.dates": 3, "train.crop": 256, "train.precision": "fp32", "train.clip": 0.0, "train.max_seconds": None,
    "data.maker.tasks": [0.0, 1.0, 0.0], "data.maker.fewer_dates": 0.0, "data.maker.extra_clouds": 0.0,
    "data.maker.rescale": 0.0, "data.maker.jitter": 0.0, "data.maker.band_dropout": [],
}  # fmt: skip
"""Every system: three whole cloudy images of 256 pixels, another date as the target, float32, no clipping."""

SADER = {
    "train.optimizer": "muon", "train.adam_lr": 3e-4, "train.betas": [0.9, 0.95], "train.weight_decay": 0.0,
    "train.schedule": "cosine", "train.schedule_steps": 50_000, "train.warmup": 500 / 50_000, "train.ema_decay": 0.9999,
    "model.network.widths": [64, 128, 256], "model.network.blocks": [2, 2, 2], "model.network.fusion_width": 64,
    "model.network.key_width": 64, "model.network.head_width": 16, "model.network.emb_width": 256,
    "model.network.date_input": "index", "model.network.use_fusion": True, "model.network.use_hybrid": True,
    "model.network.composite": False, "model.network.error_head": False,
    "model.diffusion.sigma_data": 1.0, "model.diffusion.sigma_mean": 1.0, "model.diffusion.correlation": 0.9,
    "model.diffusion.sigma_min": 0.001, "model.diffusion.log_sigma_mean": -1.4, "model.diffusion.log_sigma_std": 1.4,
    "model.diffusion.wide_share": 0.0, "model.diffusion.start": "zero", "model.diffusion.residual": None,
    "model.sampling.solver": "euler", "model.sampling.resampling": "paper", "model.sampling.resample_steps": 1,
    "model.sampling.guide": "mae",
    "objective.cloud_aware.cloud": 3.0, "objective.cloud_aware.clear": 1.0, "objective.cloud_aware.brightness": 2.0,
    "objective.cloud_aware.threshold": 0.95, "objective.cloud_aware.norm": "l2",
    "objective.cloud_aware.weight_form": "linear", "objective.cloud_aware.masks": "pixel",
}  # fmt: skip
OF_SEN2 = SADER | {
    "train.muon_lr": 1e-3, "train.batch_size": 8, "train.accumulate": 2, "epochs": 200, "samples": 476_000,
    "train.steps": 29_800, "model.network.bands": RGB, "model.network.aux_bands": ["B08"], "model.network.kernel": 5,
    "model.network.dropout": 0.0, "model.diffusion.alpha": 1.0, "model.diffusion.sigma_max": 40.0,
    "model.diffusion.steps": 4,
}  # fmt: skip
OF_TS = SADER | {
    "train.muon_lr": 1e-4, "train.batch_size": 1, "train.accumulate": 1, "epochs": 500,
    "model.network.bands": list(BANDS_13), "model.network.aux_bands": [], "model.network.kernel": 7,
    "model.network.widths": [64, 128, 256, 512], "model.network.blocks": [2, 2, 2, 2], "model.network.dropout": 0.1,
    "model.diffusion.alpha": 3.0, "model.diffusion.sigma_max": 100.0, "model.diffusion.steps": 5,
}  # fmt: skip

_ADAM = {"train.optimizer": "adam", "train.betas": [0.9, 0.999], "train.weight_decay": 0.0, "train.accumulate": 1,
         "train.warmup": 0.0, "train.ema_decay": 0.0}  # fmt: skip
_GAN = _ADAM | {"train.adam_lr": 2e-4, "train.betas": [0.5, 0.999], "train.schedule": "linear", "epochs": 200,
                "train.batch_size": 1, "loss": "vanilla GAN + 100 L1"}  # fmt: skip
_CTGAN = _ADAM | {
    "train.optimizer": "adamw", "train.adam_lr": 5e-4, "train.betas": [0.5, 0.999], "train.weight_decay": 5e-4,
    "train.schedule": "cosine", "epochs": 100, "train.batch_size": 4,
    "loss": "LSGAN + 100 L1 + MSE of the cloud masks + 50 L1 of the auxiliary images",
    "model.network.width": 32, "model.network.hidden": 128, "model.network.judge_widths": [64, 64, 128, 256, 512],
}  # fmt: skip
_PATCH_GAN = {"model.network.judge_widths": [64, 128, 256]}
BASELINE_SETTINGS: dict[str, Values] = {
    "mcgan": _GAN | {
        "epochs": 300, "model.network.width": 64, "model.network.widths": [128, 256, 512, 512, 512, 512, 512],
        "model.network.judge_stem": 32, "model.network.judge_widths": [128, 256, 512],
    },
    "pix2pix": _GAN | _PATCH_GAN | {"model.network.width": 64, "model.network.blocks": 9},
    "ae": {"loss": "MSE"},
    "cyclegan": _GAN | _PATCH_GAN | {
        "loss": "LSGAN + 10 L1 of the cycle + 5 L1 of the identity", "model.network.blocks": 9,
        "model.network.cycle": 10.0, "model.network.identity": 0.5, "model.network.pool": 50,
    },
    "stgan": _GAN | _PATCH_GAN | {
        "train.batch_size": 4, "model.network.width": 64, "model.network.blocks": 9, "model.network.dropout": 0.5,
    },
    "ctgan": _CTGAN | {
        "model.network.size": 256, "model.network.heads": 16, "model.network.head_width": 1024,
        "model.network.expansion": 4, "model.network.kernel": 31, "model.network.dropout": 0.1,
    },
    "pmaa": _CTGAN | {
        "model.network.block_width": 128, "model.network.blocks": 3, "model.network.scales": 5,
        "model.network.kernel": 11, "model.network.drop_path": 0.1,
    },
    "crtsnet": _GAN | {
        "loss": "L1", "model.network.width": 256, "model.network.date_blocks": 16, "model.network.series_blocks": 5,
        "model.network.residual_scale": 0.1,
    },
    "uncrtaints": _ADAM | {
        "loss": "Gaussian negative log likelihood, diagonal, of the data times 10", "train.adam_lr": 1e-3, "epochs": 20,
        "train.batch_size": 4, "model.network.width": 128, "model.network.decoder_blocks": 5, "model.network.heads": 16,
        "model.network.model_width": 256, "model.network.key_width": 4, "model.network.dropout": 0.1,
        "model.network.scale": 10.0, "model.network.pool": 256 // 32,
    },
    "ddpmcr": {"loss": "MSE of the noise + L1 of low and of high frequencies + L1 under clouds"},
    "diffcr": _ADAM | {
        "loss": "MSE of the clear image", "train.adam_lr": 5e-5, "train.schedule": "constant", "epochs": 3000,
        "train.batch_size": 8, "train.ema_decay": 0.9999, "model.network.width": 64, "model.network.levels": 4,
        "model.network.emb_width": 256, "model.network.sampling_steps": 20,
        "model.network.training.kind": "sigmoid", "model.network.training.steps": 2000,
        "model.network.training.first": 1e-6, "model.network.training.last": 0.01,
        "model.network.sampling.kind": "sigmoid", "model.network.sampling.steps": 1000,
        "model.network.sampling.first": 1e-4, "model.network.sampling.last": 0.09,
    },
    "seqdms": {"loss": "MSE of the clear image"},
    "emrdm": _ADAM | {
        "loss": "MSE / c_out^2", "train.optimizer": "adamw", "train.weight_decay": 0.01, "train.adam_lr": 1e-4,
        "epochs": 1000, "train.batch_size": 4, "train.ema_decay": 0.9999, "model.network.patch": 4,
        "model.network.widths": [256, 512, 768], "model.network.depths": [2, 2, 16],
        "model.network.feed_widths": [512, 1024, 1536], "model.network.head_width": 64, "model.network.kernel": 7,
        "model.network.fusion_heads": 16, "model.network.fusion_key_width": 48,
        "model.network.diffusion.alpha": 1.0, "model.network.diffusion.sigma_min": 0.001,
        "model.network.diffusion.sigma_max": 100.0, "model.network.diffusion.steps": 5,
        "model.network.diffusion.log_sigma_mean": -1.4, "model.network.diffusion.log_sigma_std": 1.4,
        "model.network.diffusion.correlation": 0.9, "model.network.diffusion.wide_share": 0.0,
    },
}  # fmt: skip
"""Settings of each publication; of ae, ddpmcr and seqdms neither sizes nor training are published."""
NOT_PUBLISHED = ("ae", "ddpmcr", "seqdms")
OWN_INPUTS = {"mcgan": (RGB, ["B08"]), "diffcr": (RGB, []), "emrdm": (RGB, ["B08"])}
"""Sen2_MTC_New: systems that predict RGB, with their bands and auxiliary bands."""

GUIDE = {
    "block": 8, "altered": False, "rates": [0.5], "size": 256, "train.crop": 64, "train.batch_size": 16,
    "epochs": 100, "train.optimizer": "muon", "train.muon_lr": 1e-3, "train.adam_lr": 1e-3, "train.betas": [0.9, 0.95],
    "train.schedule": "exponential", "train.warmup": 0.0, "train.clip": 0.0, "train.seed": 0, "train.precision": "fp32",
}  # fmt: skip


@pytest.fixture(scope="module")
def dry_runs() -> dict[str, dict[tuple[str, str], Values]]:
    """Table -> (dataset, run) -> the values of its dry run."""
    patch = pytest.MonkeyPatch()
    patch.setattr("sader.evaluation.reproduce.run.model_cost", lambda model: Cost(gmacs_forward=852.37))
    found = {name: dict(map(parsed, dry_run(ReproduceRequest((name,))))) for name in TABLES if name != HERE}
    patch.undo()
    return found


def parsed(text: str) -> tuple[tuple[str, str], Values]:
    head, *lines = text.splitlines()
    values: Values = {}
    for line in lines:
        key, mark, value = min((line.partition("="), line.partition(": ")), key=lambda parts: len(parts[0]))
        values[key] = json.loads(value) if mark == "=" else value
    values["samples"] = int(values["samples"]) if values["samples"].isdecimal() else None
    values["epochs"] = float(values["epochs"].split()[0])
    return (head.split()[1], head.split()[2]), values


def differing(found: Values, expected: Values) -> dict[str, tuple[Any, Any]]:
    """Return the keys whose value is not the expected one."""
    return {key: (found.get(key, "absent"), value) for key, value in expected.items() if found.get(key) != value}


@pytest.mark.parametrize("name", list(dict.fromkeys([*paper.TABLE_1, *paper.TABLE_2])))
@pytest.mark.parametrize(("table", "dataset"), [("table1", paper.SEN2), ("table2", paper.TS)])
def test_every_system_has_its_published_settings(dry_runs, table: str, dataset: str, name: str):
    if name not in (paper.TABLE_1 if table == "table1" else paper.TABLE_2):
        assert (dataset, name) not in dry_runs[table]
        return
    found = dry_runs[table][dataset, name]
    # Only Sen2_MTC_New is augmented, by flips and quarter turns.
    expected = {**ALL, "data.maker.symmetries": dataset == paper.SEN2}
    if name == "sader":
        expected |= OF_SEN2 if dataset == paper.SEN2 else OF_TS
        steps = {paper.SEN2: "4+1", paper.TS: "5+1"}[dataset]
        expected["rows"] = f"sader ({steps} steps, guide mae)"
    else:
        bands, others = (list(BANDS_13), []) if dataset == paper.TS else OWN_INPUTS.get(name, (RGBN, []))
        expected |= {**BASELINE_SETTINGS[name], "model.network.bands": bands, "model.network.aux_bands": others}
        assert not [key for key in found if key.startswith("objective.")]  # it has no loss of SADER
    assert differing(found, expected) == {}
    assert ("train.muon_lr" in found) == (found["train.optimizer"] == "muon")
    if dataset == paper.SEN2:  # 2,380 training series
        batch = found["train.batch_size"] * found["train.accumulate"]
        assert found["samples"] == found["epochs"] * 2380
        assert found["train.steps"] == found["epochs"] * -(-2380 // batch)
    else:  # their number is known from the folder alone
        assert found["samples"] is None
        assert "train.steps" not in found


def test_what_is_not_published_is_labelled():
    assert set(BASELINE_SETTINGS) == set(BASELINES)
    for name in BASELINES:
        assert (len(BASELINE_SETTINGS[name]) == 1) == (name in NOT_PUBLISHED)
        if name in NOT_PUBLISHED:
            assert get_system(name).label.endswith("sizes assumed)")
        assert get_system(name).loss == BASELINE_SETTINGS[name]["loss"]


CHANGES: dict[str, Values] = {
    "sader": {},
    "sader-no-tfblock": {"model.network.use_fusion": False},
    "sader-no-hablock": {"model.network.use_hybrid": False},
    "sader-mse": {"cloud": 1, "clear": 1, "brightness": 0, "threshold": 1e-6},
    "sader-no-clear": {"clear": 0},
    "sader-no-brightness": {"brightness": 0},
    "sader-1-1-1": {"cloud": 1, "clear": 1, "brightness": 1},
    "sader-1-1-2": {"cloud": 1, "clear": 1, "brightness": 2},
    "sader-3-2-1": {"cloud": 3, "clear": 2, "brightness": 1},
    "sader-2-3-1": {"cloud": 2, "clear": 3, "brightness": 1},
}
"""Run -> what differs from SADER as published; keys without a dot are those of the loss."""
RUNS = {
    "table3": ["sader", "sader-no-tfblock", "sader-no-hablock"],
    "table4": ["sader", "sader-mse", "sader-no-clear", "sader-no-brightness"],
    "table5": ["sader"],
    "table6": ["sader"],
    "qualitative": ["sader", "sader-mse"],
    "pareto": ["sader"],
    "loss-weights": [name for name in CHANGES if name == "sader" or name[6].isdecimal()],
}


@pytest.mark.parametrize("table", RUNS)
def test_runs_of_the_other_tables_differ_from_sader_in_what_they_study_alone(dry_runs, table: str):
    for dataset, main in ((paper.SEN2, "table1"), (paper.TS, "table2")):
        if dataset not in TABLES[table].rows:
            continue
        full = dry_runs[main][dataset, "sader"]
        found = {run: values for (where, run), values in dry_runs[table].items() if where == dataset}
        assert sorted(run for run in found if run.startswith("sader")) == sorted(RUNS[table])
        for run in RUNS[table]:
            named = {k if "." in k else f"objective.cloud_aware.{k}": v for k, v in CHANGES[run].items()}
            expected = {key: value for key, value in (full | named).items() if key not in ("rows", "hours")}
            assert differing(found[run], expected) == {}
        for run in set(found) & set(BASELINES):
            assert found[run] == dry_runs[main][dataset, run]


@pytest.mark.parametrize("table", ["table1", "table2", "table5", "table6", "qualitative"])
def test_the_guide_is_pretrained_as_published(dry_runs, table: str):
    datasets = TABLES[table].rows
    kinds = {"guide-mae": "mae-paper"} | ({"guide-conv": "conv"} if table == "table6" else {})
    guides = {key: values for key, values in dry_runs[table].items() if key[1].startswith("guide")}
    assert set(guides) == {(dataset, name) for dataset in datasets for name in kinds}
    for (dataset, name), found in guides.items():
        bands = RGB if dataset == paper.SEN2 else list(BANDS_13)
        assert differing(found, GUIDE | {"kind": kinds[name], "bands": bands, "data": "eurosat_ms"}) == {}


def test_rows_are_sampled_as_printed(dry_runs):
    for dataset, own in ((paper.SEN2, "4+1"), (paper.TS, "5+1")):
        five, six = (dry_runs[table][dataset, "sader"]["rows"] for table in ("table5", "table6"))
        assert five == ", ".join(f"{s} ({s} steps, guide mae)" for s in ("5+0", "5+1", "5+2", "4+0", "4+1", "4+2"))
        guides = {"no-correction": "none", "mean-guided": "mean", "conv-guided": "conv", "mae-guided": "mae"}
        first = f"no-resampling ({own[0]}+0 steps), "
        assert six == first + ", ".join(f"{name} ({own} steps, guide {kind})" for name, kind in guides.items())
        for table in ("table3", "table4", "loss-weights"):
            rows = [values["rows"] for (where, _), values in dry_runs[table].items() if where == dataset]
            assert all(row.endswith("(5 steps)") for row in rows)


def test_tables_that_train_nothing_say_so(dry_runs, capsys: pytest.CaptureFixture[str]):
    from sader.cli.main import main

    for name in (COMPLEXITY, LOSS_MASKS):
        assert dry_runs[name] == {}
        with pytest.raises(SystemExit) as done:
            main(["reproduce", name, "--dry-run"])
        assert done.value.code == 0
        assert capsys.readouterr().out == f"{name}: nothing is trained.\n"
