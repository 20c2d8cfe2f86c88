"""The mask network: any dates, any bands, nodata, and one date at a time or many."""

from __future__ import annotations

import pytest
import torch

from sader.model.heads import (
    HIDDEN_CLASSES,
    MASK_BANDS,
    MASK_CLASSES,
    MaskNetwork,
    MaskNetworkConfig,
    band_sources,
    hidden_probability,
)

SIZE = 32


@pytest.fixture(scope="module")
def network() -> MaskNetwork:
    torch.manual_seed(0)
    return MaskNetwork(MaskNetworkConfig((4, 4, 8, 8, 8), (1,) * 5, heads=2)).eval()


def series(dates: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(1, dates, len(MASK_BANDS), SIZE, SIZE, generator=generator) * 0.5
    return images, torch.ones(1, dates, SIZE, SIZE, dtype=torch.bool), torch.ones(1, len(MASK_BANDS), dtype=torch.bool)


@torch.no_grad()
@pytest.mark.parametrize("dates", [1, 3])
def test_scores_of_every_date_and_class(network: MaskNetwork, dates: int) -> None:
    scores = network(*series(dates))
    assert scores.shape == (1, dates, len(MASK_CLASSES), SIZE, SIZE)
    probability = hidden_probability(scores, dim=2)
    expected = scores.softmax(2)[:, :, list(HIDDEN_CLASSES)].sum(2)
    torch.testing.assert_close(probability, expected)


@torch.no_grad()
def test_order_of_dates_does_not_matter(network: MaskNetwork) -> None:
    images, seen, present = series(3)
    order = [2, 0, 1]
    torch.testing.assert_close(
        network(images[:, order], seen[:, order], present), network(images, seen, present)[:, order]
    )


@torch.no_grad()
def test_series_of_a_batch_do_not_inform_each_other(network: MaskNetwork) -> None:
    first, second = series(2, 0), series(2, 1)
    both = network(*(torch.cat(parts) for parts in zip(first, second, strict=True)))
    torch.testing.assert_close(both, torch.cat([network(*first), network(*second)]), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_other_dates_change_the_result(network: MaskNetwork) -> None:
    images, seen, present = series(2)
    alone = network(images[:, :1], seen[:, :1], present)
    assert (network(images, seen, present)[:, :1] - alone).abs().max() > 1e-4


@torch.no_grad()
def test_a_date_without_data_is_like_no_date(network: MaskNetwork) -> None:
    images, seen, present = series(3)
    seen[:, 2] = False
    torch.testing.assert_close(
        network(images, seen, present)[:, :2],
        network(images[:, :2], seen[:, :2], present),
        rtol=1e-4,
        atol=1e-5,
    )


@torch.no_grad()
def test_values_of_absent_bands_and_nodata_do_not_matter(network: MaskNetwork) -> None:
    images, seen, present = series(2)
    present[:, [0, 6]] = False
    seen[:, 0, :8] = False
    other = images.clone()
    other[:, :, [0, 6]] = torch.nan
    other[:, 0, :, :8] = 0.9
    torch.testing.assert_close(network(images, seen, present), network(other, seen, present))


def test_band_sources_take_substitutes() -> None:
    assert band_sources(("B04", "B8A", "B02")) == [None, 2, None, 0, 1, None, None, None, None]
    assert band_sources(MASK_BANDS) == list(range(len(MASK_BANDS)))
