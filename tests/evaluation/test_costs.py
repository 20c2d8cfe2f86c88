"""Operator counts against counts by hand, equal on the CPU and without values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sader.evaluation.costs import count_macs, count_parameters, on_meta

DEVICES = ("cpu", "meta")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("layer", "by_hand"),
    [
        # output pixels x kernel x input channels of a group x output channels
        (lambda: nn.Conv2d(3, 8, 3, padding=1), 12 * 10 * 9 * 3 * 8),
        (lambda: nn.Conv2d(3, 8, 3, padding=1, stride=2), 6 * 5 * 9 * 3 * 8),
        (lambda: nn.Conv2d(3, 6, 1, groups=3), 12 * 10 * 1 * 1 * 6),
        (lambda: nn.ConvTranspose2d(3, 4, 2, stride=2), 12 * 10 * 4 * 3 * 4),
    ],
)
def test_convolutions_match_the_count_by_hand(layer, by_hand, device):
    counts = count_macs(layer().to(device), torch.empty(2, 3, 12, 10, device=device))
    assert counts == {"total": 2 * by_hand, "convolution": 2 * by_hand}


@pytest.mark.parametrize("device", DEVICES)
def test_a_small_net_is_the_sum_of_its_layers(device):
    net = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 4, 1), nn.Flatten())
    net.append(nn.Linear(4 * 6 * 5, 7))
    counts = count_macs(net.to(device), torch.empty(1, 4, 6, 5, device=device))
    assert counts["convolution"] == 30 * (9 * 4 * 8 + 8 * 4)
    assert counts["matmul"] == 4 * 6 * 5 * 7
    assert counts["total"] == counts["convolution"] + counts["matmul"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("masked", [False, True])
def test_attention_counts_both_products(device, masked):
    query = torch.empty(2, 3, 10, 8, device=device)
    key = torch.empty(2, 3, 6, 8, device=device)
    mask = torch.zeros(2, 1, 10, 6, device=device) if masked else None
    counts = count_macs(F.scaled_dot_product_attention, query, key, key, attn_mask=mask)
    assert counts["total"] == 2 * 3 * 10 * 6 * (8 + 8)


def test_einsum_and_keywords_are_seen():
    counts = count_macs(lambda a, *, b: torch.einsum("bnd,bmd->bnm", a, b), on_meta(2, 5, 7), b=on_meta(2, 6, 7))
    assert counts["total"] == 2 * 5 * 6 * 7


def test_pointwise_work_is_free():
    assert count_macs(nn.SiLU(), on_meta(1, 3, 4, 4)) == {"total": 0}


def test_shared_weights_count_once():
    layer = nn.Linear(5, 5, bias=False)
    assert count_parameters(nn.Sequential(layer, layer)) == 25
