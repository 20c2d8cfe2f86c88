"""`open_dataset`: opens any supported public dataset; `DATASETS` lists them.

The request is checked and the layout of a folder is recognised here; the readers are in files of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from sader.bands import BANDS_13
from sader.data.public import allclear, cuhk_cr, rice, sen2_mtc, sen12mscr, sen12mscrts
from sader.data.public.dataset import PublicDataset, ReadOptions, Request, check_choice
from sader.data.public.splits import RANDOM
from sader.data.radar import SAR_SCALINGS
from sader.errors import ConfigError, DataError, check_known

if TYPE_CHECKING:
    from sader.data.items import Item

SCORING = ("reflectance", "mtc_stretch")
"""Protocols of `metrics.PROTOCOLS` a dataset can be viewed and scored under."""


@dataclass(frozen=True)
class DatasetKind:
    """Facts about a public dataset before it is opened."""

    open: Callable[[Path, Request], PublicDataset]
    splits: tuple[str, ...]
    samplers: Mapping[str, str]
    """Name -> description."""
    bands: tuple[str, ...]
    protocol: str
    """The protocol of its published figures."""
    about: str
    source: str
    """Where it can be downloaded."""
    sign: str = ""
    """A file or folder that only this layout has."""


_MTC = "mtc_stretch"
_PLAIN = "reflectance"
DATASETS: dict[str, DatasetKind] = {
    "sen2_mtc_new": DatasetKind(
        sen2_mtc.open_new, sen2_mtc.NEW_SPLITS, sen2_mtc.NEW_SAMPLERS, sen2_mtc.BANDS, _MTC,
        "Sen2_MTC_New (CTGAN): 3 cloudy dates, R G B NIR, 34 / 5 / 10 tiles",
        "CTGAN.zip, linked at https://github.com/come880412/CTGAN", "Sen2_MTC",
    ),
    "sen2_mtc_old": DatasetKind(
        sen2_mtc.open_old, sen2_mtc.OLD_SPLITS, sen2_mtc.OLD_SAMPLERS, sen2_mtc.BANDS[:3], _PLAIN,
        "Sen2_MTC_Old (STGAN multipleImage): 3 cloudy dates, 8-bit R G B with infrared, no official split",
        "https://doi.org/10.7910/DVN/BSETKZ", "multipleImage",
    ),
    "sen12mscr": DatasetKind(
        sen12mscr.open_sen12mscr, sen12mscr.SPLITS, sen12mscr.SAMPLERS, BANDS_13, _PLAIN,
        "SEN12MS-CR: 1 cloudy date, 13 bands, Sentinel-1, 155 / 10 / 10 regions",
        "https://mediatum.ub.tum.de/1554803", "ROIs*/s2_cloudy_*",
    ),
    **{
        name: DatasetKind(
            sen12mscrts.open_sen12mscrts, sen12mscrts.SPLITS, sen12mscrts.SAMPLERS, BANDS_13, _PLAIN,
            f"SEN12MS-CR-TS, {region}: 30 dates, 13 bands, Sentinel-1"
            + ("; test is ROIs1868/73 alone, as published" if name.endswith("_published") else ""),
            "https://mediatum.ub.tum.de/1639953 (train) and https://mediatum.ub.tum.de/1659251 (test)", "ROIs*/*/S2",
        )
        for name, region in sen12mscrts.REGIONS.items()
    },
    **{
        name: DatasetKind(
            rice.open_rice, rice.SPLITS, rice.SAMPLERS, rice.BANDS, _PLAIN, f"{name.upper()}: {what}",
            "https://github.com/BUPTLdy/RICE_DATASET",
        )
        for name, what in (("rice1", "thin cloud, 8-bit R G B"), ("rice2", "thick cloud, 8-bit R G B, masks"))
    },
    **{
        name: DatasetKind(
            cuhk_cr.open_cuhk_cr, cuhk_cr.SPLITS, cuhk_cr.SAMPLERS, cuhk_cr.BANDS, _PLAIN,
            f"{what}, 8-bit R G B NIR", "https://github.com/littlebeen/DDPM-Enhancement-for-Cloud-Removal",
        )
        for name, what in (("cuhk_cr1", "CUHK-CR1: thin cloud"), ("cuhk_cr2", "CUHK-CR2: thick cloud"))
    },
    "allclear": DatasetKind(
        allclear.open_allclear, allclear.SPLITS, allclear.SAMPLERS, BANDS_13, _PLAIN,
        "AllClear: 3 or 12 dates, 13 bands, cloud and shadow masks", "https://github.com/Zhou-Hangyu/allclear",
        "metadata/datasets",
    ),
}  # fmt: skip
"""Every supported dataset, by name."""


def open_dataset(
    name_or_path: str | Path,
    *,
    split: str,
    dataset: str | None = None,
    sampler: str = "leak_free",
    protocol: str | None = None,
    options: ReadOptions | None = None,
) -> PublicDataset:
    """Return one split of a public dataset as a sequence of `PublicSeries`.

    name_or_path: NAME:FOLDER with a name of `DATASETS`, or a folder, with its name in `dataset` or recognised by its
    layout. split: train, val, test or all, as the dataset has them. sampler: leak_free or published
    (`DATASETS[name].samplers` describes each). protocol: reflectance or mtc_stretch, default that of
    the dataset's published figures; it sets the scores beside plain reflectance.
    """
    name, root = _parse(name_or_path, dataset)
    kind, options = DATASETS[name], options or ReadOptions()
    check_choice(split, kind.splits, "split", name)
    check_choice(sampler, kind.samplers, "sampler", name)
    protocol = kind.protocol if protocol is None else protocol
    check_known("protocol", protocol, SCORING)
    if options.sar is not None:
        check_known("SAR scaling", options.sar, SAR_SCALINGS)
    for key in ("inputs", "draws"):
        if getattr(options, key) < 1:
            raise ConfigError(f"{key} is {getattr(options, key)}; expected 1 or more.")
    if split == "train" and sampler == "published" and training_sampler(name, sampler) != sampler:
        raise ConfigError(
            f"the sampler published of {name} is for val and test: its targets can be among the inputs. Use "
            f"{training_sampler(name, sampler)} (or leak_free) for the train split."
        )
    if not root.is_dir():
        found = "is a file" if root.exists() else "does not exist"
        raise DataError(
            f"{root} {found}; expected the folder of {name}. Check the path, or download it: {kind.source}."
        )
    _check_layout(root, name)
    return kind.open(root, Request(name, split, sampler, protocol, options))


def training_sampler(name: str, sampler: str) -> str:
    """Return the sampler of the train split of a dataset that is scored with `sampler`."""
    return RANDOM if RANDOM in DATASETS[name].samplers else sampler


def _parse(name_or_path: str | Path, dataset: str | None) -> tuple[str, Path]:
    text = str(name_or_path)
    before, colon, after = text.partition(":")
    if dataset is None and colon and len(before) > 1 and before.replace("_", "").isalnum():
        dataset, text = before, after
    if dataset is not None:
        check_known("dataset", dataset, DATASETS)
        return dataset, Path(text)
    if text in DATASETS:
        raise ConfigError(f"{text} is a dataset, not a folder; expected {text}:FOLDER with where it lies.")
    return recognise(Path(text)), Path(text)


def _check_layout(root: Path, name: str) -> None:
    """Raise where `root` has the layout of another dataset, or a folder in it has the wanted one."""
    sign = DATASETS[name].sign
    if not sign or _has(root, sign):
        return
    inside = next((child for child in sorted(root.iterdir()) if child.is_dir() and _has(child, sign)), None)
    if inside is not None:
        raise DataError(f"{root} holds no {sign}, but {inside} does; expected the folder of {name}. Give {inside}.")
    other = next((key for key, kind in DATASETS.items() if kind.sign and _has(root, kind.sign)), None)
    if other is not None:
        raise DataError(
            f"{root} has the layout of {other} ({DATASETS[other].sign}); expected that of {name} ({sign}). "
            f"Use {other}, or download {name}: {DATASETS[name].source}."
        )


def _has(root: Path, sign: str) -> bool:
    return next(root.glob(sign), None) is not None


def recognise(root: Path) -> str:
    """Return the name of the dataset whose layout `root` has; SEN12MS-CR-TS with all its regions."""
    if not root.is_dir():
        raise DataError(f"{root} is no folder; expected that of a dataset. Check the path.")
    for name, kind in DATASETS.items():
        if kind.sign and _has(root, kind.sign):
            return name
    raise DataError(
        f"{root} has the layout of no known dataset for certain. Name it: dataset=NAME (--dataset), one of "
        f"{', '.join(DATASETS)}."
    )


@dataclass(frozen=True)
class DatasetItems(Sequence["Item"]):
    """A dataset as evaluation items with the given bands, each read on demand."""

    dataset: PublicDataset
    bands: tuple[str, ...] | None = None
    aux_bands: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.dataset)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> DatasetItems: ...
    def __getitem__(self, index: Any) -> Item | DatasetItems:
        if isinstance(index, slice):
            return DatasetItems(self.dataset[index], self.bands, self.aux_bands)
        return self.dataset[index].item(self.bands, self.aux_bands)

    def named(self, names: Sequence[str]) -> list[Item]:
        """Return the items of these names without reading the others."""
        index = {entry.name: number for number, entry in enumerate(self.dataset.entries)}
        return [self[index[name]] for name in names]
