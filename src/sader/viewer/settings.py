"""How the server is set up: its one folder, where it listens, what it refuses."""

from __future__ import annotations

import ipaddress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """What is refused before any work is done."""

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
    """What GDAL must unpack at once to give one pixel: a file may be a single block."""
    scenes: int = 50
    """Kept at a time."""
    queue: int = 8
    """Jobs waiting or running; the next one is answered with 429."""
    body_bytes: int = MIB
    """Of a request that is no upload."""
    value_bytes: int = 64 * MIB
    """Of a result sent inside a JSON document."""
    keep_s: float = 24 * 3600
    """Age at which results and uploads are deleted."""
    read_s: float = 120
    """Seconds for reading a picture or a header."""
    sync_s: float = 1800
    """Seconds a synchronous call waits."""


@dataclass(frozen=True)
class ServeSettings:
    """Everything `sader serve` was told."""

    data: Path
    """The only folder that is read from and written to."""
    host: str = "127.0.0.1"
    port: int = 8765
    token: str | None = None
    """Wanted from every caller; never None where others can reach the server (`check_binding`)."""
    allow_hosts: tuple[str, ...] = ()
    """Names by which the server may be called, beside its address."""
    allow_remote: tuple[str, ...] = ()
    """Hosts from which files may be read (STAC items with https references)."""
    model: str | None = None
    device: str | None = None
    limits: Limits = field(default_factory=Limits)

    def for_child(self) -> dict[str, Any]:
        """Return what a child process needs to know; the token is not among it."""
        return {
            "data": str(self.data),
            "allow_remote": list(self.allow_remote),
            "model": self.model,
            "device": self.device,
            "limits": asdict(self.limits),
        }


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
