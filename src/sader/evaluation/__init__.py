"""One command scores many methods on the same items with known truth (issue "what must be shown").

`score_items` gives rows, `summarise` and `markdown` the tables, `run_evaluation` all of it from files to files.
"""

from __future__ import annotations

from sader.evaluation.methods import (
    ClassicalMethod,
    RemoverMethod,
    classical_methods,
    controls,
    flat_colour_of_truth,
    make_method,
)
from sader.evaluation.scoring import DEFAULT_METRICS, Method, Row, score, score_items
from sader.evaluation.summary import Interval, MethodSummary, Summary, bootstrap, markdown, summarise

__all__ = [
    "DEFAULT_METRICS",
    "ClassicalMethod",
    "Interval",
    "Method",
    "MethodSummary",
    "RemoverMethod",
    "Row",
    "Summary",
    "bootstrap",
    "classical_methods",
    "controls",
    "flat_colour_of_truth",
    "make_method",
    "markdown",
    "score",
    "score_items",
    "summarise",
]
