"""The size of the source and the length of its longest paths stay below fixed limits (`tools/walks.py` counts them)."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import sader

PACKAGE = Path(sader.__file__).parent
ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools" / "walks.py"

LINES, MODULES = 40_184, 192
CYCLES, CIRCLES = 0, 0
FILES_IN_A_FOLDER, FULL_FOLDERS = 12, 1
FUNCTION_LINES, LONG_FUNCTIONS = 80, 4
PARAMETERS, CROWDED_FUNCTIONS = 8, 17
"""At most LONG_FUNCTIONS functions have more than FUNCTION_LINES lines; the other pairs are meant likewise. Commands,
whose options are parameters, are not counted in CROWDED_FUNCTIONS."""
ESCAPES = {"fmt: skip": 60, "type: ignore": 16, "assert isinstance": 12}
"""Times that the source works around the formatter or the type checker."""
WALKS = {"call": (16, 7), "remove": (40, 9), "step": (20, 8)}
"""Files entered, and frames of the package down to `MTCDN.forward`."""


@pytest.fixture(scope="module")
def walks() -> ModuleType:
    """`tools/walks.py` as a module."""
    spec = importlib.util.spec_from_file_location("walks", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["walks"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_source_stays_small(walks):
    source = walks.count_source(PACKAGE)
    assert source.lines <= LINES
    assert source.modules <= MODULES
    assert len(source.cycles) <= CYCLES, source.cycles
    assert len(source.circles) <= CIRCLES, source.circles


@pytest.mark.slow
@pytest.mark.parametrize("name", WALKS)
def test_an_operation_enters_few_files(walks, name):
    files, depth = WALKS[name]
    walk = walks.profile(name, PACKAGE)
    assert 0 < len(walk.files) <= files, walk.files
    assert 0 < walk.depth <= depth


def test_folders_hold_few_files():
    folders = {path for path in PACKAGE.rglob("*") if path.is_dir() and (path / "__init__.py").exists()} | {PACKAGE}
    modules = {folder: [p.name for p in folder.glob("*.py") if not p.name.startswith("_")] for folder in folders}
    modules.pop(PACKAGE / "baselines" / "systems")  # one file for each system of the tables of the paper
    full = {folder.name: len(names) for folder, names in modules.items() if len(names) > FILES_IN_A_FOLDER}
    assert len(full) <= FULL_FOLDERS, full


def test_every_folder_describes_itself():
    silent = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("__init__.py")
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not silent


@cache
def functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    return list(_functions())


def _functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path.relative_to(PACKAGE).as_posix()}:{node.name}", node


def test_functions_are_short():
    lines = {name: (node.end_lineno or node.lineno) - node.lineno + 1 for name, node in functions()}
    long = {name: count for name, count in lines.items() if count > FUNCTION_LINES}
    assert len(long) <= LONG_FUNCTIONS, long


def test_functions_have_few_parameters():
    crowded = {}
    for name, node in functions():
        taken = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len([one for one in taken if one not in ("self", "cls")])
        if count > PARAMETERS and not name.startswith("cli/"):
            crowded[name] = count
    assert len(crowded) <= CROWDED_FUNCTIONS, crowded


@pytest.mark.parametrize("words", ESCAPES)
def test_few_places_work_around_the_tools(words):
    found = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if words in line
    ]
    assert len(found) <= ESCAPES[words], found


def test_cycles_are_found(walks, tmp_path):
    package = tmp_path / "pack"
    (package / "low").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "low" / "__init__.py").write_text("")
    (package / "low" / "one.py").write_text("def late():\n    from pack.low import two\n")
    (package / "low" / "two.py").write_text("from pack.low.one import late\n")
    (package / "high.py").write_text("from pack.low.two import late\n")
    source = walks.count_source(package)
    assert source.cycles == [["pack.low.one", "pack.low.two"]]
    assert source.circles == []
    assert (source.lines, source.modules) == (4, 5)
    (package / "low" / "one.py").write_text("import pack.high\n")
    assert walks.count_source(package).circles == [["high", "low"]]
    (package / "low" / "one.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pack.high\n"
    )
    assert walks.count_source(package).cycles == []


SCRIPTS = sorted(path for folder in ("tools", "benchmarks") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_scripts_import_names_that_exist(script):
    imports = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.ImportFrom)]
    missing = [f"{node.module}.{name.name}" for node in imports for name in node.names if not found(script, node, name)]
    assert not missing, f"{script.name} imports {', '.join(missing)}"


def found(script: Path, node: ast.ImportFrom, name: ast.alias) -> bool:
    """Whether the module has the name, or is neither beside the script nor of this package."""
    module = node.module or ""
    beside = script.with_name(f"{module}.py")
    if beside.exists():
        defined = rf"^(?:(?:def|class) {name.name}\b|(?:\w+, )*{name.name}\b[^=(]*=)"
        return re.search(defined, beside.read_text(), re.MULTILINE) is not None
    if module.split(".")[0] != "sader":
        return True
    here = importlib.import_module(module)
    return hasattr(here, name.name) or importlib.util.find_spec(f"{module}.{name.name}") is not None
