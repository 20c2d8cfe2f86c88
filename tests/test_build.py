"""The tested versions fit pyproject.toml; wheel and source archive are complete, and the wheel runs by itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PIN = re.compile(r"^(?:# )?([\w.-]+)==(\S+)", re.MULTILINE)
HASHED = re.compile(r"^([\w.-]+)==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}", re.MULTILINE)


def test_constraints_hold_every_dependency_of_the_tests():
    """With a version that pyproject.toml allows and at least one hash each; PyTorch without a hash."""
    requirements = pytest.importorskip("packaging.requirements")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = {name.replace("_", "-").lower(): version for name, version in PIN.findall(text)}
    hashed = {name.replace("_", "-").lower() for name, _ in HASHED.findall(text)}
    assert pinned.keys() - hashed == {"torch"}
    own = requirements.Requirement(extras["dev"][0])
    wanted = [*project["dependencies"], *extras["dev"][1:], *(line for extra in own.extras for line in extras[extra])]
    for line in wanted:
        requirement = requirements.Requirement(line)
        name = requirement.name.replace("_", "-").lower()
        if name != "sader":
            assert name in pinned, f"{name} is missing in constraints.txt. Run: make constraints"
            assert pinned[name] in requirement.specifier, f"constraints.txt has {name} {pinned[name]}, wanted {line}"


def run(*words: str | Path, **options: str | Path) -> str:
    """Run a command and return what it printed; its errors are part of a failed assertion."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, check=False, env=environment, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive of the checked-out tree."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "--directory", folder, cwd=ROOT)
    return folder


@pytest.mark.slow
def test_archives_hold_the_package_and_its_files(built):
    package = ROOT / "src" / "sader"
    wanted = {
        f"sader/{path.relative_to(package)}"
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    assert wanted <= names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"sader"}
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        assert {f"src/{name}" for name in wanted} <= {name.partition("/")[2] for name in archive.getnames()}


@pytest.mark.slow
def test_wheel_runs_in_an_environment_of_its_own(built, tmp_path):
    environment = tmp_path / "env"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    wheel = next(built.glob("*.whl"))
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel)
    packages = next(environment.glob("lib/python*/site-packages"))
    # The dependencies are those of the tests; the editable install among them is outranked by the wheel.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    where = run(python, "-c", "import sader; print(sader.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(packages)
    run(environment / "bin" / "sader", "demo", "--out", tmp_path / "demo", cwd=tmp_path)
    assert any((tmp_path / "demo").glob("*.tif"))
