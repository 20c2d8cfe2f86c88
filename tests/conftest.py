"""Test settings: one thread; tests marked `slow`, `gpu` or `network` are skipped with a reason."""

from __future__ import annotations

import pytest
import torch

# Tiny nets get no faster with more threads, and sums come out in the same order on every machine.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_start_for_every_test() -> None:
    """New layers draw from torch's global generator: a test must not depend on which tests ran before it."""
    torch.manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption("--network", action="store_true", help="also run the tests that need the internet")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = {
        "slow": None if config.getoption("--slow") else "slow: run with --slow",
        "gpu": None if torch.cuda.is_available() else "gpu: no CUDA device here",
        "network": None if config.getoption("--network") else "network: run with --network",
    }
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
