"""File operations that survive a killed process: atomic replacement with fsync, and locks between processes.

Writers of results, checkpoints and run folders use these functions, so that a test can stop a process at each of them.
`files_under` lists the files below a folder.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from sader.errors import DataError, OutputError


def write_atomically(path: Path, content: bytes | Iterable[bytes | memoryview]) -> None:
    """Write `content` so that `path` holds either the old or the new content, even after a crash or a full disk."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
            if not _running(left.name.split(".")[-2]):
                left.unlink(missing_ok=True)
        with open(partial, "wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # nothing to remove if the folder could not be created
            partial.unlink()
        raise write_error(path, error) from error


def _running(process: str) -> bool:
    """Whether a process of this number runs, as far as is known."""
    if os.name == "posix":  # elsewhere the signal 0 has another meaning
        try:
            os.kill(int(process), 0)
        except (ValueError, ProcessLookupError):
            return False
        except PermissionError:  # it belongs to another user
            return True
    return True


def write_error(path: Path | str, error: Exception, *, full: bool = False) -> OutputError:
    """Return the error of a failed write, with advice. full: the disk is known to be full."""
    if full or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        return OutputError(f"cannot write {path}: the disk is full. Free some space and run the same command again.")
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error.__cause__ or error)
    return OutputError(f"cannot write {path}: {reason.rstrip('.')}. Choose a folder that can be written to.")


def replace(source: Path, target: Path) -> None:
    """Rename `source` to `target` and write the change of the folder to disk."""
    os.replace(source, target)
    sync_folder(target.parent)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}. Copy it again.") from error


def files_under(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and below, by name; links to folders are followed, except to one that holds the link.

    `Path.rglob` does not follow links.
    """
    above: dict[str, frozenset[str]] = {}
    for here, folders, names in os.walk(folder, followlinks=True):
        real, holding = os.path.realpath(here), above.get(os.path.dirname(here), frozenset())
        if real in holding:
            folders.clear()
            continue
        above[here] = holding | {real}
        folders.sort()
        yield from (Path(here, name) for name in sorted(names))


def sync_folder(folder: Path) -> None:
    """Write the entries of a folder to disk; systems that cannot open a folder are skipped."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_partial_files(folder: Path) -> None:
    """Remove the temporary files that killed processes left in `folder`."""
    for partial in folder.glob(".*.partial"):
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = False, busy: str = "") -> Iterator[None]:
    """Hold the lock file `path`; the system releases it when the process ends for any reason.

    wait: wait for another process that holds it; otherwise raise an `OutputError` with the text `busy`.
    """
    try:
        import fcntl
    except ImportError:  # a system without such locks
        yield
        return
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a")
        except OSError as error:
            raise write_error(path, error) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise OutputError(busy or f"another process holds {path}. Wait until it ends.") from error
            # Another process may have removed the file between the opening and the lock.
            if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                yield
                return
