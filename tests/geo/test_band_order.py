"""Spectra of one date that contradict the other dates are pointed out; clouds, shadow and seasons are not."""

from __future__ import annotations

import numpy as np
import pytest

from sader.geo.scene.source import check_order
from sader.inference.scene_match import Overview

BANDS = ("B02", "B03", "B04", "B08")
GROUND = np.array([[0.03, 0.06, 0.04, 0.35], [0.08, 0.11, 0.15, 0.24], [0.06, 0.05, 0.03, 0.015]])
"""Vegetation, soil, water."""


def overview(count=3, **changes):
    """Return dates of one place with the gain and noise of a date; changes: date -> function of its image."""
    rng = np.random.default_rng(3)
    kinds = rng.choice(3, (40, 50), p=(0.5, 0.4, 0.1))
    dates = [GROUND[kinds].transpose(2, 0, 1) * rng.uniform(0.8, 1.2, (4, 40, 50)) for _ in range(count)]
    for date, change in changes.items():
        dates[int(date[1:])] = change(dates[int(date[1:])])
    values = np.stack(dates).astype(np.float32)
    return Overview(values, np.ones((count, 40, 50), bool), np.zeros((count, 40, 50), np.float32))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda image: image[::-1], "reversed"),
        (lambda image: image[[2, 1, 0, 3]], "with red and blue exchanged"),
    ],
)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_another_order_of_one_date_is_pointed_out(change, text, count):
    (warning,) = check_order(list("abcde")[:count], BANDS, overview(count, d1=change))
    assert warning.startswith("b:" if count > 2 else "a:")
    assert f"fit the other dates better with its bands {text}. Check its band names" in warning


@pytest.mark.parametrize(
    "change",
    [
        lambda image: image,
        lambda image: 0.6 * image + 0.05,  # haze
        lambda image: np.full_like(image, 0.5) + 0.1 * image,  # cloud
        lambda image: image * np.array([0.5, 0.4, 0.3, 0.2])[:, None, None],  # shadow, lit by the blue sky
        lambda image: image[:, ::-1],  # other fields
    ],
)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_changes_of_scenes_are_no_doubt(change, count):
    changes = {"d1": change} if count > 1 else {}
    assert check_order(list("abcd")[:count], BANDS, overview(count, **changes)) == []


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(
    ("order", "text"),
    [([2, 1, 0, 3], "red and blue seem to be exchanged in all dates"), ([3, 2, 1, 0], "than their names")],
)
def test_wrong_names_of_all_dates_are_pointed_out(order, text, count):
    changes = {f"d{date}": lambda image: image[order] for date in range(count)}
    (warning,) = check_order(list("abcd")[:count], BANDS, overview(count, **changes))
    assert text in warning
    assert "--bands" in warning


def test_too_few_pixels_are_no_evidence():
    found = overview(3, d1=lambda image: image[::-1])
    found.valid[1, 1:] = False
    assert check_order(list("abc"), BANDS, found) == []


def test_remove_notifies_the_user(tmp_path, write_date, tiny):
    from sader.geo.align import build_stack
    from sader.geo.read.masks import with_masks
    from sader.geo.read.sources import open_sources
    from sader.geo.scene.options import SceneOptions
    from sader.geo.scene.run import clear_scene

    dates = overview(3).cloudy * 10000
    names = [BANDS, BANDS[::-1], BANDS]
    paths = [
        write_date(tmp_path / f"S2_2022-0{n + 3}-10.tif", image.astype(np.uint16), bands=bands)
        for n, (image, bands) in enumerate(zip(dates, names, strict=True))
    ]
    masks = write_date(tmp_path / "masks.tif", np.zeros((3, 40, 50), np.uint8), bands=None, nodata=None)
    texts: list[str] = []
    stack = build_stack(with_masks(open_sources(paths), masks), tiny.config.network, notice=texts.append)
    clear_scene(stack, tiny, tmp_path / "c.tif", SceneOptions(reference=0), notice=texts.append)
    assert [text for text in texts if "S2_2022-04-10.tif: the spectra of" in text]
