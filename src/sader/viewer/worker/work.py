"""Operations of a worker process: describe and draw scenes, estimate their clouds, remove them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sader.checkpoint import shipped
from sader.demo import CRS, SOURCE_NOTE, TRANSFORM, demo_scene
from sader.figures.picture import png
from sader.geo import remove
from sader.geo.align import build_stack
from sader.geo.grid import Grid
from sader.geo.read.geotiff import open_geotiff
from sader.geo.read.raster import opened, write_geotiff
from sader.geo.read.sources import open_sources
from sader.geo.scene.options import SceneOptions
from sader.geo.scene.source import read_overview
from sader.geo.stack import DateSource, GeoStack
from sader.inference.remover import CloudRemover
from sader.inference.scene_match import Overview, overview_factor
from sader.inference.tiling import Window
from sader.viewer.problems import NotFoundError, RequestError, TooLargeError, for_clients
from sader.viewer.schema import Square
from sader.viewer.security.folder import DataFolder
from sader.viewer.security.sandbox import inspect_inputs
from sader.viewer.settings import Limits
from sader.viewer.worker import pictures
from sader.viewer.worker.mercator import mercator_fit, transformed

Send = Callable[[dict[str, Any]], None]
OUTPUT = "clear.tif"
MORE_OPTIONS = ("model", "mask", "report")
"""Options of a job that are not in `SceneOptions`."""
KEPT_SCENES = 8
KEPT_MODELS = 2


@dataclass
class OpenScene:
    """The dates of a scene with their headers read."""

    sources: list[DateSource]
    notices: list[str]
    grid: Grid
    bands: tuple[str, ...]
    limits: dict[str, tuple[float, float]]
    shares: list[float] | None = None
    masks: tuple[tuple[float, int, str], dict[str, NDArray[np.bool_]]] | None = None
    """Settings of the masks last drawn, and name of a date -> mask (h, w) in the overview."""


class SceneWork:
    """The operations, by name in `operations`. `inputs` are paths relative to the data folder, checked on each call."""

    def __init__(self, settings: dict[str, Any], send: Send) -> None:
        """settings: `ServeSettings.for_child`. send: sends an event of a running operation to the server."""
        self.folder = DataFolder(settings["data"])
        self.limits = Limits(**settings["limits"])
        self.allow_remote = tuple(settings["allow_remote"])
        self.model, self.device = settings["model"], settings["device"]
        self.send = send
        reading = (self.inspect, self.models, self.describe, self.clouds, self.picture, self.mercator, self.values)
        self.operations: dict[str, Callable[..., Any]] = {
            one.__name__: one for one in (*reading, self.demo, self.remove)
        }
        self._last: tuple[OpenScene, GeoStack, Overview] | None = None
        self._scene = lru_cache(KEPT_SCENES)(self._read)
        self._load = lru_cache(KEPT_MODELS)(lambda model: remove.load_remover(model, self.device))
        """Returns a model and its name; models stay in memory between jobs."""

    # ---------------------------------------------------------------- reading

    def inspect(self, *, inputs: list[str]) -> dict[str, Any]:
        """Check files by their headers."""
        inspect_inputs(self._paths(inputs), self.folder, self.limits, self.allow_remote)
        return {}

    def models(self) -> list[str]:
        """Return the names of the shipped weights."""
        return sorted(shipped())

    def describe(self, *, inputs: list[str], reading: dict[str, Any]) -> dict[str, Any]:
        """Return the dates of a scene, its grid and the possible band combinations."""
        scene = self._open(inputs, reading)
        grid = scene.grid
        return {
            "dates": [
                {
                    "name": source.name,
                    "date": None if source.date is None else source.date.isoformat(),
                    "bands": list(source.bands),
                    "width": source.grid.width,
                    "height": source.grid.height,
                }
                for source in scene.sources
            ],
            "bands": list(scene.bands),
            "combinations": pictures.possible(scene.bands),
            "grid": {
                "crs": grid.crs if len(grid.crs) < 40 else "custom CRS" if grid.crs else "",
                "transform": list(grid.transform),
                "width": grid.width,
                "height": grid.height,
                "degrees": grid.in_degrees,
            },
            "notices": [for_clients(text) for text in scene.notices],
        }

    def clouds(self, *, inputs: list[str], reading: dict[str, Any]) -> list[float]:
        """Return the share of each date that is hidden by cloud or shadow, or has no data, as the model estimates it.

        Baselines without a cloud head estimate none: their shares count nodata and the masks of the files only.
        """
        scene = self._open(inputs, reading)
        if scene.shares is None:
            stack, overview = self._overview(scene)
            shares = dict(zip((source.name for source in stack.sources), overview.clear_share, strict=True))
            scene.shares = [round(1 - float(shares.get(source.name, 0.0)), 4) for source in scene.sources]
        return scene.shares

    def picture(
        self, *, inputs: list[str], reading: dict[str, Any], layer: str, job: str | None, square: dict[str, Any]
    ) -> tuple[Any, bytes]:
        """Draw one square of a date ("0", "1" ...), its mask ("mask-0" ...), the result, its uncertainty or provenance.

        square: the fields of `schema.Square`.
        """
        scene, wanted = self._open(inputs, reading), Square(**square)
        grid, window = pictures.window_of(wanted, scene.grid)
        if layer.startswith("mask-"):
            source = self._date(scene, layer.removeprefix("mask-"))
            drawn = pictures.mask_colours(self._mask(scene, source, wanted), wanted, scene.grid)
        elif layer in ("uncertainty", "provenance"):
            numbers = pictures.read_numbers(
                str(self._job_file(job, f"clear_{layer}.tif")), window, grid, categories=layer == "provenance"
            )
            drawn = (
                pictures.provenance_colours(numbers[0])
                if layer == "provenance"
                else pictures.spread_colours(np.asarray(numbers, np.float32).mean(axis=0))
            )
        else:
            bands = pictures.combination(scene.bands, wanted.combination)
            source = self._result(job, scene) if layer == "result" else self._date(scene, layer)
            values, valid = source.read(window, bands=bands, grid=grid)
            limits = self._limits(scene, wanted.combination)
            drawn = pictures.colours(values, valid, wanted.combination, limits)
        return None, png(drawn, optimize=False, compress_level=3)

    def mercator(self, *, inputs: list[str], reading: dict[str, Any]) -> dict[str, Any]:
        """Return the transform from Web Mercator to the pixels of the scene."""
        return mercator_fit(self._open(inputs, reading).grid)

    def values(
        self, *, inputs: list[str], reading: dict[str, Any], job: str | None, column: int, row: int
    ) -> dict[str, Any]:
        """Return reflectance of every date, the result and its layers at one pixel, and the pixel's coordinates."""
        scene = self._open(inputs, reading)
        grid = scene.grid
        if not (0 <= column < grid.width and 0 <= row < grid.height):
            raise NotFoundError(f"pixel {column}, {row} is outside the scene of {grid.width} x {grid.height}.")
        window = Window(row, column, 1, 1)
        # A result has the bands of its model, which may be fewer than those of the dates.
        result = None if job is None else self._result(job, scene)
        bands = tuple(band for band in scene.bands if result is None or band in result.bands)
        found: dict[str, Any] = {
            "bands": list(bands),
            "dates": [_pixel(source, window, bands, grid) for source in scene.sources],
            "place": _place(grid, column, row),
        }
        if result is not None:
            found["result"] = _pixel(result, window, bands, grid)
            for layer in ("uncertainty", "provenance"):
                file = self._job_file(job, f"clear_{layer}.tif", must=False)
                if file is not None:
                    numbers = pictures.read_numbers(str(file), window, grid, categories=layer == "provenance")
                    found[layer] = [round(float(v), 5) if math.isfinite(v) else None for v in numbers[:, 0, 0]]
        return found

    # ---------------------------------------------------------------- writing

    def demo(self, *, target: str) -> list[str]:
        """Write the dates of the demo scene into a folder; return their names."""
        place = self.folder.inside(self.folder.root / target)
        scene = demo_scene()
        names = []
        for image, day in zip(scene.cloudy, scene.days, strict=True):
            taken = date(2022, 6, 1) + timedelta(days=float(day))
            names.append(f"demo_{taken:%Y-%m-%d}.tif")
            tags = {"TIFFTAG_IMAGEDESCRIPTION": SOURCE_NOTE}
            write_geotiff(place / names[-1], image, bands=scene.bands, crs=CRS, transform=TRANSFORM, tags=tags)
        return names

    def remove(
        self, *, inputs: list[str], reading: dict[str, Any], target: str, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Remove the clouds of a scene; return the report and the output files by name."""
        paths = self._paths(inputs)
        place = self.folder.inside(self.folder.root / target)
        self._stage("checking the files", 1)
        scene = self._open(inputs, reading)
        request = remove.RemoveRequest(
            inputs=tuple(str(path) for path in paths),
            out=str(place / OUTPUT),
            options=SceneOptions(overwrite=True, **{k: v for k, v in options.items() if k not in MORE_OPTIONS}),
            mask=(options["mask"],) if options.get("mask") else (),
            model=options.get("model") or self.model,
            device=self.device,
            preview=str(place / "preview.png"),
            report=str(place / "report.html") if options.get("report") else None,
            **reading,
        )
        self._stage("loading the model", 3)

        def load(model: str | None, device: str | None) -> tuple[CloudRemover, str]:
            loaded = self._load(model)
            self._stage("removing clouds", 5)
            return loaded

        report = remove.run_remove(
            request,
            load=load,
            progress=self._progress,
            notice=lambda text: self.send({"event": "notice", "text": for_clients(text)}),
        )
        outputs = {"clear": OUTPUT}
        for file in report.files[1:]:
            name = "item" if file.endswith(".json") else remove.layer_name(file, report, request.preview)
            outputs[name] = Path(file).name
        shown = {key: value for key, value in asdict(report).items() if key not in ("output", "files")}
        days = sorted({source.date.date().isoformat() for source in scene.sources if source.date is not None})
        cleaned = next((source.date for source in scene.sources if source.name == report.reference), None)
        date = cleaned.date().isoformat() if cleaned else "_".join(dict.fromkeys((*days[:1], *days[-1:])))
        texts = [for_clients(text) for text in report.notices]
        return {"report": {**shown, "notices": texts, "date": date}, "outputs": outputs}

    def _progress(self, done: int, total: int) -> None:
        """Report tiles; from 5 to 96 percent of a job."""
        tile = f", tile {done + 1} of {total}" if total > 1 else ""
        text = "writing the result" if done >= total else f"removing clouds{tile}"
        self._stage(text, 5 + 91 * done // max(1, total))

    def _stage(self, text: str, progress: int) -> None:
        self.send({"event": "stage", "text": text, "progress": progress})

    # ---------------------------------------------------------------- parts

    def _paths(self, inputs: Sequence[str]) -> list[Path]:
        return [self.folder.inside(self.folder.root / name, shown=Path(name).name) for name in inputs]

    def _open(self, inputs: list[str], reading: dict[str, Any]) -> OpenScene:
        try:
            times = [path.stat().st_mtime_ns for path in self._paths(inputs)]
        except OSError as error:
            raise NotFoundError(f"a file of the scene was deleted: {Path(str(error.filename)).name}.") from error
        return self._scene(tuple(inputs), tuple(sorted(reading.items())), tuple(times))

    def _read(self, inputs: tuple[str, ...], reading: tuple[tuple[str, Any], ...], times: tuple[int, ...]) -> OpenScene:
        """Read the headers of a scene. times: those of its files, because a file that has changed is read again."""
        paths = self._paths(inputs)
        inspect_inputs(paths, self.folder, self.limits, self.allow_remote)
        notices: list[str] = []
        sources = open_sources(paths, notice=notices.append, **dict(reading))
        if len(sources) > self.limits.files:
            raise TooLargeError(f"the scene has {len(sources)} dates; this server accepts at most {self.limits.files}.")
        common = tuple(band for band in sources[0].bands if all(band in source.bands for source in sources))
        grid = sources[0].grid
        if grid.width * grid.height > self.limits.pixels:
            raise TooLargeError(
                f"the result would have {grid.width} x {grid.height} pixels; this server accepts at most "
                f"{self.limits.pixels}. Crop the scene, or raise the server's limit (max-pixels)."
            )
        return OpenScene(sources, notices, grid, common, {})

    def _overview(self, scene: OpenScene) -> tuple[GeoStack, Overview]:
        """Return the stack of a scene and its overview; those of the last scene are kept."""
        if self._last is None or self._last[0] is not scene:
            remover, _ = self._load(self.model)
            stack = build_stack(scene.sources, remover.config.network)
            self._last = scene, stack, read_overview(stack, remover)
        return self._last[1:]

    def _mask(self, scene: OpenScene, source: DateSource, wanted: Square) -> NDArray[np.bool_]:
        """Return the mask (h, w) of a date in the overview, with the mask settings of a request."""
        key = wanted.threshold, wanted.growth, wanted.haze
        if scene.masks is None or scene.masks[0] != key:
            stack, seen = self._overview(scene)
            growth = round(wanted.growth / overview_factor(*stack.grid.shape))
            loaded, _ = self._load(self.model)
            remover = loaded.with_options(cloud_threshold=wanted.threshold, mask_growth=growth, haze=wanted.haze)
            if remover is not loaded:  # masks of files stay as they are
                first = Window(0, 0, 1, 1)
                stated = [one.read_mask(first, grid=stack.grid) is not None for one in stack.sources]
                given = [cloud > 0 if known else None for cloud, known in zip(seen.cloud, stated, strict=True)]
                seen = Overview.of(remover, seen.cloudy, valid=seen.valid, masks=given, bands=stack.bands)
            masks = (np.nan_to_num(seen.cloud) > 0) & seen.valid
            scene.masks = key, dict(zip((one.name for one in stack.sources), masks, strict=True))
        if source.name not in scene.masks[1]:
            raise NotFoundError(f"{source.name} has no mask: it lies outside the scene.")
        return scene.masks[1][source.name]

    def _date(self, scene: OpenScene, layer: str) -> DateSource:
        if not layer.isdecimal() or int(layer) >= len(scene.sources):
            raise NotFoundError(f"there is no date {layer!r}; the scene has {len(scene.sources)}, numbered from 0.")
        return scene.sources[int(layer)]

    def _limits(self, scene: OpenScene, wanted: str) -> tuple[float, float]:
        if wanted == "ndvi":
            return pictures.NDVI_RANGE
        if wanted not in scene.limits:
            bands = pictures.COMBINATIONS[wanted]
            scene.limits[wanted] = pictures.shared_limits(scene.sources, scene.grid, bands)
        return scene.limits[wanted]

    def _result(self, job: str | None, scene: OpenScene) -> DateSource:
        """Return the result as a source with the value coding of the cleaned date."""
        path = str(self._job_file(job, OUTPUT))
        source, _ = open_geotiff(path)
        cleaned = opened(path).tags().get("SADER_REFERENCE", "none")
        # An offset that is not stated in the files of the dates is not stated in the result either.
        coding = next((date.coding for date in scene.sources if date.name == cleaned), scene.sources[0].coding)
        return replace(source, coding=coding)

    def _job_file(self, job: str | None, name: str, *, must: bool = True) -> Path | None:
        if job is None:
            raise RequestError("showing a result needs a job; give its id as job.")
        path = self.folder.root / job / name
        if not path.exists():
            if must:
                raise NotFoundError(f"the job has no {name}.")
            return None
        return self.folder.inside(path)


def _pixel(source: DateSource, window: Window, bands: tuple[str, ...], grid: Grid) -> list[float] | None:
    values, valid = source.read(window, bands=bands, grid=grid)
    return [round(float(value), 4) for value in values[:, 0, 0]] if valid[0, 0] else None


def _place(grid: Grid, column: int, row: int) -> dict[str, Any] | None:
    """Return the coordinates of a pixel's centre in the CRS and in degrees; None for an image without a CRS."""
    if not grid.crs:
        return None
    x, y = grid.place(column + 0.5, row + 0.5)
    longitude, latitude = transformed(grid.crs, "EPSG:4326", np.array([x]), np.array([y]))
    if not np.isfinite([x, y, longitude[0], latitude[0]]).all():
        return None  # outside the CRS; JSON has no infinity
    return {"x": x, "y": y, "longitude": round(float(longitude[0]), 6), "latitude": round(float(latitude[0]), 6)}
