"""How far each Triton kernel is from PyTorch in float32: what decides whether a machine may use it.

Every function returns {kernel: relative error} of float16 maps, ||got - wanted|| / ||wanted||; some 2e-4 is rounding.
Sizes are those of the paper's network on a GPU, so that what is compiled here is used again, and small on a CPU, where
Triton's interpreter runs. Used by benchmarks/paper_tile.py and the tests; needs Triton.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from sader.model.attention import neighbourhood_attention
from sader.model.blocks import Resample
from sader.model.fusion import attend_over_dates, masked_mean

Sizes = tuple[tuple[int, int, int, int], ...]
"""(channels, groups, height, width)."""
SMALL: Sizes = ((64, 16, 40, 72), (48, 16, 40, 72), (7, 1, 40, 72))
PAPER: Sizes = ((64, 16, 256, 256), (128, 16, 128, 128), (256, 16, 64, 64), (7, 1, 256, 256))
MODES: tuple[tuple[Resample, tuple[int, int], Callable[[Tensor], Tensor]], ...] = (
    ("none", (1, 1), lambda v: v),
    ("down", (2, 1), lambda v: F.avg_pool2d(v, 2)),
    ("up", (1, 2), lambda v: F.interpolate(v, scale_factor=2)),
)
"""How a map is resampled, how large it was before, and the same in PyTorch."""
GOOD = 3e-3
"""A kernel further off than this is wrong."""


class Errors(dict[str, float]):
    """The largest relative error of each kernel."""

    def note(self, name: str, got: Tensor, wanted: Tensor) -> None:
        """Keep what is further off than what was seen before; NaN counts as infinitely far."""
        error = float((got.float() - wanted.float()).norm() / wanted.float().norm())
        self[name] = max(self.get(name, 0.0), error if error == error else float("inf"))


def map_of(device: torch.device, *shape: int) -> Tensor:
    """Return a random map (N, C, H, W) in float16, channels last."""
    return torch.randn(*shape, device=device).half().contiguous(memory_format=torch.channels_last)


def sizes_for(device: torch.device) -> Sizes:
    """Return the sizes to try on a device."""
    return PAPER if device.type == "cuda" else SMALL


def kernel_errors(device: torch.device) -> dict[str, float]:
    """Return the errors of the kernels of `model.kernels`."""
    from sader.model import kernels

    torch.manual_seed(0)
    errors = Errors()
    note = errors.note
    for number, (channels, groups, height, width) in enumerate(sizes_for(device)):
        x, skip = 3 * map_of(device, 2, channels, height, width) + 1, map_of(device, 2, channels, height, width)
        weight, bias, before = torch.randn(3, channels, device=device)
        gain = 0.1 * torch.randn(2, channels, device=device)
        scale, shift = kernels.norm_coefficients(x, groups, weight, bias, 1e-5, gain=gain, before=before)
        normed = F.group_norm(x.float() + before[:, None, None], groups, weight, bias) * (1 + gain)[:, :, None, None]
        # What is compiled takes time: all modes at one size only, where it is compiled.
        for mode, _, resample in MODES[:1] if number and device.type == "cuda" else MODES:
            made = kernels.apply_norm(x, scale, shift, activation="gelu", resample=mode)
            note(f"norm, gelu, {mode}", made, resample(F.gelu(normed)))
            added = kernels.add_skip(made, bias, skip, resample=mode)
            note(f"add, {mode}", added, made.float() + bias[:, None, None] + resample(skip.float()))
        matrix, offsets = (
            0.1 * torch.randn(2 * channels, channels, device=device),
            torch.randn(2 * channels, device=device),
        )
        a, b = F.conv2d(normed, matrix[:, :, None, None], offsets).chunk(2, dim=1)
        made = kernels.gate(x, scale, shift, matrix.t().contiguous().half(), offsets)
        note("gate", made, F.gelu(normed) + a * F.gelu(b))
    # Where GELU is small, and far out where it is nothing.
    x = torch.linspace(-12, 0.5, 64 * 256, device=device).view(1, 64, 16, 16).half()
    one, nothing = torch.ones(1, 64, device=device), torch.zeros(1, 64, device=device)
    x = x.contiguous(memory_format=torch.channels_last)
    note("gelu below zero", kernels.apply_norm(x, one, nothing, activation="gelu"), F.gelu(x.float()))
    pairs, values = (map_of(device, 6, width, 40, 72).unflatten(0, (2, 3)) for width in (128, 64))
    there = torch.rand(2, 3, 40, 72, device=device) > 0.3
    there[:, 0] = True
    queries, keys = pairs.chunk(2, dim=2)
    wanted = attend_over_dates(masked_mean(queries.float(), there), keys.float(), values.float(), there)
    note("dates", kernels.attend(queries, keys, values, there), wanted)
    return errors


def join_errors(device: torch.device) -> dict[str, float]:
    """Return the errors of the kernels between the blocks, `model.joinkernels`."""
    from sader.model import joinkernels, kernels

    torch.manual_seed(0)
    errors = Errors()
    note = errors.note
    for channels, groups, height, width in sizes_for(device)[: 1 if device.type == "cuda" else 2]:
        full = (height, width)
        x, more = map_of(device, 2, channels, *full), map_of(device, 2, channels, *full)
        bias = torch.randn(channels, device=device)
        for mode, (times, parts), resample in MODES:
            size = (height * times // parts, width * times // parts)
            skip = map_of(device, 2, channels, *size)
            beside = torch.zeros(2, 2 * channels, *full, device=device, dtype=x.dtype)
            beside = beside.contiguous(memory_format=torch.channels_last)
            alone = x.float() + bias[:, None, None] + resample(skip.float())
            for added, out in ((None, None), (more, None), (more, beside[:, channels:]), (None, beside[:, :channels])):
                sums = joinkernels.empty_sums(2, channels, *full, x)
                made = joinkernels.join(x, bias, skip, sums, resample=mode, more=added, out=out)
                wanted = alone if added is None else alone + added.float()
                note(f"join, {mode}", made, wanted)
                if out is not None:
                    note("join, kept", out, alone)
                scale, shift = kernels.norm_coefficients(made, groups, None, None, 1e-5, sums=sums)
                normed = made.float() * scale[:, :, None, None] + shift[:, :, None, None]
                note("join, norm", normed, F.group_norm(made.float(), groups))
        both = map_of(device, 2, 2 * channels, *full)
        a, b = both.float().chunk(2, dim=1)
        note("product", joinkernels.product_gelu(both), a * F.gelu(b))
    return errors


def double_errors(device: torch.device) -> dict[str, float]:
    """Return the errors of a convolution of a doubled map from the small one, as `model.joined` makes it."""
    from sader.model import joinkernels, kernels
    from sader.model.cpublocks import DoublingConv

    torch.manual_seed(0)
    errors = Errors()
    channels, height, width = (128, 128, 128) if device.type == "cuda" else (48, 12, 20)
    x = map_of(device, 2, channels, height, width)
    conv = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False).to(device).requires_grad_(False)
    split = DoublingConv(conv)
    weights = [split.get_buffer(f"weight_{index}").half() for index in range(4)]
    if device.type == "cuda":
        parts = [F.conv2d(x, weight, padding=1) for weight in weights]
    else:
        parts = [F.conv2d(x.float(), weight.float(), padding=1).half() for weight in weights]
    made, sums = joinkernels.interleave([part.contiguous(memory_format=torch.channels_last) for part in parts])
    errors.note("doubled", made, F.conv2d(F.interpolate(x.float(), scale_factor=2), conv.weight, padding=1))
    scale, shift = kernels.norm_coefficients(made, 16, None, None, 1e-5, sums=sums)
    errors.note("doubled, norm", _affine(made, scale, shift), F.group_norm(made.float(), 16))
    return errors


def fold_errors(device: torch.device) -> dict[str, float]:
    """Return the errors of the kernels of the attentions, `model.datekernels` and `model.nearkernels`."""
    torch.manual_seed(0)
    errors = Errors()
    size = 256 if device.type == "cuda" else 24
    _dates(errors, device, size)
    _frames(errors, device, size)
    _blend(errors, device, size)
    _window(errors, device, *((16, 64) if device.type == "cuda" else (4, 12)))
    return errors


def _affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return x.float() * scale[:, :, None, None] + shift[:, :, None, None]


def _point(x: Tensor, rows: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a convolution of one pixel in float32 from a matrix with its inputs as rows."""
    return F.conv2d(x, rows.float().t()[:, :, None, None], bias)


def _gated(u: Tensor, rows: Tensor, bias: Tensor) -> Tensor:
    a, b = _point(u, rows, bias).chunk(2, dim=1)
    return F.gelu(u) + a * F.gelu(b)


def _random(device: torch.device) -> Callable[..., Tensor]:
    def made(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, device=device)

    return made


def _dates(errors: Errors, device: torch.device, size: int) -> None:
    """Attention over the dates by way of queries and keys, and the block after it."""
    from sader.model import datekernels, kernels

    random, width, keys = _random(device), 64, 32
    x = map_of(device, 6, width, size, size)
    scale, shift = 1 + random(6, width, scale=0.2), random(6, width)
    there = torch.rand(2, 3, size, size, device=device) > 0.3
    there[:, 1] = True
    to_query, to_key = (random(width, keys, scale=0.2) for _ in range(2))
    query_bias, key_bias, bias = random(keys), random(keys), random(width)
    out = random(width, width, scale=0.1).half()
    u = _affine(x, scale, shift).unflatten(0, (2, 3))
    flat = u.flatten(0, 1)
    queries = _point(flat, to_query, query_bias).unflatten(0, (2, 3))
    per_date = _point(flat, to_key, key_bias).unflatten(0, (2, 3))
    fused = attend_over_dates(masked_mean(queries, there), per_date, u, there)
    root = keys**-0.5
    made, sums = datekernels.mixed_dates(
        x, scale, shift, there, (to_query @ to_key.t() * root).half().contiguous(),
        (query_bias @ to_key.t() * root).contiguous(), out, bias,
    )  # fmt: skip
    errors.note("dates, folded", made, _point(fused, out, bias))
    gain, offset = kernels.norm_coefficients(made, 16, None, None, 1e-5, sums=sums)
    normed = F.group_norm(made.float(), 16)
    errors.note("dates, norm", _affine(made, gain, offset), normed)
    widen, last = random(width, 2 * width, scale=0.1).half(), random(width, width, scale=0.1).half()
    widen_bias = random(2 * width)
    a, b = _point(normed, widen, widen_bias).chunk(2, dim=1)
    found = datekernels.feed_forward(made, gain, offset, widen, widen_bias, last, bias)
    errors.note("feed forward", found, made.float() + _point(a * F.gelu(b), last, bias))


def _frames(errors: Errors, device: torch.device, size: int) -> None:
    """Frames beside each other, in cells, and their mean."""
    from sader.model import datekernels

    random = _random(device)
    state, fixed = random(2, 3, 3, size, size), random(2, 3, 4, size, size)
    present = torch.tensor([[True, True, True], [True, False, True]], device=device)
    there = (torch.rand(2, 3, size, size, device=device) > 0.3) & present[:, :, None, None]
    frames, cells, mean = datekernels.frame_maps(state, fixed, present, there, 4, torch.float16)
    whole = torch.cat([state * present[:, :, None, None, None], fixed], dim=2)
    filled = F.pad(whole, (0, 0, 0, 0, 0, 1))
    errors.note("frames", frames, filled.flatten(0, 1))
    small = size // 4
    deep = filled.flatten(0, 1).view(6, 8, small, 4, small, 4).permute(0, 3, 5, 1, 2, 4)
    errors.note("frames, cells", cells, deep.reshape(6, 128, small, small))
    errors.note("frames, mean", mean, masked_mean(filled, there))


def _blend(errors: Errors, device: torch.device, size: int) -> None:
    """The two gates and the sum at the end of the fusion."""
    from sader.model import datekernels

    random, channels = _random(device), 7
    near, own = (map_of(device, 2, 8, size, size) for _ in range(2))
    near[:, channels:] = 0
    mean = F.pad(random(2, channels, size, size), (0, 0, 0, 0, 0, 1)).contiguous(memory_format=torch.channels_last)
    scale, shift, share = 1 + random(2, channels, scale=0.2), random(2, channels), random(1)[0]
    extra = 16 - channels
    wanted, matrices = [], []
    for u in (_affine(near[:, :channels], scale, shift), own[:, :channels].float()):
        rows, bias = random(channels, 2 * channels, scale=0.3).half(), random(2 * channels)
        last, offset = random(channels, channels, scale=0.3).half(), random(channels)
        wanted.append(_point(_gated(u, rows, bias), last, offset))
        wide = torch.cat([F.pad(half, (0, extra, 0, extra)) for half in rows.chunk(2, dim=1)], dim=1)
        offsets = torch.cat([F.pad(half, (0, extra)) for half in bias.chunk(2)])
        matrices.append([wide.contiguous(), offsets, F.pad(last, (0, extra, 0, extra)), F.pad(offset, (0, extra))])
    found = datekernels.blend(
        near, scale, shift, own[:, :channels], mean, share, channels=channels, near_matrices=matrices[0],
        own_matrices=matrices[1],
    )  # fmt: skip
    v = share.sigmoid()
    sum_of_both = v * (near[:, :channels].float() + wanted[0]) + (1 - v) * wanted[1]
    errors.note("blend", found, mean + F.pad(sum_of_both, (0, 0, 0, 0, 0, 1)))


def _window(errors: Errors, device: torch.device, heads: int, size: int) -> None:
    """Attention in a window, and the sum of the branches."""
    from sader.model import joinkernels, kernels, nearkernels

    random, channels, shape = _random(device), 16 * heads, (size, size + 4)
    x, bias = map_of(device, 2, 3 * channels, *shape), random(3 * channels).half()
    heat = 5 + 10 * torch.rand(heads, device=device)
    three = (x.float() + bias.float()[:, None, None]).unflatten(1, (3, heads, 16)).permute(1, 0, 2, 4, 5, 3)
    q, k = (F.normalize(one, dim=-1) * heat.sqrt()[:, None, None, None] for one in three[:2])
    wanted = neighbourhood_attention(q, k, three[2], 5).permute(0, 1, 4, 2, 3).flatten(1, 2)
    errors.note("window", nearkernels.window_attention(x, bias, heat, kernel=5), wanted)
    both = map_of(device, 2, 2 * channels, *shape)
    near, far = both.chunk(2, dim=1)
    near_new, far_new = (map_of(device, 2, channels, *shape) for _ in range(2))
    offset, gains = random(channels), random(2, 2 * channels)
    sums = joinkernels.empty_sums(2, channels, *shape, x)
    made = nearkernels.sum_of_branches(near, near_new, offset, far, far_new, gains, sums)
    first, second = (1 + gains)[:, :, None, None].chunk(2, dim=1)
    summed = first * (near.float() + near_new.float() + offset[:, None, None]) + second * (far.float() + far_new)
    errors.note("branches", made, summed)
    scale, shift = kernels.norm_coefficients(made, 16, None, None, 1e-5, sums=sums)
    errors.note("branches, norm", _affine(made, scale, shift), F.group_norm(made.float(), 16))
