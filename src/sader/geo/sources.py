"""Paths -> dates: GeoTIFF files, folders of them, .SAFE products and STAC items, each opened as a `DateSource`.

Nothing is read but headers. What is left out is said, never dropped in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sader.errors import BandError, DataError
from sader.geo.bandnames import band_in_filename, parse_bands
from sader.geo.geotiff import RASTERS, open_geotiff
from sader.geo.raster import opened, reading
from sader.geo.sentinel2 import is_safe
from sader.geo.stac_files import items_in
from sader.geo.stack import DateSource

Notice = Callable[[str], None]
SIDE_FILES = ("_mask", "_cloudmask", "_label", "_scl", "_uncertainty", "_count", "_provenance", "_cld", "_aot", "_wvp")
"""Endings of names that are masks or results beside an acquisition, no acquisition themselves."""


def open_sources(
    inputs: Sequence[str | Path],
    *,
    bands: str | Sequence[str] | None = None,
    offset: str | float | None = "auto",
    scale: float | None = None,
    mask: str | Path | Sequence[str | Path] | None = None,
    notice: Notice | None = None,
) -> list[DateSource]:
    """Return the acquisitions found in files, folders, .SAFE products and STAC items, in the order given; items last.

    A folder's files are sorted by name; files of one band each are put together by the rest of their names.
    bands: names or a preset: what the bands of plain files are, and which of a product's or an item's are wanted.
    mask: see `sader.geo.cloudmask`.
    """
    if not inputs:
        raise DataError("no input given; name at least one GeoTIFF, folder, .SAFE product or STAC item.")
    said = notice or (lambda text: None)
    names = None if bands is None else parse_bands(bands)
    found: list[DateSource] = []
    seen: set[str] = set()
    catalogue: list[Path] = []
    for entry in inputs:
        path = Path(entry)
        key = str(path.resolve())
        if key in seen:
            said(f"{path.name} was given twice; it counts once.")
            continue
        seen.add(key)
        if _holds_items(path):
            catalogue.append(path)
        else:
            found += _open(path, names, offset, scale, said)
    if catalogue:
        from sader.geo.stac import open_items

        # Together: one item may be in several files, and neighbouring tiles of one overpass are one date.
        found += open_items(catalogue, offset=offset, bands=names, notice=said)
    if mask is not None:
        from sader.geo.cloudmask import with_masks

        found = with_masks(found, mask, notice=said)
    return found


def _open(
    path: Path, bands: tuple[str, ...] | None, offset: str | float | None, scale: float | None, said: Notice
) -> list[DateSource]:
    if not path.exists():
        raise DataError(f"there is no {path}; name a GeoTIFF, a folder, a .SAFE product or a STAC item.")
    if is_safe(path):
        from sader.geo.sentinel2 import open_safe

        return [open_safe(path, offset=offset, bands=bands, notice=said)]
    if path.is_dir():
        return _open_folder(path, bands, offset, scale, said)
    source, notices = open_geotiff(path, bands=bands, offset=offset, scale=scale)
    for text in notices:
        said(text)
    return [source]


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


def _open_folder(
    folder: Path, bands: tuple[str, ...] | None, offset: str | float | None, scale: float | None, said: Notice
) -> list[DateSource]:
    products = sorted(path for path in folder.iterdir() if is_safe(path))
    if products:
        return [source for path in products for source in _open(path, bands, offset, scale, said)]
    rasters = sorted(p for p in folder.iterdir() if p.suffix.lower() in RASTERS and not p.name.startswith("."))
    beside = [path for path in rasters if path.stem.lower().endswith(SIDE_FILES) or _is_result(path)]
    if beside:
        said(f"{folder.name}: {len(beside)} files are taken as masks or side results, not as dates: {_few(beside)}.")
    files = [path for path in rasters if path not in beside]
    if not files:
        raise DataError(f"{folder} holds no raster ({', '.join(RASTERS)}), .SAFE product or STAC item.")
    if items := items_in(folder):
        said(
            f"{folder.name} holds rasters and STAC items; the rasters are taken as they are. To go by the items (their "
            f"bands, offset and date), give those: {_few(items)}."
        )
    sources: list[DateSource] = []
    single = {path: split for path in files if (split := band_in_filename(path.stem)) is not None and _count(path) == 1}
    for path in files:
        if path not in single:
            sources += _open(path, bands, offset, scale, said)
    for rest in dict.fromkeys(rest for _, rest in single.values()):
        members: dict[str, Path] = {}
        for path, (band, name) in single.items():
            if name == rest:
                members.setdefault(band, path)  # sorted by name, so that _10m comes before _20m
        sources.append(_one_per_band(rest, members, offset, scale, said))
    return sources


def _one_per_band(
    rest: str, members: dict[str, Path], offset: str | float | None, scale: float | None, said: Notice
) -> DateSource:
    """Return the acquisition whose bands are single files; its grid is that of the finest."""
    found = {
        band: open_geotiff(path, bands=(band,), offset=offset, scale=scale, name=path.name)
        for band, path in members.items()
    }
    for _, notices in found.values():
        for text in notices:
            said(text)
    codings = {source.coding for source, _ in found.values()}
    if len(codings) > 1:
        raise BandError(
            f"the files of {rest} store their values differently: {', '.join(sorted(map(str, codings)))}. "
            "Write them with one type, scale, offset and nodata value."
        )
    finest = min(members, key=lambda band: max(found[band][0].grid.resolution))
    files = {band: str(path) for band, path in members.items()}
    source, _ = open_geotiff(members[finest], offset=offset, scale=scale, name=rest, band_files=files)
    return source


def _is_result(path: Path) -> bool:
    """Whether a file was written by `sader remove`: a result is no date of the next run."""
    with reading(str(path)):
        return "SADER_VERSION" in opened(str(path)).tags()


def _count(path: Path) -> int:
    with reading(str(path)):
        return int(opened(str(path)).count)


def _few(paths: Sequence[Path]) -> str:
    return ", ".join(path.name for path in paths[:3]) + (" ..." if len(paths) > 3 else "")
