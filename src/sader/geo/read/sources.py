"""Paths -> dates: GeoTIFF files, folders of them, .SAFE products and STAC items, each opened as a `DateSource`.

Only headers are read. Inputs that are left out are reported to the user.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sader.bands import band_in_filename, parse_bands
from sader.errors import BandError, DataError, listed
from sader.geo.read.geotiff import RASTERS, date_in, open_geotiff
from sader.geo.read.landsat import open_product, products_in
from sader.geo.read.masks import MASK_ENDINGS
from sader.geo.read.raster import GeoTiffSource, opened, reading, shown
from sader.geo.read.sentinel2 import is_safe, open_safe
from sader.geo.stac.items import VIRTUAL, items_in, locate
from sader.geo.stack import DateSource
from sader.inference.tiling import Notice

LAYERS = ("_uncertainty", "_count", "_provenance", "_source_date", "_masks")
SIDE_FILES = (*MASK_ENDINGS, *LAYERS, "_aot", "_wvp", "_udm")
"""Endings of names that are masks or results beside an acquisition, no acquisition themselves."""


def open_sources(
    inputs: Sequence[str | Path],
    *,
    bands: str | Sequence[str] | None = None,
    offset: str | float | None = "auto",
    scale: float | None = None,
    notice: Notice | None = None,
) -> list[DateSource]:
    """Return the acquisitions found in files, folders, .SAFE products and STAC items, in the order given; items last.

    A file may also be an address (https://, s3://) or a path inside an archive (/vsizip/all.zip/a.tif).

    A folder's files are sorted by name; files of one band each are put together by the rest of their names.
    bands: names or a preset: what the bands of plain files are, and which of a product's or an item's are wanted.
    """
    if not inputs:
        raise DataError("no input given; name at least one GeoTIFF, folder, .SAFE product or STAC item.")
    notify = notice or (lambda text: None)
    names = None if bands is None else parse_bands(bands)
    opener = _Opener(names, offset, scale, notify)
    found: list[DateSource] = []
    seen: set[str] = set()
    catalogue: list[Path] = []
    for entry in inputs:
        if not str(entry).strip():
            # Path("") is the current folder; an empty shell variable should not mean it.
            raise DataError("an input is empty; name a GeoTIFF, a folder, a .SAFE product or a STAC item.")
        virtual = isinstance(entry, str) and VIRTUAL.match(entry) is not None
        path = Path(shown(str(entry)))
        key = str(entry) if virtual else os.path.realpath(path)  # `resolve` raises on a loop of links
        if key in seen:
            notify(f"{path.name} was given twice; it counts once.")
            continue
        seen.add(key)
        if virtual:
            where = str(entry)
            found += opener.file(locate(where, "") if "://" in where else where)
        elif _holds_items(path):
            catalogue.append(path)
        else:
            found += opener.open(path)
    if catalogue:
        from sader.geo.stac.search import open_items

        # Together: one item may be in several files, and neighbouring tiles of one overpass are one date.
        found += open_items(catalogue, offset=offset, bands=names, notice=notify)
    return told_apart(found)


@dataclass(frozen=True)
class _Opener:
    """Opens paths with the settings of `open_sources`."""

    bands: tuple[str, ...] | None
    offset: str | float | None
    scale: float | None
    notify: Notice

    def open(self, path: Path) -> list[DateSource]:
        """Return the dates of a file, a folder or a product."""
        if path.is_symlink() and not path.exists():
            raise DataError(f"{path} is a link that leads nowhere, or to itself; name the file that it should mean.")
        if not path.exists():
            raise DataError(f"there is no {path}; name a GeoTIFF, a folder, a .SAFE product or a STAC item.")
        if path.is_file() and path.suffix.lower() in RASTERS:
            return self.file(path)
        if is_safe(path):
            return [open_safe(path, offset=self.offset, bands=self.bands, notice=self.notify)]
        if path.is_dir():
            return self.folder(path)
        if path.suffix.lower() == ".zip":
            raise DataError(
                f"{path} is a zip archive; expected what is in it. Unpack it, or name a raster inside it: "
                f"/vsizip/{path}/NAME.tif."
            )
        return self.file(path)

    def file(self, path: str | Path) -> list[DateSource]:
        """Return the date of a raster file, which may be an address."""
        name = re.split(r"[/!]", shown(str(path)))[-1] if isinstance(path, str) else path.name
        return [self.geotiff(path, name, self.bands)]

    def geotiff(self, path: str | Path, name: str, bands: tuple[str, ...] | None) -> GeoTiffSource:
        """Return the date of a raster file; hand on what the user should know about it."""
        source, notices = open_geotiff(path, bands=bands, offset=self.offset, scale=self.scale, name=name)
        for text in notices:
            self.notify(text)
        return source

    def folder(self, folder: Path) -> list[DateSource]:
        """Return the dates in a folder; files of one band each are put together."""
        products = sorted(path for path in folder.iterdir() if is_safe(path))
        if products:
            return [source for path in products for source in self.open(path)]
        rasters = sorted(p for p in folder.iterdir() if p.suffix.lower() in RASTERS and not p.name.startswith("."))
        parts = products_in(rasters)
        sources: list[DateSource] = [
            open_product(name, files, bands=self.bands, notice=self.notify) for name, files in sorted(parts.items())
        ]
        if sources and (self.scale is not None or str(self.offset).lower() != "auto"):
            self.notify(f"--scale and --offset are not used for {_few(sources)}: their products define both.")
        owned = {path for files in parts.values() for path in files.values()}
        rasters = [path for path in rasters if path not in owned]
        beside = [path for path in rasters if path.stem.lower().endswith(SIDE_FILES) or _is_result(path)]
        if beside:
            self.notify(
                f"{folder.name}: {len(beside)} files are taken as masks or side results, not as dates: {_few(beside)}."
            )
        files = [path for path in rasters if path not in beside]
        if not files and not sources:
            raise DataError(f"{folder} holds no raster ({', '.join(RASTERS)}), .SAFE product or STAC item.")
        if items := items_in(folder):
            self.notify(
                f"{folder.name} holds rasters and STAC items; the rasters are taken as they are. To go by the items "
                f"(their bands, offset and date), give those: {_few(items)}."
            )
        single = {
            path: split for path in files if (split := band_in_filename(path.stem)) is not None and _count(path) == 1
        }
        for path in files:
            if path not in single:
                sources += self.open(path)
        for rest in dict.fromkeys(rest for _, rest in single.values()):
            members: dict[str, Path] = {}
            for path, (band, name) in single.items():
                if name == rest:
                    members.setdefault(band, path)  # sorted by name, so that _10m comes before _20m
            sources.append(self.one_per_band(rest, members))
        return sources

    def one_per_band(self, rest: str, members: dict[str, Path]) -> DateSource:
        """Return the acquisition whose bands are single files; its grid is that of the finest."""
        found = {band: self.geotiff(path, path.name, (band,)) for band, path in members.items()}
        codings = {source.coding for source in found.values()}
        if len(codings) > 1:
            raise BandError(
                f"the files of {rest} store their values differently: {', '.join(sorted(map(str, codings)))}. "
                "Write them with one type, scale, offset and nodata value."
            )
        finest = min(members, key=lambda band: max(found[band].grid.resolution))
        files = tuple(source.files[0] for source in found.values())
        date = date_in(rest) or found[finest].date
        return replace(found[finest], name=rest, date=date, bands=tuple(members), files=files)


def told_apart(sources: Sequence[DateSource]) -> list[DateSource]:
    """Return the sources; files of one name in several folders are named with their folder, and dated by it.

    2022-03-10/image.tif and 2022-05-13/image.tif are how many programs store a series.
    """
    counts = Counter(source.name for source in sources)
    return [
        _with_folder(source) if counts[source.name] > 1 and type(source) is GeoTiffSource else source
        for source in sources
    ]


def _with_folder(source: GeoTiffSource) -> GeoTiffSource:
    folder = Path(source.files[0].path).parent.name
    return replace(source, name=f"{folder}/{source.name}", date=source.date or date_in(folder))


def _holds_items(path: Path) -> bool:
    """Whether a path is a STAC file, or a folder that holds items and no products or rasters of its own."""
    if path.suffix.lower() in (".json", ".geojson"):
        return path.is_file()
    if not path.is_dir() or is_safe(path):
        return False
    inside = list(path.iterdir())
    if any(is_safe(one) or one.suffix.lower() in RASTERS for one in inside):
        return False
    return bool(items_in(path))


def _is_result(path: Path) -> bool:
    """Whether a file was written by `sader remove`: a result is no date of the next run."""
    with reading(str(path)):
        return "SADER_VERSION" in opened(str(path)).tags()


def _count(path: Path) -> int:
    with reading(str(path)):
        return int(opened(str(path)).count)


def _few(found: Sequence[Path] | Sequence[DateSource]) -> str:
    return listed([one.name for one in found], most=3)
