"""The network: tensors in, tensors out.

Blocks, attention, fusion of dates, the composite, the heads and the masked autoencoder. No diffusion process, no files,
no arrays of users; imports torch, numpy and einops only.
"""
