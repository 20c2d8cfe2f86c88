"""Simulated clouds, haze, cirrus and their shadows, and real clouds cut from labelled images, on batches of tensors.

Every field is spectral noise with parameters of its own for each image, cut at the quantile that gives the wanted
coverage and converted to optical depth. Radiative transfer and the land below are not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sader.bands import BANDS_13
from sader.errors import BandError, ConfigError, ShapeError, ValueRangeError, did_you_mean


@dataclass(frozen=True)
class Draws:
    """Random numbers, one per image of a batch."""

    batch: int
    generator: torch.Generator
    device: torch.device

    def uniform(self, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(self.batch, generator=self.generator, device=self.device)

    def log_uniform(self, low: float, high: float) -> Tensor:
        return self.uniform(math.log(low), math.log(high)).exp()

    def choice(self, weights: Sequence[float]) -> Tensor:
        """Return (B,) indices drawn with the given weights."""
        if min(weights) < 0 or sum(weights) <= 0:
            raise ConfigError(f"weights of the cloud kinds are {tuple(weights)}; expected none negative, one positive.")
        edges = torch.tensor(
            [sum(weights[: i + 1]) / sum(weights) for i in range(len(weights) - 1)], device=self.device
        )
        return (self.uniform(0.0, 1.0)[:, None] >= edges).sum(dim=1)

    def by_kind(self, kind: Tensor, ranges: Sequence[tuple[float, float]]) -> Tensor:
        bounds = torch.tensor(ranges, device=self.device)[kind]
        return bounds[:, 0] + (bounds[:, 1] - bounds[:, 0]) * self.uniform(0.0, 1.0)


class Grid:
    """A periodic grid on which noise is generated and shifted by its Fourier transform."""

    def __init__(self, rows: int, columns: int, draw: Draws) -> None:
        self.rows, self.columns, self.draw = rows, columns, draw
        self.ky = torch.fft.fftfreq(rows, device=draw.device)[:, None]
        self.kx = torch.fft.rfftfreq(columns, device=draw.device)[None, :]

    def noise(self, slope: Tensor, scale: Tensor, *, stretch: Tensor | None = None) -> Tensor:
        """Return (B, rows, columns) of zero mean and unit deviation; amplitude (1/scale^2 + k^2)^(-slope/2).

        `stretch` lengthens the noise along a random direction by that factor.
        """
        angle = self.draw.uniform(0.0, torch.pi)[:, None, None]
        along = self.kx * angle.cos() + self.ky * angle.sin()
        k2 = self.kx**2 + self.ky**2
        if stretch is not None:
            s = stretch[:, None, None]
            k2 = (k2 - along**2) / s + along**2 * s
        amplitude = (k2 + scale[:, None, None] ** -2) ** (-slope[:, None, None] / 2)
        # No structure finer than the sensor resolves, where thresholding would leave single pixels.
        amplitude = amplitude * torch.exp(-2 * (torch.pi * 0.7) ** 2 * (self.kx**2 + self.ky**2))
        amplitude[:, 0, 0] = 0
        white = torch.randn(
            (self.draw.batch, self.rows, self.kx.shape[1], 2), generator=self.draw.generator, device=self.draw.device
        )
        return unit(self._back(torch.view_as_complex(white) * amplitude))

    def shift_and_blur(self, field: Tensor, shift: Tensor, deviation: Tensor) -> Tensor:
        """Return `field` (B, rows, columns) moved by `shift` (B, 2) pixels, fractions included, and blurred."""
        k2 = self.kx**2 + self.ky**2
        soften = torch.exp(-2 * torch.pi**2 * deviation[:, None, None] ** 2 * k2)
        phase = -2 * torch.pi * (self.ky * shift[:, 0, None, None] + self.kx * shift[:, 1, None, None])
        return self._back(self._there(field) * torch.polar(soften, phase))

    # cuFFT creates a plan for every batch size, and creating one may wait until the device is idle: use few sizes.
    def _there(self, field: Tensor) -> Tensor:
        return torch.fft.rfft2(filled_up(field) if field.is_cuda else field)[: len(field)]

    def _back(self, spectrum: Tensor) -> Tensor:
        given = filled_up(spectrum) if spectrum.is_cuda else spectrum
        return torch.fft.irfft2(given, s=(self.rows, self.columns))[: len(spectrum)]


def filled_up(images: Tensor) -> Tensor:
    """Return the batch padded with zeros to a multiple of 8."""
    missing = -len(images) % 8
    return torch.cat([images, images.new_zeros((missing, *images.shape[1:]))]) if missing else images


def unit(field: Tensor) -> Tensor:
    field = field - field.mean(dim=(1, 2), keepdim=True)
    return field / field.std(dim=(1, 2), keepdim=True).clamp_min(1e-12)


def quantile(field: Tensor, level: Tensor) -> Tensor:
    """Return (B,) the value of `field` (B, H, W) below which a part `level` (B,) of the pixels lies."""
    height, width = field.shape[1:]
    stride = max(1, int((height * width / 65536) ** 0.5))  # a sparse grid is enough to rank smooth fields
    values = field[:, ::stride, ::stride].flatten(1).sort(dim=1).values
    count = values.shape[1]
    found = values.gather(1, (level * count).long().clamp(0, count - 1)[:, None])[:, 0]
    # Level 1 must leave nothing above the cut, not even beside the image; level 0 must leave everything.
    found = torch.where(level >= 1, math.inf, found)
    return torch.where(level <= 0, field.amin(dim=(1, 2)) - 0.5, found)


def quick_size(size: int) -> int:
    """Return the next multiple of 32, a size with a fast Fourier transform."""
    return -(-size // 32) * 32


# Per band, in the order of BANDS_13. Thick cloud relative to its B02, and the share of the radiance that a full
# shadow removes, were measured in Sentinel-2 L1C images; B09 and B10 observe only what is above the water vapour, so
# they range from the low-cloud value to the high-cloud value.
_WAVELENGTH = (443, 490, 560, 665, 705, 740, 783, 842, 865, 945, 1375, 1610, 2190)
_ALBEDO_LOW = (0.97, 1.00, 0.99, 1.05, 1.06, 1.08, 1.12, 1.10, 1.14, 0.18, 0.004, 0.96, 0.76)
_ALBEDO_HIGH = (0.97, 1.00, 0.99, 1.05, 1.07, 1.09, 1.11, 1.10, 1.13, 0.68, 0.080, 0.90, 0.74)
_SHADOW = (0.28, 0.36, 0.51, 0.65, 0.67, 0.70, 0.71, 0.72, 0.73, 0.73, 0.0, 0.75, 0.78)
_CIRRUS_DEPTH = (1.04, 1.00, 0.97, 0.94, 0.93, 0.92, 0.91, 0.90, 0.90, 0.95, 1.40, 0.55, 0.45)
_CIRRUS_ALBEDO = (0.62, 0.62, 0.61, 0.63, 0.64, 0.65, 0.66, 0.65, 0.66, 0.55, 0.45, 0.42, 0.36)
_HAZE_ALBEDO = (0.44, 0.45, 0.45, 0.47, 0.47, 0.48, 0.48, 0.48, 0.48, 0.22, 0.01, 0.42, 0.38)

# slope: how fast the amplitude falls with frequency; scale: size in pixels above which the noise is flat; gain: optical
# depth per standard deviation above the cut, so large means sharp edges; ramp: weight of the straight edge of a front.
_THICK_KINDS = {
    "broken": {"slope": (1.75, 2.1), "scale": (80.0, 300.0), "gain": (0.8, 4.0), "ramp": (0.0, 0.0)},
    "cumulus": {"slope": (1.9, 2.25), "scale": (25.0, 90.0), "gain": (1.2, 5.0), "ramp": (0.0, 0.8)},
    "stratus": {"slope": (1.7, 2.1), "scale": (80.0, 300.0), "gain": (0.8, 4.0), "ramp": (1.5, 5.0)},
}


@dataclass(frozen=True)
class CloudSettings:
    """Distributions the simulator draws from; a pair is a range, drawn uniformly unless stated otherwise."""

    coverage: tuple[float, float] = (0.05, 0.95)
    """Share of the image under visible cloud if no coverage is given; 0 to 1."""
    clear_probability: float = 0.05
    """Probability of no cloud if no coverage is given; 0 to 0.5."""
    overcast_probability: float = 0.07
    """Probability of full cover if no coverage is given; 0 to 0.5."""
    thick_kinds: tuple[float, float, float] = (0.4, 0.4, 0.2)
    """Weights of broken multi-scale cloud, cumulus fields and stratus with one long edge; need not sum to 1."""
    thin_kinds: tuple[float, float, float] = (0.45, 0.3, 0.25)
    """Weights of no thin cloud, cirrus and haze; need not sum to 1."""
    thin_only_probability: float = 0.35
    """Probability that an image with thin cloud has no thick cloud; 0 to 1."""
    thin_share: tuple[float, float] = (0.2, 0.7)
    """Share of thin cloud in the coverage if both are present; 0 to 1."""
    thickness: tuple[float, float] = (0.25, 1.5)
    """Factor on the optical depth of thick cloud, drawn uniformly in its logarithm; 0.2 to 3."""
    cirrus_depth: tuple[float, float] = (0.12, 0.9)
    """Optical depth of cirrus in B02 where it is dense, uniform in its logarithm; 0.05 to 1.5."""
    haze_depth: tuple[float, float] = (0.10, 0.8)
    """Optical depth of haze in B02 where it is dense, uniform in its logarithm; 0.05 to 1.5."""
    angstrom: tuple[float, float] = (0.4, 1.6)
    """Exponent of the fall of haze with wavelength: 0.3 is dust, 1.8 is smoke."""
    brightness: tuple[float, float] = (0.34, 0.88)
    """Reflectance of dense thick cloud in B02; 0.3 to 1."""
    texture: tuple[float, float] = (0.5, 1.3)
    """Strength of the shading of thick cloud; 0 is flat."""
    shadow_strength: tuple[float, float] = (0.65, 1.0)
    """Darkness of a full shadow; 0 is no shadow, 1 the darkest measured in Sentinel-2."""
    shadow_offset: tuple[float, float] = (6.0, 56.0)
    """Distance of a shadow from its cloud in pixels (height times the tangent of the sun's zenith angle), uniform in
    its logarithm. 10 m pixels: 500 m high and 30 degrees is 29. The cost grows with the upper end."""
    shadow_blur: tuple[float, float] = (0.7, 2.0)
    """Standard deviation in pixels of the blur of shadows; at least 0.5."""
    sun_azimuth: tuple[float, float] = (20.0, 160.0)
    """Azimuth of the sun, degrees clockwise from north (up), 0 to 360; in the east for morning orbits."""
    visible: float = 0.012
    """Opacity and darkening below this are set to zero, so that the masks mark exactly the changed pixels."""


@dataclass(frozen=True)
class CloudFields:
    """Clouds of a batch without colour, input of `apply_clouds`; (B, H, W) where no shape is given."""

    opacity: Tensor
    """Thick cloud, 0 to 1."""
    cirrus: Tensor
    """Optical depth of cirrus in B02, at least 0."""
    haze: Tensor
    """Optical depth of haze in B02, at least 0."""
    shadow: Tensor
    """Shadow on the ground, 0 to 1."""
    texture: Tensor
    """Brightness of thick cloud relative to its dense, evenly lit part; about 0.5 to 1.1."""
    height: Tensor
    """(B,) height of thick cloud relative to the water vapour, 0 low to 1 high; it sets B09 and B10."""
    displacement: Tensor
    """(B, 2) rows and columns from a cloud to its shadow."""
    settings: CloudSettings
    """Settings of the fields; `apply_clouds` draws the colours from them."""

    def visible_cloud(self) -> Tensor:
        """Return bool (B, H, W): thick or thin cloud that changes the pixel."""
        thin = -torch.expm1(-(self.cirrus + self.haze))
        return (self.opacity >= self.settings.visible) | (thin >= self.settings.visible)


def cloud_fields(
    batch: int,
    height: int,
    width: int,
    *,
    coverage: Tensor | None = None,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
    settings: CloudSettings | None = None,
) -> CloudFields:
    """Return the clouds of `batch` images of height x width pixels.

    `coverage` (B,) is the part of each image under visible cloud, 0 to 1, thick and thin together, shadows not
    counted; None draws it from `settings`. `generator` must be on `device`; the same seed gives the same bits.
    The noise is on a periodic grid larger than the image, so that clouds outside the image cast shadows into it.
    """
    settings = settings or CloudSettings()
    if batch < 1 or height < 4 or width < 4:
        raise ShapeError(f"batch {batch}, height {height}, width {width}; expected batch >= 1 and at least 4x4 pixels.")
    if coverage is not None and coverage.shape != (batch,):
        raise ShapeError(f"coverage has shape {tuple(coverage.shape)}; expected ({batch},), one value per image.")
    if coverage is not None and not bool(((coverage >= 0) & (coverage <= 1)).all()):
        raise ValueRangeError(f"coverage runs to {coverage.min():.3g}..{coverage.max():.3g}; expected 0 to 1.")
    if generator.device.type != torch.device(device).type:
        raise ConfigError(
            f"generator is on {generator.device} and the clouds on {device}; expected one device. "
            f"Use torch.Generator(device={str(device)!r})."
        )
    draw = Draws(batch, generator, torch.device(device))

    azimuth = torch.deg2rad(draw.uniform(*settings.sun_azimuth))
    offset = draw.log_uniform(*settings.shadow_offset)
    # North is up: the sun at azimuth a is in the direction (-cos a, sin a) of (rows, columns), shadows opposite.
    sun = torch.stack([-azimuth.cos(), azimuth.sin()], dim=-1)
    displacement = -sun * offset[:, None]
    margin = int(settings.shadow_offset[1] + 3 * settings.shadow_blur[1]) + 1
    grid = Grid(quick_size(height + margin), quick_size(width + margin), draw)

    kind = draw.choice(settings.thick_kinds)
    params = {name: draw.by_kind(kind, [k[name] for k in _THICK_KINDS.values()]) for name in _THICK_KINDS["broken"]}
    thick = grid.noise(params["slope"], params["scale"])
    thick = unit(thick + params["ramp"][:, None, None] * _front(grid, height, width, displacement))
    thin_kind = draw.choice(settings.thin_kinds)
    is_cirrus, is_haze = thin_kind == 1, thin_kind == 2
    thin = grid.noise(
        torch.where(is_cirrus, draw.uniform(1.7, 2.2), draw.uniform(2.4, 3.2)),
        torch.where(is_cirrus, draw.uniform(80.0, 300.0), draw.uniform(200.0, 600.0)),
        stretch=torch.where(is_cirrus, draw.log_uniform(1.5, 5.0), draw.uniform(1.0, 1.5)),
    )
    # Streaks occur in banks: a broad, unstretched field sets their positions.
    banks = grid.noise(draw.uniform(2.0, 2.6), draw.uniform(150.0, 300.0))
    thin = unit(thin + 0.8 * banks)[:, :height, :width]

    wanted = _draw_coverage(draw, settings) if coverage is None else coverage.to(draw.device, torch.float32)
    thin_part = torch.where(
        draw.uniform(0.0, 1.0) < settings.thin_only_probability, 1.0, draw.uniform(*settings.thin_share)
    )
    thin_part = torch.where(thin_kind == 0, 0.0, thin_part)
    window = thick[:, :height, :width]
    cut = quantile(window, 1 - wanted * (1 - thin_part))
    gain = params["gain"] * draw.log_uniform(*settings.thickness)
    depth = _depth(thick, cut, gain, 1.6, settings)
    opacity = _visible(-torch.expm1(-depth), settings)

    # Pixels under thick cloud come first in the ranking, so thin cloud fills exactly what is left of the coverage.
    ranked = torch.where(opacity[:, :height, :width] > 0, 1e4, thin)
    thin_cut = quantile(ranked, 1 - wanted)
    strength = torch.where(
        is_cirrus, draw.log_uniform(*settings.cirrus_depth), draw.log_uniform(*settings.haze_depth)
    ) * (thin_kind > 0)
    # A large coverage starts at a low cut: normalise, so that it is not denser.
    spread = (ranked.where(ranked < 1e4, -1e4).amax(dim=(1, 2)) - thin_cut).clamp(1.0, 4.0)
    thin_depth = _depth(thin, thin_cut, strength / spread * 1.6, 1.3, settings)
    thin_depth = torch.where(-torch.expm1(-thin_depth) >= settings.visible, thin_depth, 0.0)

    blur = draw.uniform(*settings.shadow_blur).clamp_min(0.5)
    # Slanted sunlight passes through more of the cloud than the view from above.
    blocked = -torch.expm1(-1.7 * depth) * (opacity > 0)
    shadow = grid.shift_and_blur(blocked, displacement, blur)[:, :height, :width]
    # The faint tail of the blur is removed without a step; otherwise the mask would be wider than the visible shadow.
    shadow = ((shadow - 0.07) / 0.93).clamp(0, 1)
    shadow = shadow * draw.uniform(*settings.shadow_strength)[:, None, None]
    fine = grid.noise(draw.uniform(1.4, 1.8), draw.uniform(20.0, 80.0))[:, :height, :width]
    texture = _texture(depth, fine, sun, draw.uniform(*settings.texture))[:, :height, :width]
    return CloudFields(
        opacity=opacity[:, :height, :width].contiguous(),
        cirrus=torch.where(is_cirrus[:, None, None], thin_depth, 0.0),
        haze=torch.where(is_haze[:, None, None], thin_depth, 0.0),
        shadow=_visible(shadow, settings),
        texture=texture,
        height=draw.uniform(0.0, 1.0) ** 2,
        displacement=displacement,
        settings=settings,
    )


def apply_clouds(
    clear: Tensor, fields: CloudFields, *, bands: Sequence[str], generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (cloudy (B, C, H, W), cloud_mask, shadow_mask, thin_mask), the masks bool (B, H, W).

    `clear` (B, C, H, W) is reflectance in [0, 1]. Shadow is applied first, then haze and cirrus, then thick cloud.
    `cloud_mask` marks every pixel that cloud changes, thick or thin; `thin_mask` those of them where more than half
    of the ground still shows in B04; `shadow_mask` those darkened. Outside cloud and shadow masks no bit changes.
    """
    if clear.ndim != 4 or clear.shape[1] != len(bands):
        raise ShapeError(f"clear has shape {tuple(clear.shape)}; expected (B, C, H, W) with C = {len(bands)} {bands}.")
    if (clear.shape[0], *clear.shape[2:]) != tuple(fields.opacity.shape):
        raise ShapeError(
            f"clear has shape {tuple(clear.shape)} and the clouds {tuple(fields.opacity.shape)}; expected equal "
            "B, H, W. Draw the clouds with cloud_fields(B, H, W)."
        )
    index = band_indices(bands)
    settings = fields.settings
    draw = Draws(clear.shape[0], generator, clear.device)

    def table(values: Sequence[float]) -> Tensor:
        return torch.tensor([values[i] for i in index], dtype=torch.float32, device=clear.device)[None, :, None, None]

    def each(values: Tensor) -> Tensor:
        return values[:, None, None, None]

    light = table([w / 490.0 for w in _WAVELENGTH])
    ground = clear * (1 - fields.shadow[:, None] * table(_SHADOW))

    angstrom = each(draw.uniform(*settings.angstrom))
    hidden = -torch.expm1(-fields.haze[:, None] * light ** (-angstrom))
    # Absorbing haze scatters less than it hides: smoke is dark, mist bright.
    airlight = (
        table(_HAZE_ALBEDO) * each(draw.uniform(0.75, 1.25)) * light.clamp_max(2.0) ** each(draw.uniform(-0.25, 0.1))
    )
    seen = ground + hidden * (airlight.clamp(0, 1) - ground)
    hidden = -torch.expm1(-fields.cirrus[:, None] * table(_CIRRUS_DEPTH))
    seen = seen + hidden * (table(_CIRRUS_ALBEDO) * each(draw.uniform(0.8, 1.2)) - seen)

    albedo = torch.lerp(table(_ALBEDO_LOW), table(_ALBEDO_HIGH), each(fields.height))
    # A slight tilt of colour from image to image: sun height and aerosol above the cloud.
    albedo = albedo * light.clamp_max(1.8) ** each(draw.uniform(-0.12, 0.10)) * each(draw.uniform(*settings.brightness))
    # The shaded sides receive more blue skylight than sunlight.
    texture = fields.texture[:, None] ** (0.75 + 0.25 * light.clamp_max(1.8))
    opacity = fields.opacity[:, None]
    cloudy = seen + opacity * ((albedo * texture).clamp(0, 1) - seen)

    through = (1 - fields.opacity) * torch.exp(-0.94 * fields.cirrus - (665 / 490) ** -1.2 * fields.haze)
    cloud_mask = fields.visible_cloud()
    shadow_mask = fields.shadow * (1 - fields.opacity) >= settings.visible
    return cloudy.clamp(0, 1), cloud_mask, shadow_mask, cloud_mask & (through > 0.5)


def paste_clouds(clear: Tensor, donor: Tensor, donor_mask: Tensor, *, feather: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return (cloudy (B, C, H, W), mask bool (B, H, W)): real clouds and shadows of `donor` pasted over `clear`.

    `donor` (B, C, H, W) is another image in the same bands and levels, `donor_mask` bool (B, H, W) marks what to take.
    `feather` is the width in pixels, 0 to 10, of the soft edge inside the mask, so that none of the donor's ground is
    pasted; 0 gives a hard edge. `mask` marks exactly the changed pixels.
    """
    if clear.shape != donor.shape or clear.ndim != 4:
        raise ShapeError(
            f"clear has shape {tuple(clear.shape)} and donor {tuple(donor.shape)}; expected equal (B, C, H, W)."
        )
    if donor_mask.dtype != torch.bool or donor_mask.shape != (clear.shape[0], *clear.shape[2:]):
        raise ShapeError(
            f"donor_mask is {donor_mask.dtype} {tuple(donor_mask.shape)}; expected torch.bool "
            f"{(clear.shape[0], *clear.shape[2:])}."
        )
    if feather < 0:
        raise ConfigError(f"feather is {feather}; expected at least 0 pixels (0 gives a hard edge).")
    if feather == 0:
        return torch.where(donor_mask[:, None], donor, clear), donor_mask
    weight = (2 * _blur(donor_mask.to(clear.dtype), feather / 2) - 1).clamp(0, 1) * donor_mask
    weight = torch.where(weight >= 0.01, weight, 0.0)
    # lerp with weight 0 keeps the bits of `clear`, with weight 1 those of the donor.
    cloudy = torch.where(weight[:, None] < 1, clear + weight[:, None] * (donor - clear), donor)
    return cloudy, weight > 0


def band_indices(bands: Sequence[str]) -> list[int]:
    """Return the indices of `bands` in BANDS_13, or raise a BandError with the unknown band."""
    if isinstance(bands, str) or len(bands) == 0:
        raise BandError(f"bands is {bands!r}; expected a sequence of names such as ('B02', 'B03', 'B04', 'B08').")
    for band in bands:
        if band not in BANDS_13:
            raise BandError(f"unknown band {band!r}{did_you_mean(str(band), BANDS_13)}")
    return [BANDS_13.index(band) for band in bands]


def _draw_coverage(draw: Draws, settings: CloudSettings) -> Tensor:
    fate = draw.uniform(0.0, 1.0)
    wanted = torch.where(fate < settings.clear_probability, 0.0, draw.uniform(*settings.coverage))
    return torch.where(fate > 1 - settings.overcast_probability, 1.0, wanted)


def _front(grid: Grid, height: int, width: int, displacement: Tensor) -> Tensor:
    """Return (B, rows, columns) rising in a random direction, about -1 to 1 over the image: one long edge.

    The margin of the periodic grid belongs to the side of the sun.
    """
    draw = grid.draw
    rows = torch.arange(grid.rows, device=draw.device, dtype=torch.float32)
    columns = torch.arange(grid.columns, device=draw.device, dtype=torch.float32)
    y = torch.where((rows >= height) & (displacement[:, :1] > 0), rows - grid.rows, rows) / height - 0.5
    x = torch.where((columns >= width) & (displacement[:, 1:] > 0), columns - grid.columns, columns) / width - 0.5
    angle = draw.uniform(0.0, 2 * torch.pi)[:, None, None]
    return 2 * (y[:, :, None] * angle.sin() + x[:, None, :] * angle.cos())


def _texture(depth: Tensor, fine: Tensor, sun: Tensor, strength: Tensor) -> Tensor:
    """Return brightness of thick cloud (B, H, W): thin parts greyer, sides towards the sun brighter, fine texture."""
    height, width = fine.shape[1:]
    # Height grows slower than depth; the bright side is where it rises away from the sun.
    top = torch.log1p(depth)
    fall_y = torch.roll(top, -1, dims=1) - torch.roll(top, 1, dims=1)
    fall_x = torch.roll(top, -1, dims=2) - torch.roll(top, 1, dims=2)
    lit = -(fall_y * sun[:, :1, None] + fall_x * sun[:, 1:, None])[:, :height, :width]
    dense = 1 - torch.exp(-depth[:, :height, :width] / 3.0)
    s = strength[:, None, None]
    return (1 - s * (0.28 * (1 - dense) - 0.22 * (1.2 * lit).tanh() - 0.06 * fine)).clamp(0.35, 1.12)


def _depth(field: Tensor, cut: Tensor, gain: Tensor, power: float, settings: CloudSettings) -> Tensor:
    """Return optical depth gain * (field - cut)^power, moved so that it is just visible at the cut."""
    start = (settings.visible * 1.02 / gain.clamp_min(1e-6)) ** (1 / power)
    rise = (field - (cut - start)[:, None, None]).clamp_min(0)
    return gain[:, None, None] * rise**power


def _visible(opacity: Tensor, settings: CloudSettings) -> Tensor:
    return torch.where(opacity >= settings.visible, opacity, 0.0)


def _blur(mask: Tensor, deviation: float) -> Tensor:
    """Return `mask` (B, H, W) under a Gaussian; the border is extended, so that clouds there are not thinned."""
    radius = max(1, int(3 * deviation + 0.5))
    taps = torch.arange(-radius, radius + 1, device=mask.device, dtype=mask.dtype)
    kernel = torch.exp(-0.5 * (taps / deviation) ** 2)
    kernel = kernel / kernel.sum()
    x = F.pad(mask[:, None], (radius,) * 4, mode="replicate")
    return F.conv2d(F.conv2d(x, kernel[None, None, None]), kernel[None, None, :, None])[:, 0]
