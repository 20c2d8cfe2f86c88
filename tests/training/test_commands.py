"""The training commands: through Typer, through argparse, and on a machine that has neither Typer nor Pillow."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sader.cli.train import app
from sader.training.__main__ import main
from sader.training.log import read_log


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
    assert main(["smal", "--run", str(tmp_path / "run")]) == 2
    assert "did you mean small" in capsys.readouterr().err
    assert main(["small", "--run", str(tmp_path / "run"), "--set", "train.device=cpu"]) == 2
    assert "no shards given" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(["small", "--run", str(tmp_path / "run"), "--data", str(tmp_path / "none")]) == 2
    assert "no shards at" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_training_machine_needs_little(tiny: list[str], shards: Path, tmp_path: Path) -> None:
    words = ["small", "--data", str(shards), "--run", str(tmp_path / "run"), "--quiet", "--set"]
    words += [text.replace(" ", "") for text in tiny] + ["train.steps=1", "train.validate_every=1"]
    program = f"""
        import sys
        BLOCKED = {{"typer", "rich", "PIL", "rasterio", "tensorboard", "tensorboardX"}}

        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in BLOCKED:
                    raise ModuleNotFoundError(f"{{name}} is blocked")

        import pytorch_lightning  # what it takes along itself is not our business

        sys.meta_path.insert(0, Block())
        for name in BLOCKED:  # found by Lightning, forgotten again
            sys.modules.pop(name, None)
        from sader.training.__main__ import main
        sys.exit(main({words!r}))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model.safetensors").is_file()
