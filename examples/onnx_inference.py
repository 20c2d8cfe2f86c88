"""Run an exported model with onnxruntime and numpy alone: neither sader nor PyTorch is needed.

Run: sader export sader-s2-rgbn -o sader-s2-rgbn.onnx && python examples/onnx_inference.py sader-s2-rgbn.onnx
"""

import json
import sys

import numpy as np

if len(sys.argv) < 2:
    sys.exit(print("usage: python examples/onnx_inference.py sader-s2-rgbn.onnx"))
import onnxruntime

session = onnxruntime.InferenceSession(sys.argv[1])
about = session.get_modelmeta().custom_metadata_map
bands, unit = len(json.loads(about["bands"])), int(about["multiple"])  # height and width: multiples of `unit`
cloudy = np.random.default_rng(0).uniform(0.0, 0.4, (1, 3, bands, 100, 90)).astype("float32")  # tile, date, band, y, x
rows, cols = (-size % unit for size in cloudy.shape[-2:])
cloudy = np.pad(cloudy, [(0, 0)] * 3 + [(0, rows), (0, cols)], mode="reflect")
valid = np.ones_like(cloudy[:, :, 0], dtype=bool)  # False where a date has no data
cloud = np.full_like(cloudy[:, :, 0], np.nan)  # 1 cloud or shadow, 0 clear, NaN: estimated by the model
noise = np.random.default_rng(1).standard_normal(cloudy[:, :1].shape, dtype="float32")
blocks = noise.reshape(*noise.shape[:3], noise.shape[3] // 8, 8, noise.shape[4] // 8, 8)
noise = (blocks - blocks.mean(axis=(4, 6), keepdims=True)).reshape(noise.shape)  # low frequencies would tint the image
inputs = {"cloudy": cloudy, "valid": valid, "cloud": cloud, "reference": np.array([0]), "noise": noise}
clear, used, error = session.run(None, inputs | {"band_present": np.ones((1, bands), dtype=bool)})
clear = np.where((used[:, :1] < 0.5) & valid[:, :1], cloudy[:, 0], clear.clip(0))  # date 0 keeps its clear pixels
print(
    "clear", clear[..., : -rows or None, : -cols or None].shape, "cloudy part of each date", used.mean(axis=(0, 2, 3))
)
