"""The data folder: names sent by clients become paths inside it, or are refused.

Symbolic links are resolved before the check, so a link to a file outside is refused like the file itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from sader.errors import DataError, OutputError
from sader.files import files_under
from sader.viewer.problems import ForbiddenError, NotFoundError, RequestError, TooLargeError

STATE = ".sader"
"""Folder of the server's own files inside the data folder; never listed and never accepted as a path."""
MOST_ENTRIES = 20_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+ ()-]{0,119}")
UPLOADS = (".tif", ".tiff", ".jp2", ".json", ".geojson")
"""Suffixes of files that may be uploaded."""


class DataFolder:
    """The data folder of a server."""

    def __init__(self, root: str | Path) -> None:
        try:
            Path(root).mkdir(parents=True, exist_ok=True)
            self.root = Path(root).resolve(strict=True)
            self.state = self.root / STATE
            if self.state.is_symlink():
                raise OutputError(f"{self.state} is a symbolic link; expected a folder of the server. Remove the link.")
            self.state.mkdir(mode=0o700, exist_ok=True)
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise OutputError(f"cannot use {root} as data folder: {reason}. Choose another folder.") from error

    def find(self, name: str) -> Path:
        """Return the existing file or folder with a name sent by a client."""
        parts = PurePosixPath(name).parts
        bad = not parts or name.startswith("/") or "\\" in name or "\0" in name or ":" in name or len(name) > 1000
        if bad or any(part == ".." or part.startswith(".") for part in parts):
            raise ForbiddenError(
                f"{name[:200]!r} is not an accepted path; expected a path inside the data folder, with / between its "
                "parts, without .. and without hidden names."
            )
        real = self.inside(self.root.joinpath(*parts), shown=name)
        if real.is_relative_to(self.state):  # through a link
            raise ForbiddenError(f"{name[:200]!r} leads to the server's own files.")
        return real

    def inside(self, path: str | Path, *, shown: str | None = None) -> Path:
        """Return the real path; refuse one that does not exist or, links resolved, lies outside."""
        text = shown or Path(path).name
        try:
            real = Path(path).resolve(strict=True)
        except (OSError, RuntimeError, ValueError) as error:
            if not os.path.abspath(path).startswith(f"{self.root}{os.sep}"):
                raise ForbiddenError(_outside(text)) from error
            raise NotFoundError(f"there is no {text} in the data folder.") from error
        if real != self.root and not real.is_relative_to(self.root):
            raise ForbiddenError(_outside(text))
        return real

    def files_below(self, folder: Path) -> Iterator[Path]:
        """Yield every file below a folder, also through links; raise for one outside or of the server, or too many."""
        for count, path in enumerate(files_under(folder), start=1):
            if count > MOST_ENTRIES:
                raise TooLargeError(f"{folder.name} holds more than {MOST_ENTRIES} files; give a smaller folder.")
            if not is_utf8(path.name):
                raise DataError(f"{folder.name} holds a file whose name is not UTF-8: {path.name!a}. Rename it.")
            real = self.inside(path)
            if real.is_relative_to(self.state) and not folder.is_relative_to(self.state):
                raise ForbiddenError(f"{path.name[:200]!r} leads to the server's own files.")
            yield real

    def relative(self, path: Path) -> str:
        """Return a path relative to the data folder, as clients name it."""
        return path.relative_to(self.root).as_posix()


def is_utf8(name: str) -> bool:
    """Whether a file name can be written as UTF-8, and so in a JSON document."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def upload_name(name: str) -> str:
    """Return the file name of an upload; refuse names with other characters and files of other formats."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise RequestError(
            f"the file name {name[:150]!r} is not accepted; expected up to 120 letters, digits, spaces and ._+()-, "
            "starting with a letter or digit."
        )
    if PurePosixPath(name).suffix.lower() not in UPLOADS:
        raise ForbiddenError(f"{name} is not in an accepted format; expected {', '.join(UPLOADS)}.")
    return name


def _outside(text: str) -> str:
    return f"{text[:200]} leads outside the data folder, where this server reads and writes nothing."
