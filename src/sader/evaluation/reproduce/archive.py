"""results.tgz: tables, figures and scores of `sader reproduce` in one small file, to be taken off another machine.

Unpacked elsewhere, `--report-only` writes the tables again from it. Weights and logs of training stay where they are.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from sader.files import write_atomically

NAME = "results.tgz"
LARGEST = 15 * 2**20
"""Bytes; the arrays of the examples are taken along if they fit."""
PICTURE = 2**20
"""A PNG larger than this goes in as JPEG."""


def write_archive(out: Path, tables: Sequence[str]) -> Path:
    """Write out/results.tgz and return its path."""
    arrays = sorted(out.glob("rows/*/*/*/examples.npz"))
    scores = sorted(out.glob("rows/**/*.json"))
    reports = [file for name in tables for file in sorted((out / name).rglob("*")) if file.is_file()]
    content = _packed(out, [*reports, *scores])
    # All arrays or none: of a part, a qualitative figure would be drawn with methods left out.
    if len(content) + sum(file.stat().st_size for file in arrays) <= LARGEST:
        content = _packed(out, [*reports, *scores, *arrays])
    write_atomically(out / NAME, content)
    return out / NAME


def _packed(out: Path, files: Sequence[Path]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in _contents(out, files):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _contents(out: Path, files: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    for file in files:
        name, content = file.relative_to(out).as_posix(), file.read_bytes()
        if file.suffix == ".png" and len(content) > PICTURE:
            name, content = str(Path(name).with_suffix(".jpg").as_posix()), _jpeg(content)
        yield name, content


def _jpeg(png: bytes) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").save(buffer, format="JPEG", quality=88, optimize=True)
    return buffer.getvalue()
