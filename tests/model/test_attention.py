"""Neighbourhood attention against one pixel at a time, and the hybrid block that mixes it with the global one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sader.model.attention import GlobalBranch, HybridAttention, NeighbourhoodBranch, neighbourhood_attention


def randomise(module: nn.Module, seed: int = 0, scale: float = 0.2) -> nn.Module:
    """Return `module` with noise added to every parameter: a layer that starts at zero would hide what it does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return module


def one_pixel_at_a_time(q: Tensor, k: Tensor, v: Tensor, kernel: int) -> Tensor:
    """Return neighbourhood attention as its definition reads: a window around the pixel, pushed inside at borders."""
    height, width = q.shape[2:4]
    out = torch.empty_like(q)
    for row in range(height):
        for col in range(width):
            tall, wide = min(kernel, height), min(kernel, width)
            top = min(max(row - tall // 2, 0), height - tall)
            left = min(max(col - wide // 2, 0), width - wide)
            keys = k[:, :, top : top + tall, left : left + wide].flatten(2, 3)
            values = v[:, :, top : top + tall, left : left + wide].flatten(2, 3)
            logits = torch.einsum("bkd,bknd->bkn", q[:, :, row, col], keys)
            out[:, :, row, col] = torch.einsum("bkn,bknd->bkd", logits.softmax(dim=-1), values)
    return out


@pytest.mark.parametrize("kernel", [3, 5, 7])
@pytest.mark.parametrize("size", [(1, 1), (2, 9), (5, 4), (8, 8), (9, 17), (13, 24), (11, 3)])
def test_neighbourhood_attention_is_the_definition(size, kernel):
    generator = torch.Generator().manual_seed(kernel)
    q, k, v = torch.randn(3, 2, 3, *size, 4, generator=generator, dtype=torch.float64)
    found = neighbourhood_attention(q, k, v, kernel)
    torch.testing.assert_close(found, one_pixel_at_a_time(q, k, v, kernel), rtol=1e-10, atol=1e-10)


def test_gradient_of_neighbourhood_attention_is_that_of_the_definition():
    generator = torch.Generator().manual_seed(1)
    leaves = [x.requires_grad_() for x in torch.randn(3, 1, 2, 9, 10, 3, generator=generator, dtype=torch.float64)]
    weight = torch.randn(1, 2, 9, 10, 3, generator=generator, dtype=torch.float64)
    gradients = [
        torch.autograd.grad((how(*leaves, 5) * weight).sum(), leaves)
        for how in (neighbourhood_attention, one_pixel_at_a_time)
    ]
    for fast, slow in zip(*gradients, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)


def test_heads_do_not_mix_and_channels_stay_in_place():
    """Values that name their channel come out named the same: attention averages over places, never over channels."""
    branch = NeighbourhoodBranch(32, kernel=3, head_width=16)
    randomise(branch, 2)
    seen: list[Tensor] = []
    branch.out.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        branch.to_qkv.weight[64:] = 0  # the last third makes the values
        branch.to_qkv.bias[64:] = torch.arange(32.0)
        branch(torch.randn(1, 32, 6, 7))
    torch.testing.assert_close(seen[0], torch.arange(32.0).view(1, -1, 1, 1).expand(1, 32, 6, 7))


def test_cosine_attention_ignores_the_length_of_queries_and_keys():
    branch = NeighbourhoodBranch(32, kernel=3, head_width=16)
    randomise(branch, 3)
    x = torch.randn(1, 32, 6, 7, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = branch(x)
        branch.to_qkv.weight[:64] *= 4  # a power of two: the scaling itself rounds nothing
        branch.to_qkv.bias[:64] *= 4
        torch.testing.assert_close(branch(x), before, rtol=1e-4, atol=1e-5)
        branch.temperature += 20
        assert not torch.allclose(branch(x), before, atol=1e-3)


def test_global_branch_reaches_every_pixel_and_neighbourhood_only_its_window():
    x = torch.randn(1, 32, 20, 20, generator=torch.Generator().manual_seed(4))
    changed = x.clone()
    changed[0, :, 0, 0] += 1
    for branch, reaches in ((GlobalBranch(32), True), (NeighbourhoodBranch(32, kernel=3, head_width=16), False)):
        randomise(branch, 5)
        branch.norm = nn.Identity()  # the norm sees the whole map
        with torch.no_grad():
            difference = (branch(changed) - branch(x)).abs().amax(dim=1)[0]
        assert (difference[12:, 12:] > 1e-8).any() == reaches
        assert difference[0, 0] > 1e-3


def test_hybrid_block_starts_as_identity_and_listens_to_the_noise_level():
    block = HybridAttention(32, emb_width=8, kernel=5)
    generator = torch.Generator().manual_seed(6)
    x, emb = torch.randn(2, 32, 7, 9, generator=generator), torch.randn(2, 8, generator=generator)
    assert torch.equal(block(x, emb), x)
    randomise(block, 7)
    with torch.no_grad():
        changed = block(x, emb)
        assert not torch.allclose(changed, x, atol=1e-3)
        assert not torch.allclose(block(x, emb + 1), changed, atol=1e-4)


def test_every_parameter_of_the_hybrid_block_learns():
    block = randomise(HybridAttention(32, emb_width=8, kernel=3), 8)
    block(torch.randn(1, 32, 9, 5), torch.randn(1, 8)).square().sum().backward()
    silent = [name for name, p in block.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []
