"""Train one system on the training places of TriClear with the batches of benchmarks/triclear.yaml.

    python benchmarks/systems.py emrdm --samples 100000 --data triclear/train --out runs/systems
    python benchmarks/systems.py small-mse --samples 100000 --seed 2 --data triclear/train --out runs/systems
    python benchmarks/systems.py emrdm diffcr uncrtaints --samples 100000 --data triclear/train
    python benchmarks/systems.py --list

NAME is a baseline system, `sader` (the paper's network), or `small`, the small form of the paper's network, with an
ablation such as `small-mse`. Loss, optimiser, rates and schedule are the system's own; four bands, three dates, crops
of 128 pixels and 16 series a step are the same for all (`BATCH` has the exceptions; --batch changes it). Several names
are trained at the same time on one GPU, step by step on the same batches. The same command resumes an interrupted run
and refuses other data or settings. `benchmarks/results.py` predicts and scores.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sader.config import merge
from sader.errors import ConfigError, did_you_mean
from sader.evaluation.reproduce.plans import TABLES
from sader.evaluation.reproduce.setting import tiny_overrides
from sader.models import BASELINES
from sader.training.config import RunConfig, read_yaml, resolve
from sader.training.run import fit_together

SETTINGS = Path(__file__).with_name("triclear.yaml")
PAPER = "sen2_mtc_new"
BATCH = {"ctgan": (4, 256), "crtsnet": (4, 128)}
"""Series and pixels a side: CTGAN has the fixed size 256, CR-TS Net costs 1.9 TMAC for a series of 128 pixels."""
_ROWS = {row.name: row.run for row in TABLES["here"].rows["here"] if row.run is not None}
ABLATIONS = {"small": _ROWS["paper-small"]} | {
    f"small-{part}": _ROWS[f"paper-{part}"]
    for part in ("no-tfblock", "no-hablock", "mse", "no-cloud-free", "no-brightness")
}


def names() -> list[str]:
    """Return the names of all systems."""
    return ["sader", *BASELINES, *ABLATIONS]


def base_of(name: str) -> str:
    """Return the preset or baseline system that a name trains."""
    if name not in names():
        raise ConfigError(f"unknown system {name!r}{did_you_mean(name, names())}")
    return name if name in BASELINES else PAPER


def run_settings(name: str, samples: int, *, batch: int | None = None, seed: int = 0) -> list[str]:
    """Return the changes to the run config of a system, in the notation of `sader train --set`."""
    base, shared = base_of(name), read_yaml(SETTINGS)
    series, crop = BATCH.get(base, (shared["train"]["batch_size"], shared["train"]["crop"]))
    series = batch or series
    train: dict[str, Any] = {"dates": 3, "crop": crop, "batch_size": series, "accumulate": 1}
    train |= {"steps": math.ceil(samples / series), "schedule_steps": None, "seed": seed, "precision": "auto"}
    train |= {"validate_every": 0, "panels": 0, "checkpoint_every": 200, "checkpoint_seconds": 300}
    if base == PAPER:
        train["warmup"] = shared["train"]["warmup"]
    model = (
        flat({"model": shared["model"]})
        if name == "sader"
        else list(ABLATIONS[name].overrides if name in ABLATIONS else ())
    )
    return [*model, *flat({"train": train}), *flat({"data": shared["data"]})]


def flat(values: dict[str, Any], prefix: str = "") -> list[str]:
    """Return nested values as texts KEY=VALUE; a mapping of sources stays one value."""
    texts = []
    for key, value in values.items():
        if isinstance(value, dict) and key != "real_sources":
            texts += flat(value, f"{prefix}{key}.")
        else:
            texts.append(f"{prefix}{key}={json.dumps(value)}")
    return texts


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a baseline system, sader, small or small-ABLATION")
    parser.add_argument("--samples", type=int, default=100_000, help="training series that the system sees")
    parser.add_argument("--data", nargs="+", default=[], help="shards to train on, files or folders")
    parser.add_argument("--out", type=Path, default=Path("runs/systems"), help="folder of the runs")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="each name is trained with each seed")
    parser.add_argument("--batch", type=int, help="series a step instead of 16")
    parser.add_argument("--set", nargs="+", default=[], dest="changes", metavar="KEY=VALUE", help="further changes")
    parser.add_argument("--tiny", action="store_true", help="a tiny network on a CPU, to see that it works")
    parser.add_argument("--list", action="store_true", help="print all names")
    given = parser.parse_args(arguments)
    if given.list or not given.names:
        print("\n".join(names()))
        return
    runs: dict[Path, RunConfig] = {}
    for seed in given.seed:
        for name in given.names:
            changes = run_settings(name, given.samples, batch=given.batch, seed=seed)
            if given.tiny:
                changes += [*tiny_overrides(base_of(name)), f"train.steps={given.samples // 2}"]
            config = resolve(base_of(name), [*changes, *given.changes])
            folder = given.out / (name if seed == 0 else f"{name}-seed{seed}")
            runs[folder] = merge(config, {"data": {"shards": given.data}})
    for path in fit_together(runs, resume=True):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
