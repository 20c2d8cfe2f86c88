"""From what is typed to `fit`: shared by `sader train` and `python -m sader.training`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from sader.checkpoint import find_checkpoint, read_header
from sader.config import parse_override
from sader.errors import ConfigError, TrainingError
from sader.models import model_from_dict
from sader.training.config import RunConfig, load_run_config, merged, resolve
from sader.training.run import CONFIG_FILE, fit


def run_training(
    preset: str | None,
    run_dir: str | Path,
    *,
    data: Sequence[str | Path] = (),
    validation: Sequence[str | Path] = (),
    overrides: Sequence[str] = (),
    resume: bool = False,
    init: str | None = None,
    progress: bool = True,
) -> Path:
    """Resolve the config and train; returns the path of the weights.

    preset: a name or a YAML file. Without it the network is that of `init`, or of the folder to resume.
    """
    config = _config(preset, Path(run_dir), overrides, resume=resume, init=init)
    if data:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, shards=tuple(map(str, data))))
    if validation:
        places = tuple(map(str, validation))
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, validation=places))
    return fit(config, run_dir, resume=resume, init_from=init, progress=progress)


def _config(
    preset: str | None, run_dir: Path, overrides: Sequence[str], *, resume: bool, init: str | None
) -> RunConfig:
    if preset is not None:
        return resolve(preset, overrides)
    if resume and (run_dir / CONFIG_FILE).is_file():
        config = load_run_config(run_dir / CONFIG_FILE)
        for text in overrides:
            config = merged(config, parse_override(text))
        return config
    if init is not None:
        path = find_checkpoint(init)
        return resolve(model_from_dict(read_header(path)["config"], where=f"{path.name}: config"), overrides)
    if resume:
        raise TrainingError(
            f"there is no run at {run_dir} (no {CONFIG_FILE} in it). Name the folder of a run with --run, or leave out "
            "--resume to start one."
        )
    raise ConfigError("no preset given; name one (such as small), a YAML file, --init WEIGHTS, or --resume a run.")
