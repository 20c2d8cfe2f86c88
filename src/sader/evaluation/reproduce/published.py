"""The numbers of the paper (arXiv 2602.00536, Tables 1 to 7), as printed there. Nothing here was measured with sader.

Sen2_MTC_New figures follow the protocol `mtc_stretch` (prediction and target each stretched for display). SEN12MS-CR-TS
figures are plain reflectance on ROIs1868/73 alone, with the sampler that may return the target among the inputs.
"""

from __future__ import annotations

from typing import NamedTuple

SEN2 = "sen2_mtc_new"
TS = "sen12mscrts_ea_published"
METRICS = {SEN2: ("psnr", "ssim", "lpips"), TS: ("psnr", "ssim", "sam")}
"""What Tables 1 and 2 print of each dataset."""
ABLATION_METRICS = {SEN2: ("psnr", "rmse", "mae", "ssim", "lpips"), TS: ("psnr", "rmse", "mae", "ssim", "sam")}
"""What Tables 3 to 6 print."""
SOURCE = "published: the paper's Tables 1 to 7, not measured here"
PROTOCOL = {
    SEN2: "published under mtc_stretch: prediction and target each stretched for display, RGB, 687 test series",
    TS: "published on ROIs1868/73 alone, 13 bands, reflectance, with the sampler that may give the target as an input",
}

Values = tuple[float, ...]
Ablation = dict[str, dict[str, Values]]
TRAINING_SERIES = {SEN2: 2380}
"""Usually quoted numbers of training series, for a dry run without the data."""


class Complexity(NamedTuple):
    """One column of Table 7."""

    parameters: float
    """Millions."""
    gmacs: float
    """Of one forward."""
    psnr: float
    """On Sen2_MTC_New."""


TABLE_1: dict[str, Values] = {
    "mcgan": (17.448, 0.513, 0.447), "pix2pix": (16.985, 0.455, 0.535), "ae": (15.100, 0.441, 0.602),
    "cyclegan": (17.678, 0.615, 0.392), "stgan": (18.152, 0.587, 0.513), "ctgan": (18.308, 0.609, 0.384),
    "pmaa": (18.009, 0.614, 0.392), "crtsnet": (18.585, 0.615, 0.342), "uncrtaints": (18.770, 0.631, 0.333),
    "ddpmcr": (18.742, 0.614, 0.329), "diffcr": (19.150, 0.531, 0.255), "emrdm": (20.249, 0.702, 0.244),
    "sader": (20.941, 0.729, 0.228),
}  # fmt: skip
"""Sen2_MTC_New: PSNR, SSIM, LPIPS."""

TABLE_2: dict[str, Values] = {
    "mcgan": (25.279, 0.819, 10.051), "pix2pix": (23.303, 0.818, 10.932), "cyclegan": (26.467, 0.840, 12.483),
    "stgan": (25.420, 0.818, 12.548), "pmaa": (28.396, 0.771, 16.776), "crtsnet": (26.681, 0.836, 10.663),
    "uncrtaints": (28.756, 0.914, 8.428), "diffcr": (26.072, 0.522, 11.662), "seqdms": (28.074, 0.827, 12.777),
    "emrdm": (29.320, 0.926, 5.933), "sader": (31.234, 0.937, 5.885),
}  # fmt: skip
"""SEN12MS-CR-TS East Asia: PSNR, SSIM, SAM."""

_FULL: dict[str, Values] = {SEN2: (20.806, 0.104, 0.077, 0.722, 0.229), TS: (29.914, 0.033, 0.028, 0.929, 5.973)}
TABLE_3: Ablation = {
    SEN2: {
        "no-tfblock": (20.487, 0.106, 0.079, 0.717, 0.235), "no-hablock": (20.659, 0.107, 0.079, 0.721, 0.232),
        "sader-5+0": _FULL[SEN2],
    },
    TS: {
        "no-tfblock": (28.880, 0.037, 0.079, 0.909, 7.364), "no-hablock": (29.253, 0.035, 0.030, 0.921, 6.685),
        "sader-5+0": _FULL[TS],
    },
}  # fmt: skip
"""Architecture, 5 steps without resampling. The MAE .079 of the second set is above its RMSE, which cannot be."""

TABLE_4: Ablation = {
    SEN2: {
        "mse": (20.423, 0.108, 0.081, 0.711, 0.236), "no-cloud-free": (19.978, 0.113, 0.085, 0.712, 0.249),
        "no-brightness": (20.571, 0.107, 0.079, 0.721, 0.232), "sader-5+0": _FULL[SEN2],
    },
    TS: {
        "mse": (29.401, 0.034, 0.030, 0.918, 7.168), "no-cloud-free": (28.683, 0.038, 0.032, 0.915, 7.677),
        "no-brightness": (29.693, 0.035, 0.029, 0.927, 6.162), "sader-5+0": _FULL[TS],
    },
}  # fmt: skip
"""Loss terms, 5 steps without resampling."""

TABLE_5: Ablation = {
    SEN2: {
        "5+0": _FULL[SEN2], "5+1": (20.859, 0.103, 0.077, 0.725, 0.229), "5+2": (20.873, 0.103, 0.076, 0.726, 0.229),
        "4+0": (20.900, 0.103, 0.076, 0.727, 0.229), "4+1": (20.941, 0.102, 0.076, 0.729, 0.228),
        "4+2": (20.972, 0.102, 0.075, 0.729, 0.227),
    },
    TS: {
        "5+0": _FULL[TS], "5+1": (31.234, 0.028, 0.023, 0.937, 5.885), "5+2": (31.256, 0.028, 0.023, 0.937, 5.884),
        "4+0": (29.491, 0.036, 0.031, 0.924, 5.992), "4+1": (29.520, 0.034, 0.029, 0.928, 5.982),
        "4+2": (29.550, 0.034, 0.029, 0.928, 5.979),
    },
}  # fmt: skip
"""Steps N and resamplings N^r."""

TABLE_6: Ablation = {
    SEN2: {
        "no-resampling": (20.900, 0.103, 0.076, 0.727, 0.229), "no-correction": (20.899, 0.103, 0.077, 0.726, 0.228),
        "mean-guided": (20.918, 0.103, 0.076, 0.727, 0.228), "conv-guided": (20.931, 0.103, 0.076, 0.729, 0.228),
        "mae-guided": (20.941, 0.102, 0.076, 0.729, 0.228),
    },
    TS: {
        "no-resampling": (29.914, 0.033, 0.028, 0.929, 5.973), "no-correction": (29.891, 0.035, 0.031, 0.918, 5.991),
        "mean-guided": (30.344, 0.029, 0.023, 0.934, 5.932), "conv-guided": (31.135, 0.028, 0.024, 0.937, 5.891),
        "mae-guided": (31.234, 0.028, 0.023, 0.937, 5.885),
    },
}  # fmt: skip
"""Guides of the corrective resampling, at 4+1 and 5+1."""

TABLE_7: dict[str, Complexity] = {
    "mcgan": Complexity(54.42, 35.88, 17.448), "pix2pix": Complexity(11.45, 29.47, 16.985),
    "ae": Complexity(6.53, 17.78, 15.100), "cyclegan": Complexity(11.44, 56.80, 17.678),
    "stgan": Complexity(231.93, 1094.94, 18.152), "ctgan": Complexity(642.92, 632.05, 18.308),
    "pmaa": Complexity(3.44, 92.35, 18.009), "crtsnet": Complexity(38.47, 7602.97, 15.347),
    "uncrtaints": Complexity(0.57, 37.16, 18.770), "ddpmcr": Complexity(445.44, 852.37, 18.742),
    "diffcr": Complexity(22.19, 45.86, 19.150), "emrdm": Complexity(148.88, 74.39, 20.249),
    "sader": Complexity(27.10, 346.56, 20.941),
}  # fmt: skip
"""Parameters, GMAC of one forward, PSNR. CR-TS Net has 15.347 dB here and 18.585 dB in Table 1, as printed."""
