"""Reading ahead of the network: what is left when nobody takes it any more."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

pytest.importorskip("rasterio")


def test_a_reader_that_is_closed_early_leaves_no_thread():
    from sader.geo.scene.tileread import read_ahead

    read: list[int] = []
    tiles = read_ahead(range(50), lambda number: read.append(number) or number, ahead=2)  # type: ignore[arg-type]
    assert [next(tiles), next(tiles)] == [0, 1]
    tiles.close()
    assert len(read) <= 4
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sader-read")]


def test_an_error_that_ends_the_program_is_the_only_thing_said():
    program = (
        "from sader.geo.scene.tileread import read_ahead\n"
        "tiles = read_ahead(range(9), lambda number: number, ahead=2)\n"
        "next(tiles)\n"
        "raise SystemExit('the true reason')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (1, "the true reason\n")
