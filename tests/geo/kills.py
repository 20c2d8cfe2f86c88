"""Ends `run_remove` or `run_series` at its k-th file operation, runs it again and compares the files.

    python kills.py MODEL FOLDER INPUT... --every N [--series]

A fresh process forks for every run, so that the model is loaded once and no other thread is running.
"""

from __future__ import annotations

import argparse
import builtins
import io
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from sader.geo.remove import RemoveRequest, run_remove
from sader.geo.scene.options import SceneOptions
from sader.geo.series import run_series
from sader.inference.remover import CloudRemover

OPERATIONS = ("replace", "rename", "fsync", "unlink", "rmdir", "mkdir", "truncate")
KILLED, SECONDS = 9, 120
NAMES_ITS_FOLDER = ("c.json", "c.zarr/zarr.json")
"""Files with paths in them, which differ between the folders of two runs."""


def count_operations(last: int) -> None:
    """End the process before its `last`-th file operation."""
    count = 0

    def counted(call: Any, writes: Any = lambda *given, **named: True) -> Any:
        def wrapped(*given: Any, **named: Any) -> Any:
            nonlocal count
            if writes(*given, **named):
                count += 1
                if count == last:
                    os._exit(KILLED)
            return call(*given, **named)

        return wrapped

    def opens_for_writing(file: Any, mode: str = "r", *given: Any, **named: Any) -> bool:
        return isinstance(mode, str) and any(letter in mode for letter in "wax+")

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))
    opened = counted(builtins.open, opens_for_writing)
    builtins.open = io.open = opened  # type: ignore[assignment]


def forked(request: RemoveRequest, remover: CloudRemover, last: int | None) -> int:
    """Return the exit status of a run in a process of its own; last: the operation at which it ends."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            if last is not None:
                count_operations(last)
            run = run_series if Path(request.out).suffix == "" else run_remove
            run(request, load=lambda model, device: (remover, "tiny"))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, 9)
    raise TimeoutError(f"a run that should end at operation {last} did not end")


def files_of(folder: Path) -> list[str]:
    """Return all files below a folder, and empty folders."""
    found = [path for path in folder.rglob("*") if path.is_file() or not any(path.iterdir())]
    return sorted(str(path.relative_to(folder)) for path in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("inputs", nargs="+")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--series", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.inputs[0].endswith(".zarr"):
        import dask.array  # noqa: F401  (once, not in every fork)
        import xarray  # noqa: F401
        import zarr  # noqa: F401
    remover = CloudRemover.from_pretrained(arguments.model, device="cpu").with_options(tile=32, overlap=8)

    def request(folder: Path) -> RemoveRequest:
        if arguments.series:
            return RemoveRequest(tuple(arguments.inputs), str(folder), SceneOptions(provenance=True))
        folder.mkdir(parents=True)
        options = SceneOptions(reference=0, count=True, uncertainty=True, samples=1)
        if arguments.inputs[0].endswith(".zarr"):
            return RemoveRequest(inputs=tuple(arguments.inputs), out=str(folder / "c.zarr"), options=options)
        extras = {"preview": str(folder / "look.png"), "report": str(folder / "page.html")}
        return RemoveRequest(inputs=tuple(arguments.inputs), out=str(folder / "c.tif"), options=options, **extras)

    wanted = arguments.folder / "wanted"
    assert forked(request(wanted), remover, None) == 0
    names = files_of(wanted)
    number, kills = 1, 0
    while True:
        folder = arguments.folder / f"at{number}"
        asked = request(folder)
        status = forked(asked, remover, number)
        if status == 0:
            break
        assert status == KILLED, f"operation {number}: status {status}"
        kills += 1
        assert forked(asked, remover, None) == 0, f"operation {number}: the second run failed"
        found = files_of(folder)
        assert found == names, f"operation {number}: {found}"
        for name in names:
            if not name.endswith(".html"):
                same = (folder / name).read_bytes() == (wanted / name).read_bytes()
                assert same or name in NAMES_ITS_FOLDER or (arguments.series and name.endswith(".json")), (
                    f"operation {number}: {name} differs"
                )
        number += arguments.every
    print(f"{kills} kills, {number} operations, {len(names)} files")


if __name__ == "__main__":
    main()
