"""Pictures (PNG) and self-contained HTML pages.

No evaluation, no map projection: callers pass arrays and text.
"""
