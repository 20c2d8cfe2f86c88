"""STAC: reading items and collections, searching catalogues, writing the item of a result."""
