"""A child process that opens rasters is confined: files of the data folder, three formats, no network unless allowed.

The checks before the work (`viewer.security.inspect`) refuse with good words. This is the second wall, which does not
depend on them: whatever code in the process opens a raster goes through it, and GDAL itself is told to stay away from
side files and from the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

from sader.errors import require
from sader.viewer.problems import ForbiddenError, NotFoundError, TooLargeError
from sader.viewer.security.folder import DataFolder
from sader.viewer.security.proxy import NOBODY
from sader.viewer.settings import Limits

MAGIC = {
    b"II*\0": "GTiff",
    b"MM\0*": "GTiff",
    b"II+\0": "GTiff",
    b"MM\0+": "GTiff",
    b"\0\0\0\x0cjP  \r\n\x87\n": "JP2OpenJPEG",
    b"\xff\x4f\xff\x51": "JP2OpenJPEG",
}
"""First bytes -> the only drivers that read. A COG is a GTiff; "COG" is GDAL's name for writing one."""
INDIRECT = (
    "HTTP", "WMS", "WMTS", "WCS", "PLMOSAIC", "STACIT", "STACTA", "EEDA", "EEDAI", "DAAS", "GTI", "MRF", "Zarr",
    "netCDF", "HDF5", "HDF5Image", "BAG", "GPKG", "SQLite", "Rasterlite", "MBTiles", "PDF", "DERIVED", "GeoJSON",
    "GeoJSONSeq", "ESRIJSON", "TopoJSON", "OSM", "MVT", "KMLSUPEROVERLAY", "SENTINEL2", "SAFE", "DIMAP",
)  # fmt: skip
"""Drivers that read what another file or an address names; they are not even registered."""
POINTERS = ("OVERVIEWS", "GEOLOCATION")
"""Metadata domains by which a GeoTIFF makes GDAL open another file or address for its reduced or warped pixels."""
NOWHERE = "/vsicurl/https://nowhere.invalid/"


def gdal_environment(allow_remote: Sequence[str], proxy: str = NOBODY) -> dict[str, str]:
    """Return the environment of a child: GDAL reads no side file (overviews, .aux.xml) and, unless allowed, no address.

    A GeoTIFF can name another file as its overview, and that file may be an address: hence no list of the folder, no
    .aux.xml, and one single allowed name that does not exist.
    """
    found = {
        "GDAL_SKIP": ",".join(INDIRECT),
        "GDAL_DISABLE_READDIR_ON_OPEN": "EMPTY_DIR",
        "GDAL_PAM_ENABLED": "NO",
        "GDAL_HTTP_TIMEOUT": "30",
        "GDAL_HTTP_CONNECTTIMEOUT": "10",
        "GDAL_HTTP_PROXY": proxy,  # everything that GDAL fetches, redirects included, goes through the gate
        "GDAL_MAX_DATASET_POOL_SIZE": "64",
        "GDAL_CACHEMAX": "512",  # MiB; its own choice is 5 % of the machine, for each child
    }
    if not allow_remote:
        found["CPL_VSIL_CURL_ALLOWED_FILENAME"] = NOWHERE
    return found


def confine(folder: DataFolder, allow_remote: Sequence[str], limits: Limits) -> None:
    """Make every `rasterio.open` of this process check where and what it opens."""
    rasterio = require("rasterio", extra="geo", purpose="reading GeoTIFF")
    plain = rasterio.open

    def confined(fp: Any, mode: str = "r", driver: Any = None, *args: Any, **kwargs: Any) -> Any:
        if mode != "r":
            folder.inside(Path(fp).parent)
            return plain(fp, mode, driver, *args, **kwargs)
        check_place(str(fp), folder, allow_remote)
        dataset = plain(fp, mode, driver_of(str(fp)), *args, **kwargs)
        try:
            check_domains(dataset)
            check_size(dataset, limits)
        except (ForbiddenError, TooLargeError):
            dataset.close()
            raise
        return dataset

    setattr(rasterio, "open", confined)  # noqa: B010 - mypy knows no such attribute of a module


def driver_of(path: str) -> str:
    """Return the driver for a file by its first bytes (by its name, where it is far); refuse all other kinds."""
    if remote_host(path) is not None:
        address = urlparse(parse_qs(path.partition("?")[2]).get("url", [""])[-1])
        return "JP2OpenJPEG" if address.path.lower().endswith(".jp2") else "GTiff"
    try:
        with open(path, "rb") as file:
            start = file.read(12)
    except OSError as error:
        raise NotFoundError(f"{Path(path).name} cannot be opened: {error.strerror}.") from error
    found = next((driver for magic, driver in MAGIC.items() if start.startswith(magic)), None)
    if found is None:
        raise ForbiddenError(wrong_kind(Path(path).name))
    return found


def check_domains(dataset: Any) -> None:
    """Refuse a file that sends GDAL to another one. Nothing has been followed yet: that happens when it is read."""
    found = [name for name in dataset.tag_namespaces() if name in POINTERS]
    if found:
        raise ForbiddenError(
            f"{Path(dataset.name).name} names other files in its metadata ({', '.join(found)}); the service follows no "
            "such references. Write it anew without them."
        )


def check_size(dataset: Any, limits: Limits) -> None:
    """Refuse a raster whose header says that it is too large; nothing of it has been unpacked yet."""
    name, facts = Path(dataset.name.partition("?")[0]).name, _facts(dataset)
    if facts["pixels"] > limits.pixels:
        raise TooLargeError(
            f"{name} is {facts['width']} x {facts['height']} pixels; the server takes at most {limits.pixels} pixels. "
            "Cut the scene, or start the server with a higher --max-pixels."
        )
    if facts["bands"] > limits.bands:
        raise TooLargeError(f"{name} has {facts['bands']} bands; the server takes at most {limits.bands}.")
    if facts["block_bytes"] > limits.block_bytes:
        raise TooLargeError(
            f"{name} is stored in blocks of {facts['block_bytes'] // 2**20} MiB; the server unpacks at most "
            f"{limits.block_bytes // 2**20} MiB at once. Write it anew as a tiled GeoTIFF."
        )


def _facts(dataset: Any) -> dict[str, int]:
    import numpy as np  # not at the top: the server itself uses this module for the environment of its children

    kinds = [np.dtype(kind).itemsize if kind in np.sctypeDict else 16 for kind in dataset.dtypes]
    height, width = dataset.block_shapes[0] if dataset.block_shapes else (0, 0)
    together = sum(kinds) if dataset.interleaving and dataset.interleaving.name == "pixel" else max(kinds, default=0)
    return {
        "pixels": dataset.width * dataset.height,
        "bands": dataset.count,
        "block_bytes": height * width * together,
        "width": dataset.width,
        "height": dataset.height,
    }


def wrong_kind(name: str) -> str:
    """Return the words about a file of another kind."""
    return (
        f"{name} is of a kind that the service does not open; expected GeoTIFF, COG or JPEG 2000 (VRT and other "
        "formats may name files and addresses elsewhere)."
    )


def check_place(path: str, folder: DataFolder, allow_remote: Sequence[str]) -> None:
    """Refuse what is neither a file of the data folder nor at an allowed host."""
    host = remote_host(path)
    if host is None:
        folder.inside(path)
        return
    if host not in {name.lower() for name in allow_remote}:
        raise ForbiddenError(
            f"reading from {host or 'a remote address'} is not allowed. Copy the files into the data folder, or start "
            "the server with --allow-remote and the host's name."
        )


def remote_host(path: str) -> str | None:
    """Return the host of what GDAL would fetch, "" where it has none, None for a plain path."""
    if path.startswith("/vsicurl?"):
        addresses = parse_qs(path.partition("?")[2]).get("url", [""])
        return (urlparse(addresses[-1]).hostname or "") if addresses[-1].startswith("https://") else ""
    if path.startswith("/vsi") or "://" in path:
        return ""
    return None


def child_environment(base: Mapping[str, str], allow_remote: Sequence[str], proxy: str = NOBODY) -> dict[str, str]:
    """Return the environment of a child: the server's, without anything that would widen GDAL's reach."""
    own = ("GDAL_", "CPL_", "VSI_", "AWS_", "AZURE_", "GS_", "GOOGLE_")
    # Proxies, and exceptions from them, are the gate's business alone.
    kept = {key: value for key, value in base.items() if not key.startswith(own) and not key.lower().endswith("_proxy")}
    return {**kept, **gdal_environment(allow_remote, proxy), "PYTHONUNBUFFERED": "1"}
