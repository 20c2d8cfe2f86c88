"""Several processes for the rows of a plan: what waits for what, processes that die, deadlines, and what comes back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from sader.errors import ConfigError
from sader.evaluation.reproduce.plans import HERE, TABLES, get_tables
from sader.evaluation.reproduce.pool import STOPPED, Plan, Task, run_tasks
from sader.evaluation.reproduce.run import ReproduceRequest, find_settings, plan_tasks, run_reproduce

FAKE = """
import json, os, sys, time
for line in sys.stdin:
    task = json.loads(line)
    with open(sys.argv[1], "a") as log:
        log.write(task["kind"] + " " + task["row"] + "\\n")
    if task["row"] == "dies":
        print("the last words", file=sys.stderr, flush=True)
        os._exit(3)
    if task["row"] == "slow":
        time.sleep(60)
    error = "cannot" if task["row"] == "fails" else None
    print(json.dumps({"error": error, "last": False}), flush=True)
"""


def train(row: str, seconds: float = 0.0) -> Task:
    return Task("train", HERE, row, makes=row, seconds=seconds)


def score(row: str, *needs: str) -> Task:
    return Task("score", HERE, row, needs=needs)


def run(tmp_path: Path, tasks: list[Task], **more: object) -> tuple[Plan, list[str]]:
    """Run tasks with processes that only pretend; return how it went and what they were told."""
    told = tmp_path / "told"
    options = {"workers": 2, "scorers": 1, "deadline": None, "say": lambda text: None, **more}
    plan = run_tasks(tasks, [sys.executable, "-c", FAKE, str(told)], out=tmp_path, **options)  # type: ignore[arg-type]
    return plan, told.read_text().splitlines() if told.is_file() else []


def test_a_row_waits_for_its_run_and_trainings_go_first():
    plan = Plan([train("a"), train("b"), score("a", "a"), score("free")])
    first = plan.next(trains=True)
    assert first == train("a")
    assert plan.next(trains=False) == score("free")  # a is not trained yet, b is not for a process that scores
    assert plan.next(trains=False) is None
    assert not plan.over(trains=False)
    plan.done(train("a"), None)
    assert plan.next(trains=False) == score("a", "a")
    assert plan.over(trains=False)
    assert plan.next(trains=True) == train("b")


def test_everything_is_done_once(tmp_path: Path):
    tasks = [train("a"), train("b"), score("a", "a"), score("b", "b"), score("both", "a", "b"), score("free")]
    plan, told = run(tmp_path, tasks)
    assert (plan.errors, plan.failed, plan.left, plan.waiting, plan.running) == ({}, {}, [], [], [])
    assert sorted(told) == sorted(f"{task.kind} {task.row}" for task in tasks)
    assert told.index("score both") > max(told.index("train a"), told.index("train b"))


def test_a_failure_and_a_dead_process_stop_nobody_else(tmp_path: Path):
    tasks = [train("fails"), train("a"), score("needs-it", "fails"), score("dies"), score("a", "a"), score("free")]
    plan, told = run(tmp_path, tasks, workers=1, scorers=0)
    assert plan.errors[HERE, "needs-it"] == "cannot"
    assert plan.errors[HERE, "dies"] == "its process ended with status 3: the last words"
    assert set(plan.errors) == {(HERE, "needs-it"), (HERE, "dies")}
    assert told[-2:] == ["score a", "score free"]  # by a new process
    assert "score needs-it" not in told


def test_what_found_no_memory_beside_others_is_tried_once_more():
    plan = Plan([train("big"), train("a"), score("big", "big")])
    assert plan.next(trains=True) == train("big")
    plan.done(train("big"), "OutOfMemoryError: CUDA out of memory.")
    assert plan.failed == {}
    assert plan.next(trains=False) is None  # its row still waits
    assert [plan.next(trains=True), plan.next(trains=True)] == [train("a"), train("big")]
    plan.done(train("big"), "OutOfMemoryError: CUDA out of memory.")
    assert plan.over(trains=False)
    assert plan.errors[HERE, "big"].startswith("OutOfMemoryError")


def test_the_deadline_stops_what_runs_and_starts_nothing_that_would_be_late(tmp_path: Path):
    started = time.monotonic()
    tasks = [train("long", seconds=1000.0), score("long", "long"), score("slow"), score("free")]
    plan, told = run(tmp_path, tasks, deadline=started + 3.0)
    assert time.monotonic() - started < 15
    assert {task.row for task in plan.left} == {"long", "slow"}
    assert len(plan.left) == 3
    assert "train long" not in told
    assert plan.errors == {}
    assert "score free" in told


def test_a_log_that_cannot_be_written_is_told(tmp_path: Path):
    (tmp_path / "logs").write_text("in the way")
    plan, _ = run(tmp_path, [score("a")])
    assert "cannot write" in plan.errors[HERE, "a"]
    assert STOPPED not in plan.errors[HERE, "a"]


# ------------------------------------------------------------------------------------------------ the real rows


def ask(out: Path, *only: str, **more: object) -> ReproduceRequest:
    options = {"tiny": True, "lpips": False, "examples": 1, "only": only, **more}
    return ReproduceRequest((HERE,), out=out, **options)  # type: ignore[arg-type]


def scores(out: Path, task: str = "clean") -> dict[str, float]:
    content = json.loads((out / HERE / HERE / task / "summary.json").read_text())
    return {each["method"]: each["overall"]["psnr"]["mean"] for each in content["methods"]}


def test_the_plan_trains_each_run_once_and_a_guide_where_none_is_shipped(tmp_path: Path):
    setting = find_settings(ask(tmp_path, seconds=40.0), get_tables([HERE]))[HERE]
    rows = TABLES[HERE].rows[HERE]
    tasks = plan_tasks([(setting, row) for row in rows])
    trained = [task.makes for task in tasks if task.makes]
    assert sorted(trained) == sorted({row.run.name for row in rows if row.run is not None} | {"guide-conv"})
    by_row = {task.row: task for task in tasks if task.kind == "score"}
    assert len(by_row) == len(rows)
    assert by_row["classical"].needs == ()
    assert by_row["paper-guide-conv"].needs == ("paper-small", "guide-conv")
    assert by_row["small-4+1"].needs == ("small",)  # its guide is shipped
    assert next(task.seconds for task in tasks if task.makes == "guide-conv") == 10.0


def test_runs_that_are_compared_are_trained_side_by_side(tmp_path: Path):
    setting = find_settings(ask(tmp_path, seconds=40.0), get_tables([HERE]))[HERE]
    tasks = plan_tasks([(setting, row) for row in TABLES[HERE].rows[HERE]])
    trained = [task.makes for task in tasks if task.makes]
    assert all(name.startswith("paper-small") for name in trained[:6])  # one round of six workers
    assert set(trained[6:10]) == {"small", "small-no-tfblock", "small-no-hablock", "guide-conv"}
    assert trained[-1] == "ctgan"


def test_two_workers_give_what_one_process_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("pytorch_lightning")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rows = ("classical", "pix2pix", "uncrtaints")
    several, one = tmp_path / "several", tmp_path / "one"
    outcome = run_reproduce(ask(several, *rows, workers=2, archive=True))
    assert outcome.failed == {}
    assert outcome.left == []
    run_reproduce(ask(one, *rows))
    assert scores(several) == scores(one)
    text = (several / HERE / HERE / "clean" / "table.md").read_text()
    assert "shared by 2 trainings at a time" in text
    assert "2 x 32 px" in text
    assert not list(several.glob("runs/*/*/checkpoints"))  # a finished run keeps no states
    # The archive is all that another machine needs to write the same table.
    with tarfile.open(several / "results.tgz") as archive:
        archive.extractall(tmp_path / "away", filter="data")
    assert not list((tmp_path / "away").rglob("*.safetensors"))
    run_reproduce(ask(tmp_path / "away", report_only=True))
    assert (tmp_path / "away" / HERE / HERE / "clean" / "table.md").read_text() == text


def test_a_row_that_diverges_is_in_the_table_as_failed(tmp_path: Path):
    pytest.importorskip("pytorch_lightning")
    broken = {"overrides": ("train.adam_lr=1e30", "train.clip=0"), "steps": 4}
    outcome = run_reproduce(ask(tmp_path, "classical", "uncrtaints", workers=2, **broken))
    assert list(outcome.failed) == [f"{HERE}/uncrtaints"]
    text = (tmp_path / HERE / HERE / "clean" / "table.md").read_text()
    assert "Failed:" in text
    assert "- uncrtaints: " in text
    assert "nan" in text
    assert "ridge_blend" in text
    content = json.loads((tmp_path / HERE / HERE / "clean" / "summary.json").read_text())
    assert list(content["failed"]) == ["uncrtaints"]
    assert "uncrtaints" not in content["not_run"]


@pytest.mark.slow
def test_a_killed_pool_goes_on_and_keeps_what_is_done(tmp_path: Path):
    pytest.importorskip("pytorch_lightning")
    names = [word for row in ("classical", "pix2pix", "ae", "mcgan") for word in ("--only", row)]
    command = [
        sys.executable,
        "-m",
        "sader.evaluation.reproduce.run",
        HERE,
        "--tiny",
        "--steps",
        "30",
        "--workers",
        "2",
    ]
    command += [*names, "--no-lpips", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None and not list(tmp_path.glob("runs/*/*/done.json")):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = {file: file.stat().st_mtime_ns for file in tmp_path.glob("runs/*/*/done.json")}
    assert done
    assert not (tmp_path / HERE).exists()
    again = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert {file: file.stat().st_mtime_ns for file in done} == done
    assert {"Pix2Pix", "McGAN", "ridge_blend"} <= set(scores(tmp_path))


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"workers": 0}, "workers is 0; expected 1 or more"),
        ({"workers": 2, "isolate": False}, "--no-isolate with 2 workers"),
        ({"deadline": 0.0}, "deadline is 0.0; expected more than 0"),
        ({"scorers": -1}, "scorers is -1; expected 0 or more"),
    ],
)
def test_numbers_that_cannot_be(tmp_path: Path, more: dict[str, object], text: str):
    with pytest.raises(ConfigError, match=text):
        run_reproduce(ask(tmp_path, "classical", **more))
