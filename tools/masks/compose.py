"""Training batches for the mask network, composed on the device from the file that `pack_data.py` writes.

A batch holds N dates of several series. Every date starts as a real image; clouds are those of the image itself, real
ones transferred from a labelled image together with their shadows, or simulated. Radiometry, scale, bands and missing
data vary at random.
"""

from __future__ import annotations

import json
import lzma
import struct
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pack_codec
import torch
import torch.nn.functional as F
from torch import Tensor

from sader.data.clouds import CloudSettings, Draws, Grid, apply_clouds, cloud_fields
from sader.data.pseudo_dates import pseudo_dates
from sader.model.heads import MASK_BANDS

LAND, THICK, THIN, SHADOW, WATER, SNOW, CLEAR, HIDDEN, NOT_THICK, UNKNOWN = 0, 1, 2, 3, 4, 5, 6, 7, 8, 255
SOURCE_WEIGHTS = {
    "cloudsen12": 38.0, "cloudsen12_fig": 3.0, "oscd": 16.0, "california": 8.0, "sen12mscr": 7.0, "rondonia": 7.0,
    "belgium": 5.0, "biomassters": 6.0, "bark_beetle": 5.0, "bigearthnet": 12.0, "slovenia": 1.0,
}  # fmt: skip
# Per band of MASK_BANDS: reflectance of thin cloud, of snow, and added by a clear atmosphere (Rayleigh).
THIN_CLOUD = (0.60, 0.60, 0.60, 0.62, 0.64, 0.30, 0.05, 0.45, 0.36)
SNOW_COLOUR = (0.86, 0.86, 0.85, 0.83, 0.76, 0.45, 0.004, 0.12, 0.08)
WATER_COLOUR = (0.060, 0.050, 0.045, 0.030, 0.014, 0.008, 0.001, 0.007, 0.005)
PATH = (0.075, 0.055, 0.030, 0.016, 0.007, 0.004, 0.0, 0.001, 0.0)
B02, B04, B08 = 1, 3, 4


@dataclass
class Place:
    """The images of one place, by their number in the store."""

    source: str
    images: list[int] = field(default_factory=list)
    height: int = 0
    width: int = 0


Decoded = tuple[dict, np.ndarray, np.ndarray, np.ndarray]
"""Metadata, reflectance (9, H, W) float16, labels uint8 (H, W), validity bool (H, W)."""


def _decode(job: tuple[dict, bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return reflectance (9, H, W) float16, labels and validity of one packed image."""
    torch.set_num_threads(1)
    meta, data = job
    height, width = meta["shape"]
    sizes = meta["sizes"]
    head = lzma.decompress(data[: sizes[0]])
    bits = (height * width + 7) // 8
    valid = np.unpackbits(np.frombuffer(head[:bits], np.uint8), count=height * width).reshape(height, width) > 0
    labels = np.frombuffer(head[bits:], np.uint8).reshape(height, width)
    image = np.zeros((len(MASK_BANDS), height, width), np.float16)
    at = sizes[0]
    for (metres, bands), size in zip(meta["groups"], sizes[1:], strict=True):
        step = metres // 10
        shape = (len(bands), -(-height // step), -(-width // step))
        layers = torch.from_numpy(pack_codec.decode(data[at : at + size], shape).astype(np.float32) / 1e4)
        at += size
        if step > 1:
            full = (shape[1] * step, shape[2] * step)
            layers = F.interpolate(layers[None], size=full, mode="bilinear")[0, :, :height, :width]
        for band, layer in zip(bands, layers.numpy(), strict=True):
            image[MASK_BANDS.index(band)] = layer
    return image, labels, valid


def decode_pack(path: Path, *, workers: int = 8) -> list[Decoded]:
    """Return the images of a packed file with their metadata.

    Call it before anything runs on a GPU: the images are decoded in forked processes.
    """
    raw = path.read_bytes()
    magic, size = struct.unpack_from("<8sQ", raw)
    assert magic == b"SADMASK1", f"{path} starts with {magic!r}; expected b'SADMASK1'"
    index, at = json.loads(raw[16 : 16 + size]), 16 + size
    jobs = []
    for meta in index:
        length = sum(meta["sizes"])
        jobs.append((meta, raw[at : at + length]))
        at += length
    with ProcessPoolExecutor(workers) as pool:
        decoded = list(pool.map(_decode, jobs, chunksize=4))
    return [(job[0], *parts) for job, parts in zip(jobs, decoded, strict=True)]


class Store:
    """All images of a split on one device, each stored as a run of pixels."""

    def __init__(self, images: list[Decoded], split: str, device: torch.device) -> None:
        images = [image for image in images if image[0]["split"] == split]
        decoded = [image[1:] for image in images]
        self.device = device
        self.meta = [image[0] for image in images]
        pixels = [labels.size for _, labels, _ in decoded]
        self.values = torch.empty(len(MASK_BANDS), sum(pixels), dtype=torch.float16, device=device)
        self.labels = torch.empty(sum(pixels), dtype=torch.uint8, device=device)
        self.valid = torch.empty(sum(pixels), dtype=torch.bool, device=device)
        offsets = np.concatenate([[0], np.cumsum(pixels)])
        present, cover = [], []
        for number, (image, labels, valid) in enumerate(decoded):
            where = slice(int(offsets[number]), int(offsets[number + 1]))
            self.values[:, where] = torch.from_numpy(image).flatten(1).to(device)
            self.labels[where] = torch.from_numpy(labels.copy()).flatten().to(device)
            self.valid[where] = torch.from_numpy(valid).flatten().to(device)
            bands = {band for _, group in self.meta[number]["groups"] for band in group}
            present.append([band in bands for band in MASK_BANDS])
            cover.append([float(((labels == code) & valid).sum() / valid.sum()) for code in range(9)])
        self.present, self.cover = np.array(present), np.array(cover)
        self.places = self._places()
        shape = [(*meta["shape"], *meta["origin"]) for meta in self.meta]
        self.table = torch.tensor(np.column_stack([offsets[:-1], np.array(shape)]), device=device)

    def _places(self) -> list[Place]:
        places: dict[tuple[str, str], Place] = {}
        for number, meta in enumerate(self.meta):
            place = places.setdefault((meta["source"], meta["place"]), Place(meta["source"]))
            place.images.append(number)
        for place in places.values():
            metas = [self.meta[number] for number in place.images]
            first = np.min([meta["origin"] for meta in metas], axis=0)
            for meta in metas:
                meta["origin"] = [int(a - b) for a, b in zip(meta["origin"], first, strict=True)]
            place.height, place.width = (max(m["shape"][k] + m["origin"][k] for m in metas) for k in (0, 1))
        return list(places.values())

    def clearest(self, place: Place) -> int:
        """Return the image of a place with the most clear pixels."""
        return max(place.images, key=lambda i: self.cover[i][[LAND, WATER, SNOW, CLEAR]].sum())

    def donors(self) -> list[tuple[int, int]]:
        """Return pairs (labelled cloudy image, clearest image of the same place) that hold real clouds."""
        pairs = []
        for place in self.places:
            if place.source != "cloudsen12":
                continue
            best = self.clearest(place)
            pairs += [
                (i, best) for i in place.images if i != best and self.cover[i][[THICK, THIN, SHADOW]].sum() > 0.08
            ]
        return pairs

    def sample(self, cut: Cut, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return reflectance (N, 9, s, s), labels uint8 (N, s, s) and validity bool (N, s, s) of the crops."""
        offset, height, width, top, left = (column[:, None, None] for column in self.table[cut.image].unbind(1))
        step = torch.arange(size, device=self.device)
        rows, columns = step[None, :, None], step[None, None, :]
        turn = cut.turn[:, None, None]
        y = torch.where(turn & 4 > 0, columns, rows)
        x = torch.where(turn & 4 > 0, rows, columns)
        y = torch.where(turn & 1 > 0, size - 1 - y, y) * cut.scale[:, None, None] + cut.top[:, None, None]
        x = torch.where(turn & 2 > 0, size - 1 - x, x) * cut.scale[:, None, None] + cut.left[:, None, None]

        def pixels(dy: int, dx: int) -> tuple[Tensor, Tensor]:
            row = _reflected(y + dy, cut.height[:, None, None]) - top
            column = _reflected(x + dx, cut.width[:, None, None]) - left
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            return offset + row.clamp(min=0).minimum(height - 1) * width + column.clamp(min=0).minimum(
                width - 1
            ), inside

        where, inside = pixels(0, 0)
        image = self.values[:, where].transpose(0, 1).float()
        labels, valid = self.labels[where], self.valid[where] & inside
        if bool((cut.scale > 1).any()):
            coarse = cut.scale > 1
            total = image
            for dy, dx in ((0, 1), (1, 0), (1, 1)):
                total = total + self.values[:, pixels(dy, dx)[0]].transpose(0, 1)
            image = torch.where(coarse[:, None, None, None], total / 4, image)
        labels = torch.where(valid, labels, UNKNOWN)
        return image, labels, valid


@dataclass
class Cut:
    """Where crops are taken, one entry per date."""

    image: Tensor
    top: Tensor
    left: Tensor
    height: Tensor
    """Extent of the place; positions outside are reflected into it."""
    width: Tensor
    turn: Tensor
    """Bits: 1 flip rows, 2 flip columns, 4 transpose."""
    scale: Tensor

    @staticmethod
    def of(rows: list[tuple[int, ...]], device: torch.device) -> Cut:
        return Cut(*torch.tensor(rows, device=device).unbind(1))

    def of_rows(self, rows: Tensor) -> Cut:
        return Cut(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


def _reflected(position: Tensor, size: Tensor) -> Tensor:
    period = (2 * size - 2).clamp(min=1)
    position = position.remainder(period)
    return torch.where(position < size, position, period - position)


@dataclass
class Donors:
    """Labelled images whose clouds are transferred, one per date."""

    cloudy: Cut
    clear: Cut
    """The clear date of the same place."""
    hard: Tensor
    """bool (N,): another date of the same place, whose hidden pixels are copied as they are."""
    forced: Tensor
    """bool (N,): the date gets these clouds in any case."""

    def of(self, rows: Tensor) -> Donors:
        return Donors(self.cloudy.of_rows(rows), self.clear.of_rows(rows), self.hard[rows], self.forced[rows])


@dataclass
class Batch:
    """N dates of several series."""

    images: Tensor
    seen: Tensor
    present: Tensor
    labels: Tensor
    links: Tensor


@dataclass(frozen=True)
class ComposeSettings:
    """What batches are made of."""

    size: int = 192
    sizes: tuple[int, ...] = (1,) * 10 + (2,) * 9 + (3,) * 12 + (4,) * 6 + (6,) * 2
    """Number of dates of each series of a batch."""
    paste: float = 0.38
    """Share of the clear dates that get real clouds of another place."""
    simulate: float = 0.36
    """Share of the clear dates that get simulated clouds."""
    snow: float = 0.08
    """Share of the series with simulated snow."""
    water: float = 0.16
    """Share of the series with simulated lakes."""
    bright: float = 0.12
    """Share of the series with brightened ground, such as sand and bare soil."""
    nodata: float = 0.15
    """Share of the dates with missing data."""


class Composer:
    """Draws batches from a store; the same seed gives the same batches on the same device."""

    def __init__(self, store: Store, *, seed: int, settings: ComposeSettings | None = None) -> None:
        self.store, self.settings = store, settings or ComposeSettings()
        self.device = store.device
        self.random = np.random.default_rng(seed)
        self.generator = torch.Generator(device=store.device)
        self.generator.manual_seed(seed)
        self.donor_pairs = store.donors()
        by_source: dict[str, list[Place]] = {}
        for place in store.places:
            by_source.setdefault(place.source, []).append(place)
        self.by_source = by_source
        weights = np.array([SOURCE_WEIGHTS[name] for name in by_source])
        self.source_names, self.source_weights = list(by_source), weights / weights.sum()

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.device)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def draw(self) -> Batch:
        """Return the next batch."""
        s, sizes = self.settings, self.settings.sizes
        cuts, donors, repeated, present = self._plan()
        image, labels, seen = self.store.sample(cuts, s.size)
        series = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(self.device)
        image = self._vary_ground(image, repeated, series)
        image = self._brighten(image, labels, series)
        for change, share in ((self._add_water, s.water), (self._add_snow, s.snow)):
            rows = torch.nonzero((self.uniform(len(sizes)) < share)[series])[:, 0]
            if len(rows):
                image[rows], labels[rows] = change(
                    image[rows], labels[rows], series[rows].unique(return_inverse=True)[1]
                )
        kind = torch.where(donors.forced, 2, self._overlay_kind(labels))
        rows = torch.nonzero(kind == 1)[:, 0]
        if len(rows):
            image[rows], labels[rows] = self._simulate(image[rows], labels[rows])
        rows = torch.nonzero(kind == 2)[:, 0]
        if len(rows):
            image[rows], labels[rows] = self._paste(image[rows], labels[rows], donors.of(rows))
        image, seen = self._radiometry(image, series), self._lose_data(seen)
        labels = torch.where(seen, labels, UNKNOWN)
        links = (series[:, None] == series[None]).float()
        links.fill_diagonal_(0)
        use = present[:, :, None, None] & seen[:, None]
        return Batch(image.clamp(0, 1.6).masked_fill(~use, 0.0), seen, present, labels, links)

    def _plan(self) -> tuple[Cut, Donors, Tensor, Tensor]:
        """Choose places, dates, crops, donors and bands of a batch."""
        random, size = self.random, self.settings.size
        rows, donor_rows, clear_rows, repeated, present, hard, forced = [], [], [], [], [], [], []
        for dates in self.settings.sizes:
            source = self.source_names[random.choice(len(self.source_names), p=self.source_weights)]
            place = self.by_source[source][random.integers(len(self.by_source[source]))]
            order = list(random.permutation(place.images))
            # Half of the labelled series hold a clear date with the clouds of another one, which is left out.
            leading = source == "cloudsen12" and random.random() < 0.55
            if leading:
                best = self.store.clearest(place)
                order = [best, *(i for i in order if i != best)]
            chosen = [order[i] if i < len(order) else order[random.integers(len(order))] for i in range(dates)]
            large = min(place.height, place.width) > 1.3 * size
            scale = int(random.choice([1, 2, 4], p=[0.7, 0.22, 0.08])) if large else 1
            spans = [max(1, length - scale * size + 1) for length in (place.height, place.width)]
            top, left = (int(random.integers(-8, span + 8)) for span in spans)
            turn = int(random.integers(8))
            bands = self._bands(self.store.present[chosen].all(0))
            unused = [i for i in place.images if i not in chosen and self.store.cover[i][[1, 2, 3]].sum() > 0.04]
            for number, image in enumerate(chosen):
                dy, dx = random.integers(-1, 2, 2) if random.random() < 0.15 else (0, 0)
                rows.append((image, top + dy, left + dx, place.height, place.width, turn, scale))
                repeated.append(len(place.images) == 1 or number >= len(order) or random.random() < 0.1)
                present.append(bands)
                forced.append(leading and number == 0)
                hard.append(
                    source == "cloudsen12" and len(unused) > 0 and random.random() < (0.8 if forced[-1] else 0.4)
                )
                if hard[-1]:
                    donor_rows.append((unused[random.integers(len(unused))], *rows[-1][1:]))
                    clear_rows.append(donor_rows[-1])
                    continue
                donor, clear = self.donor_pairs[random.integers(len(self.donor_pairs))]
                # Half of the clouds of other places are copied as they are, with the ground that shines through them.
                hard[-1] = random.random() < 0.5
                zoom = 2 if random.random() < 0.3 else 1
                height, width = self._extent(donor)
                place_row = [int(random.integers(0, max(1, n - zoom * size + 1))) for n in (height, width)]
                where = (*place_row, height, width, int(random.integers(8)), zoom)
                donor_rows.append((donor, *where))
                clear_rows.append((clear, *where))
        cuts = [Cut.of(part, self.device) for part in (rows, donor_rows, clear_rows)]
        flags = [torch.tensor(np.array(part), device=self.device) for part in (hard, forced, repeated, present)]
        return cuts[0], Donors(cuts[1], cuts[2], flags[0], flags[1]), flags[2], flags[3]

    def _extent(self, image: int) -> tuple[int, int]:
        meta = self.store.meta[image]
        return meta["shape"][0] + meta["origin"][0], meta["shape"][1] + meta["origin"][1]

    def _bands(self, available: np.ndarray) -> np.ndarray:
        """Choose the bands of a series: most users have B02, B03, B04, B08."""
        visible = np.isin(MASK_BANDS, ("B02", "B03", "B04"))
        four = visible | (np.array(MASK_BANDS) == "B08")
        fate = self.random.random()
        if fate < 0.5:
            wanted = four
        elif fate < 0.75:
            wanted = np.ones_like(four)
        elif fate < 0.83:
            wanted = np.array(MASK_BANDS) != "B10"
        elif fate < 0.9:
            wanted = visible
        else:
            wanted = (self.random.random(len(four)) < 0.5) | (visible & (self.random.random() < 0.8))
        chosen = wanted & available
        return chosen if chosen.sum() >= 2 else four & available

    def _vary_ground(self, image: Tensor, repeated: Tensor, series: Tensor) -> Tensor:
        """Give dates made from the same image a season of their own."""
        first = torch.zeros(image.shape[0], dtype=torch.long, device=self.device)
        varied = pseudo_dates(image.clamp(0, 1), 1, first, generator=self.generator)[:, 0]
        return torch.where(repeated[:, None, None, None], varied, image)

    def _overlay_kind(self, labels: Tensor) -> Tensor:
        """Return per date 0 none, 1 simulated, 2 pasted; dates with clouds of their own rarely get more."""
        cloudy = ((labels >= THICK) & (labels <= SHADOW)).float().mean((1, 2)) > 0.03
        fate = self.uniform(labels.shape[0])
        fate = torch.where(cloudy, fate / 0.35, fate)
        simulate, paste = self.settings.simulate, self.settings.paste
        return torch.where(fate < simulate, 1, torch.where(fate < simulate + paste, 2, 0))

    def _simulate(self, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        n, _, h, w = image.shape
        draw = Draws(n, self.generator, self.device)
        coverage = torch.where(draw.uniform(0, 1) < 0.35, draw.uniform(0.02, 0.2), draw.uniform(0.1, 1.0))
        settings = CloudSettings(thin_kinds=(0.4, 0.3, 0.3))
        fields = cloud_fields(
            n, h, w, coverage=coverage, generator=self.generator, device=self.device, settings=settings
        )
        cloudy, *_ = apply_clouds(image.clamp(0, 1), fields, bands=MASK_BANDS, generator=self.generator)
        through = (1 - fields.opacity) * torch.exp(-0.94 * fields.cirrus - 0.69 * fields.haze)
        dark = fields.shadow * (1 - fields.opacity)
        change = (image[:, B08] - cloudy[:, B08]).abs().maximum((image[:, B04] - cloudy[:, B04]).abs())
        found = torch.zeros_like(labels, dtype=torch.long)
        found[(dark > 0.08) & (through >= 0.95)] = UNKNOWN
        found[(dark > 0.25) & (change > 0.012)] = SHADOW
        found[(through < 0.985) & (found == 0)] = UNKNOWN
        found[(through < 0.95) & (found == SHADOW)] = HIDDEN
        found[through < 0.91] = THIN
        found[through < 0.55] = HIDDEN
        found[through < 0.35] = THICK
        return cloudy, _merged(labels, found)

    def _paste(self, image: Tensor, labels: Tensor, donors: Donors) -> tuple[Tensor, Tensor]:
        """Transfer the clouds and shadows of labelled images: opacity and darkening are estimated against the clear
        date of the donor's place and applied to the ground here."""
        size = image.shape[-1]
        donor, kind, seen = self.store.sample(donors.cloudy, size)
        ground, ground_kind, ground_seen = self.store.sample(donors.clear, size)
        ground = _matched_ground(donor, ground, seen & ground_seen & _visible(kind) & _visible(ground_kind))
        usable = seen & ground_seen

        sharp = (self.uniform(image.shape[0]) < 0.5)[:, None, None, None]

        def edged(layer: Tensor, deviation: float) -> Tensor:
            return torch.where(sharp, layer, _blurred(layer, deviation))

        thick = edged(((kind == THICK) & seen).float()[:, None], 0.8)
        thin_colour = torch.tensor(THIN_CLOUD, device=self.device)[None, :, None, None]
        veil = (donor[:, B02] - ground[:, B02]) / (0.6 - ground[:, B02]).clamp(min=0.15)
        veil = edged((veil.clamp(0.0, 0.95) * ((kind == THIN) & usable))[:, None], 1.5)
        dark = (1 - donor / ground.clamp(min=0.01)).clamp(0.0, 0.85) * ((kind == SHADOW) & usable)[:, None]
        dark = edged(dark, 1.0)
        brightness = (0.85 + 0.35 * self.uniform(image.shape[0]))[:, None, None, None]
        tint = (1 + 0.05 * self.normal(image.shape[0], image.shape[1]))[:, :, None, None]

        pasted = image * (1 - dark)
        pasted = pasted + veil * (thin_colour * brightness * tint - pasted)
        pasted = pasted + thick * (donor * brightness * tint - pasted)
        change = (image - pasted)[:, [B04, B08]].abs().amax(1)
        hidden = 1 - (1 - thick[:, 0]) * (1 - veil[:, 0])
        found = torch.zeros_like(labels, dtype=torch.long)
        shade = dark[:, B08]
        found[shade > 0.07] = UNKNOWN
        found[(shade > 0.18) & (change > 0.012)] = SHADOW
        found[(hidden > 0.02) & (found == 0)] = UNKNOWN
        found[(hidden > 0.09) & (found != SHADOW)] = HIDDEN
        found[(hidden > 0.09) & (kind == THIN)] = THIN
        found[(hidden > 0.5) & (kind == THICK)] = THICK

        hard = donors.hard[:, None, None]
        copied = _in(kind, (THICK, THIN, SHADOW)) & seen
        found = torch.where(hard, torch.where(copied, kind.long(), 0), found)
        pasted = torch.where(hard[:, None], torch.where(copied[:, None], donor, image), pasted)
        return pasted, _merged(labels, found)

    def _brighten(self, image: Tensor, labels: Tensor, series: Tensor) -> Tensor:
        """Brighten the clear ground of some series, on all dates alike."""
        count = int(series.max()) + 1
        gain = torch.where(self.uniform(count) < self.settings.bright, 1.1 + self.uniform(count), 1.0)[series]
        brighter = (image * gain[:, None, None, None]).minimum(image.clamp(min=0.75))
        return torch.where((labels == THICK)[:, None], image, brighter)

    def _add_water(self, image: Tensor, labels: Tensor, series: Tensor) -> tuple[Tensor, Tensor]:
        """Lay lakes into the ground of some series, at the same place on all dates."""
        n, bands, h, w = image.shape
        count = int(series.max()) + 1
        first = torch.searchsorted(series, torch.arange(count, device=self.device))
        draw = Draws(n, self.generator, self.device)
        field = Grid(h, w, draw).noise(draw.uniform(1.6, 2.4), draw.uniform(30.0, 200.0))[first]
        level = 0.7 + 0.9 * self.uniform(count)
        lake = (field > level[:, None, None])[series]
        wet = lake & _visible(labels)
        labels = torch.where(lake & _in(labels, (THIN, SHADOW, HIDDEN)), UNKNOWN, labels)
        colour = torch.tensor(WATER_COLOUR, device=self.device) * torch.exp(0.4 * self.normal(count, bands))
        colour = colour * torch.exp(0.4 * self.normal(count))[:, None]
        colour = (colour[series] * torch.exp(0.12 * self.normal(n, bands)))[:, :, None, None]
        local = image / F.avg_pool2d(image, 31, 1, 15, count_include_pad=False).clamp(min=0.01)
        water = colour * local.clamp(0.5, 2.0) ** 0.15
        share = _blurred(wet.float()[:, None], 0.7)
        labels = torch.where(wet, WATER, torch.where((share[:, 0] > 0.02) & _visible(labels), CLEAR, labels))
        return torch.lerp(image, water, share * _visible(labels)[:, None]), labels

    def _add_snow(self, image: Tensor, labels: Tensor, series: Tensor) -> tuple[Tensor, Tensor]:
        """Cover the ground of some dates with snow, more on open land than on forest."""
        n, _, h, w = image.shape
        some = self.uniform(n) < 0.6
        draw = Draws(n, self.generator, self.device)
        noise = Grid(h, w, draw).noise(draw.uniform(1.4, 2.0), draw.uniform(60.0, 300.0))
        red, near = image[:, B04], image[:, B08]
        green_land = ((near - red) / (near + red).clamp(min=0.01)).clamp(0, 1)
        level = draw.uniform(-1.0, 2.0)[:, None, None]
        amount = torch.sigmoid(2.5 * (noise + level - 2.2 * green_land))
        local = image / F.avg_pool2d(image, 31, 1, 15, count_include_pad=False).clamp(min=0.01)
        shade = local.clamp(0.4, 1.4) ** 0.6
        colour = torch.tensor(SNOW_COLOUR, device=self.device)[None, :, None, None]
        snow = colour * shade * draw.uniform(0.5, 1.05)[:, None, None, None]
        clear = _in(labels, (LAND, CLEAR)) & some[:, None, None]
        changed = torch.lerp(image, snow, amount[:, None])
        labels = torch.where(clear & (amount > 0.25), CLEAR, labels)
        labels = torch.where(clear & (amount > 0.65), SNOW, labels)
        return torch.where(some[:, None, None, None], changed, image), labels

    def _radiometry(self, image: Tensor, series: Tensor) -> Tensor:
        """Vary gains, atmosphere and noise: per series, and less per date."""
        n, count = image.shape[0], int(series.max()) + 1
        gain = (0.13 * self.normal(count))[series] + 0.05 * self.normal(n)
        gain = gain[:, None] + 0.03 * self.normal(n, image.shape[1])
        air = (1.2 * self.uniform(count) - 0.6)[series] + 0.15 * self.normal(n)
        path = torch.tensor(PATH, device=self.device)[None] * air[:, None]
        image = image * gain.clamp(-0.4, 0.4).exp()[:, :, None, None] + path[:, :, None, None]
        noise = (0.0005 + 0.003 * self.uniform(n) ** 2)[:, None, None, None] * self.normal(*image.shape)
        image = image + noise * (0.5 + image.clamp(0, 1))
        soft = self.uniform(n) < 0.15
        return torch.where(soft[:, None, None, None], _blurred(image, 0.7), image).clamp(min=0.0005)

    def _lose_data(self, seen: Tensor) -> Tensor:
        n, h, w = seen.shape
        rows = torch.arange(h, device=self.device)[None, :, None] / h
        columns = torch.arange(w, device=self.device)[None, None, :] / w
        angle = 2 * torch.pi * self.uniform(n)[:, None, None]
        along = (rows - 0.5) * angle.sin() + (columns - 0.5) * angle.cos()
        lost = (along > self.uniform(n)[:, None, None] * 0.7 - 0.1) & (
            self.uniform(n)[:, None, None] < self.settings.nodata
        )
        return seen & ~lost


def _matched_ground(donor: Tensor, ground: Tensor, clear: Tensor) -> Tensor:
    """Return `ground` scaled per band to `donor` where both are clear; unchanged where that is too little."""
    area = clear.float().mean((1, 2))[:, None] > 0.05
    both = clear[:, None]
    ratio = (donor * both).sum((2, 3)) / (ground * both).sum((2, 3)).clamp(min=1e-3)
    return ground * torch.where(area, ratio, 1.0).clamp(0.5, 2.0)[:, :, None, None]


def _visible(labels: Tensor) -> Tensor:
    return ~_in(labels, (THICK, THIN, SHADOW, HIDDEN, UNKNOWN))


def _in(labels: Tensor, codes: tuple[int, ...]) -> Tensor:
    found = labels == codes[0]
    for code in codes[1:]:
        found = found | (labels == code)
    return found


def _merged(base: Tensor, over: Tensor) -> Tensor:
    """Return labels of an image (`base`) under added clouds and shadows (`over`, 0 = none)."""
    base = base.long()
    cloud = _in(base, (THICK, THIN, HIDDEN))
    merged = torch.where(over == 0, base, over)
    merged = torch.where(_in(over, (THIN, HIDDEN)) & (base == THICK), THICK, merged)
    merged = torch.where((over == THIN) & _in(base, (SHADOW, HIDDEN, UNKNOWN)), HIDDEN, merged)
    merged = torch.where((over == SHADOW) & cloud, base, merged)
    merged = torch.where((over == SHADOW) & _in(base, (UNKNOWN, NOT_THICK)), HIDDEN, merged)
    merged = torch.where((over == UNKNOWN) & _in(base, (THICK, THIN, SHADOW, HIDDEN)), base, merged)
    return merged.to(torch.uint8)


def _blurred(x: Tensor, deviation: float) -> Tensor:
    """Return (N, C, H, W) under a Gaussian."""
    radius = max(1, round(2.5 * deviation))
    taps = torch.exp(-0.5 * (torch.arange(-radius, radius + 1, device=x.device) / deviation) ** 2)
    taps = (taps / taps.sum()).to(x.dtype)
    flat = F.pad(x.flatten(0, 1)[:, None], (radius,) * 4, mode="replicate")
    return F.conv2d(F.conv2d(flat, taps[None, None, None]), taps[None, None, :, None]).reshape(x.shape)
