"""Properties of the cloud simulator: coverage, colour, shadows, masks, seeds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sader.bands import BANDS_13
from sader.data.clouds import CloudFields, CloudSettings, apply_clouds, cloud_fields, paste_clouds
from sader.errors import BandError, ConfigError, ShapeError, ValueRangeError

RGBN = ("B02", "B03", "B04", "B08")
KINDS = {
    "broken": CloudSettings(thick_kinds=(1, 0, 0), thin_kinds=(1, 0, 0)),
    "cumulus": CloudSettings(thick_kinds=(0, 1, 0), thin_kinds=(1, 0, 0)),
    "stratus": CloudSettings(thick_kinds=(0, 0, 1), thin_kinds=(1, 0, 0)),
    "cirrus": CloudSettings(thin_kinds=(0, 1, 0), thin_only_probability=1.0),
    "haze": CloudSettings(thin_kinds=(0, 0, 1), thin_only_probability=1.0),
    "all": CloudSettings(),
}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(batch: int = 4, height: int = 48, width: int = 64, *, seed: int = 0, **options) -> CloudFields:
    return cloud_fields(batch, height, width, generator=seeded(seed), device="cpu", **{"coverage": None, **options})


def blank(rows: int = 24, columns: int = 40, **fields: torch.Tensor) -> CloudFields:
    """Fields without any cloud, for one image, with the given ones put in."""
    none = torch.zeros(1, rows, columns)
    start = CloudFields(
        opacity=none, cirrus=none, haze=none, shadow=none, texture=none + 1, height=torch.zeros(1),
        displacement=torch.zeros(1, 2), settings=CloudSettings(),
    )  # fmt: skip
    return replace(start, **fields)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wanted", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_coverage_is_met_in_every_image(kind: str, wanted: float) -> None:
    fields = draw(8, 64, 48, seed=3, coverage=torch.full((8,), wanted), settings=KINDS[kind])
    clear = torch.full((8, 4, 64, 48), 0.1)
    _, cloud, _, _ = apply_clouds(clear, fields, bands=RGBN, generator=seeded(1))
    found = cloud.float().mean(dim=(1, 2))
    assert (found - wanted).abs().max() < 0.01


def test_no_coverage_means_no_shadow_from_outside_either() -> None:
    fields = draw(16, coverage=torch.zeros(16))
    assert not fields.shadow.any()
    assert not fields.opacity.any()


def test_clouds_outside_the_image_throw_shadows_into_it() -> None:
    settings = replace(KINDS["stratus"], sun_azimuth=(90.0, 90.0), shadow_offset=(40.0, 40.0))
    fields = draw(16, 48, 48, coverage=torch.full((16,), 0.3), settings=settings)
    # The sun stands in the east: columns from 10 on are shaded by clouds from column 50 on, all outside the image.
    assert (fields.shadow[:, :, 10:] > 0.3).any()


def test_coverage_differs_by_image_as_asked() -> None:
    wanted = torch.tensor([0.1, 0.9, 0.4])
    found = draw(3, coverage=wanted).visible_cloud().float().mean(dim=(1, 2))
    assert torch.allclose(found, wanted, atol=0.01)


def test_large_images_rank_on_a_sparse_grid_and_still_meet_the_coverage() -> None:
    found = draw(1, 700, 600, coverage=torch.tensor([0.35])).visible_cloud().float().mean()
    assert abs(float(found) - 0.35) < 0.01


def test_drawn_coverage_follows_the_settings() -> None:
    settings = CloudSettings(coverage=(0.2, 0.6), clear_probability=0.0, overcast_probability=0.0)
    found = draw(64, 24, 24, settings=settings).visible_cloud().float().mean(dim=(1, 2))
    assert 0.17 < found.min() < 0.3
    assert 0.5 < found.max() < 0.63


def test_same_seed_same_bits_other_seed_other_clouds() -> None:
    first, again, other = draw(seed=5), draw(seed=5), draw(seed=6)
    for name in ("opacity", "cirrus", "haze", "shadow", "texture", "height", "displacement"):
        assert torch.equal(getattr(first, name), getattr(again, name)), name
    assert not torch.equal(first.opacity, other.opacity)
    clear = torch.rand(4, 4, 48, 64, generator=seeded(9))
    one = apply_clouds(clear, first, bands=RGBN, generator=seeded(2))[0]
    two = apply_clouds(clear, again, bands=RGBN, generator=seeded(2))[0]
    assert torch.equal(one, two)


def test_fields_are_float32_in_range_for_any_shape() -> None:
    fields = draw(5, 37, 91, seed=8)
    for name in ("opacity", "cirrus", "haze", "shadow", "texture"):
        field = getattr(fields, name)
        assert field.dtype == torch.float32, name
        assert field.shape == (5, 37, 91), name
        assert torch.isfinite(field).all(), name
        assert field.min() >= 0, name
    assert fields.opacity.max() <= 1
    assert fields.shadow.max() <= 1


def test_no_cloud_leaves_every_bit() -> None:
    clear = torch.rand(1, 13, 24, 40, generator=seeded(1))
    cloudy, cloud, shadow, thin = apply_clouds(clear, blank(), bands=BANDS_13, generator=seeded(0))
    assert torch.equal(cloudy, clear)
    assert not (cloud | shadow | thin).any()


def test_masks_mark_exactly_the_changed_pixels_and_nothing_is_mutated() -> None:
    fields = draw(16, seed=2, coverage=torch.full((16,), 0.4))
    clear = 0.02 + 0.2 * torch.rand(16, 4, 48, 64, generator=seeded(4))
    kept = clear.clone()
    cloudy, cloud, shadow, thin = apply_clouds(clear, fields, bands=RGBN, generator=seeded(3))
    changed = (cloudy != clear).any(dim=1)
    assert torch.equal(clear, kept)
    assert torch.equal(changed, cloud | shadow)
    assert cloudy.min() >= 0
    assert cloudy.max() <= 1
    assert not (thin & ~cloud).any()
    assert cloudy.movedim(1, -1)[shadow & ~cloud].mean() < clear.movedim(1, -1)[shadow & ~cloud].mean() * 0.9
    thick = cloud & ~thin
    assert cloudy.movedim(1, -1)[thick].mean() > clear.movedim(1, -1)[thick].mean() + 0.1


def test_haze_hides_blue_more_than_swir_and_cirrus_shows_in_b10() -> None:
    depth = torch.full((1, 24, 40), 0.4)
    clear = torch.full((1, 13, 24, 40), 0.05)
    clear[:, BANDS_13.index("B10")] = 0.002

    def change(fields: CloudFields) -> dict[str, float]:
        cloudy = apply_clouds(clear, fields, bands=BANDS_13, generator=seeded(0))[0]
        return dict(zip(BANDS_13, (cloudy - clear).mean(dim=(0, 2, 3)).tolist(), strict=True))

    haze, cirrus = change(blank(haze=depth)), change(blank(cirrus=depth))
    assert haze["B02"] > haze["B04"] > haze["B08"] > haze["B11"] > haze["B12"] > 0
    assert haze["B02"] > 3 * haze["B12"]
    assert cirrus["B10"] > 0.1 > 10 * haze["B10"]
    assert cirrus["B12"] > 1.2 * haze["B12"]


def test_shadow_is_darker_in_nir_than_in_blue() -> None:
    clear = torch.full((1, 4, 24, 40), 0.3)
    cloudy = apply_clouds(clear, blank(shadow=torch.full((1, 24, 40), 0.8)), bands=RGBN, generator=seeded(0))[0]
    blue, green, red, nir = cloudy.mean(dim=(0, 2, 3)).tolist()
    assert 0.3 > blue > green > red > nir > 0


@pytest.mark.parametrize("azimuth", [0.0, 90.0, 135.0, 300.0])
def test_shadows_fall_away_from_the_sun(azimuth: float) -> None:
    settings = replace(KINDS["cumulus"], sun_azimuth=(azimuth, azimuth), shadow_offset=(14.0, 14.0))
    fields = draw(2, 160, 160, seed=4, coverage=torch.full((2,), 0.2), settings=settings)
    # The shift that best aligns shadow and cloud, found by correlation.
    spectrum = torch.fft.fft2(fields.shadow) * torch.fft.fft2(fields.opacity).conj()
    match = torch.fft.ifft2(spectrum).real
    for image, moved in zip(match, fields.displacement, strict=True):
        best = int(image.argmax())
        found = torch.tensor([(best // 160 + 80) % 160 - 80, (best % 160 + 80) % 160 - 80])
        assert (found - moved).abs().max() <= 1.5
    angle = torch.deg2rad(torch.tensor(azimuth))
    away = torch.stack([angle.cos(), -angle.sin()]) * 14
    assert torch.allclose(fields.displacement[0], away, atol=1e-3)


def test_thick_cloud_has_texture_and_b10_depends_on_height() -> None:
    fields = draw(8, 96, 96, coverage=torch.full((8,), 0.8), settings=KINDS["broken"])
    clear = torch.full((8, 13, 96, 96), 0.1)
    cloudy, _, _, _ = apply_clouds(clear, fields, bands=BANDS_13, generator=seeded(0))
    dense = fields.opacity > 0.97
    for image, where in zip(cloudy[:, 1], dense, strict=True):
        if where.sum() > 200:
            assert image[where].std() > 0.01
    full = torch.ones(1, 24, 40)
    low, high = (
        apply_clouds(clear[:1, :, :24, :40], blank(opacity=full, height=torch.tensor([h])), bands=BANDS_13,
                     generator=seeded(0))[0].mean(dim=(0, 2, 3))
        for h in (0.0, 1.0)
    )  # fmt: skip
    assert high[10] > 5 * low[10]
    assert low[12] < low[1]


def test_hard_paste_takes_the_donor_and_keeps_the_rest() -> None:
    clear, donor = torch.rand(2, 3, 2, 20, 30, generator=seeded(0))
    mask = torch.zeros(3, 20, 30, dtype=torch.bool)
    mask[:, 5:15, 4:20] = True
    cloudy, pasted = paste_clouds(clear, donor, mask, feather=0.0)
    assert torch.equal(pasted, mask)
    assert torch.equal(cloudy.movedim(1, -1)[mask], donor.movedim(1, -1)[mask])
    assert torch.equal(cloudy.movedim(1, -1)[~mask], clear.movedim(1, -1)[~mask])


def test_feathered_paste_fades_inside_the_mask_only() -> None:
    clear, donor = torch.zeros(1, 1, 40, 40), torch.ones(1, 1, 40, 40)
    mask = torch.zeros(1, 40, 40, dtype=torch.bool)
    mask[:, :, 10:] = True
    cloudy, pasted = paste_clouds(clear, donor, mask, feather=4.0)
    row = cloudy[0, 0, 20]
    assert torch.equal(row[:10], torch.zeros(10))
    assert 0 < row[11] < row[13] < 1
    assert (row[11:].diff() >= 0).all()
    assert (row[24:] > 0.99).all()  # the cloud is cut by the image border there: no fading
    assert torch.equal(pasted, cloudy[:, 0] != clear[:, 0])


def test_mistakes_are_named() -> None:
    clear = torch.zeros(1, 2, 24, 40)
    with pytest.raises(BandError, match="unknown band 'B8a'; did you mean B8A"):
        apply_clouds(clear, blank(), bands=("B02", "B8a"), generator=seeded(0))
    with pytest.raises(BandError, match="sequence of names"):
        apply_clouds(clear, blank(), bands="B2", generator=seeded(0))
    with pytest.raises(ShapeError, match="expected \\(B, C, H, W\\) with C = 3"):
        apply_clouds(clear, blank(), bands=("B02", "B03", "B04"), generator=seeded(0))
    with pytest.raises(ShapeError, match="equal B, H, W"):
        apply_clouds(clear, blank(24, 41), bands=("B02", "B03"), generator=seeded(0))
    with pytest.raises(ValueRangeError, match="0 to 1"):
        draw(2, coverage=torch.tensor([0.2, 1.4]))
    with pytest.raises(ShapeError, match="one value per image"):
        draw(2, coverage=torch.tensor(0.2))
    with pytest.raises(ConfigError, match="kinds"):
        draw(2, settings=CloudSettings(thick_kinds=(0, 0, 0)))
    with pytest.raises(ShapeError, match=r"torch\.bool"):
        paste_clouds(clear, clear, torch.zeros(1, 24, 40), feather=0.0)
    with pytest.raises(ConfigError, match="feather"):
        paste_clouds(clear, clear, torch.zeros(1, 24, 40, dtype=torch.bool), feather=-1.0)
