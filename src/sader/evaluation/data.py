"""The items that are scored: from shards, from folders of scenes, or from a public dataset in its published layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sader.data.items import Item, clean_this_date, paper_task, simulated, with_dates
from sader.data.public.dataset import PublicDataset, ReadOptions
from sader.data.public.registry import DatasetItems, open_dataset
from sader.data.shards import SUFFIX, SeriesRecord, read_shards, split_of
from sader.errors import ConfigError, DataError, check_known
from sader.evaluation.request import DataRequest

TASKS = ("clean", "paper", "simulated")
"""clean: clean this date; paper: predict another date; simulated: simulated clouds."""
_KNOWN_SOURCES = ("cloudsen12", "rondonia", "sen12mscr", "eurosat")


@dataclass(frozen=True)
class OpenData:
    """Opened data: a public dataset, or records of shards and scenes."""

    request: DataRequest
    dataset: PublicDataset | None
    records: list[SeriesRecord]

    @property
    def protocol(self) -> str:
        """The scoring protocol: "reflectance", or "mtc_stretch" beside it."""
        return "reflectance" if self.dataset is None else self.dataset.request.protocol

    @property
    def facts(self) -> dict[str, Any]:
        """What the record of an evaluation states about its data."""
        facts: dict[str, Any] = {"data": [path.name for path in self.request.data], "split": self.request.split}
        return facts if self.dataset is None else {**facts, **self.dataset.facts}

    def items(self, task: str, bands: tuple[str, ...] | None, others: tuple[str, ...] = ()) -> Sequence[Item]:
        """Return the items of a task with `bands` to be scored (None: all) and `others` as additional inputs."""
        dates, seed = self.request.dates, self.request.seed
        items: Sequence[Item]
        if self.dataset is not None:
            items = DatasetItems(self.dataset, bands, others)
            if dates is not None and len(items[0].cloudy) > dates:
                items = list(with_dates(items, dates, seed=seed))
        else:
            items = list(self._record_items(task, None if bands is None else (*bands, *others)))
            if bands is not None and others:
                items = [item.with_aux(bands) for item in items]
        if not items:
            raise DataError(
                f"the data gives no item for task {task}; it needs dates that are clear on half of the frame. "
                "List its contents with: sader data show"
            )
        return items

    def _record_items(self, task: str, bands: tuple[str, ...] | None) -> Iterator[Item]:
        request, records = self.request, self.records
        options: dict[str, Any] = {"bands": bands, "seed": request.seed}
        if task == "clean":
            donors = list(load_records(request.clouds, split=request.split)) if request.clouds else None
            others = max(3, (request.dates or 0) - 1)  # three others, as in the published table, or more for `dates`
            items = clean_this_date(records, donors=donors, others=others, limit=request.limit, **options)
        elif task == "paper":
            items = paper_task(records, inputs=request.dates or 3, limit=request.limit, **options)
        else:
            items = simulated(records, dates=max(4, request.dates or 0), per_record=request.limit or 2, **options)
        return items if request.dates is None else with_dates(items, request.dates, seed=request.seed)


def open_data(request: DataRequest) -> OpenData:
    """Open the data of a request: the public dataset with `limit` series of each place, or all records."""
    if request.dataset is None:
        return OpenData(request, None, list(load_records(request.data, split=request.split)))
    if len(request.data) != 1:
        raise ConfigError(f"{len(request.data)} folders given; expected one of {request.dataset}. Give --data once.")
    options = ReadOptions(
        lists=request.lists,
        partial=request.partial,
        inputs=request.dates or 3,
        coverage=request.coverage,
        sar="default" if request.sar else None,
    )
    dataset = open_dataset(
        request.data[0],
        dataset=request.dataset,
        split=request.split,
        sampler=request.sampler,
        protocol=request.protocol,
        options=options,
    )
    return OpenData(request, dataset.limited(request.limit, seed=request.seed), [])


def load_records(where: Sequence[Path | str], *, split: str = "val") -> Iterator[SeriesRecord]:
    """Yield the records of shards or of folders in a layout that `sader data pack` can read."""
    check_known("split", split, ("val", "train", "all"))
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

    return READERS[kind_of(path)](path)
