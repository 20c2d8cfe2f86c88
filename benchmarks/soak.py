"""Memory of `sader serve` over many jobs: resident memory, open files and stored files must stay flat.

    python benchmarks/soak.py --jobs 1000 --out soak.json

Each job uploads a scene of three dates, asks for its clouds, an image and a value, removes the clouds, downloads the
result, and deletes job and scene. Memory is read from /proc (Linux) for the server and its three worker processes.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

SIZE = 64
DATES = 3
WARM_UP = 0.2
"""Share of the jobs after which memory counts as settled."""


def main() -> None:
    """Parse the options, run the jobs, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--every", type=int, default=0, help="jobs between two measurements; default: a twentieth")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = soak(Path(folder), options.jobs, every=options.every or max(1, options.jobs // 20), show=print)
    print({key: value for key, value in figures.items() if key != "rows"})
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def soak(folder: Path, jobs: int, *, every: int, show: Any = lambda row: None) -> dict[str, Any]:
    """Run `jobs` jobs on a server of its own; return the measurements and the growth after the warm-up."""
    files = [write_date(folder / f"S2_2022-03-{10 + 5 * number}.tif", number) for number in range(DATES)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    data = folder / "data"
    command = [sys.executable, "-m", "sader", "serve", str(data), "--port", str(port), "--no-browser"]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    client = Client(f"http://127.0.0.1:{port}")
    rows: list[dict[str, Any]] = []
    begun = time.perf_counter()
    try:
        client.wait()
        for number in range(jobs + 1):
            if number % every == 0 or number == jobs:
                rows.append({"jobs": number, "seconds": round(time.perf_counter() - begun, 1), **measure(server, data)})
                show(rows[-1])
            if number < jobs:
                one_job(client, files)
    finally:
        server.terminate()
        server.wait(timeout=30)
    settled = [row for row in rows if row["jobs"] >= WARM_UP * jobs]
    growth = {key: settled[-1][key] - settled[0][key] for key in ("mib", "descriptors", "files")}
    return {"jobs": jobs, "seconds": rows[-1]["seconds"], "growth": growth, "rows": rows}


def one_job(client: Client, files: list[Path]) -> None:
    """Run one job through all of the server's functions; raise where one of them fails."""
    scene = client.send("POST", "/scenes", {})["id"]
    for file in files:
        client.send("PUT", f"/scenes/{scene}/files/{file.name}", file.read_bytes())
    client.send("GET", f"/scenes/{scene}/clouds")
    client.send("GET", f"/scenes/{scene}/layers/0")
    inputs = {"scene": scene, "uncertainty": True, "provenance": True}
    job = client.send("POST", "/processes/remove-clouds/execution", {"inputs": inputs}, Prefer="respond-async")["jobID"]
    while (status := client.send("GET", f"/jobs/{job}"))["status"] in ("accepted", "running"):
        time.sleep(0.02)
    if status["status"] != "successful":
        raise RuntimeError(f"job {job} {status['status']}: {status['message']}")
    client.send("GET", f"/jobs/{job}/results/clear")
    client.send("GET", f"/scenes/{scene}/values?column=3&row=3&job={job}")
    client.send("DELETE", f"/jobs/{job}")
    client.send("DELETE", f"/scenes/{scene}")


class Client:
    """Requests to the server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """Return the answer, parsed where it is JSON."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        kind = {} if isinstance(body, bytes) or body is None else {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, {**kind, **headers}, method=method)
        with urllib.request.urlopen(request, timeout=300) as answer:
            content = answer.read()
            return json.loads(content) if content and "json" in answer.headers.get("content-type", "") else content

    def wait(self, seconds: float = 120) -> None:
        """Wait until the server answers."""
        end = time.monotonic() + seconds
        while True:
            try:
                self.send("GET", "/folder")
                return
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)


def measure(server: subprocess.Popen[bytes], data: Path) -> dict[str, Any]:
    """Return resident memory (MiB) and open descriptors of the server and its processes, and the stored files."""
    found = {"server": server.pid}
    for thread in Path(f"/proc/{server.pid}/task").iterdir():  # children are listed by the thread that started them
        try:
            children = (thread / "children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended since it was listed
            continue
        for child in children:
            found[Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[-2].decode()] = int(child)
    sizes = {}
    for name, pid in found.items():
        status = Path(f"/proc/{pid}/status").read_text()
        sizes[name] = next(int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("VmRSS"))
    descriptors = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in found.values())
    files = sum(len(names) for _, _, names in os.walk(data))
    return {"mib": sum(sizes.values()), **sizes, "descriptors": descriptors, "files": files}


def write_date(path: Path, seed: int) -> Path:
    """Write one date of four bands with a bright square as its cloud."""
    import rasterio

    ground = np.random.default_rng(7).uniform(400, 1600, (4, SIZE // 8, SIZE // 8)).repeat(8, 1).repeat(8, 2)
    image = ground + np.random.default_rng(seed).normal(0, 20, ground.shape)
    at = seed * 13 % (SIZE // 2)
    image[:, at : at + SIZE // 3, at : at + SIZE // 3] = 6500
    profile = {"driver": "GTiff", "count": 4, "height": SIZE, "width": SIZE, "dtype": "uint16", "nodata": 0}
    transform = rasterio.Affine(10, 0, 600000, 0, -10, 5100000)
    with rasterio.open(path, "w", crs="EPSG:32632", transform=transform, **profile) as dataset:
        dataset.write(np.rint(image).clip(1, 12000).astype(np.uint16))
        dataset.descriptions = ("B02", "B03", "B04", "B08")
    return path


if __name__ == "__main__":
    main()
