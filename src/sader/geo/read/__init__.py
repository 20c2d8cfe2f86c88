"""Readers of acquisitions: GeoTIFF, Sentinel-2 products, arrays, and their cloud masks.

Each returns a `DateSource`. STAC items are in `sader.geo.stac`.
"""
