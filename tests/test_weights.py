"""The weights inside the package: whole, within their budget, and better than the simple methods on an unseen scene."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import sader
from sader import checkpoint
from sader.bands import BANDS_RGBN
from sader.baselines.classical import get_classical
from sader.data.synthetic.scene import make_series
from sader.errors import CheckpointError
from sader.method.guides import make_guide
from sader.models import get_preset, model_from_dict


@pytest.fixture(scope="module")
def remover():
    return sader.CloudRemover.from_pretrained()


@pytest.fixture(scope="module")
def scene():
    # A procedural place: no such place was in the training data.
    return make_series(77, size=(160, 192), dates=3, coverage=(0.35, 0.2, 0.25), reference=0)


def error(image, scene):
    hidden = scene.cloud_mask[0]
    return float(np.sqrt(np.square(image - scene.clear)[:, hidden].mean()))


def test_every_shipped_file_is_listed_and_matches():
    files = {
        path.relative_to(checkpoint.WEIGHTS_DIR).as_posix() for path in checkpoint.WEIGHTS_DIR.rglob("*.safetensors")
    }
    assert files == set(checkpoint.checksums())
    for name in files:
        checkpoint.verified(checkpoint.WEIGHTS_DIR / name)


def test_a_changed_byte_is_noticed(tmp_path, monkeypatch):
    folder = tmp_path / "weights"
    shutil.copytree(checkpoint.WEIGHTS_DIR, folder)
    damaged = folder / "sader-s2-rgbn.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    monkeypatch.setattr(checkpoint, "WEIGHTS_DIR", folder)
    with pytest.raises(CheckpointError, match="checksum"):
        checkpoint.find_checkpoint("sader-s2-rgbn")


def test_budget(remover):
    assert sum(p.numel() for p in remover.model.parameters()) <= 8_000_000
    assert checkpoint.shipped()["sader-s2-rgbn"].stat().st_size <= 16 * 2**20
    assert remover.bands == BANDS_RGBN


def test_card_says_what_it_was_trained_on(remover):
    assert "Copernicus" in remover.card["training_data"]
    assert remover.card["licence"] == "Apache-2.0"
    assert remover.card["steps"] > 0


def test_given_masks_it_beats_the_simple_methods(remover, scene):
    result = remover(scene.cloudy, reference=0, cloud_mask=scene.cloud_mask)
    for name in ("median", "least_cloudy", "mosaic", "matched_mosaic", "ridge_blend"):
        baseline = get_classical(name)(scene.cloudy, cloud_mask=scene.cloud_mask, reference=0)
        assert error(result, scene) < error(baseline, scene), name


def test_without_masks_it_finds_the_clouds_itself(remover, scene):
    removal = remover.predict(scene.cloudy, reference=0)
    assert removal.cloud is not None
    found = removal.cloud[0] > remover.options.cloud_threshold
    assert found[scene.cloud_mask[0]].mean() > 0.9
    assert error(removal.clear, scene) < 0.5 * error(scene.cloudy[0], scene)


def test_near_infrared_may_be_missing(remover, scene):
    rgb = [0, 1, 2]
    result = remover.predict(
        scene.cloudy[:, rgb], reference=0, cloud_mask=scene.cloud_mask, bands=("B02", "B03", "B04")
    ).clear
    baseline = get_classical("median")(scene.cloudy, cloud_mask=scene.cloud_mask, reference=0)[rgb]
    hidden = scene.cloud_mask[0]
    truth = scene.clear[rgb]
    assert np.square(result - truth)[:, hidden].mean() < np.square(baseline - truth)[:, hidden].mean()


def test_the_shipped_guide_is_trained_and_used(remover):
    path = checkpoint.shipped_guide("mae", BANDS_RGBN)
    assert path is not None
    assert make_guide("mae", bands=4, weights=path).trained
    assert checkpoint.shipped_guide("mae", ("B04", "B03", "B02")) is None


PAPER = pytest.mark.skipif("sader-paper" not in checkpoint.shipped(), reason="sader-paper is not in this build")


@PAPER
def test_the_papers_network_samples_as_the_paper_does_from_the_median():
    path = checkpoint.shipped()["sader-paper"]
    assert path.stat().st_size <= 60 * 2**20
    header = checkpoint.read_header(path)
    config = model_from_dict(header["config"])
    assert config.default_steps == (4, 1)
    assert (config.sampling.resampling, config.sampling.guide) == ("paper", "mae")
    assert config.diffusion.start == "median"
    assert config.network.bands == BANDS_RGBN
    assert config.network == get_preset("sen2_mtc_new").replace(network={"bands": BANDS_RGBN, "aux_bands": ()}).network
    assert header["card"]["samples"] > 200_000
    assert header["card"]["licence"] == "Apache-2.0"
    assert "/" not in str(header["card"]["train"]["init"])


@PAPER
def test_the_papers_network_removes_clouds_without_masks():
    scene = make_series(79, size=(64, 64), dates=3, coverage=(0.5, 0.5, 0.5))
    image = sader.CloudRemover.from_pretrained("sader-paper")(scene.cloudy)
    baseline = get_classical("median")(scene.cloudy, cloud_mask=scene.cloud_mask, reference=None)
    assert np.square(image - scene.clear).mean() < np.square(baseline - scene.clear).mean()
    assert abs(float((image - scene.clear).mean())) < 0.03  # no veil
