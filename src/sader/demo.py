"""`sader demo`: removes the clouds of a real place, scores the result and writes a GeoTIFF and a picture.

Three Sentinel-2 dates of a Finnish river town with real clouds. The date to clean is a clear one into which the clouds
and shadows of a fourth date were copied, so that the truth under them is known. Every method is scored twice: without
masks, as most users have it, and with the true masks. The command line prints the report.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sader.baselines.classical import CLASSICAL, Classical
from sader.checkpoint import shipped
from sader.data.cloud_rules import estimate_cloud_mask
from sader.data.synthetic.scene import SyntheticSeries
from sader.errors import MissingDependencyError, OutputError
from sader.figures.picture import before_after, save_png
from sader.geo.read.raster import write_geotiff
from sader.inference.inputs import parse_steps
from sader.inference.remover import DEFAULT_MODEL, CloudRemover, RemoverOptions
from sader.method.metrics import evaluate
from sader.models import PRESETS, ModelConfig

FALLBACK_PRESET = "small"
UNTRAINED = "Untrained network: the picture shows that the program runs, not how good the method is."
# The scene fits into one tile, so that no overlap is computed twice.
OPTIONS = RemoverOptions(tile=512)

BASELINES: dict[str, Classical] = {
    name.replace("_", " "): CLASSICAL[name]
    for name in ("least_cloudy", "median", "mosaic", "ridge_blend", "local_ridge_blend")
}
"""Row of the table -> classical method; the last is the strongest of them."""

SCENE = Path(__file__).parent / "data" / "demo.npz"
"""Reflectance x 10000 of BioMassters chip 000aa810 (CC BY 4.0, contains modified Copernicus Sentinel data), which is
not among the training data. The masks were found by comparison with clear dates."""
BANDS = ("B02", "B03", "B04", "B08")
# The source gives no coordinates. The CRS and the grid of 10 m pixels let a GIS open the file; a tag states that the
# position is made up.
CRS = "EPSG:32635"
TRANSFORM = (10.0, 0.0, 400_000.0, 0.0, -10.0, 6_700_000.0)
SOURCE_NOTE = (
    "A place in Finland from BioMassters (CC BY 4.0), contains modified Copernicus Sentinel data. Its position on the "
    "map is made up."
)


@dataclass(frozen=True)
class Score:
    """Plain reflectance metrics over one set of pixels."""

    mae: float
    """Mean absolute error in reflectance."""
    psnr: float
    """dB"""
    ssim: float
    sam: float
    """degrees"""


@dataclass(frozen=True)
class Row:
    """One method of the table."""

    method: str
    masks: str
    """"none": the method finds the clouds itself, a classical one by rules. "true": the masks of all dates are
    given."""
    whole: Score
    """All pixels."""
    hidden: Score
    """The pixels under cloud or shadow in the reference date."""


@dataclass(frozen=True)
class DemoReport:
    """The result of a demo run."""

    model: str
    trained: bool
    steps: str
    """Steps and resamplings, as in "4+1"."""
    seed: int
    bands: tuple[str, ...]
    shape: tuple[int, int, int, int]
    """(T, C, H, W)"""
    hidden_share: float
    """Part of the reference date that is hidden."""
    seconds: float
    """Time of the cloud removal, without loading and scoring."""
    scores: tuple[Row, ...]
    files: tuple[str, ...]
    skipped: tuple[str, ...]
    """Files that were not written, with the reason."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        return asdict(self)


def run_demo(
    out: Path | str = ".",
    *,
    model: str | None = None,
    steps: int | str | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    notice: Callable[[str], None] | None = None,
) -> DemoReport:
    """Remove the clouds of the demo scene, write `clear.tif` and `before_after.png` into `out`, return the scores.

    model: shipped weights, a preset (untrained) or a checkpoint file; None = the shipped weights, or the untrained
        preset `small` while there are none.
    steps: sampling steps, 1 to about 50, or "4+1" with resampling; None = the model's own.
    progress: called with (done, total); notice: called with a message before the network runs.
    """
    folder = writable_folder(out)
    remover, name, trained = load_remover(model)
    # A wrong number is refused before the scene is computed.
    count, resamplings = parse_steps(steps, remover.config.default_steps)
    if not trained and notice is not None:
        notice(
            f"untrained preset `{name}`: the result shows that the program runs, not how well a trained network "
            "removes clouds."
        )
    scene, extra = _for_model(demo_scene(), remover)
    given: dict[str, Any] = {"reference": scene.reference, "days": scene.days}
    own = dict(steps=steps, seed=seed, **extra)
    label = "SADER" if isinstance(remover.config, ModelConfig) else remover.config.name
    label += "" if trained else " (untrained)"
    started = time.perf_counter()
    result = remover(scene.cloudy, **given, **own, progress=progress)
    seconds = time.perf_counter() - started
    everywhere = np.ones(scene.cloud_mask.shape, bool)
    rules = estimate_cloud_mask(scene.cloudy, scene.bands, valid=everywhere)
    images = {(label, "none"): result}
    images |= {(name, "none"): method(scene.cloudy, **given, cloud_mask=rules) for name, method in BASELINES.items()}
    images[label, "true"] = remover(scene.cloudy, **given, **own, cloud_mask=scene.cloud_mask)
    given["cloud_mask"] = scene.cloud_mask
    images |= {(name, "true"): method(scene.cloudy, **given) for name, method in BASELINES.items()}
    hidden = scene.cloud_mask[scene.reference or 0]
    scores = tuple(_score(*key, image, scene.clear, hidden) for key, image in images.items())
    unaided = [row for row in scores if row.method in BASELINES and row.masks == "none"]
    best = max(unaided, key=lambda row: row.hidden.psnr).method
    tags = {"SADER_MODEL": name, "SADER_SEED": str(seed), "TIFFTAG_IMAGEDESCRIPTION": SOURCE_NOTE}
    files, skipped = _write_map(folder / "clear.tif", result, scene, tags)
    classical = (f"best classical, no masks: {best}", images[best, "none"])
    files.append(_draw(folder / "before_after.png", result, scene, classical, name, trained))
    return DemoReport(
        model=name,
        trained=trained,
        steps=f"{count}+{resamplings}",
        seed=seed,
        bands=scene.bands,
        shape=scene.cloudy.shape,
        hidden_share=float(hidden.mean()),
        seconds=seconds,
        scores=scores,
        files=tuple(str(path) for path in files),
        skipped=tuple(skipped),
    )


def demo_scene() -> SyntheticSeries:
    """Return the scene of `sader demo`: three dates, 256 x 256 pixels, four bands, the first to be cleaned."""
    with np.load(SCENE) as file:
        cloudy, clear, cloud_mask = (file[name] for name in ("cloudy", "clear", "cloud_mask"))
    days = np.array([0, 30, 90], np.float32)  # months are known, days are not
    return SyntheticSeries(
        cloudy.astype(np.float32) / 10_000, clear.astype(np.float32) / 10_000, cloud_mask, days, BANDS, 0
    )


def _write_map(
    path: Path, result: np.ndarray, scene: SyntheticSeries, tags: dict[str, str]
) -> tuple[list[Path], list[str]]:
    """Write the GeoTIFF; return the files, and what could not be written without rasterio."""
    try:
        return [write_geotiff(path, result, bands=scene.bands, crs=CRS, transform=TRANSFORM, tags=tags)], []
    except MissingDependencyError as error:
        return [], [f"{path.name}: {error}"]


def _draw(
    path: Path, result: np.ndarray, scene: SyntheticSeries, classical: tuple[str, np.ndarray], title: str, trained: bool
) -> Path:
    figure = before_after(
        scene.cloudy,
        result,
        bands=scene.bands,
        truth=scene.clear,
        cloud_mask=scene.cloud_mask,
        reference=scene.reference,
        days=scene.days.tolist(),
        baselines=[classical],
        title=f"sader demo: {title}",
        note=None if trained else UNTRAINED,
    )
    return save_png(figure, path)


def load_remover(model: str | None) -> tuple[CloudRemover, str, bool]:
    """Return the remover, its name and whether it is trained; None = the shipped weights, else the preset."""
    if model is None:
        model = DEFAULT_MODEL if DEFAULT_MODEL in shipped() else FALLBACK_PRESET
    if model in PRESETS:
        return CloudRemover.from_preset(model, options=OPTIONS), model, False
    remover = CloudRemover.from_pretrained(model, options=OPTIONS)
    return remover, Path(model).stem if Path(model).is_file() else model, True


def writable_folder(path: Path | str) -> Path:
    """Return the folder, created if missing; raise where it cannot be written to."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or os.strerror(error.errno or 0)
        raise OutputError(f"cannot write into {folder}: {reason}. Choose another folder with --out.") from error
    return folder


def _for_model(scene: SyntheticSeries, remover: CloudRemover) -> tuple[SyntheticSeries, dict[str, Any]]:
    """Return the scene with the bands of the model, and the keywords `bands` and `aux` of the call."""
    bands = tuple(band for band in remover.bands if band in scene.bands)
    index = [scene.bands.index(band) for band in bands]
    extra: dict[str, Any] = {"bands": bands}
    auxiliary = remover.config.network.aux_bands
    if auxiliary and set(auxiliary) <= set(scene.bands):
        extra["aux"] = scene.cloudy[:, [scene.bands.index(band) for band in auxiliary]]
    return replace(scene, cloudy=scene.cloudy[:, index], clear=scene.clear[index], bands=bands), extra


def _score(method: str, masks: str, image: np.ndarray, truth: np.ndarray, hidden: np.ndarray) -> Row:
    """Return the metrics of an image (C, H, W) on all pixels and on the hidden ones (H, W)."""
    pair = torch.from_numpy(image)[None], torch.from_numpy(truth)[None]
    names = ("mae", "psnr", "ssim", "sam")
    whole = evaluate(*pair, metrics=names)
    part = evaluate(*pair, protocol="masked", mask=torch.from_numpy(hidden)[None], metrics=names)
    return Row(
        method=method,
        masks=masks,
        whole=Score(*(float(whole[name]) for name in names)),
        hidden=Score(*(float(part[name]) for name in names)),
    )
