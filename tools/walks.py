"""Count how much code there is and how much of it one operation enters.

    python tools/walks.py                     # a table of the checked-out tree
    python tools/walks.py --src OTHER/src     # of another tree, to compare
    python tools/walks.py --json counts.json  # the same counts, and the lists of files, for scripts
    python tools/walks.py --folders           # modules and lines of each folder instead

Counts of the source:

- lines and modules: every `.py` file under `src/sader`, blank lines included.
- module cycles: groups of modules that import each other, imports inside functions included. An import under
  `if TYPE_CHECKING` does not run and is not counted.
- package circles: the same between the folders directly under `sader`. A module outside of any folder (`errors.py`)
  counts as a package of its own; the table also gives the number of packages in the largest circle.

Counts of a run, on a CPU with the shipped weights and images of 64 x 96 pixels:

- call:   `remover(cloudy, reference=0)`, one tile, after the model was loaded.
- remove: `sader remove a.tif b.tif -o clear.tif`, two tiles, from the first line of the command to the last.
- step:   one training step of the preset `small`, the log, the checkpoint and the next batch included.

A file counts when one of its functions is entered, in any thread; running the body of a module or a class, with its
comprehensions, is an import and does not count. Depth is the number of the package's own frames on the stack at
`MTCDN.forward`, itself, lambdas and comprehensions included; work given to a thread pool counts from the function that
submitted it.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import inspect
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

WALKS = ("call", "remove", "step")
BANDS = ("B02", "B03", "B04", "B08")
SHAPE = (64, 96)

Graph = dict[str, set[str]]


@dataclass
class Source:
    """Counts of the source text."""

    lines: int
    modules: int
    cycles: list[list[str]]
    circles: list[list[str]]


@dataclass
class Walk:
    """Functions of the package entered by one operation."""

    files: list[str] = field(default_factory=list)
    """Paths relative to the package, in the order in which they are first entered."""
    functions: int = 0
    depth: int = 0
    """Functions of the package on the stack at `MTCDN.forward`; 0 when it was never called."""


# ------------------------------------------------------------------------------------------------------- the source


def module_paths(package: Path) -> dict[str, Path]:
    """Return the path of every module of a package by its dotted name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_names(tree: ast.Module) -> Iterator[str]:
    """Yield "a.b" for `import a.b` and "a.b.c" for `from a.b import c`, wherever they stand in the module."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        waiting.extend(ast.iter_child_nodes(node))


def import_graph(package: Path) -> Graph:
    """Return the modules of the package that each module imports."""
    paths = module_paths(package)
    graph: Graph = {}
    for module, path in paths.items():
        graph[module] = set()
        for name in imported_names(ast.parse(path.read_text(encoding="utf-8"))):
            while name and name not in paths:  # a function or class: its module
                name = name.rpartition(".")[0]
            if name and name != module:
                graph[module].add(name)
    return graph


def cycles(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components of more than one node, each sorted, the largest first."""
    reachable = {node: _reachable(graph, node) for node in graph}
    groups = {
        tuple(sorted({node} | {other for other in reachable[node] if node in reachable[other]})) for node in graph
    }
    return sorted((list(group) for group in groups if len(group) > 1), key=lambda group: (-len(group), group))


def _reachable(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for node in graph[waiting.pop()] - found:
            found.add(node)
            waiting.append(node)
    return found


def package_graph(modules: Graph) -> Graph:
    """Return the imports between the folders and single modules directly under the package's root."""

    def top(module: str) -> str:
        return module.split(".")[1] if "." in module else "__init__"

    graph: Graph = {top(module): set() for module in modules}
    for module, targets in modules.items():
        graph[top(module)] |= {top(target) for target in targets} - {top(module)}
    return graph


def count_source(package: Path) -> Source:
    """Return the counts of a package's source text."""
    graph = import_graph(package)
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in module_paths(package).values())
    return Source(lines, len(graph), cycles(graph), cycles(package_graph(graph)))


# --------------------------------------------------------------------------------------------------------- the runs


class Recorder:
    """Records the functions of a package that are entered between `start` and `stop`, in all threads."""

    def __init__(self, package: Path, *, inside: tuple[str, str] | None = None) -> None:
        """inside: a file and a function's name; only its first call is recorded instead of everything."""
        self._root = str(package) + "/"
        self._inside = inside
        self._recording = inside is None
        self._outer: FrameType | None = None
        self._entered: dict[CodeType, None] = {}
        self._given_away: dict[int, int] = {}
        self.depth = 0

    def __enter__(self) -> Recorder:
        self._submit = concurrent.futures.ThreadPoolExecutor.submit
        concurrent.futures.ThreadPoolExecutor.submit = self._submit_from_here()  # type: ignore[method-assign]
        threading.setprofile(self._event)
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        concurrent.futures.ThreadPoolExecutor.submit = self._submit  # type: ignore[method-assign]

    def walk(self) -> Walk:
        """Return what was recorded."""
        files = dict.fromkeys(code.co_filename.removeprefix(self._root) for code in self._entered)
        named = {code for code in self._entered if not code.co_name.startswith("<")}
        return Walk(list(files), len(named), self.depth)

    def _event(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(self._root):
            return
        if event == "return" and frame is self._outer:
            self._recording = False
        if event != "call" or not code.co_flags & inspect.CO_NEWLOCALS:
            return
        if code.co_name.startswith("<") and frame.f_back and not frame.f_back.f_code.co_flags & inspect.CO_NEWLOCALS:
            return  # a comprehension in the body of a module or a class
        if self._inside and self._outer is None and self._matches(code, *self._inside):
            self._recording, self._outer = True, frame
        if self._recording:
            self._entered[code] = None
            if self._matches(code, "model/mtcdn.py", "forward"):
                self.depth = max(self.depth, self._depth(frame))

    def _matches(self, code: CodeType, file: str, function: str) -> bool:
        return code.co_name == function and code.co_filename == self._root + file

    def _depth(self, frame: FrameType | None) -> int:
        """Return the package's functions on the stack of a frame, from the recorded function on."""
        count = self._given_away.get(threading.get_ident(), 0)
        while frame is not None:
            code = frame.f_code
            count += code.co_filename.startswith(self._root)
            if frame is self._outer:
                break
            frame = frame.f_back
        return count

    def _submit_from_here(self) -> Callable[..., Any]:
        submit = self._submit

        def with_depth(pool: Any, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
            depth = self._depth(sys._getframe(1))

            def run() -> Any:
                self._given_away[threading.get_ident()] = depth
                return function(*arguments, **options)

            return submit(pool, run)

        return with_depth


def walk_call(package: Path, _folder: Path) -> Walk:
    """Profile one prediction from arrays by a model that is loaded."""
    import numpy as np

    import sader

    remover = sader.CloudRemover.from_pretrained("sader-s2-rgbn")
    cloudy = np.stack([_image(seed) for seed in range(2)]).astype("float32") / 10000
    with Recorder(package) as recorder:
        remover(cloudy, reference=0)
    return recorder.walk()


def walk_remove(package: Path, folder: Path) -> Walk:
    """Profile the command that removes the clouds of two GeoTIFF files."""
    import rasterio

    names = []
    for seed in range(2):
        names.append(str(folder / f"2022-06-{seed + 1:02d}.tif"))
        profile = {"count": len(BANDS), "height": SHAPE[0], "width": SHAPE[1], "dtype": "uint16", "nodata": 0}
        grid = {"crs": "EPSG:32632", "transform": rasterio.Affine(10, 0, 600000, 0, -10, 5100000)}
        with rasterio.open(names[-1], "w", driver="GTiff", **profile, **grid) as file:
            file.write(_image(seed))
            file.descriptions = BANDS
    main = _command_line()
    with Recorder(package) as recorder:
        main(["remove", *names, "-o", str(folder / "clear.tif"), "--tile", "64", "--overlap", "32"])
    return recorder.walk()


def walk_step(package: Path, folder: Path) -> Walk:
    """Profile the first step of a training run, with the checkpoint and the batch that follow it."""
    import numpy as np

    from sader.data.shards import SeriesRecord, write_shard

    dn = np.stack([_image(seed) for seed in range(4)])
    labels = np.zeros((4, *SHAPE), np.uint8)
    labels[1:, 10:40] = 1
    write_shard(folder / "train-000.shard", [SeriesRecord(dn, "place", "cloudsen12", BANDS, labels, group="train")])
    settings = {"device": "cpu", "batch_size": 4, "dates": 2, "crop": 48, "steps": 2, "validate_every": 0}
    settings |= {"log_every": 1, "checkpoint_every": 1}
    options = [word for key, value in settings.items() for word in ("--set", f"train.{key}={value}")]
    main = _command_line()
    old = (package / "training" / "module.py").is_file()  # a tree whose steps were run by Lightning
    inside = ("training/module.py", "training_step") if old else ("training/run.py", "step")
    with Recorder(package, inside=inside) as recorder:
        main(["train", "small", "--data", str(folder), "--run", str(folder / "run"), "--quiet", *options])
    return recorder.walk()


def _image(seed: int) -> Any:
    """Return the stored values (C, H, W) of one date: one forest with the noise of the date; the first has a cloud."""
    import numpy as np

    reflectance = np.array([300, 500, 400, 2500])[:, None, None]
    texture = np.random.default_rng(7).normal(1, 0.08, SHAPE) * np.random.default_rng(seed).normal(1, 0.02, SHAPE)
    image = reflectance * texture
    if seed == 0:
        image[:, 20:40, 30:60] = 7000
    return np.clip(np.rint(image), 1, 20000).astype(np.uint16)


def _command_line() -> Callable[[list[str]], None]:
    """Return a function that runs a `sader` command in this process, without the handling of errors around it."""
    from sader.cli import main as entry

    app: Any = getattr(entry, "app", None) or sys.modules["sader.cli"].app  # sader.cli used to be one module

    def run(words: list[str]) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            app(words, standalone_mode=False)

    return run


def profile(name: str, package: Path) -> Walk:
    """Return the counts of one operation, run in a process of its own."""
    command = [sys.executable, __file__, "--src", str(package.parent), "--walk", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the walk {name!r} failed:\n{done.stderr}")
    return Walk(**json.loads(done.stdout.splitlines()[-1]))


def _profile_here(name: str, package: Path) -> Walk:
    sys.path.insert(0, str(package.parent))
    import torch

    import sader

    if Path(sader.__file__).parent != package:
        raise RuntimeError(f"imported {sader.__file__}, not the package at {package}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return {"call": walk_call, "remove": walk_remove, "step": walk_step}[name](package, Path(folder))


def table(source: Source, walks: dict[str, Walk]) -> str:
    """Return the counts as a Markdown table."""
    largest = max((len(circle) for circle in source.circles), default=0)
    rows = [
        ("lines in src", source.lines),
        ("modules in src", source.modules),
        ("module cycles (modules in them)", f"{len(source.cycles)} ({sum(map(len, source.cycles))})"),
        ("package circles (packages in the largest)", f"{len(source.circles)} ({largest})"),
    ]
    for name, walk in walks.items():
        outside = sum(not file.startswith("model/") for file in walk.files)
        rows.append((f"{name}: files (outside model/), functions, depth", ", ".join(
            (f"{len(walk.files)} ({outside})", str(walk.functions), str(walk.depth))
        )))  # fmt: skip
    return "\n".join(["| count | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def folder_table(package: Path) -> str:
    """Return modules (without `__init__`) and lines of each folder by kind, as Markdown."""
    names = ("modules", "lines", "code", "docstrings", "imports", "blank")
    rows = [f"| folder | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    totals = dict.fromkeys(names, 0)
    for folder in sorted({path.parent for path in package.rglob("*.py")}):
        counts = dict.fromkeys(names, 0)
        for path in folder.glob("*.py"):
            for name, count in _kinds_of_lines(path.read_text(encoding="utf-8")).items():
                counts[name] += count
            counts["modules"] += path.stem != "__init__"
        rows.append(f"| {folder.relative_to(package).as_posix()} | {' | '.join(map(str, counts.values()))} |")
        totals = {name: totals[name] + counts[name] for name in names}
    return "\n".join([*rows, f"| **all** | {' | '.join(map(str, totals.values()))} |"])


def _kinds_of_lines(text: str) -> dict[str, int]:
    """Return the lines of a module; a docstring is any string that stands alone, comments count as code."""
    tree = ast.parse(text)
    full = {number for number, line in enumerate(text.splitlines(), start=1) if line.strip()}

    def lines_of(nodes: Iterator[ast.stmt]) -> int:
        return len({number for node in nodes for number in range(node.lineno, (node.end_lineno or 0) + 1)} & full)

    alone = (node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    documents = lines_of(node for node in alone if isinstance(node.value.value, str))
    imports = lines_of(node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    total = len(text.splitlines())
    kinds = {"lines": total, "code": len(full) - documents - imports, "docstrings": documents, "imports": imports}
    return {**kinds, "blank": total - len(full)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the source and the files that one operation enters.")
    parser.add_argument("--src", type=Path, default=Path(__file__).parents[1] / "src", help="folder that holds sader/")
    parser.add_argument("--json", type=Path, help="also write the counts to this file")
    parser.add_argument("--walk", choices=WALKS, help="only this walk, in this process, as one line of JSON")
    parser.add_argument("--folders", action="store_true", help="only the lines of each folder")
    given = parser.parse_args()
    package = given.src.resolve() / "sader"
    if given.folders:
        print(folder_table(package))
        return
    if given.walk:
        print(json.dumps(asdict(_profile_here(given.walk, package))))
        return
    source, walks = count_source(package), {name: profile(name, package) for name in WALKS}
    print(table(source, walks))
    for cycle in source.cycles:
        print("cycle:", ", ".join(cycle))
    for circle in source.circles:
        print("circle:", ", ".join(circle))
    if given.json:
        counts = {"source": asdict(source), "walks": {name: asdict(walk) for name, walk in walks.items()}}
        given.json.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
