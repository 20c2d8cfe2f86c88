"""Who may import whom: the core stands on a bare machine, and arrows point one way, from the edges down to errors."""

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
EDGE_PACKAGES = {"rasterio", "xarray", "dask", "pystac", "pytorch_lightning", "typer", "rich", "PIL", "fastapi", "yaml"}

OPTIONAL = {f"model.{name}": {"triton"} for name in ("kernels", "joinkernels", "datekernels", "nearkernels")}
"""Imported only where its package is installed (`model.fused.can_fuse`)."""

# Lowest first; a file may import from its own layer and from those before it.
LAYERS: list[tuple[str, tuple[str, ...]]] = [
    ("errors", ("errors", "_version", "bands")),
    ("model", ("model",)),
    ("method", ("diffusion", "losses", "sampling", "resampling", "metrics", "lpips", "complexity")),
    # The rivals are networks: checkpoints and the pipeline hold them as they hold SADER's own.
    (
        "run",
        (
            "config",
            "presets",
            "checkpoint",
            "inputs",
            "tiling",
            "noisefield",
            "finder",
            "pipeline",
            "removal",
            "tilework",
            "scenematch",
            "tilegraph",
            "backends",
            "export",
            "fast",
            "quicktiles",
            "data.series",
            "baselines",
        ),
    ),
    ("data", ("data", "picture", "report", "geo.stack", "geo.values", "geo.bandnames", "geo.raster")),
    ("training", ("training",)),
    ("geo", ("geo",)),
    ("edges", ("evaluation", "info", "demo", "cli", "bench", "speed_commands", "data.commands", "viewer", "__main__")),
]


SHORTCUTS = {("pipeline", "sader.geo.files"), ("pipeline", "sader.geo.xarrays")}
"""`CloudRemover.remove_files` and `remove_xarray` are one line each: a door, opened only when somebody goes through."""


def layer_of(module: str) -> int | None:
    """The rank of `module` ("model.blocks"); the longest matching entry decides. None: not in the table."""
    found = [
        (len(entry), rank)
        for rank, (_, entries) in enumerate(LAYERS)
        for entry in entries
        if module == entry or module.startswith(entry + ".")
    ]
    return max(found)[1] if found else None


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
def test_arrows_point_one_way(module, path):
    rank = layer_of(module)
    assert rank is not None, f"{module} is in no layer; add it to LAYERS"
    for name in imports(path):
        if name.startswith("sader.") and (module, name) not in SHORTCUTS:
            target = layer_of(name.removeprefix("sader."))
            assert target is not None, f"{module} imports {name}, which is in no layer"
            assert target <= rank, f"{module} ({LAYERS[rank][0]}) imports {name} ({LAYERS[target][0]})"


@pytest.mark.parametrize(
    ("module", "path"),
    [(m, p) for m, p in modules() if (layer_of(m) or 0) <= 2],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_model_and_method_import_the_core_only(module, path):
    standard = set(sys.stdlib_module_names)
    for name in imports(path):
        package = name.split(".")[0]
        assert package in CORE | standard | {"sader"} | OPTIONAL.get(module, set()), f"{module} imports {name}"


def test_optional_packages_are_never_imported_at_the_top():
    homes = {"cli": {"typer"}, "data.commands": {"typer"}, "picture": {"PIL"}}
    for module, path in modules():
        # Training is Lightning's; the viewer is FastAPI's, and only `sader serve` imports more of it than its command.
        if module.startswith("training") or (module.startswith("viewer.") and module != "viewer.commands"):
            continue
        found = {name.split(".")[0] for name in imports(path, top_only=True)} & EDGE_PACKAGES
        assert found <= homes.get(module, set()), f"{module} imports {found} at its top"


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
        import sader.losses, sader.metrics, sader.resampling, sader.data.synthetic, sader.baselines.classical
        try:
            import sader.geo.raster as raster, numpy
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
