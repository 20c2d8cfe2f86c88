"""xarray cubes, Zarr stores and dask clusters as sources and outputs of the scene loop."""
