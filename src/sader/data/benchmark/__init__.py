"""TriClear, the benchmark of this project: fixed items from open imagery, with checksums (docs/benchmark.md).

`places` reads the sources and splits them, `exact` has arithmetic with the same bits on every machine, `compose` makes
one item from a place, `build` writes all items as shards and compares them with `frozen.json`.
"""
