"""Georeferenced scenes; the only package that imports rasterio, xarray and dask.

Grids, stacks of dates, alignment, values and `remove`. Readers are in `read`, STAC in `stac`, the scene loop in
`scene`, xarray, Zarr and dask in `xarray`.
"""
