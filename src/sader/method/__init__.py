"""The paper's method around the network.

Diffusion process and denoiser, sampling, resampling with its guides, losses and metrics. No data sets, no files; a
module here can be read beside the paper.
"""
