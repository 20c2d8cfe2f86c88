"""Test settings: one thread; tests marked `slow`, `gpu` or `network` are skipped with a reason."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
import typer.main

# What imports and the collection of tests create stays until the end: searching it for garbage takes a third of the
# time of the collection, and again a part of every test.
gc.disable()

# Tiny nets get no faster with more threads, and sums come out in the same order on every machine.
torch.set_num_threads(1)

# Typer collects the parameters of all commands at every call, which takes longer than most commands of the tests.
typer.main.get_command = cache(typer.main.get_command)


@pytest.fixture(autouse=True)
def _same_start_for_every_test() -> None:
    """New layers draw from torch's global generator: a test must not depend on which tests ran before it."""
    torch.manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption("--network", action="store_true", help="also run the tests that need the internet")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--slow"):
        os.environ["SADER_SLOW_TESTS"] = "1"  # for the number of examples, which is needed at import


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


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@dataclass(frozen=True)
class Disk:
    """A small file system of its own."""

    folder: Path

    def fill(self, left: int = 0) -> None:
        """Leave so many bytes free."""
        ballast = self.folder / "ballast"
        with suppress(OSError), open(ballast, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        os.truncate(ballast, max(0, ballast.stat().st_size - left))

    def free(self) -> None:
        """Take away what `fill` wrote."""
        (self.folder / "ballast").unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A disk of 8 MiB; skipped where none can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={8 * 2**20}", "tmpfs", str(folder)]
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a file system cannot be mounted here; that takes root on Linux")
    yield Disk(folder)
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
