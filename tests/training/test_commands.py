"""The training commands, also on a machine without Pillow, rasterio and TensorBoard."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sader.cli.main import main
from sader.cli.train import app
from sader.training.record import read_log


def test_train_and_resume_from_typer(tiny: list[str], shards: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = [word for text in [*tiny, "train.steps=2"] for word in ("--set", text)]
    words = ["train", "small", "--data", str(shards), "--run", str(run), "--quiet", *options]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    assert f"wrote {run / 'model.safetensors'}" in done.output
    again = CliRunner().invoke(app, ["train", "--resume", "--run", str(run), "--quiet"], catch_exceptions=False)
    assert again.exit_code == 0
    assert max(step for step, _, _ in read_log(run / "metrics.csv")) == 2


def test_pretrain_guide_from_typer(shards: Path, tmp_path: Path) -> None:
    overrides = ["train.steps=1", "train.batch_size=2", "train.crop=16", "train.device=cpu"]
    options = [word for text in overrides for word in ("--set", text)]
    run = tmp_path / "guide"
    words = ["pretrain-guide", "--data", str(shards), "--run", str(run), "--kind", "conv", "--quiet", *options]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    assert (run / "guide.safetensors").is_file()


def test_mistakes_are_one_line_and_status_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    for words, text in (
        (["smal", "--run", str(run)], "did you mean small"),
        (["small", "--run", str(run), "--set", "train.device=cpu"], "no shards given"),
        (["small", "--run", str(run), "--data", str(tmp_path / "none")], "no shards at"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["train", *words])
        assert caught.value.code == 2
        assert text in capsys.readouterr().err
        assert not run.exists()


@pytest.mark.slow
def test_training_machine_needs_little(tiny: list[str], shards: Path, tmp_path: Path) -> None:
    words = ["train", "small", "--data", str(shards), "--run", str(tmp_path / "run"), "--quiet"]
    changes = [*tiny, "train.steps=1", "train.validate_every=1"]
    words += [word for text in changes for word in ("--set", text.replace(" ", ""))]
    program = f"""
        import sys
        import torch._dynamo  # it looks for packages without importing them
        BLOCKED = {{"PIL", "rasterio", "tensorboard", "xarray", "dask", "pytorch_lightning"}}

        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in BLOCKED:
                    raise ModuleNotFoundError(f"{{name}} is blocked")

        sys.meta_path.insert(0, Block())
        from sader.cli.main import main
        main({words!r})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model.safetensors").is_file()
