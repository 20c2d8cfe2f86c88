"""The network: tensors in, tensors out.

Blocks, attention, fusion of dates, the composite, the heads and the masked autoencoder. The diffusion
process is in `sader.method`. Imports torch, numpy and einops only.
"""
