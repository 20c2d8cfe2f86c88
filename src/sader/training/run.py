"""`fit`: a run folder from a run config. Everything about files, devices and resuming is here; the step is `module.py`.

A run folder holds config.yaml, metrics.csv, checkpoints/ (the last two), panels/, TensorBoard events where tensorboard
is installed, and model.safetensors: the averaged weights, ready for `CloudRemover.from_pretrained`.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader

from sader.baselines.baseline import Baseline
from sader.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from sader.config import to_dict
from sader.data.bank import SeriesBank, SeriesMaker
from sader.data.shards import shard_files
from sader.errors import TrainingError
from sader.files import write_atomically
from sader.method.diffusion import Denoiser
from sader.models import build_model
from sader.training.card import count_sources, make_card, parent_card
from sader.training.config import RunConfig, TrainConfig, differing_keys, load_run_config, save_run_config
from sader.training.feed import Maker
from sader.training.log import Bar, CsvLog
from sader.training.module import LossOf, TrainingModule
from sader.training.objective import BaselineObjective, Objective
from sader.training.state import drop_partial_files, load_state, save_state
from sader.training.validation import VALIDATION_SEED, save_panel, scores

CONFIG_FILE = "config.yaml"
MODEL_FILE = "model.safetensors"


def fit(
    config: RunConfig, run_dir: str | Path, *, resume: bool = False, init_from: str | None = None, progress: bool = True
) -> Path:
    """Train, and return the path of the exported weights.

    run_dir: a new folder, or with resume=True the folder of an interrupted run of the same config.
    init_from: weights to start from (shipped name or file), instead of config.train.init.
    """
    run_dir = Path(run_dir)
    if init_from is not None:
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, init=str(init_from)))
    device = choose_device(config.train)
    check_shards(config.data.shards, *config.data.validation)
    main = is_main_process()
    if main:
        prepare_folder(config, run_dir, resume=resume, load=load_run_config)
    run = _Run(config, run_dir, _first_model(config), main=main)
    module = TrainingModule(
        run.denoiser,
        run.objective,
        config.train,
        make_maker=run.make_maker,
        bf16=uses_bf16(config.train, device),
        after_step=run.after_step,
    )
    if config.train.compile:
        _compile(run.denoiser)
    run_module(module, run_dir, device=device, resume=resume, progress=progress)
    return run_dir / MODEL_FILE


def run_module(module: TrainingModule, run_dir: Path, *, device: str, resume: bool, progress: bool = True) -> None:
    """Run the steps that are left of a prepared run folder."""
    state = load_state(run_dir) if resume else None
    if state is not None:
        module.restore(state)
    if module.progress() >= 1:
        return
    config, start = module.config, module.steps_done
    if device == "cuda":
        _quick_arithmetic(search=not isinstance(module.denoiser, Baseline))
    trainer = _trainer(config, run_dir, device, start=start, main=is_main_process(), progress=progress)
    with warnings.catch_warnings():
        # Steps are numbers, not files: there is nothing for workers to load. We log by ourselves.
        for noise in (".*does not have many workers.*", ".*smaller than the logging interval.*", ".*treespec.*"):
            warnings.filterwarnings("ignore", message=noise)
        trainer.fit(module, DataLoader(range(start, config.steps), batch_size=None))  # type: ignore[arg-type]


def check_shards(shards: Sequence[str], *validation: str) -> None:
    """Raise where there is nothing to train on, before a folder is made."""
    if not shards:
        raise TrainingError("no shards given; name them with --data (make them with: sader data pack).")
    shard_files((*shards, *validation))


def is_main_process() -> bool:
    """Return whether this process writes files; the others of a distributed run only compute."""
    return getattr(rank_zero_only, "rank", None) in (None, 0)


def uses_bf16(config: TrainConfig, device: str) -> bool:
    """Return whether the network runs in bf16 autocast."""
    return config.precision == "bf16" or (config.precision == "auto" and device == "cuda")


def choose_device(config: TrainConfig) -> str:
    """Return "cpu" or "cuda" as asked for, or raise where that cannot be had."""
    there = torch.cuda.is_available()
    if config.device == "cuda" and not there:
        raise TrainingError(
            "train.device is cuda, but torch sees no GPU. Use train.device=cpu, or check the driver with nvidia-smi."
        )
    device = "cuda" if there and config.device != "cpu" else "cpu"
    if config.precision == "bf16" and device == "cpu":
        raise TrainingError("train.precision is bf16, which needs a GPU; found none. Use train.precision=fp32.")
    if device == "cuda" and config.devices > torch.cuda.device_count():
        raise TrainingError(
            f"train.devices is {config.devices}; found {torch.cuda.device_count()} GPUs. Use at most that many."
        )
    return device


def prepare_folder(config: Any, run_dir: Path, *, resume: bool, load: Callable[[Path], Any]) -> None:
    """Make the run folder and write its config, or check that it may be gone on with; `load` reads a config."""
    saved = run_dir / CONFIG_FILE
    if resume:
        if not saved.is_file():
            raise TrainingError(f"{run_dir} holds no {CONFIG_FILE}; expected the folder of a run. Leave out --resume.")
        different = differing_keys(load(saved), config)
        if different:
            raise TrainingError(
                f"{run_dir} was started with another config: {'; '.join(different)}. Go on with the old values, or "
                f"start a new run in another folder (--init {run_dir / MODEL_FILE} begins with what it learned)."
            )
        drop_partial_files(run_dir)
        return
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise TrainingError(f"{run_dir} is there already and not empty. Go on with --resume, or choose another folder.")
    write_atomically(saved, save_run_config(config))


def _first_model(config: RunConfig) -> Denoiser | Baseline:
    """Return the model of step 0: random from the seed, or the weights of train.init."""
    torch.manual_seed(config.train.seed)
    model = build_model(config.model)
    if config.train.init is not None:
        _start_from(model, config)
    return model.train()


def _start_from(model: Denoiser | Baseline, config: RunConfig) -> None:
    """Put the weights of train.init into the model; with train.init_anew, what they lack stays random."""
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
    # In place, so that names in the state dict stay; the parts whose batch shapes never change.
    if isinstance(model, Baseline):
        for part in model.children():
            part.compile()
        return
    network: Any = model.network
    network.compile()
    network.condition_net.compile()
    if network.cloud_head is not None:
        network.cloud_head.compile()


class _GradientSumStrategy(DDPStrategy):
    """Lightning's processes and their connection without the wrapper: the module adds up gradients once per step."""

    def configure_ddp(self) -> None:
        pass


def _quick_arithmetic(*, search: bool) -> None:
    """Let a GPU use TF32 and, with `search`, try out which convolution is the fastest for each shape.

    Not for baselines: for DiffCR's depthwise layers the search took 30 s on an H200, for a step of 0.08 s.
    """
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = search


def _trainer(config: TrainConfig, run_dir: Path, device: str, *, start: int, main: bool, progress: bool) -> Trainer:
    """Return a Lightning trainer with everything that costs time at every step turned off."""
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    strategy: Any = "auto"
    if config.devices > 1:
        strategy = _GradientSumStrategy(process_group_backend="gloo" if device == "cpu" else None)
    loggers: list[Logger] = []
    if main:
        loggers.append(CsvLog(run_dir, keep_until=start))
        try:  # tensorboard is not everywhere; the CSV log always is
            import tensorboard  # noqa: F401
            from pytorch_lightning.loggers import TensorBoardLogger
        except ImportError:
            pass
        else:
            loggers.append(TensorBoardLogger(run_dir, name="", version="tensorboard", purge_step=start or None))
    return Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=config.devices,
        strategy=strategy,
        max_epochs=1,
        logger=loggers or False,
        callbacks=[Bar(refresh_rate=config.log_every)] if progress else [],
        enable_progress_bar=progress,
        enable_checkpointing=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        benchmark=device == "cuda",
    )


class _Run:
    """What happens around the steps: data at the start, checkpoints, validation and the export."""

    def __init__(self, config: RunConfig, run_dir: Path, denoiser: Denoiser | Baseline, *, main: bool) -> None:
        self.config, self.run_dir, self.main = config, run_dir, main
        self.denoiser = denoiser
        self.objective: LossOf = BaselineObjective() if isinstance(denoiser, Baseline) else Objective(config.objective)
        self.sources: dict[str, int] = {}
        self.parent = {} if config.train.init is None else parent_card(config.train.init)
        self.validation: Maker | None = None

    def make_maker(self, device: torch.device) -> Maker:
        """Load all shards onto the device."""
        data, network = self.config.data, self.config.model.network
        # Auxiliary bands follow the others, as the objective expects.
        bands = (*network.bands, *network.aux_bands)
        bank = SeriesBank.load(data.shards, bands=bands, device=device)
        self.sources = count_sources(bank)
        maker = SeriesMaker(bank, data.maker, self.config.train.seed)
        if self.main and self.config.train.validate_every:
            self.validation = maker
            if data.validation:
                other = SeriesBank.load(data.validation, bands=bands, device=device)
                self.validation = SeriesMaker(other, data.maker, VALIDATION_SEED)
        return maker

    def after_step(self, module: TrainingModule, step: int, over: bool) -> None:
        """Validate, save and export where it is time to; only the main process does."""
        train = self.config.train
        if not self.main:
            return
        if train.validate_every and (step % train.validate_every == 0 or over):
            self._validate(module, step)
        if step % train.checkpoint_every == 0 or over:
            module.write_log()  # raises on values that are not finite, before they reach a checkpoint
            save_state(self.run_dir, module.state())
            self.export(module)

    def _validate(self, module: TrainingModule, step: int) -> None:
        train, maker = self.config.train, self.validation
        assert maker is not None
        module.write_log()
        denoiser = self.denoiser
        with module.ema.applied():
            denoiser.eval()
            shape = (train.batch_size, train.dates, train.crop)
            with module.precision():
                found = scores(
                    denoiser, self.objective, maker, shape=shape, batches=train.validate_batches, device=module.device
                )
                if train.panels:
                    batch = maker.batch(VALIDATION_SEED, train.panels, train.dates, train.crop)
                    path = self.run_dir / "panels" / f"step-{step:08d}.png"
                    save_panel(path, denoiser, self.config.model, batch, title=f"{self.config.model.name}, step {step}")
            denoiser.train()
        for logger in module.loggers:
            logger.log_metrics(found, step)
        module.latest |= found

    def export(self, module: TrainingModule) -> None:
        """Write the averaged weights with their card as model.safetensors."""
        train = self.config.train
        card = make_card(module, self.sources) | self.parent
        if not isinstance(self.denoiser, Baseline):  # a baseline's losses are its own
            card |= {"objective": to_dict(self.config.objective)}
        with module.ema.applied():
            save_checkpoint(
                self.run_dir / MODEL_FILE,
                self.denoiser,
                self.config.model,
                card=card,
                dtype=torch.float16 if train.half else torch.float32,
            )
