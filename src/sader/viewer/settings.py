"""Settings of the server: data folder, address, access, limits."""

from __future__ import annotations

import ipaddress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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
    pixels: int = 130_000_000
    """Of one raster, and of a result; a Sentinel-2 tile of 10 m has 120.6 million."""
    bands: int = 32
    """In one raster."""
    block_bytes: int = 512 * MIB
    """Of one block of a raster, decoded: GDAL decodes a whole block to return one pixel."""
    scenes: int = 50
    """Stored at a time."""
    queue: int = 8
    """Jobs waiting or running; further ones are refused with status 429."""
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

    data: Path
    """The only folder the server reads and writes."""
    host: str = "127.0.0.1"
    port: int = 8765
    token: str | None = None
    """Required from every client; never None where other machines can reach the server (`launch.with_token`)."""
    allow_hosts: tuple[str, ...] = ()
    """Accepted host names, besides the server's address."""
    allow_remote: tuple[str, ...] = ()
    """Hosts from which files may be read (STAC items with https references)."""
    model: str | None = None
    device: str | None = None
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
