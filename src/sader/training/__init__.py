"""Training: configuration, one training step, optimisers, the loop, and the run folder.

Batches come from `sader.data`, losses from `sader.method.losses`; baselines are trained here too.
"""
