"""The scene loop: overview, reference date, radiometric match, tiles, blend, rows.

Also what makes a run resumable, the GeoTIFF writer and the report of a scene. Readers are in `sader.geo.read`.
"""
