"""Synthetic places with a known truth.

Landscape, spectra and the scenes of the tests, the examples and the demo. Simulated clouds are in `sader.data.clouds`.
"""
