"""Pictures (PNG) and self-contained HTML pages.

Callers pass arrays and text; evaluation and map projection are in other packages.
"""
