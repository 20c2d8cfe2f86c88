"""Train the cloud head and the mask refinement of a product's network beside the mask network.

    python tools/masks/train_head.py RUN triclear/train --init WEIGHTS --seconds 90 [--set KEY=VALUE]

The masks of the other dates are those of the mask network, as in tiles; the rest of the network does not change. Beside
the batches of `sader train`, some series show a reference date among mostly hidden ones, lakes, bright ground, changed
fields and burn scars. Clouds that hardly change a pixel count as clear.
How the score of clear was shifted before the last stage is in benchmarks/log/training.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sader.bands import BANDS_RGBN
from sader.data.bank import SeriesMaker
from sader.data.batch import CLEAR, SHADOW, THIN, UNKNOWN, keyed_generator
from sader.data.clouds import Draws, Grid, quantile
from sader.data.plan import Plan
from sader.training import run

AMONG_CLOUDS = 0.25
"""Share of the series whose other dates are mostly hidden; half of them have a reference date without clouds."""
LAKES, BRIGHT, FIELDS = 0.10, 0.12, 0.15
"""Shares of the series with lakes or bright ground on all dates, and with fields that changed on single dates."""
SLIGHT, WEAK = 0.008, 0.02
"""Thin cloud and shadow that change reflectance by less than the first number count as clear, by less than the second
as unknown."""
SCARS = 0.12
"""Share of the series with a burn scar on one date only, or on all dates but one."""


class Surface(NamedTuple):
    """What one band shows of some surfaces."""

    water: float
    """Reflectance."""
    harvest: float
    """Relative change where vegetation is lost."""
    char: float
    """Reflectance of burnt ground (California fires). Vegetation loses near infrared only, dry grass all."""
    haze: float
    """What the atmosphere adds to dark ground at most, in images that are not corrected for it."""
    seen: float = 1.0
    """Share of bright ground that is seen: B09 and B10 hardly reach the ground."""


SURFACES = {
    "B01": Surface(0.055, 0.4, 0.030, 0.055),
    "B02": Surface(0.050, 0.6, 0.038, 0.045),
    "B03": Surface(0.045, 0.6, 0.047, 0.030),
    "B04": Surface(0.030, 1.0, 0.056, 0.015),
    "B05": Surface(0.026, 0.5, 0.063, 0.012),
    "B06": Surface(0.020, -0.3, 0.070, 0.009),
    "B07": Surface(0.018, -0.5, 0.075, 0.007),
    "B08": Surface(0.014, -0.6, 0.080, 0.005),
    "B8A": Surface(0.013, -0.6, 0.085, 0.004),
    "B09": Surface(0.010, -0.4, 0.040, 0.003, seen=0.3),
    "B10": Surface(0.001, 0.0, 0.001, 0.001, seen=0.01),
    "B11": Surface(0.008, 0.4, 0.130, 0.001),
    "B12": Surface(0.006, 0.8, 0.140, 0.000),
}
"""Typical values; those of burnt ground in B02, B03, B04 and B08 are from the pairs of California."""
SETTINGS = (
    "train.seed=4", "train.steps=50000", "train.batch_size=40", "train.dates=4", "train.crop=192",
    "train.muon_lr=1.1e-3", "train.adam_lr=3e-4", "train.weight_decay=0.1", "train.clip=2", "train.ema_decay=0.996",
    "train.checkpoint_every=100000", "train.validate_every=0", "train.panels=0",
    "objective.masks_only=true", "objective.mask_network=true", "objective.own_mask=0.75",
    "data.maker.tasks=[0.66, 0.0, 0.34]", "data.maker.extra_clouds=0.4", "data.maker.heavy=0.08",
    "data.maker.jitter=0.15", "data.maker.mixed=0.4", "data.maker.mixing=0.3",
    "data.maker.real_sources={cloudsen12: 0.38, oscd: 0.18, california_fires: 0.14, bark_beetle: 0.07,"
    " biomassters: 0.05, belgium: 0.06, sen12mscr: 0.08, rondonia_20LMR: 0.09}",
    "data.maker.single_sources={oscd: 0.28, bigearthnet: 0.25, california_fires: 0.08, bark_beetle: 0.08,"
    " biomassters: 0.06, cloudsen12: 0.12, sen12mscr: 0.08, rondonia_20LMR: 0.06}",
)  # fmt: skip


def values_of(what: str, bands: Sequence[str], device: torch.device) -> Tensor:
    """Return one field of the `SURFACES` of the bands, (C,)."""
    return torch.tensor([getattr(SURFACES[band], what) for band in bands], device=device)


def with_scars(
    dates: Tensor,
    clear: Tensor,
    reference: Tensor,
    *,
    share: float,
    generator: torch.Generator,
    bands: Sequence[str] = BANDS_RGBN,
) -> Tensor:
    """Return the dates (B, T, C, H, W) with burn scars on clear ground, in a part `share` of the series.

    clear: bool (B, T, H, W). reference: (B,), -1 for none. A scar covers 5 to 40 % of the image and lies on one date
    alone, or on all dates but one; that date is the reference in half of the series, and else any. Water stays.
    """
    (b, t, c, h, w), device = dates.shape, dates.device

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    draw = Draws(b, generator, device)
    grid = Grid(h, w, draw)
    y, x = torch.arange(h, device=device)[None, :, None] / h, torch.arange(w, device=device)[None, None] / w
    centre = uniform(b, 2, 1, 1)
    outline = grid.noise(draw.uniform(1.9, 2.5), draw.uniform(30.0, 150.0))
    outline = outline - 6 * ((y - centre[:, 0]).square() + (x - centre[:, 1]).square())  # one patch rather than many
    cut = quantile(outline, 1 - draw.uniform(0.05, 0.4))[:, None, None]
    burnt = torch.sigmoid((outline - cut) / (0.01 + 0.09 * uniform(b, 1, 1)))
    islands = grid.noise(draw.uniform(1.4, 2.0), draw.uniform(5.0, 40.0))
    burnt = burnt * (0.7 + 0.3 * uniform(b, 1, 1)) * (1 - 0.3 * (islands - 0.3).clamp(0, 2))

    other = (uniform(b, t) * (1e-6 + clear.flatten(2).any(dim=2))).argmax(dim=1)
    odd = torch.where((reference >= 0) & (uniform(b) < 0.5), reference, other)
    scarred = (torch.arange(t, device=device) == odd[:, None]) == (uniform(b, 1) < 0.6)
    scarred = scarred & (uniform(b, 1) < share)
    ground = clear & (dates[:, :, list(bands).index("B08")] > 0.1)  # darker in near infrared: water or shadow
    amount = (burnt[:, None] * (scarred[:, :, None, None] & ground))[:, :, None].clamp(0, 1)
    spread = torch.randn(b, c, generator=generator, device=device)
    colour = values_of("char", bands, device) * torch.exp(0.3 * spread[:, :1] + 0.08 * spread)
    dark = dates.masked_fill(~clear[:, :, None], 1.0).amin((1, 3, 4))  # 0.03 or more under an atmosphere
    haze = torch.minimum((dark - 0.02).clamp(min=0), values_of("haze", bands, device))
    colour = (colour + haze * uniform(b, 1))[:, None, :, None, None]
    mean = dates.mean((-2, -1), keepdim=True).clamp(min=0.01)
    return torch.lerp(dates, colour * (dates / mean).clamp(0.4, 2.0) ** 0.3, amount)


class Maker(SeriesMaker):
    """Batches with clear reference dates among clouds, and ground that resembles cloud or shadow."""

    def plan(self, step: int, batch_size: int, dates: int, crop: int) -> Plan:
        plan = super().plan(step, batch_size, dates, crop)
        rng = keyed_generator(self.seed, step, 11)
        chosen = (rng.random(batch_size) < AMONG_CLOUDS) & (plan.reference >= 0)
        bare = chosen & (rng.random(batch_size) < 0.5)
        bare_slots = (np.arange(batch_size) * dates + plan.reference)[bare]
        pasted = ~np.isin(plan.paste_slot, bare_slots)
        names = ("paste_slot", "paste_frame", "paste_y", "paste_x", "paste_symmetry", "paste_side")
        simulated = ~np.isin(plan.cloud_slot, bare_slots)
        cover = dict(zip(plan.cloud_slot[simulated].tolist(), plan.coverage[simulated].tolist(), strict=True))
        slots = (np.arange(batch_size)[:, None] * dates + np.arange(dates)[None])[chosen]
        slots = slots[plan.present[chosen] & (np.arange(dates)[None] != plan.reference[chosen][:, None])]
        for slot, amount in zip(slots.tolist(), rng.uniform(0.5, 1.0, len(slots)).tolist(), strict=True):
            cover[slot] = max(cover.get(slot, 0.0), amount)
        return replace(
            plan,
            **{name: getattr(plan, name)[pasted] for name in names},
            cloud_slot=np.array(sorted(cover), np.int64),
            coverage=np.array([cover[slot] for slot in sorted(cover)], np.float32),
        )

    def _recoloured(self, images: Tensor, present: Tensor, t: int, generator: torch.Generator) -> Tensor:
        """Lay lakes and bright ground into all dates of some series, and draw fields for `_clouded`."""
        images = super()._recoloured(images, present, t, generator)
        (b, c), (h, w), device = present.shape, images.shape[-2:], images.device
        bands = self.bank.bands[: self.bank.optical]

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator, device=device)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        target = images[b * t :]
        dates = torch.cat([images[: b * t].view(b, t, c, h, w), target[:, None]], dim=1)
        mean = target.mean((-2, -1), keepdim=True)[:, None].clamp(min=0.01)
        # Not where a date shows something else than the target, such as a cloud of its own.
        same = (dates - target[:, None]).abs().amax(2, keepdim=True) < 0.12
        same = same & (dates > 0).any(2, keepdim=True) & (target > 0).any(1)[:, None, None]
        draw = Draws(b, generator, device)
        grid = Grid(h, w, draw)
        field = grid.noise(draw.uniform(1.6, 2.4), draw.uniform(30.0, 200.0))
        lake = (field > (0.7 + 0.9 * uniform(b, 1, 1))) & (uniform(b, 1, 1) < LAKES)
        colour = values_of("water", bands, device) * torch.exp(0.4 * normal(b, c))
        level = (colour[:, None] * torch.exp(0.12 * normal(b, t + 1, c)))[..., None, None]
        dates = torch.where(lake[:, None, None] & same, level * (dates / mean).clamp(0.5, 2.0) ** 0.15, dates)

        spots = grid.noise(draw.uniform(1.2, 2.2), draw.uniform(6.0, 120.0))
        bright = (spots > (0.6 + 1.2 * uniform(b, 1, 1))) & (uniform(b, 1, 1) < BRIGHT)
        white = (0.22 + 0.5 * uniform(b, 1)) * torch.exp(0.15 * normal(b, c)) * values_of("seen", bands, device)
        white = white[:, None] * torch.exp(0.06 * normal(b, t + 1, 1) + 0.03 * normal(b, t + 1, c))
        share = (0.5 + 0.5 * uniform(b, 1, 1, 1, 1)) * (bright[:, None, None] & same)
        dates = torch.lerp(dates, white[..., None, None] * (0.8 + 0.2 * (dates / mean).clamp(0.3, 2.0)), share)

        # Fields are cells of a turned grid; vegetation lost or gained moves red and near infrared against each other.
        angle = 3.2 * uniform(b, 1, 1)
        y, x = torch.arange(h, device=device).float()[None, :, None], torch.arange(w, device=device).float()[None, None]
        size = 8 + 40 * uniform(b, 2, 1, 1)
        row = torch.floor((x * angle.cos() + y * angle.sin()) / size[:, 0])
        column = torch.floor((y * angle.cos() - x * angle.sin()) / size[:, 1])
        kind = torch.frac(torch.sin(row * 12.9898 + column * 78.233 + 100 * uniform(b, 1, 1)) * 43758.5453).abs()
        changed = (kind[:, None] - uniform(b, t + 1, 1, 1)).abs() < 0.12
        changed &= (uniform(b, 1, 1, 1) < FIELDS) & (uniform(b, t + 1, 1, 1) < 0.6)
        lost = 0.15 + 0.35 * uniform(b, t + 1, 1)
        sign = torch.where(uniform(b, t + 1, 1) < 0.65, 1.0, -1.0)
        pattern = values_of("harvest", bands, device) * torch.exp(0.3 * normal(b, t + 1, c))
        self._fields = changed[:, :t, None], torch.exp(sign * lost * pattern)[:, :t, :, None, None]
        return torch.cat([dates[:, :t].flatten(0, 1), dates[:, t]])

    def _clouded(
        self, cloudy: Tensor, labels: Tensor, valid: Tensor, plan: Plan, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Change the fields of clear ground and burn some, add clouds, and correct the labels of weak clouds."""
        changed, gain = self._fields
        before = torch.where((labels == CLEAR)[:, :, None] & changed, (cloudy * gain).clamp(0, 1), cloudy)
        reference = torch.from_numpy(plan.reference).to(cloudy.device)
        bands = self.bank.bands[: self.bank.optical]
        before = with_scars(before, labels == CLEAR, reference, share=SCARS, generator=generator, bands=bands)
        after, found, covered = super()._clouded(before, labels, valid, plan, generator)
        change = (after - before).abs().amax(dim=2)
        weak = covered & (found >= THIN) & (found <= SHADOW)
        found = torch.where(weak & (change < WEAK), UNKNOWN, found)
        found = torch.where(weak & (change < SLIGHT) & (labels == CLEAR), CLEAR, found)
        return after, found.to(labels.dtype), covered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("shards", nargs="+")
    parser.add_argument("--init", required=True, help="weights to start from")
    parser.add_argument("--preset", default="small", help="small or small_msi")
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--set", action="append", default=[], help="a changed key, such as train.batch_size=8")
    given = parser.parse_args()
    run.SeriesMaker = Maker
    changes = [*SETTINGS, f"train.max_seconds={given.seconds}", *given.set, f"train.init={given.init}"]
    print(run.run_training(given.preset, given.run, data=given.shards, overrides=changes))


if __name__ == "__main__":
    main()
