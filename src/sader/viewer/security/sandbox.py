"""Restrictions of a worker process: rasters of the data folder, three formats, no network unless allowed.

Two independent layers. `inspect_inputs` checks the inputs of a request by their headers and raises readable errors;
nothing is decoded, because a file of a few kilobytes may declare a million pixels. `install_sandbox` applies the same
checks to every `rasterio.open` of the process, and `child_environment` keeps GDAL from side files and from the network.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

from sader.errors import DataError, require
from sader.viewer.problems import ForbiddenError, NotFoundError, TooLargeError
from sader.viewer.security.folder import DataFolder
from sader.viewer.security.proxy import CLOSED_PORT
from sader.viewer.settings import Limits

RASTERS = (".tif", ".tiff", ".jp2")
INDIRECT_FILES = (".vrt", ".img", ".zarr", ".nc", ".h5", ".gpkg", ".zip")
JSONS = (".json", ".geojson")
MOST_JSON = 16 * 2**20
"""Bytes of a STAC document."""
MOST_ITEMS = 500
MAGIC = {
    b"II*\0": "GTiff",
    b"MM\0*": "GTiff",
    b"II+\0": "GTiff",
    b"MM\0+": "GTiff",
    b"\0\0\0\x0cjP  \r\n\x87\n": "JP2OpenJPEG",
    b"\xff\x4f\xff\x51": "JP2OpenJPEG",
}
"""First bytes -> the only GDAL drivers used for reading. A COG is a GTiff; "COG" is GDAL's driver for writing one."""
INDIRECT_DRIVERS = (
    "HTTP WMS WMTS WCS PLMOSAIC STACIT STACTA EEDA EEDAI DAAS GTI MRF Zarr netCDF HDF5 HDF5Image BAG GPKG SQLite "
    "Rasterlite MBTiles PDF DERIVED GeoJSON GeoJSONSeq ESRIJSON TopoJSON OSM MVT KMLSUPEROVERLAY SENTINEL2 SAFE DIMAP"
)
"""Drivers that read another file or address named by the input; GDAL does not register them."""
POINTERS = ("OVERVIEWS", "GEOLOCATION")
"""Metadata domains through which a GeoTIFF makes GDAL open another file or address for reduced or warped pixels."""
NOWHERE = "/vsicurl/https://nowhere.invalid/"


def child_environment(base: Mapping[str, str], allow_remote: Sequence[str], proxy: str = CLOSED_PORT) -> dict[str, str]:
    """Return the environment of a worker process: the server's, without any variable that extends GDAL's access.

    A GeoTIFF can name another file, or an address, as its overview. GDAL therefore lists no folder, reads no .aux.xml
    and, unless hosts are allowed, may fetch a single address only, which does not exist. Everything it fetches,
    redirects included, goes through `proxy`.
    """
    removed = ("GDAL_", "CPL_", "VSI_", "AWS_", "AZURE_", "GS_", "GOOGLE_")
    kept = {
        key: value for key, value in base.items() if not key.startswith(removed) and not key.lower().endswith("_proxy")
    }
    gdal = {
        "GDAL_SKIP": INDIRECT_DRIVERS.replace(" ", ","),
        "GDAL_DISABLE_READDIR_ON_OPEN": "EMPTY_DIR",
        "GDAL_PAM_ENABLED": "NO",
        "GDAL_HTTP_TIMEOUT": "30",
        "GDAL_HTTP_CONNECTTIMEOUT": "10",
        "GDAL_HTTP_PROXY": proxy,
        "GDAL_MAX_DATASET_POOL_SIZE": "64",
        "GDAL_CACHEMAX": "512",  # MiB; the default is 5 % of the machine's memory, for each process
    }
    if not allow_remote:
        gdal["CPL_VSIL_CURL_ALLOWED_FILENAME"] = NOWHERE
    return {**kept, **gdal, "PYTHONUNBUFFERED": "1"}


def install_sandbox(folder: DataFolder, allow_remote: Sequence[str], limits: Limits) -> None:
    """Replace `rasterio.open` for this process by a version that checks location, format and size.

    The replacement is deliberate: any code in the process that opens a raster passes the checks, whether or not it
    was written with the server in mind.
    """
    rasterio = require("rasterio", extra="geo", purpose="reading GeoTIFF")
    unchecked = rasterio.open

    def checked(fp: Any, mode: str = "r", driver: Any = None, *args: Any, **kwargs: Any) -> Any:
        if mode != "r":
            folder.inside(Path(fp).parent)
            return unchecked(fp, mode, driver, *args, **kwargs)
        check_location(str(fp), folder, allow_remote)
        dataset = unchecked(fp, mode, driver_of(str(fp)), *args, **kwargs)
        try:
            check_header(dataset, limits)
        except (ForbiddenError, TooLargeError):
            dataset.close()
            raise
        return dataset

    setattr(rasterio, "open", checked)  # noqa: B010 - mypy does not accept an assignment to a module's attribute


# ---------------------------------------------------------------- inputs of a request


def inspect_inputs(inputs: Sequence[Path], folder: DataFolder, limits: Limits, allow_remote: Sequence[str]) -> None:
    """Refuse inputs of another format, above the size limits, or outside the data folder and the allowed hosts."""
    rasters = dict.fromkeys(raster for path in inputs for raster in _rasters_of(path, folder, allow_remote))
    rasterio = require("rasterio", extra="geo", purpose="reading GeoTIFF")
    from sader.geo.read.raster import reading

    for raster in rasters:
        check_location(raster, folder, allow_remote)
        if remote_host(raster) is not None:
            continue
        driver = driver_of(raster)
        with reading(Path(raster).name), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # images without georeferencing
            with rasterio.open(raster, driver=driver) as dataset:
                check_header(dataset, limits)


def _rasters_of(path: Path, folder: DataFolder, allow_remote: Sequence[str]) -> Iterator[str]:
    if not path.is_dir():
        if path.suffix.lower() not in RASTERS + JSONS:
            raise ForbiddenError(wrong_format(path.name))
        yield from _rasters_of_json(path, folder, allow_remote) if path.suffix.lower() in JSONS else [str(path)]
        return
    # Readers take the files of a folder itself, and products in it as a whole; every file must lie in the data folder.
    for file in folder.files_below(path):
        suffix, direct = file.suffix.lower(), file.parent == path
        if suffix in RASTERS:
            yield str(file)
        elif suffix in JSONS and direct:
            yield from _rasters_of_json(file, folder, allow_remote)
        elif suffix in INDIRECT_FILES and direct:
            raise ForbiddenError(wrong_format(file.name))


def _rasters_of_json(path: Path, folder: DataFolder, allow_remote: Sequence[str]) -> Iterator[str]:
    """Yield the rasters of STAC items. Catalogues are refused, because their links may lead anywhere."""
    from sader.geo.stac.items import bands_of, classification_of, load_items, read_json

    size = path.stat().st_size
    if size > MOST_JSON:
        raise TooLargeError(f"{path.name} has {size} bytes; expected a STAC item of at most {MOST_JSON}.")
    content = read_json(path)
    kind = content.get("type") if isinstance(content, dict) else None
    if kind not in ("Feature", "FeatureCollection"):
        raise ForbiddenError(
            f"{path.name} holds {f'a {kind}' if kind else 'no STAC item'}; expected a STAC item (Feature) or a "
            "FeatureCollection of items. Links of catalogues are not followed."
        )
    items = load_items(path)
    if len(items) > MOST_ITEMS:
        raise TooLargeError(f"{path.name} holds {len(items)} items; expected at most {MOST_ITEMS}.")
    for item, base in items:
        _check_crs(item, path.name)
        try:
            entries = [*bands_of(item, base).values()]
            classes = classification_of(item, base)
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            raise DataError(f"{path.name} holds an invalid STAC item: {type(error).__name__} in its assets.") from error
        for entry in [*entries, *([classes] if classes else [])]:
            check_location(entry.path, folder, allow_remote)
            if remote_host(entry.path) is None and Path(entry.path).suffix.lower() not in RASTERS:
                raise ForbiddenError(wrong_format(Path(entry.path).name))
            yield entry.path


def _check_crs(item: Any, name: str) -> None:
    """Refuse an item whose CRS is not a plain code: GDAL opens other names as an address or a file where it can."""
    from sader.geo.stac.items import CRS_CODE

    for members in (item.properties, *(asset.extra_fields for asset in item.assets.values())):
        code, number = members.get("proj:code"), members.get("proj:epsg")
        if not (code is None or (isinstance(code, str) and CRS_CODE.fullmatch(code))):
            raise ForbiddenError(f"{name} has proj:code {str(code)[:80]!r}; expected a code such as EPSG:32632.")
        if not (number is None or (isinstance(number, int) and 0 < number < 10**7)):
            raise ForbiddenError(f"{name} has proj:epsg {str(number)[:80]!r}; expected a number such as 32632.")


# ---------------------------------------------------------------- one raster


def driver_of(path: str) -> str:
    """Return the GDAL driver of a file by its first bytes (of a remote one by its suffix); refuse other formats."""
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
        raise ForbiddenError(wrong_format(Path(path).name))
    return found


def check_header(dataset: Any, limits: Limits) -> None:
    """Refuse a raster that refers to other files, or whose header declares more than the limits; decodes nothing."""
    import numpy as np  # not at the top: the server process imports this module and stays without NumPy

    name = Path(dataset.name.partition("?")[0]).name
    domains = [domain for domain in dataset.tag_namespaces() if domain in POINTERS]
    if domains:
        raise ForbiddenError(
            f"{name} refers to other files in its metadata ({', '.join(domains)}); such references are not followed. "
            "Write the file again without them."
        )
    if dataset.width * dataset.height > limits.pixels:
        raise TooLargeError(
            f"{name} is {dataset.width} x {dataset.height} pixels; this server accepts at most {limits.pixels} pixels. "
            "Crop the scene, or raise the server's limit (max-pixels)."
        )
    if dataset.count > limits.bands:
        raise TooLargeError(f"{name} has {dataset.count} bands; this server accepts at most {limits.bands}.")
    sizes = [np.dtype(kind).itemsize if kind in np.sctypeDict else 16 for kind in dataset.dtypes]
    height, width = dataset.block_shapes[0] if dataset.block_shapes else (0, 0)
    pixel = sum(sizes) if dataset.interleaving and dataset.interleaving.name == "pixel" else max(sizes, default=0)
    if height * width * pixel > limits.block_bytes:
        raise TooLargeError(
            f"{name} is stored in blocks of {height * width * pixel // 2**20} MiB; this server decodes blocks of at "
            f"most {limits.block_bytes // 2**20} MiB. Write the file again as a tiled GeoTIFF."
        )


def check_location(path: str, folder: DataFolder, allow_remote: Sequence[str]) -> None:
    """Refuse a path that is neither in the data folder nor at an allowed host."""
    host = remote_host(path)
    if host is None:
        folder.inside(path)
    elif host not in {name.lower() for name in allow_remote}:
        raise ForbiddenError(
            f"reading from {host or 'a remote address'} is not allowed. Copy the files into the data folder, or let "
            "the administrator of this server allow the host (allow-remote)."
        )


def remote_host(path: str) -> str | None:
    """Return the host that GDAL would contact for a path: "" without an https host, None for a local path."""
    if path.startswith("/vsicurl?"):
        addresses = parse_qs(path.partition("?")[2]).get("url", [""])
        return (urlparse(addresses[-1]).hostname or "") if addresses[-1].startswith("https://") else ""
    if path.startswith("/vsi") or "://" in path:
        return ""
    return None


def wrong_format(name: str) -> str:
    """Return the message about a file of another format."""
    return (
        f"{name} is not in a format this server opens; expected GeoTIFF, COG or JPEG 2000 (VRT and similar formats may "
        "refer to files and addresses elsewhere)."
    )
