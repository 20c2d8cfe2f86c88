"""`python -m sader.training`: the training commands with argparse, for machines without Typer.

Needs torch, numpy, einops, safetensors, PyYAML and PyTorch Lightning only. The same functions are behind `sader train`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from sader.errors import SaderError


def _train_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sader.training", description="Train a network (or: guide ...).")
    parser.add_argument(
        "preset", nargs="?", help="preset, baseline system or YAML file; left out with --resume or --init"
    )
    parser.add_argument("--data", nargs="+", default=[], help="shards to train on, files or folders")
    parser.add_argument("--validation", nargs="+", default=[], help="shards of other places to validate on")
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="train.steps=...")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    parser.add_argument("--init", help="weights to start from: a shipped name or a file")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def _guide_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sader.training guide", description="Pretrain a resampling guide.")
    parser.add_argument("--data", nargs="+", default=[], help="shards to train on, files or folders")
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--kind", help="mae (default), mae-paper or conv")
    parser.add_argument("--bands", help="bands of the images, B02,B03,...")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="train.steps=...")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; a `SaderError` becomes one line on standard error and exit status 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words[:1] == ["guide"]:
            from sader.training.guide import run_guide

            given = _guide_parser().parse_args(words[1:])
            path = run_guide(
                given.data, given.run, kind=given.kind, bands=given.bands, overrides=given.set, resume=given.resume,
                progress=not given.quiet,
            )  # fmt: skip
        else:
            from sader.training.launch import run_training

            given = _train_parser().parse_args(words)
            path = run_training(
                given.preset, given.run, data=given.data, validation=given.validation, overrides=given.set,
                resume=given.resume, init=given.init, progress=not given.quiet,
            )  # fmt: skip
    except SaderError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    if os.environ.get("LOCAL_RANK", "0") == "0":  # the other processes of a distributed run wrote nothing
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
