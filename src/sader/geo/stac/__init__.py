"""STAC with pystac: items on disk, bands of their assets, searches on an API, and the item of a result."""
