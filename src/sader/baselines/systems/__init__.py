"""The trained systems of the paper's tables, one file each.

A new system is a new file here with a `SYSTEM`, listed in `sader.models`.
"""
