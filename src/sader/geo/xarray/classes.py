"""The classes of every pixel of an xarray cube."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sader._version import __version__
from sader.geo.classes import LEGEND, classified
from sader.geo.xarray.cube import cube_scene, open_cube
from sader.inference.tiling import Progress, Window
from sader.inference.values import UNKNOWN

if TYPE_CHECKING:
    import xarray as xr

    from sader.inference.remover import CloudRemover


def classify_xarray(
    remover: CloudRemover, array: xr.DataArray | xr.Dataset, *, progress: Progress | None = None
) -> xr.Dataset:
    """Return classes (time, y, x) and percentages (time, class, y, x) of an array (time, band, y, x); 255 = nodata.

    array: as in `sader.remove_xarray`. One backed by dask is read tile by tile; the result is in memory.

    >>> masks = sader.classify_xarray(remover, cube)                     # doctest: +SKIP
    >>> clear = cube.where(masks.classes.isin([0, 4, 5]))                # doctest: +SKIP
    """
    cube = open_cube(array, remover)
    import xarray

    def read(window: Window) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        scene = cube_scene(cube, np.asarray(cube.data[..., *window.slices]), None)
        return scene.cloudy, scene.valid

    dates, _, height, width = cube.shape
    classes = np.empty((dates, height, width), np.uint8)
    percent = np.empty((dates, len(LEGEND), height, width), np.uint8)
    for window, ours, theirs in classified(remover, (height, width), cube.bands, read, progress):
        classes[:, *window.slices], percent[..., *window.slices] = ours, theirs
    time, band, y, x = cube.layout.dims
    names = [name for name, _ in LEGEND]
    kept = {key: value for key, value in cube.layout.attrs.items() if key in ("grid_mapping", "crs")}
    attrs = {"flag_values": list(range(len(names))), "flag_meanings": " ".join(one.replace(" ", "_") for one in names)}
    found = xarray.Dataset(
        {
            "classes": ((time, y, x), classes, {**kept, **attrs, "_FillValue": UNKNOWN}),
            "probability": ((time, "class", y, x), percent, {**kept, "units": "percent", "_FillValue": UNKNOWN}),
        },
        coords={**cube.layout.isel({band: 0}, drop=True).coords, "class": names},
        attrs={"source": f"sader {__version__}"},
    )
    if "grid_mapping" in cube.layout.encoding:  # rioxarray finds the CRS by it
        for one in found.data_vars.values():
            one.encoding["grid_mapping"] = cube.layout.encoding["grid_mapping"]
    return found
