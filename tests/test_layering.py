"""Layering: imports point from higher folders to lower ones, and the core imports without optional packages."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import sader

PACKAGE = Path(sader.__file__).parent
CORE = {"torch", "numpy", "einops", "safetensors"}
EDGE_PACKAGES = {"rasterio", "xarray", "dask", "pystac", "typer", "rich", "PIL", "fastapi", "yaml"}

# Lowest first. A module may import from its own folder and from those before it.
RANKS: tuple[tuple[str, ...], ...] = (
    ("errors", "_version", "files", "bands", "config"),
    ("model",),
    ("method",),
    ("data",),
    ("baselines",),
    ("models", "checkpoint"),
    ("inference",),
    ("figures",),
    ("geo",),
    ("training",),
    ("evaluation",),
    ("demo", "viewer"),
    ("cli", "__main__"),
)


def rank_of(module: str) -> int | None:
    """Return the rank of a module's folder ("model.blocks" -> that of model), or None for an unknown folder."""
    folder = module.split(".")[0]
    return next((rank for rank, names in enumerate(RANKS) if folder in names), None)


def modules() -> list[tuple[str, Path]]:
    """(dotted name without "sader.", path) of every module except the lazy top-level `__init__`."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        if parts:
            found.append((".".join(parts), path))
    return found


def imports(path: Path, *, top_only: bool = False) -> Iterator[str]:
    """Every imported module of a file as a dotted name, except those for type checkers only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    checked_only = {
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    for node in tree.body if top_only else ast.walk(tree):
        if node in checked_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: write absolute imports"
            yield node.module or ""


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_point_down(module, path):
    rank = rank_of(module)
    assert rank is not None, f"{module} is in no folder of RANKS"
    for name in imports(path):
        if name.startswith("sader."):
            target = rank_of(name.removeprefix("sader."))
            assert target is not None, f"{module} imports {name}, which is in no folder of RANKS"
            assert target <= rank, f"{module} imports {name}, which lies above it"


@pytest.mark.parametrize(
    ("module", "path"),
    [(m, p) for m, p in modules() if (rank_of(m) or 0) <= 2 and m != "config"],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_model_and_method_import_the_core_only(module, path):
    standard = set(sys.stdlib_module_names)
    for name in imports(path):
        package = name.split(".")[0]
        assert package in CORE | standard | {"sader"}, f"{module} imports {name}"


def test_optional_packages_are_never_imported_at_the_top():
    homes = {"figures.picture": {"PIL"}}
    for module, path in modules():
        if module.startswith(("training", "viewer.")):  # Lightning's and FastAPI's own folders
            continue
        found = {name.split(".")[0] for name in imports(path, top_only=True)} & EDGE_PACKAGES
        allowed = {"typer"} if module.startswith("cli.") else homes.get(module, set())
        assert found <= allowed, f"{module} imports {found} at its top"


def test_the_package_names_all_it_resolves():
    assert set(sader.__all__) == {"__version__", *sader._WHERE}


def test_the_core_works_with_everything_else_blocked(tmp_path):
    """A subprocess in which the optional packages cannot be imported builds the network all the same."""
    program = f"""
        import sys
        BLOCKED = {sorted(EDGE_PACKAGES | {"scipy", "skimage", "matplotlib", "torchmetrics", "tensorboard", "jax"})!r}

        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in BLOCKED:
                    raise ImportError(f"{{name}} is blocked")

        sys.meta_path.insert(0, Block())
        import sader
        assert "torch" not in sys.modules, "import sader is lazy"
        for name in sader.__all__:
            getattr(sader, name)
        sader.MTCDN()
        import sader.method.losses, sader.method.metrics, sader.method.resampling
        import sader.data.synthetic.scene, sader.baselines.classical
        try:
            import sader.geo.read.raster as raster, numpy
            grid = {{"crs": "EPSG:32632", "transform": (1, 0, 0, 0, -1, 0)}}
            raster.write_geotiff("a.tif", numpy.zeros((1, 2, 2)), bands=["B02"], **grid)
        except sader.errors.MissingDependencyError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == 'writing GeoTIFF needs rasterio. Run: pip install "sader[geo]"'
