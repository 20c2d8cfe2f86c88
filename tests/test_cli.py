"""The command line: light, quick to answer, clear about mistakes, and never a traceback for one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sader.checkpoint import checksums
from sader.cli import main as cli
from sader.errors import ConfigError
from sader.evaluation.request import DataRequest, EvaluationRequest, ReproduceRequest
from sader.geo.scene.options import BatchSettings
from sader.viewer.settings import Limits, ServeSettings

COMMANDS = (
    "demo", "info", "remove", "train", "pretrain-guide", "evaluate", "compare", "reproduce", "export", "bench", "serve",
    "data",
)  # fmt: skip
HEAVY = ("torch", "numpy", "rasterio", "PIL", "einops", "safetensors")


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `sader` in a process of its own, as a user does."""
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "sader", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=environment,
        timeout=120,
    )


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run `sader` in this process (quick: torch is loaded already): exit status, stdout, stderr."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(arguments))
    out, err = capsys.readouterr()
    code = stopped.value.code
    return (code if isinstance(code, int) else 0), out, err


def fails_clearly(result: tuple[int, str, str], error: str, *texts: str) -> None:
    """Exit status 2, one message of this kind on standard error, nothing else."""
    code, out, err = result
    assert code == 2, err
    assert err.startswith(f"{error}: "), err
    assert "Traceback" not in err
    assert out == ""
    for text in texts:
        assert text in err


# ---------------------------------------------------------------- the root


def test_help_is_light_and_quick():
    program = (
        "import sys, time\n"
        "sys.argv = ['sader', '--help']\n"
        "from sader.cli.main import main\n"
        "try:\n    main()\n"
        f"finally:\n    print('heavy:', [m for m in {HEAVY!r} if m in sys.modules])\n"
        "    print('seconds:', time.process_time())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert f" {command} " in done.stdout
    assert "heavy: []" in done.stdout
    seconds = float(done.stdout.rsplit("seconds:", 1)[1])  # of the processor: independent of other processes
    assert seconds < 1.0, f"sader --help took {seconds:.2f} s (0.2 s on an idle machine)"


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS), ("data", "pack")])
def test_every_command_has_help_that_shows_flags_as_flags(capsys, command):
    code, out, err = called(capsys, *command, "--help")
    assert (code, err) == (0, "")
    assert "Usage: sader" in out
    assert "<bool>" not in out


def test_shell_completion_can_be_installed(capsys):
    assert "--install-completion" in called(capsys, "--help")[1]


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_the_command_keeps_freed_memory_unless_the_environment_says_otherwise():
    script = (
        "import os, resource, sys; from sader.cli import main; main.app = lambda *_, **__: None; main.main()\n"
        "for _ in range(20): b'x' * 2**26\n"
        "faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(20): b'x' * 2**26\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)"
    )
    faults = []
    for given in ({}, dict.fromkeys(cli.MALLOC, "131072")):
        environment = {**{k: v for k, v in os.environ.items() if k not in cli.MALLOC}, **given}
        found = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
        faults.append(int(found.stdout))
    kept, returned = faults
    assert 10 * kept < returned  # each is 16,384 pages, or 32 huge ones


def test_version():
    from sader._version import __version__

    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"sader {__version__}\n")


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["demo", "--nonsense"], ["demo", "--steps", "many"], ["info", "--dates", "0"]]
)
def test_wrong_usage_exits_2(capsys, arguments):
    code, _, err = called(capsys, *arguments)
    assert code == 2
    assert "Traceback" not in err


def test_an_interrupted_command_exits_130(capsys, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sader.evaluation.costs.describe", interrupted)
    code, _, err = called(capsys, "info", "small")
    assert code == 130
    assert "Traceback" not in err


def test_debug_shows_the_traceback(capsys):
    assert "Traceback" not in called(capsys, "info", "smal")[2]
    debug = run("info", "smal", "--debug")
    assert "Traceback" in debug.stderr
    assert "ConfigError" in debug.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-o", "a.onnx"], "onnx"), (["-o", "a.pt2"], "torch-export"), (["-o", "a.pt2", "--format", "onnx"], "onnx"),
    ],
)  # fmt: skip
def test_export_takes_the_format_from_the_ending(capsys, monkeypatch, arguments, expected):
    asked = []

    def export_model(model: str, out: object, *, format: str, steps: int | None) -> dict[str, object]:
        asked.append(format)
        return {}

    monkeypatch.setattr("sader.inference.onnx.export_model", export_model)
    code, _, err = called(capsys, "export", "small", *arguments, "--json")
    assert (code, asked) == (0, [expected]), err


# ---------------------------------------------------------------- info


def test_info_lists_the_presets_and_the_baselines_on_request(capsys):
    code, out, _ = called(capsys, "info", "--json")
    assert code == 0
    assert {entry["kind"] for entry in json.loads(out)} == {"weights", "preset"}
    every = json.loads(called(capsys, "info", "--all", "--json")[1])
    assert len([entry for entry in every if entry["kind"] == "baseline"]) == 13
    entries = {entry["name"]: entry for entry in json.loads(out)}
    assert json.loads(out)[0]["kind"] == "weights"  # what can be used at once comes first
    assert {"sen2_mtc_new", "sen12mscrts_ea", "small", "small_msi"} <= set(entries)
    assert entries["small"]["bands"] == ["B02", "B03", "B04", "B08"]
    assert entries["small"]["parameters"] <= 8e6
    code, out, _ = called(capsys, "info")
    assert code == 0
    assert "sen2_mtc_new" in out


def test_info_counts_of_the_paper_network(capsys):
    code, out, _ = called(capsys, "info", "sen2_mtc_new", "--json")
    assert code == 0
    details = json.loads(out)
    assert 27.1e6 <= details["parameters"] <= 27.7e6
    assert 340 <= details["gmacs_forward"] <= 365
    assert details["gmacs_condition"] == pytest.approx(208.4, rel=0.02)
    # The condition network runs once per scene, however many evaluations the sampling takes.
    expected = details["gmacs_condition"] + details["evaluations"] * details["gmacs_evaluation"]
    assert details["gmacs_sample"] >= expected * 0.999
    assert details["bands"] == ["B04", "B03", "B02"]
    assert details["aux_bands"] == ["B08"]


def test_info_of_the_small_preset(capsys):
    """Its budget, the growth of its cost with pixels and dates, and the text for people."""
    details = json.loads(called(capsys, "info", "small", "--json")[1])
    assert details["parameters"] <= 8e6
    assert details["gmacs_sample"] <= 100
    assert details["trained"] is False
    fewer = json.loads(called(capsys, "info", "small", "--json", "--dates", "1", "--size", "32")[1])
    assert details["gmacs_forward"] > 1.2 * 64 * fewer["gmacs_forward"]
    code, out, _ = called(capsys, "info", "small")
    assert code == 0
    for text in ("parameters", "GMAC", "B02 B03 B04 B08", "training data", "licence"):
        assert text in out


@pytest.mark.parametrize(
    ("name", "bands", "parameters", "about"),
    [
        ("sader-masks", "B01 B02 B03 B04 B08 B09 B10 B11 B12", 2_830_786, "masks of all models"),
        ("sader-guide-rgbn", "B02 B03 B04 B08", 1_264_384, "guide of the resampling"),
    ],
)
def test_info_of_weights_that_models_use(capsys, name, bands, parameters, about):
    details = json.loads(called(capsys, "info", name, "--json")[1])
    assert details["name"] == name
    assert details["bands"] == bands.split()
    assert details["parameters"] == parameters
    assert details["sha256"] in checksums().values()
    code, out, _ = called(capsys, "info", name)
    assert code == 0
    for text in (name, about, bands, f"{parameters / 1e6:.2f} M", f"{details['file_bytes'] / 2**20:.1f} MiB"):
        assert text in out
    assert name in called(capsys, "info")[1]
    fails_clearly(called(capsys, "info", name[:-1]), "ConfigError", f"did you mean {name}?")


def test_an_unknown_preset_gets_a_suggestion(capsys):
    fails_clearly(called(capsys, "info", "smal"), "ConfigError", "smal", "did you mean small?")


# ---------------------------------------------------------------- train and evaluate


def test_training_an_unknown_preset_gets_a_suggestion(capsys, tmp_path):
    run = tmp_path / "run"
    arguments = ("--data", str(tmp_path / "x"), "--run", str(run))
    fails_clearly(called(capsys, "train", "nonsense_preset", *arguments), "ConfigError", "nonsense_preset", "known: ")
    fails_clearly(called(capsys, "train", "smal", *arguments), "ConfigError", "smal", "did you mean small?")
    assert not run.exists()


def test_evaluating_what_is_not_there_exits_2(capsys, tmp_path, tiny_checkpoint):
    nowhere, missing = str(tmp_path / "nowhere"), str(tmp_path / "missing.safetensors")
    fails_clearly(called(capsys, "evaluate", missing, "--data", nowhere), "CheckpointError", missing)
    fails_clearly(called(capsys, "evaluate", str(tiny_checkpoint), "--data", nowhere), "DataError", nowhere)


# ---------------------------------------------------------------- checkpoints


def test_a_missing_truncated_or_foreign_checkpoint(capsys, tmp_path):
    missing = tmp_path / "missing.safetensors"
    fails_clearly(called(capsys, "info", str(missing)), "CheckpointError", str(missing))
    foreign = tmp_path / "foreign.safetensors"
    foreign.write_bytes(b"these are no weights")
    fails_clearly(called(capsys, "info", str(foreign)), "CheckpointError", str(foreign))


def test_training_settings_are_printed_on_request(capsys):
    brief, whole = (called(capsys, "info", "sader-s2-rgbn", "--size", "32", *more)[1] for more in ((), ("--all",)))
    assert "attribution" in brief
    assert "muon_lr" not in brief
    assert "muon_lr" in whole


def test_a_whole_checkpoint_is_described_and_a_cut_one_refused(capsys, tmp_path, tiny_checkpoint):
    code, out, err = called(capsys, "info", str(tiny_checkpoint), "--json", "--size", "32")
    assert code == 0, err
    details = json.loads(out)
    assert details["bands"] == ["B02", "B03", "B04", "B08"]
    assert details["training_data"] == "made for a test"
    assert details["trained"] is True
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(tiny_checkpoint.read_bytes()[:-1000])
    fails_clearly(called(capsys, "info", str(cut)), "CheckpointError", str(cut))
    fails_clearly(called(capsys, "demo", "--model", str(cut), "--out", str(tmp_path)), "CheckpointError", str(cut))


# ---------------------------------------------------------------- demo


def test_demo_writes_a_map_and_a_picture_and_scores_them(capsys, tmp_path, small_scene, tiny_checkpoint):
    rasterio = pytest.importorskip("rasterio")
    out = tmp_path / "new" / "folder"
    code, printed, err = called(
        capsys, "demo", "--model", str(tiny_checkpoint), "--out", str(out), "--steps", "1", "--json"
    )
    assert code == 0, err
    report = json.loads(printed)
    assert report["trained"] is True
    assert report["steps"] == "1+0"
    methods = ["SADER", "least cloudy", "median", "mosaic", "ridge blend", "local ridge blend"]
    assert [row["method"] for row in report["scores"]] == methods * 2
    assert [row["masks"] for row in report["scores"]] == ["none"] * 6 + ["true"] * 6
    for row in report["scores"]:
        for region in ("whole", "hidden"):
            assert all(np.isfinite(value) for value in row[region].values())
    with rasterio.open(out / "clear.tif") as dataset:
        assert dataset.descriptions == ("B02", "B03", "B04", "B08")
        assert dataset.crs.to_epsg() == 32635
        assert dataset.dtypes == ("uint16",) * 4
        assert dataset.nodata == 0
        assert "made up" in dataset.tags()["TIFFTAG_IMAGEDESCRIPTION"]
        counts = dataset.read()
    assert counts.min() >= 1
    # Pixels of the reference date that count as clear are in the file as they were.
    wanted = np.maximum(np.rint(small_scene.cloudy[small_scene.reference] * 1e4), 1)
    assert (np.abs(counts - wanted).max(axis=0) <= 1).mean() > 0.1
    assert (out / "before_after.png").stat().st_size > 1000
    assert sorted(path.name for path in out.iterdir()) == ["before_after.png", "clear.tif"]


def test_demo_announces_an_untrained_preset_and_prints_a_table(capsys, tmp_path, small_scene):
    code, printed, err = called(capsys, "demo", "--model", "small", "--out", str(tmp_path), "--steps", "1")
    assert code == 0, err
    assert "untrained preset `small`" in " ".join(err.split())
    for text in ("PSNR", "SSIM", "SAM", "SADER (untrained)", "ridge blend", "clear.tif", "before_after.png"):
        assert text in printed


def test_demo_uses_what_is_shipped(monkeypatch):
    from sader import demo

    assert demo.load_remover(None)[1:] == ("sader-s2-rgbn", True)
    monkeypatch.setattr("sader.demo.shipped", dict)
    assert demo.load_remover(None)[1:] == ("small", False)


def test_the_same_seed_gives_the_same_file(capsys, tmp_path, small_scene, tiny_checkpoint):
    pytest.importorskip("rasterio")
    files = []
    for folder in ("a", "b"):
        out = tmp_path / folder
        called(capsys, "demo", "--model", str(tiny_checkpoint), "--out", str(out), "--seed", "3", "--steps", "1")
        files.append((out / "clear.tif").read_bytes())
    assert files[0] == files[1]


def test_demo_without_rasterio_still_draws(capsys, tmp_path, small_scene, tiny_checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "rasterio", None)
    code, printed, err = called(capsys, "demo", "--model", str(tiny_checkpoint), "--out", str(tmp_path), "--steps", "1")
    assert code == 0, err
    assert 'pip install "sader[geo]"' in printed
    assert [path.name for path in tmp_path.iterdir()] == ["before_after.png"]


def test_an_output_that_cannot_be_written_is_refused_first(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("sader.demo.load_remover", lambda *_: pytest.fail("the folder must be checked before the work"))
    occupied = tmp_path / "file"
    occupied.write_text("not a folder")
    fails_clearly(called(capsys, "demo", "--out", str(occupied)), "OutputError", str(occupied), "--out")
    fails_clearly(called(capsys, "demo", "--out", str(occupied / "below")), "OutputError", str(occupied))
    assert occupied.read_text() == "not a folder"


def test_the_demo_is_a_real_place_that_is_won_with_and_without_masks(capsys, tmp_path):
    code, printed, err = called(capsys, "demo", "--out", str(tmp_path), "--json")
    assert code == 0, err
    scores = json.loads(printed)["scores"]
    for masks in ("none", "true"):
        rows = {row["method"]: row["hidden"] for row in scores if row["masks"] == masks}
        own = rows.pop("SADER")
        assert own["mae"] <= min(row["mae"] for row in rows.values()) + 1e-4
        assert own["psnr"] > max(row["psnr"] for row in rows.values())
    none = next(row["hidden"] for row in scores if row["masks"] == "none")
    assert none["psnr"] > 32


@pytest.mark.parametrize("steps", ["0", "-1", "many", "4+x"])
def test_wrong_steps_are_refused(capsys, tmp_path, steps):
    code, _, err = called(capsys, "demo", "--out", str(tmp_path), f"--steps={steps}")
    assert code == 2
    assert "ConfigError: steps is" in err
    assert "Traceback" not in err


def test_unknown_weights_are_refused(capsys, tmp_path):
    fails_clearly(
        called(capsys, "demo", "--model", "sader-s2-rgbm", "--out", str(tmp_path)), "CheckpointError", "sader-s2-rgbm"
    )


@pytest.fixture
def small_scene(monkeypatch):
    """The demo's scene replaced by one of 32 x 48 pixels."""
    from sader.data.synthetic.scene import make_series

    scene = make_series(5, size=(32, 48), dates=3, coverage=(0.4, 0.3, 0.5), reference=0)
    monkeypatch.setattr("sader.demo.demo_scene", lambda: scene)
    return scene


@pytest.fixture(scope="module")
def tiny_checkpoint(tmp_path_factory):
    """A checkpoint of a very small network, with a card."""
    import torch

    from sader.checkpoint import save_checkpoint
    from sader.models import build_model, get_preset

    network = {
        "widths": (16, 16),
        "blocks": (1, 1),
        "fusion_width": 16,
        "emb_width": 16,
        "cloud_widths": (8,),
        "refinement_widths": (8,),
    }
    config = get_preset("small").replace(name="tiny", network=network)
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_checkpoint(
        path, build_model(config), config, card={"training_data": "made for a test", "licence": "Apache-2.0"}
    )
    return path


@pytest.mark.parametrize(
    ("function", "line", "expected"),
    [
        (
            "sader.evaluation.evaluate.run_evaluation",
            "evaluate m n --data d --clouds c --limit 2 --task paper --steps 4 --no-classical --rules --no-lpips -o o",
            EvaluationRequest(
                ("m", "n"), DataRequest((Path("d"),), clouds=(Path("c"),), limit=2), ("paper",), steps="4",
                classical=False, rules=True, lpips=False, out=Path("o"),
            ),
        ),
        (
            "sader.evaluation.evaluate.run_evaluation",
            "compare m --data d --data e --split all --against median --metric sam --examples 0",
            EvaluationRequest(
                ("m",), DataRequest((Path("d"), Path("e")), split="all"), ("clean", "paper"), compare=True,
                against="median", metric="sam", examples=0,
            ),
        ),
        (
            "sader.evaluation.reproduce.run.run_reproduce",
            "reproduce table1 table2 --data a --set b=1 --only c --report-only --seconds 3 --partial",
            ReproduceRequest(
                ("table1", "table2"), ("a",), overrides=("b=1",), only=("c",), report_only=True, seconds=3, partial=True
            ),
        ),
        (
            "sader.viewer.launch.launch",
            "serve d --port 0 --allow-host a --allow-host b --queue 2 --max-pixels 9 --max-upload-mb 1 --keep-hours 2",
            ServeSettings(
                Path("d"), port=0, allow_hosts=("a", "b"),
                limits=Limits(upload_bytes=2**20, pixels=9, queue=2, keep_s=7200),
            ),
        ),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)  # fmt: skip
def test_options_fill_the_request_of_a_command(monkeypatch, function, line, expected):
    taken = []

    def stop(request, *_, **__):
        taken.append(request)
        raise SystemExit

    monkeypatch.setattr(function, stop)
    with pytest.raises(SystemExit):
        cli.main(line.split())
    assert taken == [expected]


def test_requests_refuse_values_below_those_of_the_command_line():
    for kind, name, least in (
        (DataRequest, "dates", 1),
        (EvaluationRequest, "pictures", 0),
        (ReproduceRequest, "draws", 1),
        (BatchSettings, "retries", 0),
    ):
        kind(**{name: least})
        with pytest.raises(ConfigError, match=f"{name} is {least - 1}; expected {least} or more"):
            kind(**{name: least - 1})
