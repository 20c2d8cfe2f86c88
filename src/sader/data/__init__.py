"""Training batches and evaluation items.

Shards on disk, batches composed on the device, simulated clouds, evaluation items and packing. Readers of published
datasets are in `public`, synthetic places in `synthetic`.
"""
