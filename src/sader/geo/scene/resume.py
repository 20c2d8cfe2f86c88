"""The work folder beside an output: what is finished of a job, so that a killed process continues where it stopped.

`.clear.tif.sader/` holds `lock` (its first line marks the folder as ours), one file of rows per layer, the unfinished
part of the blend, and `state.json`: the job, the rows of tiles that are finished with their checksums, and, once all
are, the report. Files are synced before `state.json` names them, and checked before they are used. The order is:

    rows of tiles ... -> COGs in the work folder -> report into state.json -> COGs renamed, the output last
    -> preview, item, page -> work folder removed, state.json after the rows

A process killed anywhere in this order leaves either a folder whose state lists what is missing, or a complete output,
which carries the checksum of its job (`SADER_JOB`) and is recognised by it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sader.errors import OutputError
from sader.files import locked, sync_folder, write_atomically
from sader.geo.grid import Grid
from sader.geo.read.raster import shown
from sader.geo.scene.cog import Layer, RowFile, writing
from sader.geo.stack import DateSource
from sader.inference.scene import FinishedRows, ScenePlan
from sader.inference.values import NODATA, OBSERVED, RECONSTRUCTED, ValueCoding, as_tensor

FORMAT = 2
PROVENANCE = {"nodata": NODATA, "observed": OBSERVED, "reconstructed": RECONSTRUCTED}
"""Name -> code of the provenance layer."""
MARKER = "sader work folder\n"
STORE, REPLACED = "store", "replaced"
"""Folders of a Zarr store that is being written, and of the one that it replaces."""
CHUNK, CHUNKS = 2**16, 64
"""Bytes and number of the samples that identify a file; smaller files are read as a whole."""


@dataclass
class State:
    """What is finished of a job."""

    strips: int = 0
    """Rows of tiles that are finished."""
    counts: list[dict[str, int]] = field(default_factory=list)
    """Pixels by provenance, of each finished row of tiles."""
    sums: dict[str, list[int]] = field(default_factory=dict)
    """Layer -> checksum of the rows of each finished row of tiles."""
    blend: int | None = None
    """Checksum of the unfinished part of the blend."""
    report: dict[str, Any] | None = None
    """The report, once all layers are complete: the files are being published."""


class WorkFolder:
    """The folder of one output. As a context manager it holds the lock on it."""

    def __init__(self, output: Path, job: Mapping[str, Any]) -> None:
        self.output = output
        self.path = output.with_name(f".{output.name}.sader")
        self.job = json.loads(json.dumps(job, sort_keys=True, default=str))
        self.state = State()
        self.note: str | None = None
        """Message for the user about earlier work that is resumed or discarded."""
        self._exits = contextlib.ExitStack()

    @property
    def pixels(self) -> dict[str, int]:
        """Pixels so far by provenance."""
        return {name: sum(one[name] for one in self.state.counts) for name in PROVENANCE}

    @property
    def digest(self) -> str:
        """Checksum of the job."""
        return job_digest(self.job)

    def __enter__(self) -> WorkFolder:
        with writing(self.output):
            check_own(self.path)
            busy = f"another process is writing {self.output}. Wait for it, or choose another output name."
            self._exits.enter_context(locked(self.path / "lock", busy=busy))
            check_own(self.path)
            (self.path / "lock").write_text(MARKER, encoding="utf-8")
            self._load()
        return self

    def __exit__(self, *exception: object) -> None:
        self._exits.close()

    @property
    def fresh(self) -> bool:
        """Whether there is no earlier work."""
        return not (self.path / "state.json").exists()

    def save(self) -> None:
        """Write the state; the files that it names must be on the disk."""
        content = {"format": FORMAT, "job": self.job, **self.state.__dict__}
        with writing(self.output):
            write_atomically(self.path / "state.json", json.dumps(content, indent=1).encode())

    def end_rows(
        self, strip: int, unfinished: tuple[Tensor, Tensor], rows: Mapping[str, int], counts: Mapping[str, int]
    ) -> None:
        """Record a finished row of tiles and keep the part of the blend that lies below it.

        rows: layer -> checksum; counts: pixels by provenance.
        """
        buffer = io.BytesIO()
        np.savez(buffer, total=unfinished[0].cpu().numpy(), weight=unfinished[1].cpu().numpy())
        content = buffer.getvalue()
        with writing(self.output):
            write_atomically(self._blend(strip + 1), content)
        self.state.counts.append(dict(counts))
        for name, checksum in rows.items():
            self.state.sums.setdefault(name, []).append(checksum)
        self.state.strips, self.state.blend = strip + 1, zlib.crc32(content)
        self.save()
        self._blend(strip).unlink(missing_ok=True)

    def unfinished(self) -> tuple[Tensor, Tensor] | None:
        """Return total and weight of the unfinished part of the blend; None where it is missing or damaged."""
        try:
            content = self._blend(self.state.strips).read_bytes()
            if zlib.crc32(content) != self.state.blend:
                return None
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                return as_tensor(arrays["total"]), as_tensor(arrays["weight"])
        except (OSError, ValueError, KeyError):
            return None

    def check_rows(self, files: Sequence[RowFile], bounds: Sequence[tuple[int, int]]) -> None:
        """Forget the rows of tiles from the first damaged one on. bounds: (first row, rows) of each row of tiles."""
        good = self.state.strips if 0 <= self.state.strips <= len(bounds) else 0
        for file in files:
            sums = self.state.sums.get(file.layer.name, [])
            for strip in range(good):
                if strip >= len(sums) or file.checksum(*bounds[strip]) != sums[strip]:
                    good = strip
                    break
        for file in files if good == 0 else ():  # they may be missing, too
            file.create()
        if good == self.state.strips:
            return
        self.note = f"work files of a previous run are damaged; continuing after {good} of {len(bounds)} rows of tiles"
        kept = {name: values[:good] for name, values in self.state.sums.items()}
        self.state = State(good, self.state.counts[:good], kept)

    def clear(self) -> None:
        """Delete all work files; the state first, so that it never names files that are gone."""
        (self.path / "state.json").unlink(missing_ok=True)
        sync_folder(self.path)
        for entry in self.path.iterdir():
            if entry.name != "lock":
                _delete(entry)

    def remove(self) -> None:
        """Delete the folder: the job is complete, or cannot be continued."""
        with contextlib.suppress(OSError):
            for entry in list(self.path.iterdir()):
                if entry.name not in ("state.json", "lock"):
                    _delete(entry)
            (self.path / "state.json").unlink(missing_ok=True)
            (self.path / "lock").unlink(missing_ok=True)
            self.path.rmdir()

    def _blend(self, strip: int) -> Path:
        return self.path / f"blend-{strip}.npz"

    def _load(self) -> None:
        state_file = self.path / "state.json"
        if not state_file.exists():
            self.clear()
            return
        before: dict[str, Any] = {}
        try:
            content = json.loads(state_file.read_text(encoding="utf-8"))
            before = content.pop("job")
            known = content.pop("format") == FORMAT
            state = State(**content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            known = False
        if known and before == self.job:
            self.state = state
            self.note = "resuming a previous run"
            return
        why = ", ".join(differences(before, self.job)[:3]) if known else "it is unreadable or of another version"
        self.note = f"discarding the unfinished work of a different job ({why})"
        self.clear()


class RowFiles:
    """Writes the rows of each layer and records them in the work folder."""

    def __init__(
        self,
        work: WorkFolder,
        layers: Sequence[Layer],
        grid: Grid,
        plan: ScenePlan,
        threshold: float,
        own: Sequence[ValueCoding] = (),
        *,
        overviews: bool = True,
    ) -> None:
        """own: codings of the reference date where its stored numbers are copied (`FinishedRows.encoded`).

        overviews: compute those of a COG with the rows.
        """
        self.work, self.plan, self.threshold = work, plan, threshold
        self.files = [RowFile(work.path / f"{layer.name}.rows", layer, grid) for layer in layers]
        self._own, self._overviews = own, overviews
        self._top, self._parts = 0, list[tuple[int, dict[str, NDArray[Any]]]]()

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """(first row, rows) that each row of tiles finishes."""
        starts = [*self.plan.starts, self.plan.shape[0]]
        return [(top, end - top) for top, end in pairwise(starts)]

    def prepare(self) -> None:
        """Check the files of an earlier run, or create empty ones and the first state."""
        if not self.work.fresh:
            self.work.check_rows(self.files, self.bounds)
            return
        self._check_space()
        with writing(self.work.output):
            for file in self.files:
                file.create()
        self.work.save()

    def _check_space(self) -> None:
        """Refuse now what would fail after hours: too little space for the rows, their overviews and the output."""
        size = sum(file.layer.bytes_for(file.grid) for file in self.files)
        blend = 2 * self.plan.windows[0].height * self.plan.shape[1] * (self.plan.channels + 1) * 4
        needed, free = int(2.7 * size + blend), shutil.disk_usage(self.work.path).free
        if needed > free:
            raise OutputError(
                f"writing {self.work.output} takes up to {_bytes(needed)} for a while; {_bytes(free)} are free there. "
                "Free some space, or choose another folder."
            )

    def write(self, top: int, left: int, part: FinishedRows) -> None:
        """Take a rectangle of the rows in progress."""
        layers: dict[str, NDArray[Any]] = {"provenance": part.provenance().cpu().numpy()[None]}
        for file in self.files:
            name = file.layer.name
            if name == "result":
                layers[name] = part.encoded(file.layer.coding, self._own)
            elif name == "count":
                layers[name] = part.count(self.threshold).cpu().numpy()[None]
            elif name == "masks":
                layers[name] = part.masks(self.threshold).cpu().numpy()
            elif name == "source_date":
                assert part.source_date is not None
                layers[name] = part.source_date.cpu().numpy()[None]
            elif name == "uncertainty":
                assert part.spread is not None
                layers[name] = part.spread.cpu().numpy()
        self._top = top
        self._parts.append((left, layers))

    def end_rows(self, strip: int, unfinished: tuple[Tensor, Tensor]) -> None:
        """Write the rows in progress and record them, with the part of the blend that lies below."""
        sums = {}
        with writing(self.work.output):
            for file in self.files:
                lines = np.concatenate([layers[file.layer.name] for _, layers in self._parts], axis=2)
                sums[file.layer.name] = file.write(self._top, lines.swapaxes(0, 1))
                if self._overviews:
                    file.extend_overviews(self._top + lines.shape[1])
        codes = np.concatenate([layers["provenance"].ravel() for _, layers in self._parts])
        found = np.bincount(codes, minlength=len(PROVENANCE))
        counts = {name: int(found[code]) for name, code in PROVENANCE.items()}
        self._parts.clear()
        self.work.end_rows(strip, unfinished, sums, counts)


def _bytes(number: int) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def check_own(folder: Path) -> None:
    """Refuse a work folder that is a link, or holds files without the marker of this program."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise OutputError(
            f"{folder} is a link or a file; expected a work folder of sader, or nothing. It is left as it is: move it "
            "away, or choose another output name."
        )
    if not folder.exists():
        return
    inside = sorted(entry.name for entry in folder.iterdir())
    lock = folder / "lock"
    text = lock.read_text("utf-8", "replace") if lock.is_file() and not lock.is_symlink() else None
    ours = text == MARKER or (text == "" and inside == ["lock"])
    stores = (STORE, REPLACED)
    links = [one.name for one in folder.iterdir() if one.is_symlink() or (one.is_dir() and one.name not in stores)]
    if links or (inside and not ours):
        kind = "links or folders" if links else "files of other origin"
        raise OutputError(
            f"{folder} holds {kind} ({', '.join((links or inside)[:3])}); expected a work folder of sader, or nothing. "
            "It is left as it is: move it away, or choose another output name."
        )


def _delete(entry: Path) -> None:
    if entry.is_dir():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def job_digest(job: Mapping[str, Any]) -> str:
    """Return the checksum of a job, which is kept in the tags of its output."""
    return hashlib.sha256(json.dumps(job, sort_keys=True, default=str).encode()).hexdigest()


def differences(before: Any, now: Any, where: str = "") -> list[str]:
    """Return the differences between two jobs, such as "seed was 0, is 1"."""
    if isinstance(before, dict) and isinstance(now, dict):
        found = []
        for key in sorted(before.keys() | now.keys()):
            found += differences(before.get(key), now.get(key), f"{where}.{key}".strip("."))
        return found
    if before == now:
        return []
    if isinstance(before, dict | list) or isinstance(now, dict | list):
        return [f"{where} changed"]
    return [f"{where} was {before}, is {now}"]


def describe_source(source: DateSource) -> dict[str, Any]:
    """Return what identifies a date: its name, and size, time and sampled content of its files, or of its array.

    A remote file is identified by its address without the signature.
    """
    facts: dict[str, Any] = {"name": source.name, "coding": str(source.coding), "bands": list(source.bands)}
    files: dict[str, list[Any]] = {}
    for path in source.paths:
        try:
            found = os.stat(path)
            files[os.path.abspath(path)] = [found.st_size, found.st_mtime_ns, sampled_hash(path, found.st_size)]
        except (OSError, ValueError):
            files[shown(path)] = []
    if files or source.paths:
        return {**facts, "files": files}
    return {**facts, "content": hashlib.sha256(pickle.dumps(source)).hexdigest()}


def sampled_hash(path: str, size: int) -> str:
    """Return a checksum of `CHUNKS` parts of a file, evenly spaced from its first to its last byte."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        if size <= CHUNK * CHUNKS:
            digest.update(file.read())
        else:
            for number in range(CHUNKS):
                file.seek((size - CHUNK) * number // (CHUNKS - 1))
                digest.update(file.read(CHUNK))
    return digest.hexdigest()
