"""Write and check `constraints.txt`, the tested versions with the hashes of their files.

    python tools/constraints.py write   # from the packages installed beside this interpreter; needs uv
    python tools/constraints.py audit   # known vulnerabilities of these versions; needs pip-audit

Each line allows every file of a release (wheels of all platforms, the source archive), so that the set installs on
other systems than the one it was written on. PyTorch stands in a comment: see `make constraints`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

FILE = Path(__file__).parents[1] / "constraints.txt"
APART = re.compile(r"(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+|pip|uv|pip-audit)==")
"""PyTorch with its CUDA libraries, and the tools that read or write the file."""


def installed() -> list[str]:
    """Return "name==version" of everything that is installed, without this project and what stands apart."""
    command = [sys.executable, "-m", "pip", "freeze", "--exclude-editable"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if "==" in line and not APART.match(line.replace("_", "-").lower())]


def write() -> None:
    """Replace the file by the installed versions; uv reads the hashes from the index."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-deps", "--no-header", "--no-annotate"]
    command += ["--generate-hashes", "--python", sys.executable, "-"]
    done = subprocess.run(command, input="\n".join(installed()), stdout=subprocess.PIPE, text=True, check=True)
    release = version("torch").split("+")[0]
    system = f"Python {sys.version_info.major}.{sys.version_info.minor}, {sys.platform}"
    head = f"# torch=={release} (any build)\n# The tested set of {system}, written by `make constraints`.\n"
    FILE.write_text(head + done.stdout, encoding="utf-8")
    print(f"wrote {FILE.name}: {done.stdout.count('==')} packages, torch {release}")


def audit() -> int:
    """Return 1 if a pinned version has a known vulnerability; 0 otherwise, with a message if nothing was checked."""
    command = [sys.executable, "-m", "pip_audit", "--disable-pip", "--require-hashes", "--requirement", str(FILE)]
    command += ["--format", "json", "--progress-spinner", "off", "--timeout", "30"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except json.JSONDecodeError:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        print(f"audit skipped: pip-audit has no answer from the advisory service ({last})")
        return 0
    checked = [package for package in packages if "skip_reason" not in package]
    if not checked:
        print(f"audit skipped: the advisory service has no record of any of {len(packages)} packages from here")
        return 0
    found = [package for package in checked if package["vulns"]]
    for package in found:
        names = ", ".join(weakness["id"] for weakness in package["vulns"])
        print(f"{package['name']} {package['version']}: {names}")
    print(f"audited {len(checked)} of {len(packages)} packages: {len(found)} with a known vulnerability")
    return 1 if found else 0


if __name__ == "__main__":
    commands = {"write": write, "audit": audit}
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        sys.exit(f"usage: {Path(sys.argv[0]).name} {'|'.join(commands)}")
    sys.exit(commands[sys.argv[1]]())
