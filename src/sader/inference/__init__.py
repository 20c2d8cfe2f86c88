"""Arrays in, one clear array out.

`CloudRemover`, its options, the computation of a tile, cloud masks, tiling, noise and acceleration. Files and map
projections are in `sader.geo`.
"""
