"""`sader demo`: removes the clouds of the built-in scene, scores the result and writes a GeoTIFF and a picture.

The scene is synthetic, so the truth under its clouds is known. Every method gets the same dates and the scene's own
cloud masks. The command line prints the report.
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

from sader.baselines.classical import Classical, least_cloudy, local_ridge_blend, median, mosaic, ridge_blend
from sader.checkpoint import shipped
from sader.data.synthetic.scene import SyntheticSeries, demo_scene
from sader.errors import MissingDependencyError, OutputError
from sader.figures.picture import before_after, save_png
from sader.geo.read.raster import write_geotiff
from sader.inference.inputs import parse_steps
from sader.inference.remover import DEFAULT_MODEL, CloudRemover, RemoverOptions
from sader.method.metrics import evaluate
from sader.presets import PRESETS, ModelConfig

FALLBACK_PRESET = "small"
# The scene fits into one tile, so that no overlap is computed twice.
OPTIONS = RemoverOptions(tile=512)

BASELINES: dict[str, Classical] = {
    "least cloudy": least_cloudy,
    "median": median,
    "mosaic": mosaic,
    "ridge blend": ridge_blend,
    "local ridge blend": local_ridge_blend,
}
"""Row of the table -> classical method; the last is the strongest of them."""

# The scene is synthetic. The CRS and the grid of 10 m pixels let a GIS open the file; the tags state that the place is
# fictitious.
CRS = "EPSG:32632"
TRANSFORM = (10.0, 0.0, 600_000.0, 0.0, -10.0, 5_100_000.0)
PLACE_NOTE = "Synthetic scene of sader demo: its coordinates are made up, no such place exists."


@dataclass(frozen=True)
class Score:
    """Plain reflectance metrics over one set of pixels."""

    psnr: float
    """dB"""
    ssim: float
    sam: float
    """degrees"""


@dataclass(frozen=True)
class Row:
    """One method of the table."""

    method: str
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
    """Remove the clouds of the built-in scene, write `clear.tif` and `before_after.png` into `out`, return the scores.

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
    given: dict[str, Any] = {"reference": scene.reference, "cloud_mask": scene.cloud_mask, "days": scene.days}
    started = time.perf_counter()
    result = remover(scene.cloudy, **given, **extra, steps=steps, seed=seed, progress=progress)
    seconds = time.perf_counter() - started

    label = "SADER" if isinstance(remover.config, ModelConfig) else remover.config.name
    images = {f"{label}{'' if trained else ' (untrained)'}": result}
    if trained and remover.matches_dates:  # the case of most users: no masks are given
        unaided = given | {"cloud_mask": None}
        images["SADER, own masks"] = remover(scene.cloudy, **unaided, **extra, steps=steps, seed=seed)
    images |= {label: method(scene.cloudy, **given) for label, method in BASELINES.items()}
    hidden = scene.cloud_mask[scene.reference or 0]
    scores = tuple(_score(label, image, scene.clear, hidden) for label, image in images.items())
    best = max((row for row in scores if row.method in BASELINES), key=lambda row: row.hidden.psnr).method
    tags = {"SADER_MODEL": name, "SADER_SEED": str(seed), "TIFFTAG_IMAGEDESCRIPTION": PLACE_NOTE}
    files, skipped = _write_map(folder / "clear.tif", result, scene, tags)
    classical = (f"best classical: {best}", images[best])
    files.append(_draw(folder / "before_after.png", result, scene, classical, title=name, trained=trained))
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


def _write_map(
    path: Path, result: np.ndarray, scene: SyntheticSeries, tags: dict[str, str]
) -> tuple[list[Path], list[str]]:
    """Write the GeoTIFF; return the files, and what could not be written without rasterio."""
    try:
        return [write_geotiff(path, result, bands=scene.bands, crs=CRS, transform=TRANSFORM, tags=tags)], []
    except MissingDependencyError as error:
        return [], [f"{path.name}: {error}"]


def _draw(
    path: Path,
    result: np.ndarray,
    scene: SyntheticSeries,
    classical: tuple[str, np.ndarray],
    *,
    title: str,
    trained: bool,
) -> Path:
    untrained = "Untrained network: the picture shows that the program runs, not how good the method is."
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
        note=None if trained else untrained,
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


def _score(method: str, image: np.ndarray, truth: np.ndarray, hidden: np.ndarray) -> Row:
    """Return the metrics of an image (C, H, W) on all pixels and on the hidden ones (H, W)."""
    pair = torch.from_numpy(image)[None], torch.from_numpy(truth)[None]
    names = ("psnr", "ssim", "sam")
    whole = evaluate(*pair, metrics=names)
    part = evaluate(*pair, protocol="masked", mask=torch.from_numpy(hidden)[None], metrics=names)
    return Row(
        method=method,
        whole=Score(*(float(whole[name]) for name in names)),
        hidden=Score(*(float(part[name]) for name in names)),
    )
