"""Requests of `sader evaluate`, `compare` and `reproduce`: what is scored, on which data, and what is written.

A field that `config.option` declares is an option of the command line with its name. This module imports nothing heavy.
"""

# No "from __future__ import annotations": the command line reads the types of the fields.

from dataclasses import dataclass, field
from pathlib import Path

from sader.config import check_limits, option
from sader.errors import ConfigError

DATA, METHODS, REPORT = "Data", "Methods", "Report"
"""Panels of the help page."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """How the data is read; the same for `sader evaluate`, `compare` and `reproduce`."""

    sampler: str = option(
        "How dates of a public dataset are chosen: leak_free or published.", DATA, default="leak_free"
    )
    lists: str | None = option("Split lists of a public dataset: folder, frozen, hash, or a file.", DATA)
    partial: bool = option("Accept an incomplete dataset: use the places on disk.", DATA, default=False)
    coverage: str = option(
        "SEN12MS-CR-TS: cloud cover by auto, masks, s2cloudless, rules or a table (sader data cover).",
        DATA,
        default="auto",
    )
    limit: int | None = option("Items per place; default: all.", DATA, min=1)
    seed: int = option("Seed of every random choice.", DATA, default=0)

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True)
class DataRequest(DataOptions):
    """Which data to score on."""

    data: tuple[Path, ...] = option("Shards or a folder of scenes; repeatable.", DATA, default=(), kind=list[Path])
    """Also folders that `sader data pack` can read, and the folder of `dataset`."""
    split: str = option("Part of a known dataset: val, train, all; with --dataset also test.", DATA, default="val")
    """Other data is used whole."""
    dataset: str | None = option("Public dataset in its published layout, by name (sader data list).", DATA)
    """It has its own task."""
    protocol: str | None = option(
        "With --dataset: mtc_stretch (beside reflectance) or reflectance; default: as published.", DATA
    )
    sar: bool = False
    """With `dataset`: read Sentinel-1 as well, for models that take it."""
    clouds: tuple[Path, ...] = option(
        "Labelled places whose clouds are pasted; repeatable.", DATA, default=(), kind=list[Path] | None
    )
    """Into data without labels; default: those among `data`."""
    dates: int | None = option("Dates of each item; default: all.", DATA, min=1)


@dataclass(frozen=True)
class EvaluationRequest:
    """Which models to score on which data, and what to report."""

    models: tuple[str, ...] = option(
        "Shipped names, checkpoint files, run folders, classical names or predictions (.npz, one array per item); "
        "NAME=FILE sets the label, FILE@4+1 the sampling steps.",
        default=(),
        kind=list[str],
        argument=True,
    )
    data: DataRequest = field(default_factory=DataRequest)
    tasks: tuple[str, ...] = ("clean",)
    """Of `data.TASKS`; a public dataset has its own task."""
    mask: str = option("Masks given to the models: true, reference, or own (none).", METHODS, default="true")
    """The standard classical methods get the true ones."""
    steps: int | str | None = option(
        "Sampling steps: 1, 4, or 4+1 with resampling; default: each model's own.", METHODS, kind=str | None
    )
    samples: int = option("Results averaged; from 2 on their spread is scored.", METHODS, default=1, min=1)
    guide: str | None = option("Guide of the resampling: mae, conv, mean, lowpass or none.", METHODS)
    guide_weights: str | None = option("Weights of the guide (sader pretrain-guide).", METHODS)
    resampling: str | None = option(
        "Variant of the resampling: paper (Algorithm 1), public_code or default; default: each model's own.", METHODS
    )
    classical: bool = option("Score the classical methods too.", METHODS, default=True)
    """And the flat-colour control."""
    rules: bool = option("Score classical methods with rule-based masks too.", METHODS, default=False)
    lpips: bool | None = option("Score LPIPS; default: if installed.", REPORT)
    compare: bool = False
    """Add paired tests, costs, the Pareto figure and the qualitative figure."""
    against: str | None = option("The method all others are tested against; default: the first.", REPORT)
    metric: str = option("Metric of the tests and of the Pareto figure.", REPORT, default="psnr")
    """It also decides the best classical method."""
    examples: int = option("Items in the qualitative figure.", REPORT, default=3, min=0)
    pictures: int = option("Best and worst cases drawn for each model.", REPORT, default=2, min=0)
    out: Path | None = option("Folder for tables, JSON, CSV, figures and pictures.", REPORT, "--out", "-o")

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True)
class ReproduceRequest(DataOptions):
    """Which tables to reproduce from which data, with which training budget."""

    tables: tuple[str, ...] = option(
        "table1 to table7, pareto, qualitative, loss-masks, loss-weights, here, or all (of the paper).",
        default=(),
        kind=list[str] | None,
        argument=True,
    )
    data: tuple[str, ...] = option(
        "Folder or NAME:FOLDER of a dataset, eurosat_ms:FOLDER for the guides; for here: shards to train on.",
        DATA,
        default=(),
        kind=list[str] | None,
    )
    validation: tuple[str, ...] = option(
        "For here: shards to score on; repeatable.", DATA, default=(), kind=list[str] | None
    )
    split: str = option("Split that is scored.", DATA, default="test")
    draws: int = option(
        "SEN12MS-CR-TS: training series of each patch, each with its own target.", DATA, default=1, min=1
    )
    seconds: float | None = option("Training time of each system.")
    steps: int | None = option("Training steps of each system.", min=1)
    overrides: tuple[str, ...] = option(
        "A change to every run, or guide.KEY=VALUE; repeatable.", None, "--set", default=(), kind=list[str] | None
    )
    only: tuple[str, ...] = option("Run only this row; repeatable.", default=(), kind=list[str] | None)
    """The table shows all finished ones."""
    tiny: bool = option("Tiny networks on synthetic data: minutes on a CPU.", default=False)
    report_only: bool = option("Write the tables of finished rows only.", default=False)
    lpips: bool | None = option("Score LPIPS; default: if installed.", REPORT)
    examples: int = option("Items in the qualitative figure.", REPORT, default=3, min=0)
    out: Path = option("Folder of runs, rows and tables.", REPORT, "--out", "-o", default=Path("reproduce"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seconds is not None and not self.seconds > 0:
            raise ConfigError(f"seconds is {self.seconds}; expected more than 0.")
