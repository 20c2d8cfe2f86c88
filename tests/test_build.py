"""The tested versions fit pyproject.toml; wheel and source archive are complete, and each runs once installed."""

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
    wheel_file = next(built.glob("*.whl"))
    assert wheel_file.stat().st_size < 100_000_000  # the limit of the package index
    with zipfile.ZipFile(wheel_file) as wheel:
        names = set(wheel.namelist())
    assert wanted <= names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"sader"}
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        assert {f"src/{name}" for name in wanted} <= {name.partition("/")[2] for name in archive.getnames()}


@pytest.mark.slow
@pytest.mark.parametrize("archive", ["*.whl", "*.tar.gz"], ids=["wheel", "sdist"])
def test_archive_runs_in_an_environment_of_its_own(built, tmp_path, archive):
    environment = tmp_path / "env"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    packages = next(environment.glob("lib/python*/site-packages"))
    # The dependencies and the build tools are those of the tests; the editable install among them is outranked.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    install = ("install", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed", "--quiet")
    run(sys.executable, "-m", "pip", "--python", python, *install, next(built.glob(archive)))
    where = run(python, "-c", "import sader; print(sader.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(packages)
    run(environment / "bin" / "sader", "demo", "--out", tmp_path / "demo", cwd=tmp_path)
    assert any((tmp_path / "demo").glob("*.tif"))


# ------------------------------------------------------------------------------------------------ other packages


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def test_dockerfile_follows_the_usual_rules():
    steps = dockerfile()
    assert {word for word, _ in steps} <= {"FROM", "ENV", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD"}
    assert re.fullmatch(r"python:3\.1[1-3]-slim-\w+", steps[0][1]), "a fixed version of the base image"
    users = [number for number, (word, _) in enumerate(steps) if word == "USER"]
    assert users, "it does not run as root"
    assert not [rest for word, rest in steps[users[-1] :] if word in ("RUN", "COPY")]
    assert all(rest.startswith("[") for word, rest in steps if word in ("ENTRYPOINT", "CMD"))
    assert "PIP_NO_CACHE_DIR=1" in dict(steps)["ENV"]
    copied = [path for word, rest in steps if word == "COPY" for path in rest.split()[:-1]]
    assert all((ROOT / path).exists() for path in copied)
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copied) <= kept
    named = re.search(r"\.\[(.*?)\]", " ".join(rest for word, rest in steps if word == "RUN"))
    assert named is not None
    assert set(named[1].split(",")) <= project()["optional-dependencies"].keys()
    torch = next(line for line in project()["dependencies"] if line.startswith("torch"))
    assert any(f'"{torch}"' in rest for word, rest in steps if word == "RUN")


@pytest.mark.slow
def test_steps_of_the_dockerfile_run(tmp_path):
    """In an environment that has the dependencies already; nothing is downloaded, and no user is created."""
    pytest.importorskip("hatchling")
    environment, copy = tmp_path / "env", tmp_path / "copy"
    run(sys.executable, "-m", "venv", environment)
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    copy.mkdir()
    steps = dockerfile()
    for path in (path for word, rest in steps if word == "COPY" for path in rest.split()[:-1]):
        run("cp", "-r", ROOT / path, copy)
    settings = {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}", "PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1",
                "PIP_NO_BUILD_ISOLATION": "0"}  # fmt: skip
    for step in [rest for word, rest in steps if word == "RUN" and not rest.startswith("useradd")]:
        done = subprocess.run(
            ["sh", "-ec", step], cwd=copy, env={**os.environ, "PYTHONPATH": "", **settings}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("sader ")


def test_conda_recipe_and_citation_agree_with_the_project():
    yaml = pytest.importorskip("yaml")
    recipe = yaml.safe_load((ROOT / "packaging" / "conda" / "meta.yaml").read_text(encoding="utf-8"))
    wanted = {*project()["dependencies"], *project()["optional-dependencies"]["geo"]}
    names = {"torch": "pytorch"}
    pairs = (re.match(r"([\w-]+)(.*)", line) for line in wanted)
    found = {f"{names.get(pair[1], pair[1])} {pair[2]}" for pair in pairs}
    assert {*found, f"python {project()['requires-python']}"} == set(recipe["requirements"]["run"])
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    import sader

    assert sader.__version__ == recipe["package"]["version"] == citation["version"]
    assert citation["license"] == recipe["about"]["license"] == project()["license"]
