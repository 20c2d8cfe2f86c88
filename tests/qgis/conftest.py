"""The plugin without QGIS as the package `sader_qgis`, because its own name is that of the tool."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "qgis" / "sader"


def _load(name: str, path: Path, **more: list[str]) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=more.get("inside"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def plugin() -> Path:
    """The folder of the plugin."""
    return PLUGIN


@pytest.fixture(scope="session")
def command() -> ModuleType:
    """`qgis/sader/command.py`."""
    _load("sader_qgis", PLUGIN / "__init__.py", inside=[str(PLUGIN)])
    return importlib.import_module("sader_qgis.command")


@pytest.fixture(scope="session")
def form(command: ModuleType) -> ModuleType:
    """`qgis/sader/form.py`."""
    return importlib.import_module("sader_qgis.form")


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make qgis` writes."""
    tool = _load("qgis_plugin", ROOT / "tools" / "qgis_plugin.py")
    made: Path = tool.build(tmp_path_factory.mktemp("plugin"))
    return made
