"""`BaselineTile`: the tiles of a baseline system behind the call of `inference.tile.Tile`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from sader.baselines.baseline import Baseline, BaselineInputs
from sader.inference.inputs import TileInputs
from sader.inference.masks import MaskSettings, TileMasks
from sader.inference.noise import NoiseOf
from sader.inference.tile import TileOutput
from sader.model.blocks import to_model_range, to_reflectance


class BaselineTile(nn.Module):
    """Tiles of a baseline: images and masks, no error. The baseline itself gets the given masks alone."""

    def __init__(self, model: Baseline, masks: MaskSettings | None = None) -> None:
        super().__init__()
        self.model = model
        self.masks = TileMasks(model.config.bands, None, masks or MaskSettings())

    def forward(
        self,
        inputs: TileInputs,
        noises: Sequence[NoiseOf],
        *,
        steps: int,
        resamplings: int = 0,
    ) -> TileOutput:
        """Return the images (S, B, C, H, W) of a batch of tiles; see `Tile`."""
        assert not resamplings, "baselines do not resample"
        given = BaselineInputs(
            cloudy=to_model_range(inputs.cloudy),
            aux=None if inputs.aux is None else to_model_range(inputs.aux),
            observed=inputs.valid,
            cloud=inputs.cloud,
            # A date without a valid pixel in the tile is absent there.
            present=inputs.valid.flatten(2).any(dim=2),
            reference=inputs.reference,
            days=inputs.days,
        )
        taken = None if self.model.config.steps is None else steps
        images = [to_reflectance(self.model.predict(given, noise, steps=taken)) for noise in noises]
        cloud = inputs.cloud if inputs.known_masks else self.masks(inputs)
        return TileOutput(torch.stack(images), cloud)
