"""`MaskedAutoencoder`: a vision transformer that fills the holes of an image (paper, MAE-guided prior).

The guide of the paper's resampling. Unlike the published one: predicted patches go back to their own block (there, a
raw reshape made token n image row n), pixels missing inside a visible patch never leak in, hidden tokens are masked in
the attention rather than cut out and padded, any image size works, and nothing is random outside dropout.
Reflectance in [0, 1] in training and in sampling alike; the [-1, 1] of the sampler is mapped in `guides.LearnedGuide`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from sader.errors import BandError, ConfigError
from sader.model.blocks import reflect_pad, zero_init
from sader.model.infill import check_holes, push_pull_fill, visible_mean

Positions = Literal["learned", "rotary"]
TYPICAL_REFLECTANCE = 0.2  # assumed for an image without a visible pixel


@dataclass(frozen=True)
class MaskedAutoencoderConfig:
    """Shape of a `MaskedAutoencoder`; the defaults are the paper's guide."""

    bands: int = 3
    """Bands of the image, C; 3, 4 or 13 here."""
    patch: int = 16
    """Pixels along a side of one token."""
    dim: int = 192
    """Features of a token."""
    heads: int = 12
    """Attention heads; they divide `dim`."""
    encoder: int = 12
    """Blocks that see visible tokens only."""
    decoder: int = 8
    """Blocks that see visible tokens and mask tokens."""
    mlp: int = 4
    """Width of a block's hidden layer, in `dim`s."""
    dropout: float = 0.2
    """Share of features dropped in training."""
    positions: Positions = "learned"
    """"learned": a table of `grid` x `grid`, interpolated to other sizes; "rotary": relative, no table."""
    grid: int = 16
    """Tokens along a side of the learned table: 16 = the paper's 256 pixels."""
    relative: bool = False
    """Predict what a smooth fill lacks, from values relative to the visible mean, instead of plain reflectance."""

    def __post_init__(self) -> None:
        if self.positions not in ("learned", "rotary"):
            raise ConfigError(f"positions is {self.positions!r}; expected 'learned' or 'rotary'.")
        if self.bands < 1 or self.patch < 1:
            raise ConfigError(f"bands is {self.bands} and patch {self.patch}; expected 1 or more of each.")
        step = 4 if self.positions == "rotary" else 1
        if self.heads < 1 or self.dim % (self.heads * step):
            raise ConfigError(
                f"dim is {self.dim} with {self.heads} heads; expected a multiple of {max(self.heads, 1) * step} for "
                f"{self.positions} positions."
            )

    @classmethod
    def paper(cls, bands: int = 3) -> Self:
        """Return the paper's guide: 9.29 M parameters with 3 bands, 10.28 M with 13 (published: 9.24, 10.23).

        The surplus of 49,152 is the visibility channel of the patch embedding.
        """
        return cls(bands=bands)

    @classmethod
    def small(cls, bands: int = 4) -> Self:
        """Return the guide we ship: 1.27 M parameters with 4 bands, patch 8, any size by relative positions."""
        return cls(
            bands=bands, patch=8, dim=128, heads=4, encoder=4, decoder=2, dropout=0.0, positions="rotary", relative=True
        )


def patchify(image: Tensor, patch: int) -> Tensor:
    """Return tokens (B, N, C, p*p) of image (B, C, H, W): token n is the n-th p x p block in reading order."""
    return rearrange(image, "b c (h p) (w q) -> b (h w) c (p q)", p=patch, q=patch)


def unpatchify(tokens: Tensor, patch: int, rows: int) -> Tensor:
    """Return the image (B, C, H, W) of tokens (B, N, C, p*p) with `rows` rows of blocks; inverse of `patchify`."""
    return rearrange(tokens, "b (h w) c (p q) -> b c (h p) (w q)", h=rows, p=patch, q=patch)


def rotary_angles(rows: int, columns: int, features: int, *, device: torch.device) -> Tensor:
    """Return the angles (N, features/2) of 2-D rotary positions: half for the row, half for the column of a token.

    Attention then depends on the distance between tokens alone, so an image size never seen in training still works.
    """
    count = features // 4
    frequency = 100.0 ** (-torch.arange(count, device=device, dtype=torch.float32) / count)
    row = torch.arange(rows, device=device, dtype=torch.float32)[:, None] * frequency
    column = torch.arange(columns, device=device, dtype=torch.float32)[:, None] * frequency
    pair = torch.cat([row[:, None].expand(-1, columns, -1), column[None].expand(rows, -1, -1)], dim=-1)
    return pair.flatten(0, 1)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Return x (B, K, N, D) with its feature pairs turned by angles (N, D/2)."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class TransformerBlock(nn.Module):
    """Pre-norm attention and MLP; hidden tokens are never attended to."""

    def __init__(self, config: MaskedAutoencoderConfig) -> None:
        super().__init__()
        dim = config.dim
        self.heads, self.dropout = config.heads, config.dropout
        self.norm_attention, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.project = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        drop = nn.Dropout(config.dropout)
        self.mlp = nn.Sequential(
            nn.Linear(dim, config.mlp * dim), nn.GELU(), drop, nn.Linear(config.mlp * dim, dim), drop
        )

    def forward(self, x: Tensor, *, angles: Tensor | None, seen: Tensor | None) -> Tensor:
        """Return tokens (B, N, D); seen: bool (B, 1, 1, N), which tokens may be attended to, None = all."""
        q, k, v = rearrange(self.qkv(self.norm_attention(x)), "b n (three k d) -> three b k n d", three=3, k=self.heads)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropout)
        x = x + F.dropout(self.project(rearrange(attended, "b k n d -> b n (k d)")), self.dropout, self.training)
        return x + self.mlp(self.norm_mlp(x))


class MaskedAutoencoder(nn.Module):
    """Image with holes -> the whole image as predicted by the network.

    A patch is visible when more than half of its pixels are. Pixels missing inside it are replaced by the mean of its
    visible ones, and a visibility channel tells which they are. Hidden patches become one learned mask token.
    """

    def __init__(self, config: MaskedAutoencoderConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or MaskedAutoencoderConfig()
        area = config.patch**2
        self.embed = nn.Linear((config.bands + 1) * area, config.dim)
        self.mask_token = nn.Parameter(torch.zeros(config.dim))
        nn.init.trunc_normal_(self.mask_token, std=0.02)
        self.table: nn.Parameter | None = None
        if config.positions == "learned":
            self.table = nn.Parameter(torch.zeros(1, config.dim, config.grid, config.grid))
            nn.init.trunc_normal_(self.table, std=0.02)
        self.encoder = nn.ModuleList(TransformerBlock(config) for _ in range(config.encoder))
        self.norm_encoder = nn.LayerNorm(config.dim)
        self.decoder = nn.ModuleList(TransformerBlock(config) for _ in range(config.decoder))
        self.norm_decoder = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.bands * area)
        if config.relative:
            zero_init(self.head)  # an untrained network is then the smooth fill, not noise

    def forward(self, image: Tensor, missing: Tensor) -> Tensor:
        """Return the predicted reflectance (B, C, H, W), at visible pixels too (a guide replaces those by the input).

        image: (B, C, H, W) in [0, 1]; missing: bool (B, 1, H, W), True = hole. Any size: the image is reflected at the
        right and bottom up to whole patches.
        """
        check_holes(image, missing)
        config = self.config
        height, width = image.shape[-2:]
        if image.shape[1] != config.bands:
            raise BandError(
                f"image has {image.shape[1]} bands; this masked autoencoder was built for {config.bands}. Use the "
                "weights of your band set."
            )
        offset: Tensor | float = 0.0
        base: Tensor | float = 0.0
        if config.relative:
            offset = visible_mean(image, missing, fallback=TYPICAL_REFLECTANCE)
            base = push_pull_fill(image, missing, fallback=TYPICAL_REFLECTANCE)
        rows, columns = -(-height // config.patch), -(-width // config.patch)
        whole = (rows * config.patch, columns * config.patch)
        tokens, visible = self.tokens(reflect_pad(image - offset, *whole), reflect_pad(missing, *whole))
        prediction = self.transform(tokens, visible, rows, columns)
        prediction = rearrange(prediction, "b n (c p) -> b n c p", c=config.bands)
        return unpatchify(prediction, config.patch, rows)[..., :height, :width] + base

    def tokens(self, image: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
        """Return patches (B, N, (C+1)*p*p) without any trace of missing pixels, and which are visible, bool (B, N)."""
        seen = ~patchify(missing, self.config.patch)
        values = torch.where(seen, patchify(image, self.config.patch), 0)
        count = seen.sum(dim=-1, keepdim=True)
        mean = values.sum(dim=-1, keepdim=True) / count.clamp(min=1)
        values = torch.where(seen, values, mean)
        visible = rearrange(2 * count > self.config.patch**2, "b n 1 1 -> b n")
        return torch.cat([values, seen.to(values.dtype)], dim=2).flatten(2), visible

    def transform(self, tokens: Tensor, visible: Tensor, rows: int, columns: int) -> Tensor:
        """Return the predicted patches (B, N, C*p*p): encode what is visible, decode all positions."""
        config = self.config
        angles, positions = None, None
        if self.table is None:
            angles = rotary_angles(rows, columns, config.dim // config.heads, device=tokens.device)
        else:
            table: Tensor = self.table
            if (rows, columns) != (config.grid, config.grid):
                table = F.interpolate(table, size=(rows, columns), mode="bicubic", align_corners=False)
            positions = rearrange(table, "1 d h w -> 1 (h w) d")
        x = self.embed(tokens)
        x = x if positions is None else x + positions
        # Attention over no token at all is undefined on some devices; what it gives is thrown away just below.
        seen = (visible | ~visible.any(dim=1, keepdim=True))[:, None, None, :]
        for block in self.encoder:
            x = block(x, angles=angles, seen=seen)
        x = torch.where(visible[..., None], self.norm_encoder(x), self.mask_token.to(x.dtype))
        x = x if positions is None else x + positions
        for block in self.decoder:
            x = block(x, angles=angles, seen=None)
        return self.head(self.norm_decoder(x))
