"""The rows of each table and figure of the paper: the run each row trains and how it is sampled.

A row is one line of a table. Rows share runs: the table of steps trains one network and samples it six ways. `here` is
the plan for the user's own shards (SADER small and the baselines, the same training time each). The paper's numbers are
in `published.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from sader.bands import BANDS_13, BANDS_RGBN
from sader.baselines.classical import CLASSICAL
from sader.errors import ConfigError, check_known
from sader.evaluation.methods import CONTROL
from sader.evaluation.reproduce import published as paper
from sader.models import BASELINES, get_system

HERE = "here"
"""The dataset name of shards given with --data and --validation."""
SYSTEMS, ABLATIONS, SAMPLING = "Systems", "Ablations", "Sampling of the same weights"
"""Parts of the table of `here`."""
FIGURE_CLASSICAL = ("masked_median", "matched_mosaic", "ridge_blend", "local_ridge_blend")
"""The classical methods in the figures of `here`; all of them would leave no space for the systems."""
SLOW_STEPS = {"seqdms": "10"}
"""Fewer sampling steps in `here`: SeqDMs' 50 of 708 GMAC each would take longer to score than to train."""


@dataclass(frozen=True)
class RunSpec:
    """One training run, shared by all rows that name it."""

    name: str
    base: str
    """A preset or a baseline system."""
    overrides: tuple[str, ...] = ()
    """Changes to its run config, beside those of the dataset and the budget."""


@dataclass(frozen=True)
class PlanRow:
    """One line of a table."""

    name: str
    title: str
    run: RunSpec | None = None
    """What is trained; None for the classical methods."""
    methods: tuple[str, ...] = ()
    """Classical methods, scored together."""
    steps: str | None = None
    """Sampling, such as 4+1; None = the model's own."""
    guide: str | None = None
    """Guide of the resampling: mae, conv, mean or none; None = the model's own."""
    group: str = ""
    """Part of a long table; figures show `SYSTEMS` and rows without a group."""


@dataclass(frozen=True)
class Table:
    """A table or figure by name."""

    name: str
    title: str
    number: str
    """What it is in the paper."""
    rows: Mapping[str, tuple[PlanRow, ...]]
    """Dataset -> rows; empty for a table that needs no data. A figure of the data alone has no rows."""
    published: Mapping[str, Mapping[str, paper.Values]] = field(default_factory=dict)
    """Dataset -> row -> the paper's values."""
    metrics: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Dataset -> what those values are."""


_SADER_BASE = {paper.SEN2: "sen2_mtc_new", paper.TS: "sen12mscrts_ea"}
_OWN_STEPS = {paper.SEN2: "4+1", paper.TS: "5+1"}
SCORED_BANDS = {paper.SEN2: ("B04", "B03", "B02"), paper.TS: BANDS_13, HERE: BANDS_RGBN}
"""Bands that are scored, the same for every row."""
HELPING_BANDS: dict[str, tuple[str, ...]] = {paper.SEN2: ("B08",), paper.TS: (), HERE: ()}

_OWN_INPUTS = {
    "mcgan": (SCORED_BANDS[paper.SEN2], HELPING_BANDS[paper.SEN2]),
    "diffcr": (SCORED_BANDS[paper.SEN2], ()),
    "emrdm": (SCORED_BANDS[paper.SEN2], HELPING_BANDS[paper.SEN2]),
}
"""Bands and auxiliary bands of systems that were published for RGB; the others have four bands in and out."""

# Plain MSE: both weights are 1, and at this threshold every pixel is in exactly one of the two terms.
_MSE = tuple(f"objective.cloud_aware.{text}" for text in ("cloud=1", "clear=1", "brightness=0", "threshold=0.000001"))
_WEIGHTS = ("3:1:2", "1:1:1", "1:1:2", "3:2:1", "2:3:1")
"""cloud : clear : brightness in the study of the weights. The paper names its choice, the first, and no others; the
last two are those of the public code."""
_NO_CLEAR = ("objective.cloud_aware.clear=0",)
_NO_BRIGHTNESS = ("objective.cloud_aware.brightness=0",)
_NO_FUSION = ("model.network.use_fusion=false",)
_NO_HYBRID = ("model.network.use_hybrid=false",)
_SMALL = tuple(
    f"model.network.{text}"
    for text in (
        "bands=[B02, B03, B04, B08]", "aux_bands=[]", "widths=[48, 80, 112]", "stem=2", "fusion_width=48",
        "fusion_patches=pool", "emb_width=128",
    )
)  # fmt: skip
"""The paper's method at the size of the preset `small`: no composite, no cloud head."""


def _sader(dataset: str, name: str = "sader", overrides: tuple[str, ...] = ()) -> RunSpec:
    return RunSpec(name, _SADER_BASE[dataset], overrides)


def _baseline(dataset: str, name: str) -> RunSpec:
    bands, others = (BANDS_13, ()) if dataset == paper.TS else _OWN_INPUTS.get(name, (BANDS_RGBN, ()))
    if bands == BANDS_RGBN:
        return RunSpec(name, name)
    texts = [f"{key}=[{', '.join(names)}]" for key, names in (("bands", bands), ("aux_bands", others)) if names]
    return RunSpec(name, name, tuple(f"model.network.{text}" for text in texts))


def _systems(dataset: str, names: Iterable[str]) -> tuple[PlanRow, ...]:
    rows = [PlanRow(name, get_system(name).label, _baseline(dataset, name)) for name in names if name != "sader"]
    steps = _OWN_STEPS[dataset]
    classical = PlanRow("classical", "classical methods and controls", methods=(*CLASSICAL, CONTROL))
    return (*rows, PlanRow("sader", f"SADER {steps}", _sader(dataset), steps=steps, guide="mae"), classical)


def _full(dataset: str) -> PlanRow:
    return PlanRow("sader-5+0", "SADER, 5 steps", _sader(dataset), steps="5")


_ABLATED = {
    "no-tfblock": ("without TFBlock", "sader-no-tfblock", _NO_FUSION),
    "no-hablock": ("without HABlock", "sader-no-hablock", _NO_HYBRID),
    "mse": ("MSE", "sader-mse", _MSE),
    "no-cloud-free": ("without the cloud-free term", "sader-no-clear", _NO_CLEAR),
    "no-brightness": ("without the brightness term", "sader-no-brightness", _NO_BRIGHTNESS),
}
"""Row of the ablations in five steps -> title, run and its changes."""


def _ablations(dataset: str, names: Iterable[str]) -> tuple[PlanRow, ...]:
    rows = [(name, *_ABLATED[name]) for name in names]
    made = (PlanRow(name, title, _sader(dataset, run, changes), steps="5") for name, title, run, changes in rows)
    return (*made, _full(dataset))


def _weights(dataset: str) -> tuple[PlanRow, ...]:
    rows = []
    for name in _WEIGHTS[1:]:
        parts = zip(("cloud", "clear", "brightness"), name.split(":"), strict=True)
        changes = tuple(f"objective.cloud_aware.{key}={value}" for key, value in parts)
        run = _sader(dataset, f"sader-{name.replace(':', '-')}", changes)
        rows.append(PlanRow(name, f"weights {name}", run, steps="5"))
    return (_full(dataset), *rows)


def _steps(dataset: str) -> tuple[PlanRow, ...]:
    return tuple(
        PlanRow(steps, f"SADER {steps}", _sader(dataset), steps=steps, guide="mae")
        for steps in ("5+0", "5+1", "5+2", "4+0", "4+1", "4+2")
    )


def _guides(dataset: str) -> tuple[PlanRow, ...]:
    steps, run = _OWN_STEPS[dataset], _sader(dataset)
    first = PlanRow("no-resampling", "without resampling", run, steps=f"{steps[0]}+0")
    kinds = (("no-correction", "none"), ("mean-guided", "mean"), ("conv-guided", "conv"), ("mae-guided", "mae"))
    return (first, *(PlanRow(name, f"{steps}, guide {kind}", run, steps=steps, guide=kind) for name, kind in kinds))


def _here() -> tuple[PlanRow, ...]:
    """Return the rows of the experiment on the user's shards.

    `small` predicts a residual of a composite and has its own objective. The terms of the paper's loss and its guides
    are therefore ablated on the paper's method at the same size, in five steps as in the paper.
    """
    small, own = RunSpec("small", "small"), RunSpec("paper-small", "sen2_mtc_new", _SMALL)
    title = "paper's method, small"

    def baseline(name: str) -> PlanRow:
        steps = SLOW_STEPS.get(name)
        label = get_system(name).label + (f", {steps} steps" if steps else "")
        return PlanRow(name, label, RunSpec(name, name), steps=steps, group=SYSTEMS)

    def ablation(name: str, label: str, base: RunSpec, changes: tuple[str, ...], steps: str | None = "5") -> PlanRow:
        spec = RunSpec(f"{base.name}-{name.split('-', 1)[1]}", base.base, (*base.overrides, *changes))
        return PlanRow(name, label, spec, steps=steps, group=ABLATIONS)

    def sampling(name: str, label: str, run: RunSpec, steps: str, guide: str = "mae") -> PlanRow:
        return PlanRow(name, label, run, steps=steps, guide=guide, group=SAMPLING)

    return (
        PlanRow("classical", "classical methods and controls", methods=(*CLASSICAL, CONTROL), group=SYSTEMS),
        PlanRow("small", "SADER small", small, group=SYSTEMS),
        PlanRow("paper-small", title, own, steps="4+1", guide="mae", group=SYSTEMS),
        *map(baseline, BASELINES),
        ablation("small-no-tfblock", "SADER small without TFBlock", small, _NO_FUSION, None),
        ablation("small-no-hablock", "SADER small without HABlock", small, _NO_HYBRID, None),
        PlanRow("paper-5+0", f"{title}, 5 steps", own, steps="5+0", group=ABLATIONS),
        ablation("paper-no-tfblock", f"{title}, 5 steps, without TFBlock", own, _NO_FUSION),
        ablation("paper-no-hablock", f"{title}, 5 steps, without HABlock", own, _NO_HYBRID),
        ablation("paper-mse", f"{title}, 5 steps, MSE loss", own, _MSE),
        ablation("paper-no-cloud-free", f"{title}, 5 steps, no cloud-free term", own, _NO_CLEAR),
        ablation("paper-no-brightness", f"{title}, 5 steps, no brightness term", own, _NO_BRIGHTNESS),
        *(sampling(f"small-{s}", f"SADER small, {s}", small, s) for s in ("4+0", "4+1", "5+1")),
        *(sampling(f"paper-{s}", f"{title}, {s}", own, s) for s in ("4+0", "5+1")),
        *(
            sampling(f"paper-guide-{kind}", f"{title}, 4+1, guide {kind}", own, "4+1", kind)
            for kind in ("none", "mean", "conv")
        ),
    )


COMPLEXITY, LOSS_MASKS = "table7", "loss-masks"
"""The table of costs, and the figure of the pixel weights of the loss: neither trains anything."""


def _paper_tables() -> list[Table]:
    def both(rows: Callable[[str], tuple[PlanRow, ...]]) -> dict[str, tuple[PlanRow, ...]]:
        return {dataset: rows(dataset) for dataset in (paper.SEN2, paper.TS)}

    def ablation(name: str, title: str, rows: Callable[[str], tuple[PlanRow, ...]], values: paper.Ablation) -> Table:
        return Table(name, title, f"Table {name[-1]}", both(rows), values, paper.ABLATION_METRICS)

    main = {paper.SEN2: _systems(paper.SEN2, paper.TABLE_1), paper.TS: _systems(paper.TS, paper.TABLE_2)}
    values = {paper.SEN2: paper.TABLE_1, paper.TS: paper.TABLE_2}
    shown = {d: (*main[d], _ablations(d, ["mse"])[0], _full(d), _guides(d)[0]) for d in main}
    first, second = ({d: main[d]} for d in main)
    names = list(_ABLATED)
    return [
        Table("table1", "All systems on Sen2_MTC_New", "Table 1", first, values, paper.METRICS),
        Table("table2", "All systems on SEN12MS-CR-TS, East Asia", "Table 2", second, values, paper.METRICS),
        ablation("table3", "Ablation of the architecture", partial(_ablations, names=names[:2]), paper.TABLE_3),
        ablation("table4", "Ablation of the loss", partial(_ablations, names=names[2:]), paper.TABLE_4),
        ablation("table5", "Sampling steps and resamplings", _steps, paper.TABLE_5),
        ablation("table6", "Guides of the resampling", _guides, paper.TABLE_6),
        Table(COMPLEXITY, "Parameters and GMACs", "Table 7", {}),
        Table("pareto", "Quality against parameters and cost", "figure of efficiency", first, values, paper.METRICS),
        Table("qualitative", "Inputs, every method, target and errors", "figures of the visual comparison and of the "
              "effect of loss and resampling", shown, values, paper.METRICS),
        Table(LOSS_MASKS, "Pixel weights of the cloud-aware loss", "figure of the loss", both(lambda dataset: ())),
        Table("loss-weights", "Weights of the three terms of the loss", "sensitivity of the loss weights, in the text",
              both(_weights), {d: {"sader-5+0": v["sader-5+0"]} for d, v in paper.TABLE_4.items()},
              paper.ABLATION_METRICS),
    ]  # fmt: skip


TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        *_paper_tables(),
        Table(HERE, "All systems on the user's shards", "not in the paper", {HERE: _here()}),
    )
}
"""Every table by name, in the paper's order."""


def get_tables(names: Iterable[str]) -> list[Table]:
    """Return the tables by name; "all" is every one of the paper."""
    found: dict[str, Table] = {}
    for name in names:
        if name == "all":
            found |= {key: table for key, table in TABLES.items() if key != HERE}
        else:
            check_known("table", name, [*TABLES, "all"])
            found[name] = TABLES[name]
    if not found:
        raise ConfigError(f"no table given; expected one of {', '.join(TABLES)}, or all.")
    return list(found.values())
