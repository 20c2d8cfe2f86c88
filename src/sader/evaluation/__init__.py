"""Scoring methods on items with a known truth: scores, statistics, costs, reports and figures.

`evaluate` is the entry point of `sader evaluate` and `sader compare`. The paper's tables are in `reproduce`.
"""
