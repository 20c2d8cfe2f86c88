"""A hook of MkDocs that includes files of the repository: `<!-- include: MODELS.md -->`.

Links of an included file are relative to its folder in the repository; they are rewritten for the site.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
INCLUDE = re.compile(r"^<!-- include: (\S+) -->$", re.M)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
PAGES = {"MODELS.md": "models.md", "benchmarks/RESULTS.md": "results.md", "CHANGELOG.md": "changelog.md"}


def on_page_markdown(markdown: str, /, **_: Any) -> str:
    """Return the page with its includes; called by MkDocs for every page."""
    return INCLUDE.sub(lambda found: included(found[1]), markdown)


def included(name: str) -> str:
    """Return the text of a file of the repository for a page at the top of the docs."""
    path = ROOT / name
    if not path.is_file():
        raise FileNotFoundError(f"{name} is not in the repository; correct the include.")
    return LINK.sub(lambda link: _moved(link, posixpath.dirname(name)), path.read_text(encoding="utf-8"))


def _moved(link: re.Match[str], folder: str) -> str:
    picture, text, address, anchor = link[1], link[2], link[3], link[4] or ""
    if re.match(r"[a-z]+:", address):
        return link[0]
    target = os.path.normpath(posixpath.join(folder, address)).replace("\\", "/")
    if target in PAGES:
        return f"{picture}[{text}]({PAGES[target]}{anchor})"
    if target.startswith("docs/"):
        return f"{picture}[{text}]({target.removeprefix('docs/')}{anchor})"
    return text if target in text else f"{text} (`{target}`)"  # a file that is not part of the site
