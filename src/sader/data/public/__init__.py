"""Readers of published datasets, one file each.

The common dataset class, the registry, splits and image files. Packing into shards is in `sader.data.pack`.
"""
