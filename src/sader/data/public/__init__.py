"""Readers of published data sets, one file each.

The common data set class, the registry, splits and image files. Packing into shards is in `sader.data.pack`.
"""
