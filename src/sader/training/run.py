"""Runs in a folder: `fit` trains a network from a run config, `run_training` from the words of the command line, and
`fit_together` several networks at the same time.

A run folder holds config.yaml, metrics.csv, checkpoints/ (the last two), panels/, TensorBoard events where tensorboard
is installed, and model.safetensors: the averaged weights, ready for `CloudRemover.from_pretrained`.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from sader.baselines.baseline import Baseline, BaselineConfig
from sader.checkpoint import find_checkpoint, load_checkpoint, read_header, save_checkpoint
from sader.config import merge, parse_override, to_dict
from sader.data.bank import SeriesBank, SeriesMaker
from sader.data.plan import MakerSettings
from sader.data.shards import fingerprint, shard_files
from sader.errors import CheckpointError, ConfigError, TrainingError
from sader.files import locked, write_atomically
from sader.inference.accelerate import has_bfloat16
from sader.method.diffusion import Denoiser
from sader.models import build_model, model_from_dict
from sader.training.config import (
    RunConfig,
    TrainConfig,
    differing_keys,
    load_run_config,
    resolve,
    save_run_config,
    with_steps,
)
from sader.training.objective import Objective
from sader.training.optim import progress_of
from sader.training.processes import Process, run_processes
from sader.training.record import Log, ProgressLine, clean_folder, load_state, make_card, parent_card, save_state
from sader.training.trainer import Maker, PhasedTrainer, SharedMaker, Trainer
from sader.training.validation import VALIDATION_SEED, save_panel, scores

CONFIG_FILE = "config.yaml"
LOCK_FILE = ".lock"
MODEL_FILE = "model.safetensors"


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
    """Resolve the config of a command and train; returns the path of the weights.

    preset: a name or a YAML file. Without it the network is that of `init`, or of the folder to resume.
    """
    config = _config(preset, Path(run_dir), overrides, resume=resume, init=init)
    given = {"shards": data, "validation": validation}
    config = merge(config, {"data": {key: list(map(str, paths)) for key, paths in given.items() if paths}})
    return fit(config, run_dir, resume=resume, init_from=init, progress=progress)


def _config(
    preset: str | None, run_dir: Path, overrides: Sequence[str], *, resume: bool, init: str | None
) -> RunConfig:
    if preset is not None:
        return resolve(preset, overrides)
    if resume and (run_dir / CONFIG_FILE).is_file():
        config = load_run_config(run_dir / CONFIG_FILE)
        for text in overrides:
            config = merge(config, parse_override(text))
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


def fit(
    config: RunConfig, run_dir: str | Path, *, resume: bool = False, init_from: str | None = None, progress: bool = True
) -> Path:
    """Train, and return the path of the exported weights.

    run_dir: a new folder, or with resume=True the folder of an interrupted run of the same config.
    init_from: weights to start from (shipped name or file), instead of config.train.init.
    """
    if init_from is not None:
        config = merge(config, {"train": {"init": str(init_from)}})
    check_shards(config.data.shards)
    return run_job(ModelJob(with_steps(config)), Path(run_dir), resume=resume, progress=progress)


def fit_together(configs: Mapping[Path, RunConfig], *, resume: bool = False, progress: bool = True) -> list[Path]:
    """Train several networks at the same time on one device, and return the paths of the exported weights.

    configs: a run config for each run folder. The runs take turns, one step each, so that all have seen the same number
    of samples. A batch that several of them need is composed once. On a GPU each run has a stream of its own: kernels
    that do not fill the GPU run beside those of the other runs.
    """
    shared: dict[str, SharedMaker] = {}
    jobs = {run_dir: ModelJob(with_steps(config), shared=shared) for run_dir, config in configs.items()}
    devices = {choose_device(config.train) for config in configs.values()}
    if len(devices) != 1 or any(config.train.devices > 1 for config in configs.values()):
        raise TrainingError(
            f"found runs on {' and '.join(sorted(devices))}, with up to "
            f"{max(config.train.devices for config in configs.values())} processes; runs that are trained together "
            "share one device and one process. Set train.device to the same value and train.devices=1."
        )
    process = Process(torch.device(*devices))
    on_gpu = process.device.type == "cuda"
    with ExitStack() as stack:
        for run_dir, job in jobs.items():
            there = resume and (run_dir / CONFIG_FILE).is_file()
            stack.enter_context(_folder(job, run_dir, resume=there))
        runs = [
            (Run(process, job, run_dir, resume=resume), torch.cuda.Stream() if on_gpu else None)
            for run_dir, job in jobs.items()
        ]
        if on_gpu:
            torch.cuda.synchronize()
        lines = {run: ProgressLine(run.trainer) for run, _ in runs if progress and run.goes_on}
        while left := [(run, stream) for run, stream in runs if run.goes_on]:
            for run, stream in left:
                with torch.cuda.stream(stream):  # None is no stream of its own
                    run.step()
            for run, _ in left[-1:]:
                if run in lines:
                    lines[run].show(run.trainer)
        for run, _ in runs:
            run.close()
    return [run_dir / job.file for run_dir, job in jobs.items()]


class Job(ABC):
    """What is trained in a folder: a network (`ModelJob`) or a guide (`guide.GuideJob`)."""

    file: str
    """Name of the exported weights."""
    load_config: Callable[[Path], Any]
    """Reads the config that a run folder was started with."""

    def __init__(self, config: Any) -> None:
        """`config` is the run config, with its `train`."""
        self.config = config
        self.sources: dict[str, int] = {}
        """Number of series of each source, once they are loaded."""

    @property
    @abstractmethod
    def shards(self) -> tuple[str, ...]:
        """Shards to train and validate on."""

    @abstractmethod
    def make_trainer(self, process: Process) -> Trainer[Any]:
        """Return the trainer at step 0, with all shards on the device."""

    def validate(self, trainer: Trainer[Any], run_dir: Path) -> dict[str, float]:
        """Return the scores of the averaged weights; none for a guide."""
        return {}

    @abstractmethod
    def export(self, trainer: Trainer[Any], path: Path) -> None:
        """Write the averaged weights with their card."""

    @abstractmethod
    def read_card(self, path: Path) -> dict[str, Any]:
        """Return the card of exported weights."""

    def is_exported(self, path: Path, state: dict[str, Any]) -> bool:
        """Return whether the state is that of the last step and its weights are at `path`."""
        if progress_of(self.config.train, state["step"], state["elapsed"]) < 1:
            return False
        try:
            return bool(self.read_card(path).get("steps") == state["step"])
        except (CheckpointError, SafetensorError, OSError, KeyError, ValueError):
            return False


def run_job(job: Job, run_dir: Path, *, resume: bool = False, progress: bool = True) -> Path:
    """Train a job in its folder and return the path of the weights."""
    device = choose_device(job.config.train)
    with _folder(job, run_dir, resume=resume):
        run_processes(_run, (job, run_dir, resume, progress), device=device, count=job.config.train.devices)
    return run_dir / job.file


def _run(process: Process, job: Job, run_dir: Path, resume: bool, progress: bool) -> None:
    """Do the steps that are left."""
    run = Run(process, job, run_dir, resume=resume)
    line = ProgressLine(run.trainer) if process.main and progress and run.goes_on else None
    while run.goes_on:
        run.step()
        if line is not None:
            line.show(run.trainer)
    run.close()


@contextmanager
def _folder(job: Job, run_dir: Path, *, resume: bool) -> Iterator[None]:
    """Check the shards and the folder of a run, prepare the folder, and lock it within the context."""
    check_shards(job.shards)
    if resume and not (run_dir / CONFIG_FILE).is_file():
        raise TrainingError(f"{run_dir} holds no {CONFIG_FILE}; expected the folder of a run. Leave out --resume.")
    if run_dir.exists() and not run_dir.is_dir():
        raise TrainingError(f"{run_dir} is a file; expected a folder or a new name. Choose another --run.")
    busy = f"another process is training in {run_dir}. Wait until it ends, or choose another folder."
    with locked(run_dir / LOCK_FILE, busy=busy):
        prepare_folder(job, run_dir, resume=resume)
        yield


class Run:
    """A job in its folder between two steps: its trainer, its log, and what each step leaves behind."""

    def __init__(self, process: Process, job: Job, run_dir: Path, *, resume: bool) -> None:
        """Make the trainer, and restore the last checkpoint with resume=True."""
        self.job, self.run_dir = job, run_dir
        train: TrainConfig = job.config.train
        state = load_state(run_dir) if resume else None
        self.data = fingerprint(job.shards)
        if state is not None and state["data"] != self.data:
            raise TrainingError(
                f"the shards of {run_dir} have changed since its last checkpoint. Restore them, or start a new run in "
                f"another folder (--init {run_dir / job.file} starts from its weights)."
            )
        path = run_dir / job.file
        self.log: Log | None = None
        self.end = -math.inf
        """Value of `elapsed` at which the run pauses."""
        if state is not None and job.is_exported(path, state):
            return
        self.trainer = trainer = job.make_trainer(process)
        if process.device.type == "cuda":
            _set_arithmetic(train, search=not isinstance(trainer, PhasedTrainer))
        if state is not None:
            trainer.restore(state)
        if trainer.over and process.main:  # the run was killed between its last checkpoint and the export
            job.export(trainer, path)
        self.log = Log(run_dir, start=trainer.steps_done) if process.main else None
        self.end = math.inf if train.pause_seconds is None else trainer.elapsed + train.pause_seconds

    @property
    def goes_on(self) -> bool:
        """Whether there is a step to do before the end or the pause of the run."""
        return self.end > -math.inf and not self.trainer.over and self.trainer.elapsed < self.end

    def step(self) -> None:
        """Do one step; then log, validate, save the state and export where they are due.

        Only the main process has a log.
        """
        trainer, job, log = self.trainer, self.job, self.log
        trainer.step()
        train, step = trainer.config, trainer.steps_done
        validating = train.validate_every > 0 and (step % train.validate_every == 0 or trainer.over)
        waited = trainer.elapsed - trainer.saved_at >= train.checkpoint_seconds
        saving = (step % train.checkpoint_every == 0 and waited) or not self.goes_on
        if step % train.log_every == 0 or validating or saving:
            means = trainer.collect()  # raises on values that are not finite, before they reach a checkpoint
            if log is not None:
                log.write(means, step)
        if log is None:
            return
        if validating:
            found = job.validate(trainer, self.run_dir)
            log.write(found, step)
            trainer.latest |= found
        if saving:
            save_state(self.run_dir, trainer.state() | {"data": self.data})
            trainer.saved_at = trainer.elapsed
            job.export(trainer, self.run_dir / job.file)

    def close(self) -> None:
        """Close the log."""
        if self.log is not None:
            self.log.close()


def check_shards(shards: Sequence[str]) -> None:
    """Raise if there are no shards or one is missing, before a folder is created."""
    if not shards:
        raise TrainingError("no shards given; name them with --data (make them with: sader data pack).")
    shard_files(shards)


def choose_device(config: TrainConfig) -> str:
    """Return "cpu" or "cuda" as configured, or raise if it is not available."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise TrainingError(
            "train.device is cuda, but torch finds no GPU. Use train.device=cpu, or check the driver with nvidia-smi."
        )
    device = "cuda" if available and config.device != "cpu" else "cpu"
    if config.precision == "bf16" and device == "cpu" and not has_bfloat16():
        raise TrainingError(
            "train.precision is bf16, which needs a GPU or a processor with bfloat16 instructions; found none. "
            "Use train.precision=fp32."
        )
    if device == "cuda" and config.devices > torch.cuda.device_count():
        raise TrainingError(
            f"train.devices is {config.devices}; found {torch.cuda.device_count()} GPUs. Use at most that many."
        )
    return device


def prepare_folder(job: Job, run_dir: Path, *, resume: bool) -> None:
    """Write the config into a new run folder, or check that a folder to resume has the same."""
    saved = run_dir / CONFIG_FILE
    if resume:
        different = differing_keys(job.load_config(saved), job.config)
        if different:
            raise TrainingError(
                f"{run_dir} was started with another config: {'; '.join(different)}. Go on with the old values, or "
                f"start a new run in another folder (--init {run_dir / MODEL_FILE} starts from its weights)."
            )
        clean_folder(run_dir)
        return
    clean_folder(run_dir)
    if any(path.name != LOCK_FILE for path in run_dir.iterdir()):
        raise TrainingError(f"{run_dir} exists and is not empty. Go on with --resume, or choose another folder.")
    write_atomically(saved, save_run_config(job.config))


def _set_arithmetic(config: TrainConfig, *, search: bool) -> None:
    """Let a GPU use TF32 unless train.precision is fp32; with `search`, let cuDNN time convolutions of each shape.

    The search is off for baselines: for DiffCR's depthwise layers it took 30 s on an H200, for a step of 0.08 s.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.precision != "fp32"
    torch.backends.cudnn.benchmark = search


class ModelJob(Job):
    """Training of SADER's denoiser or of a baseline."""

    file = MODEL_FILE
    load_config = staticmethod(load_run_config)
    config: RunConfig

    def __init__(self, config: RunConfig, *, shared: dict[str, SharedMaker] | None = None) -> None:
        """shared: sources of batches that several jobs use, filled by the first that needs one."""
        super().__init__(config)
        self.shared = shared
        self.parent = {} if config.train.init is None else parent_card(config.train.init)
        self.validation: SeriesMaker | None = None

    @property
    def shards(self) -> tuple[str, ...]:
        return (*self.config.data.shards, *self.config.data.validation) if self.config.data.shards else ()

    def make_trainer(self, process: Process) -> Trainer[Any]:
        config, data, network = self.config, self.config.data, self.config.model.network
        model = first_model(config)
        if config.train.compile:
            _compile(model)
        # Auxiliary bands follow the others, as the objective expects.
        bands = (*network.bands, *network.aux_bands)
        settings = maker_settings(config)
        maker = self._maker(bands, settings, process.device)
        self.sources = maker.bank.sources
        if process.main and config.train.validate_every:
            self.validation = maker
            if data.validation:
                other = SeriesBank.load(data.validation, bands=bands, device=process.device)
                self.validation = SeriesMaker(other, settings, VALIDATION_SEED)
        source: Maker = maker
        if self.shared is not None:
            source = self.shared.setdefault(self._batches(bands, settings), SharedMaker(maker))
        if isinstance(model, Baseline):
            return PhasedTrainer(model, Baseline.main_loss, config.train, source, process)
        return Trainer(model, Objective(config.objective), config.train, source, process)

    def _maker(self, bands: tuple[str, ...], settings: MakerSettings, device: torch.device) -> SeriesMaker:
        """Return the maker of the batches, that of an earlier job where it makes the same ones."""
        if self.shared is not None and (found := self.shared.get(self._batches(bands, settings))) is not None:
            assert isinstance(found.maker, SeriesMaker)
            return found.maker
        bank = SeriesBank.load(self.config.data.shards, bands=bands, device=device)
        return SeriesMaker(bank, settings, self.config.train.seed)

    def _batches(self, bands: tuple[str, ...], settings: MakerSettings) -> str:
        """Return a text that is the same for jobs with the same batches."""
        return repr((self.config.data.shards, bands, settings, self.config.train.seed))

    def validate(self, trainer: Trainer[Denoiser | Baseline], run_dir: Path) -> dict[str, float]:
        """Return the scores of the averaged weights on fixed batches, and write a panel of images."""
        train, model, maker = self.config.train, trainer.model, self.validation
        assert maker is not None
        with trainer.ema.applied():
            model.eval()
            with trainer.precision():
                found = scores(trainer, maker)
                if train.panels:
                    batch = maker.batch(VALIDATION_SEED, train.panels, train.dates, train.crop)
                    step = trainer.steps_done
                    title = f"{self.config.model.name}, step {step}"
                    save_panel(
                        run_dir / "panels" / f"step-{step:08d}.png", model, self.config.model, batch, title=title
                    )
            model.train()
        return found

    def export(self, trainer: Trainer[Denoiser | Baseline], path: Path) -> None:
        card = make_card(trainer, self.sources) | self.parent
        if not isinstance(trainer.model, Baseline):  # a baseline has losses of its own
            card |= {"objective": to_dict(self.config.objective)}
        dtype = torch.float16 if self.config.train.half else torch.float32
        with trainer.ema.applied():
            save_checkpoint(path, trainer.model, self.config.model, card=card, dtype=dtype)

    def read_card(self, path: Path) -> dict[str, Any]:
        return dict(read_header(path)["card"])


def maker_settings(config: RunConfig) -> MakerSettings:
    """Return the settings of the batches, with days or the order of dates if the network has them as input."""
    network, settings = config.model.network, config.data.maker
    if isinstance(network, BaselineConfig):
        return settings
    return dataclasses.replace(
        settings,
        days=settings.days or network.date_input == "days",
        time_order=settings.time_order or network.date_input == "index",
    )


def first_model(config: RunConfig) -> Denoiser | Baseline:
    """Return the model of step 0: random from the seed, or the weights of train.init."""
    torch.manual_seed(config.train.seed)
    model = build_model(config.model)
    if config.train.init is not None:
        _start_from(model, config)
    return model.train()


def _start_from(model: Denoiser | Baseline, config: RunConfig) -> None:
    """Copy the weights of train.init into the model; with train.init_anew, tensors they lack stay random."""
    init = config.train.init
    assert init is not None
    given = load_checkpoint(find_checkpoint(init))
    lines = differing_keys(RunConfig(model=given.config), RunConfig(model=config.model))
    different = [line for line in lines if line.startswith(("model.network.", "model.system"))]
    if different and not config.train.init_anew:
        raise TrainingError(
            f"{init} holds another network: {'; '.join(different)}. Leave the preset out to train the network of the "
            "weights, or use train.init_anew=true to start from random what they lack."
        )
    found = given.model.state_dict()
    taken = {
        name: found[name] if name in found and found[name].shape == value.shape else value
        for name, value in model.state_dict().items()
    }
    model.load_state_dict(taken, strict=True)


def _compile(model: Denoiser | Baseline) -> None:
    # In place, so that names in the state dict stay; only parts whose batch shapes never change.
    if isinstance(model, Baseline):
        for path in model.compiled or [f"{name}.forward" for name, _ in model.named_children()]:
            owner, _, name = path.rpartition(".")
            part = model.get_submodule(owner)
            # The method, not the module: `Module.compile` leaves an `nn.Sequential` and its layers of PyTorch eager.
            # Static: of two batch sizes the second would be compiled for all sizes, which is slower.
            setattr(part, name, torch.compile(getattr(part, name), dynamic=False))
        return
    network: Any = model.network
    network.compile()
    network.condition_net.compile()
    if network.cloud_head is not None:
        network.cloud_head.compile()
