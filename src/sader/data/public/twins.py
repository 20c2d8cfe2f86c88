"""Images that stand twice in a dataset, found by the SHA-256 of their bytes.

USERS C: RICE lists and the CUHK-CR1 test repeat images. A pair counts as repeated if its clear or its cloudy image is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from sader.errors import DataError


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}. Copy it again from the dataset.") from error


def content_groups(names: Iterable[str], path_of: Callable[[str], Path]) -> dict[str, list[str]]:
    """Return hash -> names whose files are equal, the names in their order."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(file_hash(path_of(name)), []).append(name)
    return groups


def without_twins(
    names: Sequence[str],
    seen: Iterable[str],
    paths_of: Callable[[str], Sequence[Path]],
    *,
    seen_paths_of: Callable[[str], Sequence[Path]] | None = None,
) -> list[str]:
    """Return `names` without those that share a file's content with one of `seen` or with an earlier one."""
    known = {file_hash(path) for name in seen for path in (seen_paths_of or paths_of)(name)}
    kept = []
    for name in names:
        hashes = {file_hash(path) for path in paths_of(name)}
        if not hashes & known:
            kept.append(name)
        known |= hashes
    return kept
