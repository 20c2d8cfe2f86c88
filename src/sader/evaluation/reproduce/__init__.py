"""The paper's tables and figures: which rows they have, how their systems are trained, and the published values.

Training itself is in `sader.training`, scoring in `sader.evaluation`.
"""
