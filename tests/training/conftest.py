"""A tiny bank on disk and the overrides that make a network tiny enough to train within a test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sader.data.shards import SeriesRecord, write_shard

RGBN = ("B02", "B03", "B04", "B08")


def _record(seed: int) -> SeriesRecord:
    """Four dates of one place: the first is clear, the others have a labelled bright bar."""
    rng = np.random.default_rng(seed)
    dn = np.clip(rng.normal(1500, 250, (4, 4, 48, 56)), 200, 4000).astype(np.uint16)
    labels = np.zeros((4, 48, 56), np.uint8)
    for k in range(1, 4):
        labels[k, 10 * k : 10 * k + 12] = 1 + k % 3
        dn[k][:, labels[k] > 0] = 7000
    return SeriesRecord(dn, f"place_{seed:02d}", "cloudsen12", RGBN, labels, group=f"train/place_{seed:02d}")


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one shard of two places."""
    folder = tmp_path_factory.mktemp("shards")
    write_shard(folder / "train-000.shard", [_record(1), _record(2)])
    return folder


@pytest.fixture(scope="session")
def tiny() -> list[str]:
    """Overrides of the preset `small`: a network of a few thousand parameters on crops of 16 pixels."""
    return [
        "model.network.widths=[8, 16]",
        "model.network.blocks=[1, 1]",
        "model.network.fusion_width=8",
        "model.network.key_width=8",
        "model.network.head_width=8",
        "model.network.kernel=3",
        "model.network.emb_width=16",
        "model.network.cloud_widths=[8, 8]",
        "model.network.refinement_widths=[8]",
        "train.device=cpu",
        "train.batch_size=2",
        "train.dates=2",
        "train.crop=16",
        "train.steps=6",
        "train.log_every=1",
        "train.checkpoint_every=2",
        "train.validate_every=0",
        "train.warmup=0.2",
    ]
