"""All training series in the memory of one device, and batches of any task composed from them there.

`SeriesBank` decodes shards once; `SeriesMaker.batch(step, ...)` depends on (seed, step) alone, so that a resumed run
gets the same batches. Random choices are drawn in `plan.py`, clouds are in `clouds.py`.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sader.data.batch import CLEAR, SHADOW, THICK, THIN, UNKNOWN, SeriesBatch, keyed_generator, keyed_torch
from sader.data.clouds import CloudSettings, apply_clouds, cloud_fields, paste_clouds
from sader.data.plan import CELL, SINGLE, Catalogue, MakerSettings, Plan, Planner
from sader.data.pseudo_dates import PseudoDateSettings, pseudo_dates
from sader.data.radar import optical_count
from sader.data.shards import SeriesRecord, observed, read_shard, shard_files
from sader.errors import BandError, DataError

_NODATA = 254
"""Value in the bank's label plane of a pixel without data."""


class SeriesBank:
    """Every pixel of the given records on `device`: `values` int16 (N, C) in counts, `labels` uint8 (N,).

    Bands that a record lacks are 0, and False in `band_present` (R, C). 150 million values take 0.3 GB.
    """

    def __init__(
        self, records: Iterable[SeriesRecord], *, bands: Sequence[str], device: torch.device | str = "cpu"
    ) -> None:
        self.bands, self.device = tuple(bands), torch.device(device)
        self.optical = optical_count(self.bands)
        self.names: list[str] = []
        values, labels, tables, rows = [], [], [], []
        present, days = [], []
        pixels = cells = 0
        for number, record in enumerate(records):
            has = [name in record.bands for name in self.bands]
            if not any(has[: self.optical]):
                raise BandError(f"{record.name} has bands {record.bands}; expected some of {self.bands}.")
            t, _, h, w = record.dn.shape
            dn = np.zeros((t, h, w, len(self.bands)), np.int16)
            for k, name in enumerate(self.bands):
                if has[k]:
                    dn[..., k] = np.minimum(record.dn[:, record.bands.index(name)], 32767)
            optical = [name for name in self.bands[: self.optical] if name in record.bands]
            seen = observed(record.dn[:, [record.bands.index(name) for name in optical]], optical)
            known = np.full((t, h, w), UNKNOWN, np.uint8) if record.labels is None else record.labels
            known = np.where(seen, known, _NODATA).astype(np.uint8)
            values.append(torch.from_numpy(np.where(seen[..., None], dn, 0).reshape(-1, len(self.bands))))
            labels.append(torch.from_numpy(known.reshape(-1)))
            for k in range(t):
                clear, cloud = known[k] == CLEAR, (known[k] >= THICK) & (known[k] <= SHADOW)
                rows.append((number, pixels + k * h * w, h, w, int(clear.sum()), int(cloud.sum()), cells))
                tables.append((_summed(clear), _summed(cloud)))
                cells += len(tables[-1][0])
            pixels += t * h * w
            present.append(has)
            days.append(record.days or (float("nan"),) * t)
            self.names.append(f"{record.source}/{record.name}")
        if not rows:
            raise DataError("the shards hold no series; expected at least one. Check the shards with: sader data show.")
        self.values = torch.cat(values).to(self.device)
        self.labels = torch.cat(labels).to(self.device)
        self.band_present = torch.tensor(present, device=self.device)
        self.days = np.array([day for record_days in days for day in record_days], np.float32)
        names = ("record", "base", "height", "width", "clear_count", "cloud_count", "table_at")
        columns = dict(zip(names, np.array(rows, np.int64).T, strict=True))
        first = np.searchsorted(columns["record"], np.arange(len(self.names)))
        self.catalogue = Catalogue(
            **columns,
            clear_table=np.concatenate([clear for clear, _ in tables]),
            cloud_table=np.concatenate([cloud for _, cloud in tables]),
            first=first,
            dates=np.diff(np.append(first, len(rows))),
            source=np.array([name.split("/")[0] for name in self.names]),
            donor=np.all(np.array(present)[:, : self.optical], axis=1),
        )

    @property
    def sources(self) -> dict[str, int]:
        """Number of series of each source."""
        return dict(Counter(name.split("/")[0] for name in self.names))

    @classmethod
    def load(
        cls, where: str | Path | Iterable[str | Path], *, bands: Sequence[str], device: torch.device | str = "cpu"
    ) -> SeriesBank:
        """Return the bank of all shards in a folder, a file or several of either; they are decoded in parallel."""
        # LZMA and most of NumPy release the interpreter lock; `map` keeps the order, on which the batches depend.
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            decoded = pool.map(lambda path: list(read_shard(path)), shard_files(where))
            return cls((record for records in decoded for record in records), bands=bands, device=device)

    def windows(
        self, frame: np.ndarray, y: np.ndarray, x: np.ndarray, symmetry: np.ndarray, side: int
    ) -> tuple[Tensor, Tensor]:
        """Return reflectance (N, C, side, side) and labels (N, side, side), 254 where not observed.

        `frame`, `y`, `x`, `symmetry` are (N,); a window may reach beyond its frame.
        """
        c = self.catalogue
        # One transfer for all the small numbers.
        facts = np.stack([c.base[frame], c.height[frame], c.width[frame], y, x, symmetry])
        base, height, width, top, left, turned = torch.from_numpy(facts).to(self.device)[:, :, None, None]
        row = torch.arange(side, device=self.device)[None, :, None]
        column = row.transpose(1, 2)
        # The inverse of `batch.turn`: source of the pixel at (row, column) of the turned window.
        row = torch.where((turned & 1).bool(), side - 1 - row, row)
        column = torch.where((turned & 2).bool(), side - 1 - column, column)
        swap = (turned & 4).bool()
        row, column = torch.where(swap, column, row) + top, torch.where(swap, row, column) + left
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        place = torch.where(inside, base + row * width + column, 0)
        reflectance = self.values[place].permute(0, 3, 1, 2).float() * (inside[:, None] / 10000.0)
        return reflectance.clamp_(0, 1), torch.where(inside, self.labels[place], _NODATA)


class SeriesMaker:
    """Composes batches from the series of a bank. `batch` depends on (seed, step) and its arguments alone."""

    def __init__(
        self,
        bank: SeriesBank,
        settings: MakerSettings | None = None,
        seed: int = 0,
        *,
        clouds: CloudSettings | None = None,
        pseudo: PseudoDateSettings | None = None,
    ) -> None:
        self.bank, self.settings, self.seed = bank, settings or MakerSettings(), seed
        self.clouds, self.pseudo = clouds, pseudo
        self.planner = Planner(bank.catalogue, self.settings)
        groups = [[name in names for name in bank.bands] for names, _ in self.settings.band_dropout]
        # A group with all bands of the bank cannot be dropped.
        chances = [chance for _, chance in self.settings.band_dropout]
        self._chances = np.array([0.0 if all(group) else p for group, p in zip(groups, chances, strict=True)])
        self._groups = torch.tensor(groups, dtype=torch.bool, device=bank.device).reshape(-1, len(bank.bands))

    def plan(self, step: int, batch_size: int, dates: int, crop: int) -> Plan:
        """Return the plan of a batch, without reading a pixel."""
        return self.planner.draw(keyed_generator(self.seed, step), batch_size, dates, crop, self._chances)

    @torch.no_grad()
    def batch(self, step: int, batch_size: int, dates: int, crop: int) -> SeriesBatch:
        """Return batch number `step`: `batch_size` series of `dates` slots, crop x crop pixels, on the device."""
        bank, device = self.bank, self.bank.device
        plan = self.plan(step, batch_size, dates, crop)
        generator = keyed_torch(device, self.seed, step, 1)
        b, t = plan.frames.shape

        def each(values: np.ndarray) -> np.ndarray:
            return np.concatenate([np.repeat(values, t), values])

        frames = np.concatenate([plan.frames.ravel(), plan.target])
        images, labels = bank.windows(frames, each(plan.y), each(plan.x), each(plan.symmetry), plan.side)
        images, labels = _coarser(images, labels, crop)
        # Radar takes no part in colours and clouds; it returns to the batch at the end.
        images, radar = images[:, : bank.optical], images[:, bank.optical :]
        every_band = bank.band_present[torch.from_numpy(bank.catalogue.record[plan.target]).to(device)]
        bands = every_band[:, : bank.optical]
        images = self._recoloured(images, bands, t, generator)
        clear, target_labels = images[b * t :], labels[b * t :]
        cloudy, labels = images[: b * t].view(b, t, *images.shape[1:]), labels[: b * t].view(b, t, crop, crop)
        reference = torch.from_numpy(plan.reference).to(device)

        single = np.flatnonzero(plan.task == SINGLE)
        if len(single):
            rows = torch.from_numpy(single).to(device)
            drawn = pseudo_dates(clear[rows], t, reference[rows], generator=generator, settings=self.pseudo)
            drawn = drawn * (labels[rows] != _NODATA)[:, :, None]
            cloudy = cloudy.index_copy(0, rows, drawn)
            clear = clear.index_copy(0, rows, drawn[torch.arange(len(rows), device=device), reference[rows]])

        if plan.derived.any():
            at = torch.from_numpy(np.stack(np.nonzero(plan.derived))).to(device).unbind()
            none_kept = torch.full_like(at[0], -1)
            settings = replace(self.pseudo or PseudoDateSettings(), bright=0.0)
            drawn = pseudo_dates(cloudy[at], 1, none_kept, generator=generator, settings=settings)[:, 0]
            cloudy = cloudy.index_put(at, drawn * (labels[at] != _NODATA)[:, None])

        valid = labels != _NODATA
        labels = torch.where(valid, labels, UNKNOWN)
        scored = target_labels == CLEAR
        cloudy, labels, covered = self._clouded(cloudy, labels, valid, plan, generator)

        estimate = ((cloudy - clear[:, None]) * bands[:, None, :, None, None]).abs().amax(2) > 0.04
        estimate = F.max_pool2d(estimate.float(), 5, 1, 2) > 0
        cloud_mask = torch.where(labels == UNKNOWN, estimate & scored[:, None], labels != CLEAR) | covered
        at = (torch.arange(b, device=device), reference.clamp_min(0))
        hidden = covered[at] & (reference >= 0)[:, None, None]

        dropped = torch.from_numpy(plan.dropped).to(device)
        bands = every_band & ~(dropped[:, :, None] & self._groups[None]).any(1)
        if radar.shape[1]:
            kept = keyed_generator(self.seed, step, 2).random(b) >= self.settings.radar_dropout
            bands[:, bank.optical :] &= torch.from_numpy(kept).to(device)[:, None]
            cloudy = torch.cat([cloudy, radar[: b * t].view(b, t, *radar.shape[1:])], dim=2)
            clear = torch.cat([clear, radar[b * t :]], dim=1)
        present = torch.from_numpy(plan.present).to(device)
        shown = valid & present[:, :, None, None]
        return SeriesBatch(
            cloudy=cloudy * shown[:, :, None] * bands[:, None, :, None, None],
            clear=clear * bands[:, :, None, None],
            scored=scored,
            hidden=hidden,
            cloud_mask=cloud_mask & shown,
            labels=torch.where(shown, labels, UNKNOWN),
            valid=shown,
            present=present,
            reference=reference,
            days=self._days(plan) if self.settings.days else None,
            band_present=bands,
        )

    def _recoloured(self, images: Tensor, present: Tensor, t: int, generator: torch.Generator) -> Tensor:
        """Return the images (B * T inputs, then B targets) with changed colours, the same for all dates of a series.

        present: bool (B, C). This keeps a network from memorising the colours of few places. Bands are mixed with
        weights that add up to 1, so that grey stays grey and clouds stay white, and then scaled by series and band.
        """
        b, c = present.shape
        device, settings = images.device, self.settings
        scores = 2 * torch.randn(b, c, c, generator=generator, device=device)
        chosen = scores.masked_fill(~present[:, None, :], -torch.inf).softmax(dim=2).nan_to_num(0.0)
        amount = settings.mixing * torch.rand(b, 1, 1, generator=generator, device=device)
        amount = amount * (torch.rand(b, 1, 1, generator=generator, device=device) < settings.mixed)
        mixer = (1 - amount) * torch.eye(c, device=device) + amount * chosen
        mixer = torch.where(present[:, :, None], mixer, torch.eye(c, device=device))
        gain = settings.jitter * torch.randn(b, 1, generator=generator, device=device)
        gain = gain + settings.jitter / 3 * torch.randn(b, c, generator=generator, device=device)
        mixer = mixer * gain.exp()[:, :, None]
        mixer = torch.cat([mixer.repeat_interleave(t, 0), mixer])
        # Products and sums, because a matrix product would be rounded to TF32 on a GPU.
        parts = (mixer[:, :, band, None, None] * images[:, band, None] for band in range(c))
        return functools.reduce(torch.add, parts).clamp(0, 1)

    def _clouded(
        self, cloudy: Tensor, labels: Tensor, valid: Tensor, plan: Plan, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the dates and labels with pasted and simulated clouds, and the covered pixels, bool (B, T, H, W)."""
        b, t, c, h, w = cloudy.shape
        device = cloudy.device
        flat, flat_labels, flat_valid = cloudy.flatten(0, 1), labels.flatten(0, 1), valid.flatten(0, 1)
        covered = torch.zeros_like(flat_valid)
        if len(plan.paste_slot):
            donor, donor_labels = self._donors(plan, h)
            donor = donor[:, : self.bank.optical]
            slots = torch.from_numpy(plan.paste_slot).to(device)
            take = (donor_labels >= THICK) & (donor_labels <= SHADOW) & flat_valid[slots]
            foreign = torch.from_numpy(plan.paste_symmetry >= 0).to(device)
            donor = carried_over(donor, donor_labels, flat[slots], foreign)
            pasted, mask = paste_clouds(flat[slots], donor, take, feather=plan.feather)
            flat = flat.index_copy(0, slots, pasted)
            flat_labels = flat_labels.index_copy(0, slots, torch.where(mask, donor_labels, flat_labels[slots]))
            covered = covered.index_copy(0, slots, mask)
        if len(plan.cloud_slot):
            slots = torch.from_numpy(plan.cloud_slot).to(device)
            sky = cloud_fields(
                len(slots), h, w, coverage=torch.from_numpy(plan.coverage), generator=generator, device=device,
                settings=self.clouds,
            )  # fmt: skip
            seen, cloud, shadow, thin = apply_clouds(
                flat[slots], sky, bands=self.bank.bands[: self.bank.optical], generator=generator
            )
            mask = (cloud | shadow) & flat_valid[slots]
            kind = torch.where(thin, THIN, THICK).where(cloud, SHADOW).to(torch.uint8)
            flat = flat.index_copy(0, slots, torch.where(mask[:, None], seen, flat[slots]))
            flat_labels = flat_labels.index_copy(0, slots, torch.where(mask, kind, flat_labels[slots]))
            covered = covered.index_copy(0, slots, mask)
        shape = (b, t, h, w)
        return flat.view(b, t, c, h, w), flat_labels.view(shape), covered.view(shape)

    def _donors(self, plan: Plan, crop: int) -> tuple[Tensor, Tensor]:
        """Return images and labels of the pasted clouds, (P, C, H, W) and (P, H, W)."""
        t = plan.frames.shape[1]
        symmetry = np.where(plan.paste_symmetry < 0, plan.symmetry[plan.paste_slot // t], plan.paste_symmetry)
        order, parts = [], []
        for side in np.unique(plan.paste_side):
            mine = np.flatnonzero(plan.paste_side == side)
            order.append(mine)
            windows = self.bank.windows(
                plan.paste_frame[mine], plan.paste_y[mine], plan.paste_x[mine], symmetry[mine], int(side)
            )
            parts.append(_coarser(*windows, crop))
        back = torch.from_numpy(np.argsort(np.concatenate(order))).to(self.bank.device)
        return torch.cat([image for image, _ in parts])[back], torch.cat([label for _, label in parts])[back]

    def _days(self, plan: Plan) -> Tensor:
        days = np.where(plan.task[:, None] == SINGLE, np.nan, self.bank.days[plan.frames])
        days = np.where(plan.present, days, np.nan).astype(np.float32)
        earliest = np.fmin.reduce(days, axis=1, keepdims=True)
        return torch.from_numpy(days - earliest).to(self.bank.device)


def _coarser(images: Tensor, labels: Tensor, crop: int) -> tuple[Tensor, Tensor]:
    """Return the windows at crop x crop pixels: averaged values, nearest labels; nodata spreads."""
    if images.shape[-1] == crop:
        return images, labels
    images = F.interpolate(images, (crop, crop), mode="bilinear", antialias=True)
    nearest = F.interpolate(labels[:, None].float(), (crop, crop), mode="nearest-exact")[:, 0].to(torch.uint8)
    seen = F.interpolate((labels != _NODATA)[:, None].float(), (crop, crop), mode="bilinear", antialias=True)[:, 0]
    seen = seen > 0.999
    nearest = torch.where(seen, nearest, _NODATA)
    return images * seen[:, None], nearest


def carried_over(donor: Tensor, labels: Tensor, ground: Tensor, foreign: Tensor) -> Tensor:
    """Return `donor` (P, C, H, W) with the thin clouds and shadows of `foreign` places moved over `ground`.

    Pixels of thin cloud and shadow show the ground below, which must not be pasted with them. A shadow is transferred
    as a ratio to the donor's clear ground, a thin cloud as a difference from it.
    """
    known = (labels == CLEAR)[:, None]
    count = known.sum((-2, -1), keepdim=True)
    clear = (donor * known).sum((-2, -1), keepdim=True) / count.clamp_min(1)
    enough = count > 0.005 * labels[0].numel()
    clear = torch.where(enough, clear, ground.mean((-2, -1), keepdim=True)).clamp_min(1e-3)
    ratio, dark = donor / clear, (labels == SHADOW)[:, None]
    # Bands that the ground lacks are 0 there; their ratios are meaningless.
    counted = dark & (ground.amax((-2, -1), keepdim=True) > 0)
    # The clear ground of the window may differ from that under the shadow; a shadow must darken in any case.
    usual = (ratio * counted).mean((1, 2, 3), keepdim=True)
    usual = usual / counted.float().mean((1, 2, 3), keepdim=True).clamp_min(1e-6)
    shadow = ground * (ratio * (0.65 / usual.clamp_min(0.65))).clamp(0.12, 1)
    thin = (0.6 * ground + donor - 0.6 * clear).clamp(0, 1)
    moved = torch.where(dark, shadow, torch.where((labels == THIN)[:, None], thin, donor))
    return torch.where(foreign[:, None, None, None], moved, donor)


def _summed(mask: np.ndarray) -> np.ndarray:
    """Return the flat summed-area table, (rows + 1) x (columns + 1), of a mask (H, W) counted in cells."""
    height, width = mask.shape
    rows, columns = -(-height // CELL), -(-width // CELL)
    padded = np.zeros((rows * CELL, columns * CELL), np.int64)
    padded[:height, :width] = mask
    counts = padded.reshape(rows, CELL, columns, CELL).sum((1, 3))
    table = np.zeros((rows + 1, columns + 1), np.int64)
    table[1:, 1:] = counts.cumsum(0).cumsum(1)
    return table.ravel()
