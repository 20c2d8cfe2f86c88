"""Scoring methods on items with a known truth.

Scores, statistics, costs, tables and figures. The paper's tables are in `reproduce`.
"""
