"""Training shards: many series in one checked file, readable with NumPy and the standard library alone.

A shard is a header, then records: lengths, a CRC-32, metadata as JSON, the compressed image and labels. Images are
stored as differences of neighbouring pixels in a row, compressed with LZMA. A shard is written under a temporary name
and renamed, so that a partly written one never has the final name. Readers of GeoTIFF are in `pack.py`.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from sader.errors import ConfigError, DataError, ShapeError
from sader.files import write_atomically

MAGIC = b"SADERSHD"
VERSION = 2
SUFFIX = ".shard"
DEFAULT_STEP = 4
"""Counts (1/10000 reflectance) between stored values."""
HELD_OUT_ROIS = ("ROIs1868_summer_101", "ROIs1970_fall_85", "ROIs1158_spring_39")
"""SEN12MS-CR regions kept for validation."""
_HEADER = struct.Struct("<8sHII")
_RECORD = struct.Struct("<IIII")
_SAMPLED = 1 << 16


@dataclass(frozen=True)
class SeriesRecord:
    """One place on T dates, as stored: counts, labels and metadata."""

    dn: np.ndarray
    """uint16 (T, C, H, W), reflectance x 10000, 0 = nodata."""
    name: str
    """Unique within its source, such as place_03."""
    source: str
    """Name of the source: cloudsen12, rondonia, sen12mscr, eurosat, folder, or a name of `registry.DATASETS`."""
    bands: tuple[str, ...]
    """Names of the C bands."""
    labels: np.ndarray | None = None
    """uint8 (T, H, W): 0 clear, 1 thick, 2 thin, 3 shadow, 255 unknown; None: all unknown."""
    level: str = "L1C"
    """Processing level, L1C or L2A. Levels are never mixed inside one series."""
    resolution: float | None = 10.0
    """Metres per pixel, or None."""
    days: tuple[float, ...] | None = None
    """Days since the first date, or None."""
    group: str = ""
    """Records of one group are always in the same split."""
    extra: dict[str, object] = field(default_factory=dict)
    """Further metadata (JSON)."""

    def __post_init__(self) -> None:
        if self.dn.ndim != 4 or self.dn.dtype != np.uint16:
            raise ShapeError(
                f"dn of {self.name} is {self.dn.dtype} {self.dn.shape}; expected uint16 (T, C, H, W). "
                "Scale reflectance by 10000 and add the axis of dates."
            )
        t, c, h, w = self.dn.shape
        if len(self.bands) != c:
            raise ShapeError(f"{self.name} has {c} bands of data but {len(self.bands)} names {self.bands}.")
        if self.labels is not None and (self.labels.shape != (t, h, w) or self.labels.dtype != np.uint8):
            raise ShapeError(
                f"labels of {self.name} are {self.labels.dtype} {self.labels.shape}; expected uint8 {(t, h, w)}."
            )
        if self.days is not None and len(self.days) != t:
            raise ShapeError(f"{self.name} has {t} dates but {len(self.days)} days.")


def observed(dn: np.ndarray, bands: Sequence[str]) -> np.ndarray:
    """Return bool (T, H, W), where counts (T, C, H, W) hold data.

    The cirrus band is 0 to a few counts over clear land, so that 0 is a value there, not nodata.
    """
    return np.all(dn[:, [name != "B10" for name in bands]] > 0, axis=1)


def split_of(record: SeriesRecord) -> str:
    """Return "train" or "val" (or "test", of a public dataset), from the record's metadata alone.

    A public dataset follows its lists; cloudsen12 follows its folders; rondonia is split in space (west trains, a strip
    in the east validates, a gap lies between); sen12mscr holds out whole regions; of eurosat every 20th mosaic and of
    a user's folders about every tenth group validates.
    """
    if record.extra.get("split") in ("train", "val", "test"):  # public datasets have splits of their own
        return str(record.extra["split"])
    if record.source == "cloudsen12":
        return "val" if "/val" in f"/{record.group}" else "train"
    if record.source == "sen12mscr":
        return "val" if record.group in HELD_OUT_ROIS else "train"
    if record.source == "eurosat":
        number = re.search(r"(\d+)$", record.name)
        return "val" if number and int(number.group(1)) % 20 == 7 else "train"
    if record.group.endswith(("/west", "/east")):
        return "val" if record.group.endswith("/east") else "train"
    return "val" if zlib.crc32(record.group.encode()) % 10 == 0 else "train"


def write_shard(path: str | Path, records: Iterable[SeriesRecord], *, step: int = DEFAULT_STEP) -> int:
    """Write `records` to one shard, whole or not at all; returns its size in bytes.

    `step` (1 to 64 counts) is the distance of stored values: values are restored within half of it; values from 1 to
    half of it become one step, because 0 means nodata.
    """
    return _write_blobs(Path(path), [encode_record(record, step=step) for record in records])


def _write_blobs(path: Path, blobs: list[bytes]) -> int:
    header = _HEADER.pack(MAGIC, VERSION, len(blobs), _header_sum(VERSION, len(blobs)))
    write_atomically(path, [header, *blobs])
    return path.stat().st_size


def encode_record(record: SeriesRecord, *, step: int = DEFAULT_STEP) -> bytes:
    """Return one record in the format of a shard."""
    if not 1 <= step <= 64:
        raise ConfigError(f"step is {step} counts; expected 1 to 64. 4 keeps 0.0002 reflectance.")
    keys = ("name", "source", "bands", "level", "resolution", "days", "group", "extra")
    meta = {key: getattr(record, key) for key in keys} | {"shape": record.dn.shape, "step": step}
    text = json.dumps(meta, separators=(",", ":")).encode()
    # In units of the step; 0 stays 0 and no other value becomes 0.
    units = np.maximum((record.dn.astype(np.uint32) + step // 2) // step, 1)
    image = _compress(np.where(record.dn == 0, 0, units).astype(np.uint16))
    labels = b"" if record.labels is None else lzma.compress(record.labels.tobytes())
    body = text + image + labels
    return _RECORD.pack(len(text), len(image), len(labels), zlib.crc32(body)) + body


def _compress(units: np.ndarray) -> bytes:
    """Return uint16 (T, C, H, W) as LZMA of row differences; signs are folded into the lowest bit, low bytes first."""
    difference = np.diff(units, axis=-1, prepend=np.uint16(0)).view(np.int16)
    folded = ((difference << 1) ^ (difference >> 15)).astype("<u2")
    return lzma.compress(folded.view(np.uint8).reshape(-1, 2).T.tobytes())


def _decompress(payload: bytes, shape: tuple[int, ...]) -> np.ndarray:
    """Return the array that `_compress` was called with."""
    planes = np.frombuffer(lzma.decompress(payload), np.uint8).reshape(2, -1)
    folded = np.ascontiguousarray(planes.T).view("<u2").reshape(shape)
    return np.cumsum((folded >> 1) ^ (0 - (folded & 1)), axis=-1, dtype=np.uint16)


def read_shard(path: str | Path) -> Iterator[SeriesRecord]:
    """Yield the records of one shard; a damaged one raises `DataError` naming file and record."""
    path = Path(path)
    with _open(path) as file:
        count = _read_header(file, path)
        for number in range(count):
            yield _read_record(file.read, path, number, count)
        if file.read(1):
            raise DataError(f"{path} has data after its last record {count}: the file is damaged. Pack it again.")


def _open(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise DataError(f"cannot open shard {path}: {error.strerror}. Make shards with: sader data pack.") from error


def _read_header(file: BinaryIO, path: Path) -> int:
    """Return the number of records after checking the header."""
    head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or not head.startswith(MAGIC):
        raise DataError(f"{path} starts with {head[:8]!r}; expected {MAGIC!r}. This is no shard; pack it again.")
    _, version, count, checksum = _HEADER.unpack(head)
    if checksum != _header_sum(version, count):
        raise DataError(f"the header of {path} does not match its checksum. Copy or pack it again.")
    if version != VERSION:
        raise DataError(
            f"{path} is a shard of version {version}; this sader reads version {VERSION}. "
            "Pack it again: sader data pack."
        )
    return count


def _header_sum(version: int, count: int) -> int:
    return zlib.crc32(struct.pack("<HI", version, count))


def _read_record(read: Callable[[int], bytes], path: Path, number: int, count: int) -> SeriesRecord:
    where = f"record {number + 1} of {count} in shard {path}"
    head = read(_RECORD.size)
    if len(head) < _RECORD.size:
        raise DataError(f"{where} is missing: the file is cut short. Copy or pack it again.")
    text_size, image_size, label_size, checksum = _RECORD.unpack(head)
    wanted = text_size + image_size + label_size
    body = read(wanted)
    if len(body) < wanted:
        raise DataError(f"{where} has {len(body)} of {wanted} bytes: the file is cut short. Copy or pack it again.")
    if zlib.crc32(body) != checksum:
        raise DataError(f"{where} does not match its checksum: the file is damaged. Copy or pack it again.")
    meta = json.loads(body[:text_size])
    shape, step, days = tuple(meta.pop("shape")), meta.pop("step"), meta.pop("days")
    units = _decompress(body[text_size : text_size + image_size], shape)
    dn = np.minimum(units.astype(np.uint32) * step, 65535).astype(np.uint16)
    labels = None
    if label_size:
        stored = lzma.decompress(body[text_size + image_size :])
        labels = np.frombuffer(stored, np.uint8).reshape(shape[0], *shape[2:]).copy()
    meta["bands"] = tuple(meta["bands"])
    return SeriesRecord(dn=dn, labels=labels, days=None if days is None else tuple(days), **meta)


def shard_files(where: str | Path | Iterable[str | Path]) -> list[Path]:
    """Return the shard files of a folder, a file, or several of either; none is a `DataError`."""
    places = [where] if isinstance(where, str | Path) else list(where)
    found: list[Path] = []
    for place in map(Path, places):
        inside = sorted(place.glob(f"*{SUFFIX}")) if place.is_dir() else [place]
        if not inside or not inside[0].exists():
            raise DataError(
                f"no shards at {place}; expected *{SUFFIX} files. Make them with: sader data pack SOURCE --out {place}"
            )
        found += inside
    return found


def count_records(where: str | Path | Iterable[str | Path]) -> int:
    """Return the number of records of the shards in a folder, a file or several of either, from their headers."""
    total = 0
    for path in shard_files(where):
        with _open(path) as file:
            total += _read_header(file, path)
    return total


def fingerprint(where: str | Path | Iterable[str | Path]) -> str:
    """Return a checksum of shards: names, sizes and the first and last 64 KiB of each, which hold record checksums."""
    digest = hashlib.sha256()
    for path in shard_files(where):
        with open(path, "rb") as file:
            size = path.stat().st_size
            digest.update(f"{path.name} {size} ".encode() + file.read(_SAMPLED))
            file.seek(max(0, size - _SAMPLED))
            digest.update(file.read(_SAMPLED))
    return digest.hexdigest()


def read_shards(where: str | Path | Iterable[str | Path]) -> Iterator[SeriesRecord]:
    """Yield all records of the shards in a folder, a file or several of either."""
    for path in shard_files(where):
        yield from read_shard(path)


class ShardWriter:
    """Collects records and writes numbered shards `NAME-000.shard` of about `limit` bytes each.

    Memory holds one shard's compressed records only. `flush` writes the last shard.
    """

    def __init__(self, folder: str | Path, name: str, *, step: int = DEFAULT_STEP, limit: int = 8 << 20) -> None:
        self.folder, self.name, self.step, self.limit = Path(folder), name, step, limit
        self.files: list[Path] = []
        self.records = 0
        self._blobs: list[bytes] = []

    def add(self, record: SeriesRecord) -> None:
        """Compress one record; a shard is written when it is full."""
        self._blobs.append(encode_record(record, step=self.step))
        self.records += 1
        if sum(map(len, self._blobs)) >= self.limit:
            self.flush()

    def flush(self) -> None:
        """Write the collected records."""
        if self._blobs:
            path = self.folder / f"{self.name}-{len(self.files):03d}{SUFFIX}"
            _write_blobs(path, self._blobs)
            self.files.append(path)
            self._blobs = []
