"""A first result in Python: remove the clouds of a synthetic scene and print the error.

Run: python examples/first_result.py
"""

from __future__ import annotations

import numpy as np

import sader
from sader.data.synthetic.scene import demo_scene
from sader.errors import CheckpointError


def main() -> None:
    scene = demo_scene()
    print(f"{scene.cloudy.shape[0]} dates, {scene.cloudy.shape[1]} bands, hidden: {scene.cloud_mask.mean(axis=(1, 2))}")

    try:
        remover = sader.CloudRemover.from_pretrained("sader-s2-rgbn")
    except CheckpointError as error:
        print(f"{error}\nusing an untrained network instead: this shows how to call it, not how good it is")
        remover = sader.CloudRemover.from_preset("small")

    clear = remover(scene.cloudy, reference=scene.reference, cloud_mask=scene.cloud_mask, days=scene.days, seed=0)

    error = np.abs(clear - scene.clear)
    hidden = scene.cloud_mask[scene.reference]
    print(
        f"mean absolute error: hidden pixels {error[:, hidden].mean():.4f}, kept pixels {error[:, ~hidden].mean():.4f}"
    )


if __name__ == "__main__":
    main()
