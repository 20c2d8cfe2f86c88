"""Hooks of MkDocs: files of the repository are included (`<!-- include: MODELS.md -->`), notebooks become pages.

Links of an included file are relative to its folder in the repository; they are rewritten for the site. The pages of
notebooks show the stored outputs; nothing is executed.
"""

from __future__ import annotations

import base64
import json
import os
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
INCLUDE = re.compile(r"^<!-- include: (\S+) -->$", re.M)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
PAGES = {
    "MODELS.md": "models.md",
    "benchmarks/RESULTS.md": "measurements.md",
    "docs/results.md": "results.md",
    "CHANGELOG.md": "changelog.md",
}


def on_files(files: Any, /, *, config: Any) -> Any:
    """Add a page `notebooks/NAME.md` for each notebook, and its pictures; called by MkDocs once."""
    from mkdocs.structure.files import File

    for path in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")):
        text, pictures = notebook_page(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and the pictures in it by name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/jpeg" in data:
                name = f"{path.stem}-{len(pictures)}.jpg"
                pictures[name] = base64.b64decode("".join(data["image/jpeg"]))
                parts.append(f"![Output]({name})")
            elif text := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
                parts.append(f"```text\n{text}\n```")
    parts.append(f"*This page is `{path.relative_to(ROOT).as_posix()}` with its stored outputs.*")
    return "\n\n".join(parts) + "\n", pictures


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
