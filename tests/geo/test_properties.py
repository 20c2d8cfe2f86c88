"""Rasters and arrays of any kind: a `SaderError`, or exactly the result of the plain computation in memory."""

from __future__ import annotations

import math
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sader.errors import SaderError
from sader.geo.align import build_stack
from sader.geo.read.masks import with_masks
from sader.geo.read.sources import open_sources
from sader.geo.scene.options import SceneOptions
from sader.geo.scene.run import clear_scene
from sader.inference.values import HIGHEST, LOWEST, ValueCoding, decode_array, encode_array

rasterio = pytest.importorskip("rasterio")
hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies
BANDS = ("B02", "B03", "B04", "B08")
SLOW = "SADER_SLOW_TESTS" in os.environ  # set by tests/conftest.py
SETTINGS = hypothesis.settings(
    max_examples=60 if SLOW else 20,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
TRANSFORMS = st.sampled_from(
    [(10.0, 0.0, 6e5, 0.0, -10.0, 5.1e6)] * 4
    + [(10.0, 0.0, math.nan, 0.0, -10.0, 5.1e6), (0.0, 0.0, 6e5, 0.0, 0.0, 5.1e6), (1e-9, 0.0, 0.0, 0.0, 1e-9, 0.0)]
)


@st.composite
def rasters(draw: Any) -> dict[str, Any]:
    """How two dates are written: type, coding, size, values, holes."""
    kind = draw(st.sampled_from(["uint16", "int16", "float32", "float64", "int32", "uint8"]))
    whole = np.issubdtype(np.dtype(kind), np.integer)
    scale = draw(st.sampled_from([None, 1e-4, 2e-4, 2.75e-5] if whole else [None, 1.0, 1e-4]))
    nodata: list[float | None] = [None, 0, 7] + ([] if kind.startswith("u") else [-9999])
    return {
        "dtype": kind,
        "scale": scale,
        "offset": draw(st.sampled_from([0.0, -0.1])) if scale else 0.0,
        "nodata": draw(st.sampled_from([*nodata, *([] if whole else [math.nan])])),
        "size": (draw(st.integers(1, 40)), draw(st.integers(1, 40))),
        "seed": draw(st.integers(0, 2**16)),
        "holes": draw(st.sampled_from([0.0, 0.1, 0.9, 1.0])),
        "extremes": draw(st.booleans()),
        "transform": draw(TRANSFORMS),
        "tiled": draw(st.booleans()),
        "cloud": draw(st.sampled_from([0.0, 0.3, 1.0])),
    }


def numbers_of(raster: dict[str, Any], date: int) -> np.ndarray:
    generator = np.random.default_rng((raster["seed"], date))
    kind = np.dtype(raster["dtype"])
    scale = raster["scale"] or (1e-4 if np.issubdtype(kind, np.integer) else 1.0)
    reflectance = generator.uniform(0.02, 0.6, (4, *raster["size"]))
    with np.errstate(all="ignore"):
        numbers = ((reflectance - raster["offset"]) / scale).clip(None, 250 if kind == np.uint8 else None).astype(kind)
    if raster["extremes"] and np.issubdtype(kind, np.floating):
        numbers[0, 0, 0] = [np.nan, np.inf, -np.inf][raster["seed"] % 3]
    if raster["nodata"] is not None:
        numbers[:, generator.random(raster["size"]) < raster["holes"]] = raster["nodata"]
    return numbers


def write(path: Path, numbers: np.ndarray, raster: dict[str, Any], **profile: Any) -> Path:
    settings = {"tiled": True, "blockxsize": 16, "blockysize": 16} if raster["tiled"] else {}
    with (
        warnings.catch_warnings(),
        rasterio.open(
            path, "w", driver="GTiff", count=len(numbers), height=numbers.shape[1], width=numbers.shape[2],
            dtype=numbers.dtype, crs="EPSG:32632", transform=rasterio.Affine(*raster["transform"]),
            **{**settings, **profile},
        ) as dataset,
    ):  # fmt: skip
        warnings.simplefilter("ignore")
        dataset.write(numbers)
        if len(numbers) == 4:
            dataset.descriptions = BANDS
            if raster["scale"] is not None:
                dataset.scales, dataset.offsets = (raster["scale"],) * 4, (raster["offset"],) * 4
    return path


@SETTINGS
@hypothesis.given(raster=rasters())
def test_a_raster_is_refused_or_cleared_as_in_memory(tiny, raster):
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        stored = [numbers_of(raster, date) for date in range(2)]
        generator = np.random.default_rng(raster["seed"])
        mask = generator.random((2, *raster["size"])) < raster["cloud"]
        try:
            paths = [
                write(folder / f"S2_2022-0{n + 3}-10.tif", numbers, raster, nodata=raster["nodata"])
                for n, numbers in enumerate(stored)
            ]
        except (ValueError, rasterio.errors.RasterioError):
            return  # GDAL does not write such a file
        masks = write(folder / "m.tif", mask.astype(np.uint8), raster)
        out = folder / "out" / "c.tif"
        try:
            stack = build_stack(with_masks(open_sources(paths), masks), tiny.config.network)
            clear_scene(stack, tiny, out, SceneOptions(reference=0), notice=lambda text: None)
        except SaderError:
            assert not out.exists()
            assert not out.parent.exists() or not list(out.parent.iterdir())
            return
        coding = stack.sources[0].coding
        pairs = [decode_array(numbers, (coding,) * 4) for numbers in stored]
        cloudy, valid = np.stack([v for v, _ in pairs]), np.stack([t for _, t in pairs])
        days = stack.days
        expected = tiny.predict(
            cloudy.clip(LOWEST, HIGHEST), reference=0, valid=valid, cloud_mask=list(mask), days=days, bands=BANDS
        )
        wanted = encode_array(np.where(expected.kept, cloudy[0], expected.clear), valid.any(axis=0), coding)
        wanted = np.where(expected.kept, stored[0], wanted)
        with rasterio.open(out) as dataset:
            np.testing.assert_array_equal(dataset.read(), wanted)
            assert np.isfinite(dataset.read()[:, valid.any(axis=0)].astype(float)).all()


@hypothesis.settings(SETTINGS, max_examples=25 if SLOW else 10)
@hypothesis.given(raster=rasters())
def test_a_zarr_store_is_refused_or_cleared_as_in_memory(tiny, raster):
    xarray, zarr = pytest.importorskip("xarray"), pytest.importorskip("sader.geo.xarray.zarr")
    pytest.importorskip("zarr")
    stored = np.stack([numbers_of(raster, date) for date in range(2)])
    mask = np.random.default_rng(raster["seed"]).random((2, *raster["size"])) < raster["cloud"]
    attributes = {} if raster["scale"] is None else {"scale_factor": raster["scale"], "add_offset": raster["offset"]}
    if raster["nodata"] is not None:
        attributes["_FillValue"] = stored.dtype.type(raster["nodata"])
    cube = xarray.DataArray(stored, dims=("time", "band", "y", "x"), coords={"band": list(BANDS)}, attrs=attributes)
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store, out = Path(name) / "in.zarr", Path(name) / "out" / "c.zarr"
        dataset = cube.to_dataset(name="numbers").assign(cloud=(("time", "y", "x"), mask))
        dataset.to_zarr(store, consolidated=False)
        try:
            zarr.clear_zarr(store, out, tiny, SceneOptions(reference=0), mask="cloud", notice=lambda text: None)
        except SaderError:
            assert not out.parent.exists() or not list(out.parent.iterdir())
            return
        found = xarray.open_zarr(out, mask_and_scale=False, consolidated=False).clear
        coding = zarr.open_cube(cube, tiny).coding
        pairs = [decode_array(numbers, (coding,) * 4) for numbers in stored]
        cloudy, valid = np.stack([v for v, _ in pairs]), np.stack([t for _, t in pairs])
        result = tiny.predict(
            cloudy.clip(LOWEST, HIGHEST), reference=0, valid=valid, cloud_mask=list(mask), bands=BANDS
        )
        wanted = encode_array(np.where(result.kept, cloudy[0], result.clear), valid.any(axis=0), coding)
        np.testing.assert_array_equal(found.values, np.where(result.kept, stored[0], wanted))


@SETTINGS
@hypothesis.given(
    shape=st.tuples(st.integers(0, 3), st.sampled_from([3, 4, 4, 4, 4]), st.integers(0, 40), st.integers(1, 40)),
    kind=st.sampled_from(
        ["float32"] * 4 + ["float64", "float16", ">f4", "int16", "uint16", "bool", "complex64", "object"]
    ),
    spoil=st.sampled_from(["nothing"] * 4 + ["nan", "inf", "negative", "huge", "masked", "masked"]),
    reference=st.sampled_from([None, None, 0, 0, 1, 7]),
    seed=st.integers(0, 2**16),
)
def test_an_array_is_refused_or_finite_and_kept_where_clear(tiny, shape, kind, spoil, reference, seed):
    generator = np.random.default_rng(seed)
    values: Any = generator.uniform(0.02, 0.6, shape)
    if values.size and spoil in ("nan", "inf", "negative", "huge"):
        values.ravel()[0] = {"nan": np.nan, "inf": np.inf, "negative": -5, "huge": 1e6}[spoil]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cloudy = values.astype(kind)
        if spoil == "masked":
            cloudy = np.ma.masked_array(cloudy, generator.random(shape) < 0.1)
        try:
            result = tiny.predict(cloudy, reference=reference)
        except SaderError:
            return
    given = np.ma.getdata(cloudy).astype(np.float32)
    valid = ~np.ma.getmaskarray(cloudy).any(axis=1)
    seen = valid.any(axis=0)
    assert np.isfinite(result.clear[:, seen]).all()
    assert np.isnan(result.clear[:, ~seen]).all()
    assert (result.clear[:, seen & ~result.kept] >= 0).all()
    if reference is not None:
        np.testing.assert_array_equal(result.clear[:, result.kept], given[reference][:, result.kept])


def test_the_codings_of_the_property_test_are_real():
    """Guards the comparison itself: encode(decode(x)) is x for stored numbers."""
    coding = ValueCoding("int16", 2.75e-5, -0.1, -9999.0)
    numbers = np.arange(1, 30000, 7, dtype=np.int16)[None, None]
    values, valid = decode_array(numbers, [coding])
    np.testing.assert_array_equal(encode_array(values, valid, coding), numbers)
