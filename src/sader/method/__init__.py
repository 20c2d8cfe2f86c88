"""The paper's method around the network.

Diffusion process and denoiser, sampling, resampling with its guides, losses and metrics. The package
reads no datasets and no files.
"""
