"""Every code block of README and docs is run, and so are the notebooks.

The blocks of a page run in order, in one folder and one Python session. Shell blocks are run in this process without a
shell, because starting Python for every line would take minutes. `console` blocks show a failing command and its
message. A block that cannot be run has a comment with the reason above it: <!-- not run: needs the network -->.
"""

from __future__ import annotations

import glob
import importlib
import io
import itertools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sader.checkpoint import WEIGHTS_DIR, load_checkpoint
from sader.cli.main import main
from sader.data.synthetic.scene import make_series

pytest.importorskip("rasterio")

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))

EXPECTED = {
    "README.md": (2, 1),
    "docs/api.md": (1, 0),
    "docs/catalogues.md": (1, 8),
    "docs/changelog.md": (0, 0),
    "docs/benchmark.md": (0, 4),
    "docs/compare.md": (4, 2),
    "docs/datasets.md": (0, 1),
    "docs/getting-started.md": (3, 3),
    "docs/how-it-works.md": (2, 0),
    "docs/index.md": (0, 0),
    "docs/install.md": (0, 3),
    "docs/limits.md": (0, 0),
    "docs/masks.md": (3, 0),
    "docs/method.md": (5, 1),
    "docs/models.md": (0, 0),
    "docs/own-scene.md": (10, 2),
    "docs/qgis.md": (0, 1),
    "docs/reproduce.md": (2, 1),
    "docs/measurements.md": (0, 0),
    "docs/results.md": (0, 1),
    "docs/scale.md": (3, 7),
    "docs/settings.md": (3, 0),
    "docs/training.md": (6, 2),
    "docs/troubleshooting.md": (18, 1),
    "docs/uncertainty.md": (3, 0),
    "docs/values.md": (0, 0),
}
"""Page -> (blocks that are run, blocks that are not), so that a block that is not recognised fails the test."""

CONTINUES = {"docs/compare.md": "docs/training.md"}
"""Page -> page whose files it uses."""
REASONS = (
    "installs packages",
    "needs the network",
    "needs a dataset",
    "needs predictions",
    "needs QGIS",
    "needs a cluster",
    "takes a GPU",
    "the server runs until",
    "the answer depends on",
)
COMMANDS = ("make", "sader", "pip", "git", "python")
FENCE = re.compile(r"^```(\w+)(.*)$")
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")


@dataclass(frozen=True)
class Block:
    """One code block of a page."""

    kind: str
    text: str
    line: int
    title: str | None = None
    reason: str | None = None
    """Reason why it is not run."""


def blocks(path: Path) -> Iterator[Block]:
    """Yield the fenced blocks, and indented blocks that start with a command."""
    lines = path.read_text(encoding="utf-8").splitlines()
    number, above = 0, ""
    while number < len(lines):
        line, start = lines[number], number + 1
        fence = FENCE.match(line)
        indented = line.startswith("    ") and line.split()[:1] and not lines[number - 1].strip()
        body: list[str] = []
        if fence or line.startswith("```"):
            number += 1
            while not lines[number].startswith("```"):
                body.append(lines[number])
                number += 1
            kind = fence[1] if fence else ""
        elif indented:
            while number < len(lines) and (lines[number].startswith("    ") or not lines[number].strip()):
                body.append(lines[number][4:])
                number += 1
            number -= 1
            kind = "shell" if body[0].split()[0] in COMMANDS else "formula"
        if body:
            found = NOT_RUN.search(above)
            title = re.search(r'title="([^"]+)"', fence[2]) if fence else None
            assert kind, f"{path.name}:{start}: a block without a language"
            if kind != "formula":
                yield Block(kind, "\n".join(body), start, title[1] if title else None, found[1] if found else None)
        if line.strip():
            above = line if not body else ""
        number += 1


def run_line(line: str) -> tuple[int, str]:
    """Run one shell line; return its exit status and everything it printed."""
    words = [w for word in shlex.split(line, comments=True) for w in (sorted(glob.glob(word)) or [word])]
    if words[0] == "python":
        done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr
    assert words[0] == "sader", f"cannot run {line!r}: mark the block as not run, or extend run_line"
    text, status = io.StringIO(), 0
    with redirect_stdout(text), redirect_stderr(text):
        try:
            main(words[1:])
        except SystemExit as error:
            status = int(error.code or 0)
    return status, text.getvalue()


def run_block(block: Block, names: dict[str, Any], page: str) -> None:
    where = f"{page}:{block.line}"
    if block.kind == "python":
        with redirect_stdout(io.StringIO()):
            exec(compile(block.text, where, "exec"), names)
    elif block.kind == "yaml":
        assert block.title, f"{where}: a YAML block needs the name of its file as title"
        Path(block.title).write_text(block.text + "\n", encoding="utf-8")
    elif block.kind in ("shell", "bash", "sh"):
        for line in block.text.replace("\\\n", " ").splitlines():
            if line.split("#")[0].strip():
                status, output = run_line(line)
                assert status == 0, f"{where}: {line}\n{output}"
    elif block.kind == "console":
        command, *wanted = block.text.splitlines()
        status, output = run_line(command.removeprefix("$ "))
        pattern = ".*".join(re.escape(part) for part in " ".join(wanted).split("..."))
        assert re.search(pattern, " ".join(output.split())), f"{where}: {command}\n{output}"
        assert status == 2, f"{where}: exit status {status}"
    else:
        raise AssertionError(f"{where}: a block of unknown kind {block.kind!r}")


@pytest.fixture(scope="module")
def run_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Run a page in a folder with the practice scene; a page that others continue is run once.

    `sader demo` uses a smaller scene here; the full one is run in test_examples.py. Shipped weights are loaded once.
    """
    import sader.demo
    import sader.inference.remover

    folders: dict[str, Path] = {}
    patch = pytest.MonkeyPatch()
    patch.setattr(sader.demo, "demo_scene", lambda: make_series(7, size=(96, 128), coverage=0.3))
    shipped = {path: cache(partial(load_checkpoint, path)) for path in WEIGHTS_DIR.rglob("*.safetensors")}
    patch.setattr(
        sader.inference.remover, "load_checkpoint", lambda path: shipped.get(path, partial(load_checkpoint, path))()
    )

    def run(page: str) -> Path:
        if page in folders:
            return folders[page]
        before = CONTINUES.get(page)
        folder = run(before) if before else tmp_path_factory.mktemp("page")
        names: dict[str, Any] = {"__name__": "page"}
        with chdir(folder):
            if not before:
                practice_scene(names)
            for block in blocks(ROOT / page):
                if block.reason is None:
                    run_block(block, names, page)
        folders[page] = folder
        return folder

    yield run
    patch.undo()


def practice_scene(names: dict[str, Any]) -> None:
    """Write the files of "Your own scene" with its own code, and the invalid files of "Troubleshooting"."""
    import rasterio

    first = next(block for block in blocks(DOCS / "own-scene.md") if block.kind == "python")
    practice: dict[str, Any] = {}
    exec(compile(first.text, "own-scene.md", "exec"), practice)
    names["cloudy"] = practice["series"].cloudy  # the input of the README's Python block
    whole = Path("S2_2022-03-10.tif")
    Path("broken.tif").write_bytes(whole.read_bytes()[:3000])
    with rasterio.open(whole) as file:
        counts, profile, bands = file.read(), file.profile, file.descriptions
    invalid = {
        "unnamed.tif": (counts, {}, (None,) * 4),
        "byte.tif": ((counts // 64).astype(np.uint8), {"dtype": "uint8"}, bands),
        "bright.tif": (counts / np.float32(500), {"dtype": "float32", "predictor": 1, "nodata": None}, bands),
        "elsewhere.tif": (counts, {"transform": rasterio.Affine(10, 0, 700000, 0, -10, 5200000)}, bands),
        "classes.tif": (np.full((1, *counts.shape[1:]), 7, np.uint8), {"dtype": "uint8", "count": 1}, (None,)),
    }
    for name, (values, changes, descriptions) in invalid.items():
        with rasterio.open(name, "w", **(profile | changes)) as file:
            file.write(values)
            file.descriptions = descriptions


LONG_PAGES = ("docs/compare.md", "docs/reproduce.md", "docs/scale.md")
"""Pages whose commands take long; the last starts processes, each of which imports everything."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page in LONG_PAGES else ())
        for page, (runs, _) in EXPECTED.items()
        if runs
    ],
)
def test_every_block_runs(page: str, run_page: Any) -> None:
    run_page(page)


def test_every_page_and_block_is_listed() -> None:
    pages = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    found = {}
    for path in pages:
        all_blocks = list(blocks(path))
        marked = [block for block in all_blocks if block.reason is not None]
        for block in marked:
            assert str(block.reason).startswith(REASONS), (
                f"{path.name}:{block.line}: {block.reason!r} is not a known reason"
            )
        found[path.relative_to(ROOT).as_posix()] = (len(all_blocks) - len(marked), len(marked))
    assert found == EXPECTED


def test_fenced_indented_and_marked_blocks_are_recognised(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "text\n\n    make demo   # words\n    sader info\n\ntext\n\n    a = b * c\n\n"
        "```python\nx = 1\n\ny = 2\n```\n<!-- not run: needs the network -->\n```shell\npip list\n```\n\n"
        '```yaml title="a.yaml"\nbase: small\n```\n'
    )
    assert [(b.kind, b.line, b.title, b.reason) for b in blocks(page)] == [
        ("shell", 3, None, None),
        ("python", 10, None, None),
        ("shell", 16, None, "needs the network"),
        ("yaml", 20, "a.yaml", None),
    ]


def test_a_failing_block_fails_the_test(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run_block(Block("python", "1 / 0", 1), {}, "page")
    with pytest.raises(AssertionError, match="page:1"):
        run_block(Block("shell", "sader info unknown", 1), {}, "page")
    with pytest.raises(AssertionError, match="page:1"):
        run_block(Block("console", "$ sader info unknown\nCheckpointError: all is well", 1), {}, "page")


def test_pages_pictures_and_api_names_exist() -> None:
    yaml = pytest.importorskip("yaml")
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    navigation = re.findall(r"[\w/-]+\.md", json.dumps(yaml.safe_load(text)["nav"]))
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(navigation) == sorted([*pages, *(f"notebooks/{path.stem}.md" for path in NOTEBOOKS)])
    for path in DOCS.rglob("*.md"):
        for picture in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / picture).is_file(), f"{path.name}: {picture}"
    for name in re.findall(r"^::: (\S+)", (DOCS / "api.md").read_text(encoding="utf-8"), re.M):
        module, _, last = name.rpartition(".")
        assert importlib.util.find_spec(name) if module == "sader" else hasattr(importlib.import_module(module), last)


def test_documents_name_no_work_items_and_no_files_outside_the_repository() -> None:
    inside = re.compile(r"\b(?:issue|session) \d|scratch script|/work/|\b(?:METHOD|LESSONS|HOUSE|USERS|BASELINES)\b")
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
    assert len(pages) > 20
    for path in pages:
        assert not (found := inside.search(path.read_text(encoding="utf-8"))), f"{path.name}: {found}"


def test_paths_in_contributing_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("No `utils.py`", "")
    paths = set(re.findall(r"`([\w/.]+(?:\.py|/))`", text))
    assert len(paths) > 30
    missing = [path for path in paths if not (ROOT / path).exists() and not (ROOT / "src/sader" / path).exists()]
    assert not missing, f"CONTRIBUTING.md names {missing}"


def slug(heading: str) -> str:
    """Return the anchor that MkDocs and GitHub give a heading."""
    return re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")


def test_citations_of_the_method_name_an_existing_section() -> None:
    headings = re.findall(r"^#+ (.+)$", (DOCS / "method.md").read_text(encoding="utf-8"), re.M)
    anchors = {slug(heading) for heading in headings}
    for path in [*(ROOT / "src").rglob("*.py"), *DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for anchor in re.findall(r"method\.md#([\w-]+)", path.read_text(encoding="utf-8")):
            assert anchor in anchors, f"{path.name}: docs/method.md has no section #{anchor}"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_gives_the_stored_kinds_of_output(path: Path, tmp_path: Path) -> None:
    """In a kernel, as a user runs it; figures may differ in the last digit between machines."""
    for package in ("xarray", "nbclient", "ipykernel"):
        pytest.importorskip(package)
    sys.path.insert(0, str(ROOT / "tools"))
    from notebooks import execute

    stored = json.loads(path.read_text(encoding="utf-8"))
    assert path.stat().st_size < 400_000
    assert kinds(execute(path, str(tmp_path))) == kinds(stored)
    assert ["image/jpeg"] in kinds(stored) or path.stem == "own_time_series"


def kinds(notebook: Any) -> list[list[str]]:
    """Return the kinds of output of each code cell that has any.

    A slow kernel sends the printed text of a cell in several parts, which count as one.
    """
    cells = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    found = [[kind for one in outputs for kind in one.get("data", {"text": ""})] for outputs in cells]
    assert "error" not in [one["output_type"] for outputs in cells for one in outputs]
    return [[kind for kind, _ in itertools.groupby(each)] for each in found if each]


def test_notebooks_tell_the_four_stories_with_outputs_and_without_errors() -> None:
    stories = ["first_result", "flooded_town", "own_time_series", "train_your_own", "year_of_a_field"]
    assert [path.stem for path in NOTEBOOKS] == stories
    for path in NOTEBOOKS:
        assert len(kinds(json.loads(path.read_text(encoding="utf-8")))) >= 3, f"{path.name}: python tools/notebooks.py"


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_without_outside_resources(tmp_path: Path) -> None:
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package)
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outside = re.compile(r"<(?:link|script|img|iframe)[^>]+(?:src|href)=[\"']?(?:https?:)?//[^\"'> ]+")
    for page in (tmp_path / "site").rglob("*.html"):
        found = [tag for tag in outside.findall(page.read_text(encoding="utf-8")) if "canonical" not in tag]
        assert not found, f"{page.name}: {found[:3]}"
