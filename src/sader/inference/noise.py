"""Standard normal noise over the plane of a scene, computed from the pixel's position.

The noise of a pixel depends on the seed, the draw, the band and the position alone, and not on tile size, order, number
of workers or batch. The integer arithmetic is the same on every device; the result differs between a CPU and a GPU by
rounding at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sader.inference.tiling import Window
from sader.inference.values import to_device

NoiseOf = Callable[[int, int], Tensor]
"""(draw, channels) -> standard normal noise (B, channels, H, W) of the tiles of a batch."""

_SHIFTS = (16, 15, 16)
_FACTORS = (0x7FEB352D, 0x846CA68B - 2**32)
"""Odd, as int32. With the shifts they make every bit of a word depend on every other."""
_LONG_SHIFTS = (30, 27, 31)
_LONG_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_APART = np.uint64(0x9E3779B97F4A7C15)
"""Distance between the words of neighbouring lines before mixing."""
BLOCK = 8
"""Edge in pixels of the blocks over which balanced noise sums to 0."""


def sample_seeds(seed: int, samples: int) -> list[int]:
    """Return the seed of each of several samples of one scene; the first is the given one."""
    return [seed + 7919 * number for number in range(samples)]


class NoiseField:
    """Standard normal noise over the plane.

    balanced: the noise of every block of 8 x 8 pixels sums to 0. With a single sampling step, slow variations of the
    noise become variations of brightness; balanced noise gives the same grain with less error.
    """

    def __init__(self, seed: int, *, balanced: bool = False) -> None:
        self.seed, self.balanced = seed, balanced

    def of(self, windows: Sequence[Window], device: torch.device | str = "cpu") -> NoiseOf:
        """Return the noise of windows of one size as a function of draw and channels."""
        return lambda draw, channels: self.windows(windows, channels=channels, draw=draw, device=device)

    def window(self, window: Window, *, channels: int, draw: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the noise (channels, h, w) of a window of a draw (0 = start, 1.. = resampling)."""
        return self.windows([window], channels=channels, draw=draw, device=device)[0]

    def windows(
        self, windows: Sequence[Window], *, channels: int, draw: int, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Return the noise (B, channels, h, w) of windows of one size; see `window`."""
        if not self.balanced:
            return self._white(windows, channels, draw, device)
        # Whole blocks around each window; their number does not depend on the window's position.
        height, width = (-(-edge // BLOCK) * BLOCK + BLOCK for edge in (windows[0].height, windows[0].width))
        around = [Window(w.row // BLOCK * BLOCK, w.col // BLOCK * BLOCK, height, width) for w in windows]
        blocks = self._white(around, channels, draw, device).unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        blocks -= blocks.mean(dim=(3, 5), keepdim=True)
        blocks *= math.sqrt(BLOCK**2 / (BLOCK**2 - 1))
        made = blocks.flatten(4, 5).flatten(2, 3)
        return torch.stack(
            [
                one[:, w.row - a.row : w.row - a.row + w.height, w.col - a.col : w.col - a.col + w.width]
                for one, w, a in zip(made, windows, around, strict=True)
            ]
        )

    def _white(self, windows: Sequence[Window], channels: int, draw: int, device: torch.device | str) -> Tensor:
        # One pair of words gives two independent numbers (Box-Muller), so bands are computed in pairs.
        pairs = -(-channels // 2)
        down = self._words([range(w.row, w.row + w.height) for w in windows], pairs, draw, axis=0)
        across = self._words([range(w.col, w.col + w.width) for w in windows], pairs, draw, axis=1)
        rows = to_device(down, torch.device(device))[..., :, None]
        cols = to_device(across, torch.device(device))[..., None, :]
        if rows.is_cuda:
            return _normal(rows, cols).flatten(1, 2)[:, :channels].contiguous()
        # One plane at a time, so that it stays in the processor's cache.
        made = torch.empty((len(windows), 2 * pairs, rows.shape[-2], cols.shape[-1]))
        for tile in range(len(windows)):
            for pair in range(pairs):
                made[tile, 2 * pair : 2 * pair + 2] = _normal(rows[:, tile, pair], cols[:, tile, pair])
        return made[:, :channels].contiguous()

    def _words(self, lines: Sequence[range], pairs: int, draw: int, *, axis: int) -> NDArray[np.int32]:
        """Return two words for each line (2, B, pairs, lines); they depend on the line, not on the window."""
        keys = np.random.SeedSequence([self.seed, draw, axis]).generate_state(1, np.uint64)
        # The key of a band does not depend on the number of bands.
        keys = _mixed_long(keys + np.arange(1, pairs + 1, dtype=np.uint64) * _APART)
        numbers = np.array([np.asarray(line, dtype=np.int64) for line in lines]).astype(np.uint64)
        words = _mixed_long(keys[:, None] + numbers[:, None, :] * _APART)
        return np.stack([words >> np.uint64(32), words & np.uint64(0xFFFFFFFF)]).astype(np.uint32).view(np.int32)


def _normal(rows: Tensor, cols: Tensor) -> Tensor:
    """Return (..., 2, h, w) independent standard normal numbers from words of rows (2, ..., h, 1) and columns."""
    first = _mixed(rows[0] + cols[0])
    second = _mixed((rows[1] + cols[1]).bitwise_xor_(first))
    # 23 bits plus one half: exact in float32 and never 0, whose logarithm is infinite.
    radius = _share(first, 9).log_().mul_(-2).sqrt_()
    angle = _share(second, 9).mul_(2 * math.pi)
    made = torch.stack([angle.cos(), angle.sin()], dim=-3)
    return made.mul_(radius.unsqueeze(-3))


def _share(words: Tensor, shift: int) -> Tensor:
    """Return the upper bits of words (int32, taken as unsigned) as numbers in (0, 1)."""
    return _down(words, shift).float().add_(0.5).mul_(2.0 ** (shift - 32))


def _mixed(words: Tensor) -> Tensor:
    """Mix words (int32) in place, so that every bit depends on every bit of the input, and return them."""
    for shift, factor in zip(_SHIFTS, (*_FACTORS, None), strict=True):
        words.bitwise_xor_(_down(words, shift))
        if factor is not None:
            words.mul_(factor)  # modulo 2^32, on every device
    return words


def _down(words: Tensor, shift: int) -> Tensor:
    """Return int32 words shifted right as unsigned numbers; the operator itself keeps the sign."""
    return (words >> shift).bitwise_and_((1 << (32 - shift)) - 1)


def _mixed_long(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return mixed 64-bit words."""
    for shift, factor in zip(_LONG_SHIFTS, (*_LONG_FACTORS, None), strict=True):
        words = words ^ (words >> np.uint64(shift))
        if factor is not None:
            words = words * factor
    return words
