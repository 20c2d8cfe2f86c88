"""Settings of the server: data folder, address, access, limits."""

# No "from __future__ import annotations": the command line reads the types of the fields.

import ipaddress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sader.config import option

MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """Limits checked before any work is done."""

    upload_bytes: int = 2048 * MIB
    """Of one uploaded file."""
    stored_bytes: int = 20480 * MIB
    """Of all uploads together."""
    files: int = 24
    """Files uploaded for one scene, and dates in one job."""
    pixels: int = option("Largest raster, in pixels.", None, "--max-pixels", default=130_000_000, min=1)
    """Also of a result; a Sentinel-2 tile of 10 m has 120.6 million."""
    bands: int = 32
    """In one raster."""
    block_bytes: int = 512 * MIB
    """Of one block of a raster, decoded: GDAL decodes a whole block to return one pixel."""
    scenes: int = 50
    """Stored at a time."""
    queue: int = option("Largest number of waiting and running jobs.", default=8, min=1)
    """Further ones are refused with status 429."""
    body_bytes: int = MIB
    """Of the body of a request, uploads excepted."""
    body_s: float = 30
    """Seconds without data after which an incomplete request body is refused."""
    header_s: float = 15
    """Seconds after which a connection with an incomplete request header is closed."""
    value_bytes: int = 64 * MIB
    """Of a result sent inside a JSON document."""
    keep_s: float = 24 * 3600
    """Age at which results and uploads are deleted."""
    read_s: float = 120
    """Seconds for reading an image or a header."""
    sync_s: float = 1800
    """Seconds a synchronous call waits."""


@dataclass(frozen=True)
class ServeSettings:
    """Options of `sader serve`."""

    data: Path = option(
        "Folder of scenes; the only folder the server reads and writes.", default=Path("sader-data"), argument=True
    )
    host: str = option("Address to listen at; other than a loopback address it needs a token.", default="127.0.0.1")
    port: int = option("Port; 0 chooses a free one.", default=8765, min=0, max=65535)
    token: str | None = None
    """Required from every client; never None where other machines can reach the server (`launch.with_token`)."""
    allow_hosts: tuple[str, ...] = option(
        "A host name of the server that is accepted: maps.example.org; repeatable.",
        None,
        "--allow-host",
        default=(),
        kind=list[str] | None,
    )
    allow_remote: tuple[str, ...] = option(
        "A host from which STAC assets may be read over https; repeatable.", default=(), kind=list[str] | None
    )
    model: str | None = option("Shipped weights, a preset or a checkpoint file.")
    device: str | None = option("cpu, cuda or cuda:1; default: a GPU if there is one.")
    limits: Limits = field(default_factory=Limits)

    def for_child(self) -> dict[str, Any]:
        """Return the settings of a worker process, without the token."""
        return {
            "data": str(self.data),
            "allow_remote": list(self.allow_remote),
            "model": self.model,
            "device": self.device,
            "limits": asdict(self.limits),
        }


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
