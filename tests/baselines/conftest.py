"""What the tests of the baseline systems share: small series, noise, networks whose zero layers are stirred."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sader.baselines.baseline import Baseline, BaselineInputs, BaselineModelConfig, NoiseOf, System, generator_noise
from sader.data.batch import SeriesBatch


@pytest.fixture
def series() -> Callable[..., BaselineInputs]:
    """Make inputs of random reflectance: series(dates, channels, height, width, batch=, aux=)."""

    def make(
        dates: int = 3, channels: int = 4, height: int = 32, width: int = 32, *, batch: int = 2, aux: int = 0
    ) -> BaselineInputs:
        generator = torch.Generator().manual_seed(dates + 10 * height)

        def image(count: int) -> Tensor:
            return torch.rand(batch, dates, count, height, width, generator=generator) * 2 - 1

        return BaselineInputs(
            cloudy=image(channels),
            aux=image(aux) if aux else None,
            observed=torch.ones(batch, dates, height, width, dtype=torch.bool),
            cloud=(torch.rand(batch, dates, height, width, generator=generator) < 0.3).float(),
            present=torch.ones(batch, dates, dtype=torch.bool),
            reference=torch.full((batch,), -1),
            days=None,
        )

    return make


@pytest.fixture
def batch() -> Callable[..., SeriesBatch]:
    """Make a training batch: batch(dates, channels, size); clouds are white bars, the ground is smooth."""

    def make(dates: int = 3, channels: int = 4, size: int = 32, *, count: int = 2) -> SeriesBatch:
        generator = torch.Generator().manual_seed(5)
        coarse = torch.rand(count, channels, 4, 4, generator=generator) * 0.4 + 0.1
        clear = nn.functional.interpolate(coarse, size=(size, size), mode="bilinear")
        cloudy = clear[:, None].repeat(1, dates, 1, 1, 1)
        mask = torch.zeros(count, dates, size, size, dtype=torch.bool)
        for date in range(dates):
            mask[:, date, 4 * date : 4 * date + 6] = True
        cloudy = torch.where(mask[:, :, None], 0.9, cloudy)
        scored = torch.ones(count, size, size, dtype=torch.bool)
        scored[:, :3, :2] = False
        return SeriesBatch(
            cloudy=cloudy,
            clear=clear,
            scored=scored,
            hidden=torch.zeros_like(scored),
            cloud_mask=mask,
            labels=mask.to(torch.uint8),
            valid=torch.ones_like(mask),
            present=torch.ones(count, dates, dtype=torch.bool),
            reference=torch.full((count,), -1),
            days=None,
            band_present=torch.ones(count, channels, dtype=torch.bool),
        )

    return make


@pytest.fixture
def noise_for() -> Callable[..., NoiseOf]:
    """Make the noise of inputs from a seed."""
    return lambda inputs, seed=0: generator_noise(inputs, torch.Generator().manual_seed(seed))


@pytest.fixture
def stirred() -> Callable[[Baseline], Baseline]:
    """Return the network in evaluation mode with random numbers where it starts at zero, so that every part counts."""

    def stir(network: Baseline) -> Baseline:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in network.parameters():
                if not parameter.any():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        return network.eval()

    return stir


@pytest.fixture
def one_step(batch: Callable[..., SeriesBatch]) -> Callable[..., tuple[float, float]]:
    """Train one Adam step on one batch; return the loss before and after it, on the same noise."""

    def loss_of(network: Baseline, example: SeriesBatch) -> Tensor:
        phases = list(network.losses(example, torch.Generator().manual_seed(3)))
        assert [phase.name for phase in phases] == list(network.parameter_groups())
        for phase in phases:
            assert all(not term.requires_grad and term.isfinite() for term in phase.terms.values())
        return torch.stack([phase.loss for phase in phases]).sum()

    def train(network: Baseline, *, rate: float = 1e-3, size: int = 32) -> tuple[float, float]:
        example = batch(channels=network.config.date_channels, size=size)
        network.train()
        optimizer = torch.optim.Adam(network.parameters(), rate)
        before = loss_of(network, example)
        before.backward()
        assert any(p.grad is not None and p.grad.any() for p in network.parameters())
        optimizer.step()
        with torch.no_grad():
            after = float(loss_of(network, example))
            with torch.autocast("cpu", torch.bfloat16):  # as on a GPU
                assert float(loss_of(network, example)) == pytest.approx(after, rel=0.1, abs=0.05)
        return float(before.detach()), after

    return train


@pytest.fixture
def round_trip(tmp_path: Path) -> Callable[[System, Baseline], Baseline]:
    """Save a network as a checkpoint and return what is loaded from it."""

    def save_and_load(system: System, network: Baseline) -> Baseline:
        from sader.checkpoint import load_checkpoint, save_checkpoint

        path = tmp_path / f"{system.name}.safetensors"
        save_checkpoint(path, network, BaselineModelConfig(system.name, network.config))
        loaded = load_checkpoint(path)
        assert isinstance(loaded.model, Baseline)
        assert loaded.config == BaselineModelConfig(system.name, network.config)
        return loaded.model

    return save_and_load
