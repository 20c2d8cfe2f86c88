"""The files of a scene: room for them beforehand, Cloud Optimized GeoTIFFs with their tags in the end."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sader._version import __version__
from sader.errors import OutputError
from sader.geo.scene.cog import RowFile, make_cog, writing
from sader.geo.scene.options import side_file
from sader.geo.scene.resume import WorkFolder
from sader.inference.masks import FALLBACK_MODEL
from sader.inference.remover import CloudRemover

if TYPE_CHECKING:
    from sader.geo.scene.tiles import SceneJob


def check_room(job: SceneJob, work: WorkFolder) -> None:
    """Refuse now what would fail after hours: not enough room for the rows, the tiles in hand and the COG."""
    grid = job.stack.grid
    tile = job.windows[0]
    layers = sum(layer.bytes_for(grid) for layer in job.layers)
    tiles = 2 * len({window.col for window in job.windows}) * tile.height * tile.width * job.channels.count * 4
    needed = int(2.4 * layers + tiles)
    free = shutil.disk_usage(work.path).free
    if needed > free:
        work.remove()
        raise OutputError(
            f"writing {job.target} takes up to {_bytes(needed)} while it is made; {_bytes(free)} are free "
            "there. Free some space, or choose another folder."
        )


def _bytes(number: int) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def publish(job: SceneJob, rows: Mapping[str, RowFile]) -> list[Path]:
    """Make the COGs, move them to their names and return the paths."""
    tags = tags_of(job)
    made = {name: make_cog(file, tags=tags) for name, file in rows.items()}
    paths = {name: job.target if name == "result" else side_file(job.target, name) for name in made}
    with writing(job.target):
        # The output itself comes last: whoever sees it finds the others beside it.
        for name in sorted(made, key=lambda name: name == "result"):
            os.replace(made[name], paths[name])
    return [paths["result"], *(path for name, path in paths.items() if name != "result")]


def tags_of(job: SceneJob) -> dict[str, str]:
    """Return what a result says about how it was made."""
    steps, again = job.remover.check_numbers(job.options.steps, 1, job.options.seed)
    reference = "none" if job.reference is None else job.stack.sources[job.reference].name
    tags = {
        "SADER_VERSION": __version__,
        "SADER_MODEL": job.options.model_name or job.remover.config.name,
        "SADER_MODEL_SHA256": model_checksum(job.remover),
        "SADER_SEED": str(job.options.seed),
        "SADER_STEPS": f"{steps}+{again}" if again else str(steps),
        "SADER_SAMPLES": str(job.options.sample_count),
        "SADER_REFERENCE": reference,
        "SADER_INPUTS": ", ".join(source.name for source in job.stack.sources),
        "TIFFTAG_SOFTWARE": f"sader {__version__}",
    }
    if job.remover.uses_fallback_masks([band in job.stack.bands for band in job.remover.bands]):
        tags["SADER_CLOUD_MODEL"] = FALLBACK_MODEL  # where no masks are given
    date = None if job.reference is None else job.stack.sources[job.reference].date
    if date is not None:
        tags["ACQUISITION_DATE"] = date.isoformat()
    return tags


def model_checksum(remover: CloudRemover) -> str:
    """Return the SHA-256 of all weights."""
    digest = hashlib.sha256()
    for name, value in sorted(remover.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
