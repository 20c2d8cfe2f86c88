"""One command scores many methods on the same items with known truth (issue "what must be shown").

`scoring.score_items` gives rows, `summary.summarise` and `summary.markdown` the tables, `run.run_evaluation` all of it
from files to files. Nothing is imported here: `sader --help` passes through.
"""
