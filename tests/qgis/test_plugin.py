"""The plugin without QGIS: archive, metadata, styles, command lines, and the child process."""

from __future__ import annotations

import ast
import configparser
import os
import re
import stat
import sys
import time
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer

import sader
from sader.cli.main import app
from sader.geo.classes import LEGEND
from sader.geo.scene.cog import PROVENANCE_LEGEND


def script(path: Path, body: str) -> Path:
    """Write a program that stands in for the command."""
    path.write_text(f"#!{sys.executable}\nimport os, subprocess, sys, time\n{body}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# ------------------------------------------------------------------------------------------------ archive


def test_archive_holds_the_whole_plugin_in_one_folder(archive, plugin):
    with zipfile.ZipFile(archive) as opened:
        names = set(opened.namelist())
    assert {name.split("/")[0] for name in names} == {"sader"}
    own = {f"sader/{path.relative_to(plugin).as_posix()}" for path in plugin.rglob("*") if path.is_file()}
    assert names == {*(name for name in own if "__pycache__" not in name), "sader/LICENSE"}


def test_metadata_is_complete(archive, plugin):
    given = configparser.ConfigParser()
    given.read(plugin / "metadata.txt", encoding="utf-8")
    values = given["general"]
    wanted = (
        "name",
        "description",
        "about",
        "author",
        "email",
        "homepage",
        "tracker",
        "repository",
    )  # of the QGIS site
    assert all(values[name].strip() for name in wanted)
    assert values["version"] == sader.__version__
    assert archive.name == f"sader-qgis-{sader.__version__}.zip"
    assert values["hasProcessingProvider"] == "yes"  # else qgis_process does not load it
    assert (plugin / values["icon"]).is_file()


def test_plugin_imports_neither_sader_nor_new_python(plugin):
    for path in plugin.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
        for node in ast.walk(tree):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            packages = {name.split(".")[0] for name in names}
            assert packages <= {*sys.stdlib_module_names, "qgis", "processing"}, path.name


@pytest.mark.parametrize(
    ("name", "legend"), [("classes", dict(enumerate(LEGEND))), ("provenance", dict(enumerate(PROVENANCE_LEGEND)))]
)
def test_styles_have_the_classes_of_the_files(plugin, name, legend):
    entries = ElementTree.parse(plugin / "styles" / f"{name}.qml").iter("paletteEntry")
    found = {int(entry.attrib["value"]): entry.attrib for entry in entries}
    assert {value: entry["label"] for value, entry in found.items()} == {
        value: label for value, (label, _) in legend.items() if label != "nodata"
    }
    if name == "classes":
        for value, (_, (*rgb, _)) in legend.items():
            assert found[value]["color"] == "#" + "".join(f"{part:02x}" for part in rgb)


# ------------------------------------------------------------------------------------------------ command lines


def test_fields_name_options_of_the_command(form):
    commands = typer.main.get_command(app).commands
    for operation, fields in form.FORMS.items():
        known = {name for one in commands[operation].params for name in one.opts}
        assert {field.option for field in fields if field.option} <= known
        assert len({field.name for field in fields}) == len(fields)


def test_an_empty_form_gives_a_short_command_line(form):
    assert form.command_line("remove", {"INPUT": ["/a b.tif", "/c.tif"], "REFERENCE": "auto", "OUTPUT": "/o.tif"}) == [
        "remove", "/a b.tif", "/c.tif", "--json", "--overwrite", "--reference=auto", "--out=/o.tif",
    ]  # fmt: skip
    assert form.command_line("mask", {"FOLDER": "/2022", "OUTPUT": "/m", "OVERWRITE": False, "LOAD": True}) == [
        "mask", "/2022", "--json", "--out=/m",
    ]  # fmt: skip


def test_every_field_reaches_the_command_line(form):
    values = {
        "FOLDER": "/2022", "BANDS": "blue,green,red,nir", "EXTENT": (-3.5, 51.0, -3.25, 51.125), "MASK": "scl",
        "MASK_VALUES": "3, 8", "HAZE": "keep", "CLOUD_THRESHOLD": 0.3, "MASK_GROWTH": 0, "PROVENANCE": True,
        "COUNT": False, "MODEL": "sader-s2-msi", "DEVICE": "cpu", "EXTRA": "--offset -1000 --grid 'my grid.tif'",
        "NEAREST": 4, "POINT": (-3.3, 51.1), "ANIMATION": "/a.gif", "OVERWRITE": True, "OUTPUT": "/out",
    }  # fmt: skip
    words = form.command_line("series", values)
    assert words[:3] == ["series", "/2022", "--json"]
    assert set(words[3:-4]) == {
        "--bands=blue,green,red,nir", "--bbox=-3.50000000,51.00000000,-3.25000000,51.12500000", "--mask=scl:3,8",
        "--haze=keep", "--cloud-threshold=0.3", "--mask-growth=0", "--provenance", "--model=sader-s2-msi",
        "--device=cpu", "--nearest=4", "--point=-3.30000000,51.10000000", "--animation=/a.gif", "--overwrite",
        "--out=/out",
    }  # fmt: skip
    assert words[-4:] == ["--offset", "-1000", "--grid", "my grid.tif"]


def test_mask_files_and_own_weights_replace_the_choices(form):
    words = form.command_line(
        "remove",
        {
            "FOLDER": "/d",
            "MASK_FOLDER": "/m",
            "MASK_VALUES": "2,4",
            "MODEL": "sader-s2-msi",
            "WEIGHTS": "/w.safetensors",
        },
    )
    assert words == [
        "remove",
        "/d",
        "--json",
        "--overwrite",
        "--mask-values=2,4",
        "--mask=/m",
        "--model=/w.safetensors",
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "No input was chosen"),
        ({"FOLDER": "/d", "MASK": "scl", "MASK_FOLDER": "/m"}, "choose one of them"),
        ({"FOLDER": "/d", "MASK": "own", "MASK_VALUES": "3"}, "Classes 3 are given"),
        ({"FOLDER": "/d", "EXTRA": "--grid 'a.tif"}, "has no partner"),
    ],
)
def test_contradictions_are_refused(command, form, values, message):
    with pytest.raises(command.CommandError, match=message):
        form.command_line("remove", values)


def test_paths_of_windows_keep_their_backslashes(form):
    assert form.further_options(r'--grid "C:\my data\g.tif" --seed 3', posix=False) == [
        "--grid", r"C:\my data\g.tif", "--seed", "3",
    ]  # fmt: skip


def test_results_are_told_apart(form):
    scene = {"output": "/o/2022-05-13.tif", "files": ["/o/2022-05-13.tif", "/o/2022-05-13_count.tif", "/o/a.json"]}
    assert form.results_of("series", {"scenes": [scene]}) == [
        ("/o/2022-05-13.tif", "result", "2022-05-13", "2022-05-13"),
        ("/o/2022-05-13_count.tif", "count", "2022-05-13 clear observations", "2022-05-13"),
    ]
    assert form.results_of("remove", {"output": "/o.tif", "files": ["/o.tif", "/o_masks.tif", "/o.png"]}) == [
        ("/o.tif", "result", "Clear image", None),
        ("/o_masks.tif", "masks", "Masks", None),
    ]
    files = ["/m/a_mask.tif", "/m/a_probability.tif", "/m/collection.json"]
    assert form.results_of("mask", {"files": files}) == [
        ("/m/a_mask.tif", "classes", "a classes", None),
        ("/m/a_probability.tif", "probability", "a probabilities", None),
    ]


# ------------------------------------------------------------------------------------------------ the child process


def test_the_command_is_searched_for(command, tmp_path):
    mine, other = (script(tmp_path / name, "") for name in ("mine", "sader"))
    path = {"PATH": str(tmp_path)}
    assert command.find_command(str(mine), path) == str(mine)
    assert command.find_command("", {**path, "SADER_COMMAND": str(mine)}) == str(mine)
    assert command.find_command("", path) == str(other)
    assert command.find_command("", {"PATH": ""}, [f"{tmp_path}/no*/sader", f"{tmp_path}/sad*"]) == str(other)
    with pytest.raises(command.CommandError, match=r"/nowhere .* is not a program"):
        command.find_command("/nowhere", path)
    with pytest.raises(command.CommandError, match="was not found"):
        command.find_command("", {"PATH": ""}, [])


def test_the_child_does_not_get_the_environment_of_qgis(command):
    made = command.child_environment({"PYTHONHOME": "/qgis", "PROJ_LIB": "/qgis", "AWS_REGION": "x", "HOME": "/h"})
    assert made.keys() == {"AWS_REGION", "HOME", "PYTHONUTF8", "NO_COLOR", "SADER_LOG_SECONDS"}


def test_progress_lines_of_the_tool_are_read(command, monkeypatch):
    from sader.cli import remove as commands

    monkeypatch.setattr(commands, "LOG_EVERY", -1.0)
    said: list[str] = []
    for work in ("removing clouds", "classifying"):
        lines = commands.ProgressLines(said.append, work)
        lines(1, 4)
        lines(2, 4)
    assert [command.progress_of(line) for line in said] == [25, 50, 25, 50]
    assert command.progress_of("note: 1 of 4 tiles were left out") is None


def test_a_report_comes_back(command, tmp_path):
    body = (
        "print('note: gr\\u00fcn', file=sys.stderr)\nprint('removing clouds: 1 of 2 tiles', file=sys.stderr)\n"
        "print('{\"files\": []}')"
    )
    seen: list[str] = []
    found = command.run_command([str(script(tmp_path / "c", body))], seen.append, lambda: False)
    assert found == {"files": []}
    assert seen == ["note: gr\u00fcn", "removing clouds: 1 of 2 tiles"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sys.exit('note: x\\nDataError: a.tif has no bands.\\nName them.')", "^a.tif has no bands.\nName them.$"),
        (
            "sys.exit('\u256d\u2500 Error\\n\u2502 No such option: --x   \u2502\\n\u2570\u2500')",
            "^No such option: --x$",
        ),
        ("sys.exit(3)", "^The command ended with status 3"),
        ("print('hello')", "printed no report"),
    ],
)
def test_a_failure_has_the_sentence_of_the_command(command, tmp_path, body, message):
    with pytest.raises(command.CommandError, match=message):
        command.run_command([str(script(tmp_path / "c", body))], lambda line: None, lambda: False)


def test_a_command_that_cannot_start_is_named(command):
    with pytest.raises(command.CommandError, match="/nowhere/sader cannot be started"):
        command.run_command(["/nowhere/sader"], lambda line: None, lambda: False)


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("stubborn", [False, True])
def test_cancel_ends_the_child_and_its_children(command, tmp_path, monkeypatch, stubborn):
    monkeypatch.setattr(command, "GRACE", 0.3)
    body = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" if stubborn else ""
    body += (
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(os.getpid(), child.pid, file=sys.stderr, flush=True)\ntime.sleep(60)"
    )
    seen: list[str] = []
    with pytest.raises(command.Cancelled):
        command.run_command([str(script(tmp_path / "c", body))], seen.append, lambda: bool(seen))
    end = time.monotonic() + 30
    while any(alive(int(pid)) for pid in seen[0].split()):
        assert time.monotonic() < end
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_real_error_reaches_the_caller(command, form, tmp_path):
    root = Path(sader.__file__).parents[1]
    body = f"sys.path.insert(0, {str(root)!r})\nfrom sader.cli.main import main\nmain()"
    words = form.command_line("remove", {"INPUT": [str(tmp_path / "no.tif")], "OUTPUT": str(tmp_path / "o.tif")})
    with pytest.raises(command.CommandError) as caught:
        command.run_command([str(script(tmp_path / "c", body)), *words], lambda line: None, lambda: False)
    assert "no.tif" in str(caught.value)
    assert not re.match(r"\w+Error:", str(caught.value))
