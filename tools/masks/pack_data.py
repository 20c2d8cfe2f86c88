"""Read the training imagery and write it, with labels, into one compact file for `train.py`.

    python tools/masks/pack_data.py DATA OUT.pack [--only-source NAME]

Labels (uint8): 0 land, 1 thick cloud, 2 thin cloud, 3 shadow, 4 water, 5 snow, 6 clear of unknown surface,
7 hidden of unknown kind, 8 neither thick cloud nor shadow, 255 unknown. Human labels are kept; where only "clear" is
known, spectral rules name water and snow and leave doubtful pixels at 6.
"""

from __future__ import annotations

import argparse
import json
import lzma
import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pack_codec
import rasterio

GROUPS = {10: ("B02", "B03", "B04", "B08"), 20: ("B11", "B12"), 60: ("B01", "B09", "B10")}
"""Bands that are packed, by their resolution in metres."""
LAND, THICK, THIN, SHADOW, WATER, SNOW, CLEAR, HIDDEN, NOT_THICK, UNKNOWN = 0, 1, 2, 3, 4, 5, 6, 7, 8, 255
VAL_OSCD = ("bordeaux", "mumbai", "lasvegas", "montpellier")
VAL_CALIFORNIA = ("DOVE_20241019", "CLEAR_20240626", "1-7_20200817")
VAL_SEN12 = ("1158_spring_s2_39", "1868_summer_s2_101", "1970_fall_s2_85")
SMOKE = ("1-12_", "4-8_", "5-4_", "5-6_", "1-7_")
"""Californian fires with smoke over the later date."""
COLD = {"p068", "p071", "p072", "p113", "p114"}
"""BigEarthNet patches with snow."""


@dataclass
class Image:
    """One date of one place."""

    source: str
    place: str
    date: str
    bands: tuple[str, ...]
    counts: np.ndarray
    """uint16 (C, H, W), 0 = nodata."""
    labels: np.ndarray
    level: str
    split: str = "train"
    origin: tuple[int, int] = (0, 0)
    """Row and column of the first pixel within the place."""


def read(path: Path) -> tuple[tuple[str, ...], np.ndarray]:
    with rasterio.open(path) as file:
        return file.descriptions, file.read()


def surface(image: Image, *, cold: bool = False) -> Image:
    """Name the surface of the pixels labelled `CLEAR` where the spectrum leaves no doubt."""
    value = {band: layer.astype(np.float32) / 1e4 for band, layer in zip(image.bands, image.counts, strict=True)}
    blue, green, red = value["B02"], value["B03"], value["B04"]
    visible = (blue + green + red) / 3
    label = np.full(green.shape, CLEAR, np.uint8)
    if "B08" in value:
        near = value["B08"]
        water_index = (green - near) / np.maximum(green + near, 1e-3)
        vegetation = (near - red) / np.maximum(near + red, 1e-3)
        label[water_index < -0.02] = LAND
        wet = (water_index > 0.25) & (near < 0.10)
        if "B11" in value:
            wet &= value["B11"] < 0.08
        label[wet] = CLEAR
        label[wet & (local_share(wet, 2) > 0.6)] = WATER
        white = (visible > 0.28) & (np.abs(blue - red) < 0.25 * visible) & (vegetation < 0.15)
        if "B11" in value:
            snow_index = (green - value["B11"]) / np.maximum(green + value["B11"], 1e-3)
            label[(snow_index > 0.1) & (green > 0.15) & (label == LAND)] = CLEAR
            label[(snow_index > 0.45) & (green > 0.22)] = SNOW
        elif cold:
            label[(visible > 0.2) & (vegetation < 0.2)] = CLEAR
            label[white] = SNOW
    elif cold:
        label[visible > 0.35] = SNOW
    image.labels = np.where(image.labels == CLEAR, label, image.labels)
    return image


def dilated(mask: np.ndarray, radius: int) -> np.ndarray:
    return local_share(mask, radius) > 1e-9


def local_share(mask: np.ndarray, radius: int) -> np.ndarray:
    """Return the share of True pixels within a square of `radius` pixels."""
    padded = np.pad(mask.astype(np.float64), radius, mode="edge")
    sums = np.pad(padded.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    edge = 2 * radius + 1
    window = sums[edge:, edge:] - sums[:-edge, edge:] - sums[edge:, :-edge] + sums[:-edge, :-edge]
    return window / edge**2


def cloudsen12(root: Path) -> Iterator[Image]:
    for part in ("train", "val"):
        for place in sorted((root / "cloudsen12" / part).iterdir()):
            for path in sorted(place.glob("date_?.tif")):
                if (part, place.name, path.stem) == ("train", "place_04", "date_1"):  # the same acquisition as date_0
                    continue
                bands, counts = read(path)
                with rasterio.open(path.with_name(path.stem + "_label.tif")) as file:
                    labels = file.read(1)
                labels = np.where(labels == 0, CLEAR, labels).astype(np.uint8)
                yield surface(
                    Image("cloudsen12", f"{part}_{place.name}", path.stem, bands, counts, labels, "L1C", part)
                )
    for place in ("ROI_1746", "ROI_2507", "ROI_4683"):
        for path in sorted((root / "cloudsen12_fig" / place).glob("*_label.tif")):
            bands, counts = read(path.with_name(path.name.replace("_label", "")))
            with rasterio.open(path) as file:
                labels = file.read(1)
            labels = np.where(labels == 0, CLEAR, labels).astype(np.uint8)
            split = "val" if place == "ROI_1746" else "train"
            date = path.stem.replace("_label", "")
            yield surface(
                Image("cloudsen12_fig", place, date, bands, counts, labels, "L1C", split), cold="4683" in place
            )


def clear(source: str, place: str, path: Path, level: str, split: str, *, cold: bool = False) -> Image:
    bands, counts = read(path)
    labels = np.full(counts.shape[1:], CLEAR, np.uint8)
    return surface(Image(source, place, path.stem, bands, counts, labels, level, split), cold=cold)


def oscd(root: Path) -> Iterator[Image]:
    for place in sorted((root / "oscd").iterdir()):
        if not place.is_dir():
            continue
        split = "val" if place.name in VAL_OSCD else "train"
        pair = [clear("oscd", place.name, place / f"date_{k}.tif", "L1C", split) for k in (0, 1)]
        if place.name == "paris":
            seen = [image.counts[:3].astype(np.int32).mean(0) for image in pair]
            pair[1].labels[dilated(seen[1] > seen[0] + 600, 40)] = UNKNOWN
        yield from pair


def california(root: Path) -> Iterator[Image]:
    for place in sorted((root / "california_fires").iterdir()):
        if not place.is_dir():
            continue
        split = "val" if place.name in VAL_CALIFORNIA else "train"
        pre = clear("california", place.name, place / "pre.tif", "L2A", split)
        post = clear("california", place.name, place / "post.tif", "L2A", split)
        if place.name.startswith(SMOKE):
            rise = post.counts[0].astype(np.int32) - pre.counts[0]
            post.labels[rise > 120] = UNKNOWN
            post.labels[rise > 300] = THIN
        yield from (pre, post)


def sen12mscr(root: Path) -> Iterator[Image]:
    for path in sorted((root / "sen12mscr").glob("*_clear.tif")):
        place = path.stem.replace("_clear", "")
        split = "val" if any(name in place for name in VAL_SEN12) else "train"
        image = clear("sen12mscr", place, path, "L1C", split)
        hazy = "1970_fall_s2_136" in place
        if hazy and place.rsplit("_", 1)[1] not in ("p100", "p139", "p315", "p500", "p840"):
            continue
        cloudy = clear("sen12mscr", place, path.with_name(path.name.replace("_clear", "_cloudy")), "L1C", split)
        value = dict(zip(cloudy.bands, cloudy.counts.astype(np.int32), strict=True))
        rise = value["B02"] - image.counts[image.bands.index("B02")].astype(np.int32)
        snow = (cloudy.labels == SNOW) & (value["B11"] < 1500) & (value["B10"] < 60)
        cloudy.labels[:] = UNKNOWN
        cloudy.labels[(rise > 1500) & (value["B11"] > 2000)] = HIDDEN
        cloudy.labels[snow] = SNOW
        if hazy:
            image.labels[:] = NOT_THICK
        yield from (image, cloudy)


def rondonia(root: Path) -> Iterator[Image]:
    paths = sorted((root / "rondonia_20LMR").glob("*.tif"))
    for path in paths:
        if path.stem[-5:] not in ("05-13", "06-30", "09-18"):
            continue
        whole = clear("rondonia", "west", path, "L2A", "train")
        for number, (rows, columns) in enumerate(((slice(0, 512), slice(0, 448)), (slice(600, 1112), slice(430, 878)))):
            yield Image("rondonia", f"west_{number}", path.stem, whole.bands, whole.counts[:, rows, columns],
                        whole.labels[rows, columns], "L2A")  # fmt: skip
        yield Image("rondonia", "east", path.stem, whole.bands, whole.counts[:, 300:620, 900:],
                    whole.labels[300:620, 900:], "L2A", "val")  # fmt: skip


def belgium(root: Path) -> Iterator[Image]:
    with np.load(next((root / "belgium").glob("belgium_*.npz"))) as data:
        images, scenes, dates = data["img"], data["scl"], data["date"]
    table = np.full(256, UNKNOWN, np.uint8)
    table[[4, 5, 6, 8, 9, 10, 11]] = (CLEAR, CLEAR, CLEAR, HIDDEN, THICK, THIN, CLEAR)
    for number, (image, scene, date) in enumerate(zip(images, scenes, dates, strict=True)):
        labels = table[scene]
        if str(date)[5:7] not in ("12", "01", "02", "03"):
            labels[scene == 11] = UNKNOWN  # in this series the scene classification names autumn clouds snow
        for kind in ((labels == CLEAR), (labels == THICK) | (labels == HIDDEN) | (labels == THIN)):
            labels[~kind & dilated(kind, 1) & (labels != UNKNOWN)] = UNKNOWN
        split = "val" if number >= len(dates) - 25 else "train"
        record = Image("belgium", f"belgium_{split}", str(date), GROUPS[10], image, labels, "L2A", split)
        yield surface(record, cold=bool((scene == 11).mean() > 0.05))


def biomassters(root: Path) -> Iterator[Image]:
    for place in ("0060c0a5", "000aa810"):
        for path in sorted((root / "biomassters" / place).glob("month_??.tif")):
            split = "val" if place == "000aa810" else "train"
            image = clear("biomassters", place, path, "L2A", split)
            with rasterio.open(path.with_name(path.stem + "_cloudprob.tif")) as file:
                probability = file.read(1)
            swir = image.counts[image.bands.index("B11")]
            image.labels[probability > 5] = UNKNOWN
            image.labels[(probability >= 70) & (swir > 1500)] = HIDDEN
            yield image


def others(root: Path) -> Iterator[Image]:
    folders = sorted(path for path in (root / "bark_beetle").iterdir() if path.is_dir())
    for number, place in enumerate(folders):
        split = "val" if number >= len(folders) - 6 else "train"
        for path in sorted(place.glob("*.tif")):
            yield clear("bark_beetle", place.name, path, "L2A", split)
    for path in sorted((root / "bigearthnet").glob("p*.tif")):
        split = "val" if int(path.stem[1:]) >= 100 else "train"
        yield clear("bigearthnet", path.stem, path, "L2A", split, cold=path.stem in COLD)
    for path in sorted((root / "eolearn_slovenia").glob("*.tif")):
        image = clear("slovenia", "slovenia", path, "L1C", "train")
        if path.stem in ("date_0", "date_1"):
            image.labels[:] = THICK if path.stem == "date_0" else HIDDEN
        yield image


def crop_middle(image: Image, size: int) -> Image:
    """Cut the image to `size` pixels around the middle, the same for every date of a place."""
    top, left = (max(0, (length - size) // 2) for length in image.labels.shape)
    image.counts = image.counts[:, top : top + size, left : left + size]
    image.labels = image.labels[top : top + size, left : left + size]
    image.origin = (top, left)
    return image


def blob(image: Image) -> tuple[dict[str, object], bytes]:
    valid = (image.counts > 0).all(0)
    labels = np.where(valid, image.labels, UNKNOWN).astype(np.uint8)
    rows, columns = np.nonzero(valid)
    top, left, bottom, right = rows.min(), columns.min(), rows.max() + 1, columns.max() + 1
    counts, labels, valid = (a[..., top:bottom, left:right] for a in (image.counts, labels, valid))
    parts, groups = [lzma.compress(np.packbits(valid).tobytes() + labels.tobytes())], []
    for metres, bands in GROUPS.items():
        have = [band for band in bands if band in image.bands]
        if have:
            layers = filled(np.stack([counts[image.bands.index(band)] for band in have]), valid)
            layers = shrunk(layers, metres // 10) if metres > 10 else layers
            groups.append([metres, have])
            parts.append(pack_codec.encode(layers))
    meta = {"source": image.source, "place": image.place, "date": image.date, "level": image.level,
            "split": image.split, "shape": list(valid.shape), "groups": groups, "sizes": [len(p) for p in parts],
            "origin": [int(top) + image.origin[0], int(left) + image.origin[1]]}  # fmt: skip
    return meta, b"".join(parts)


def filled(layers: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Fill pixels without data with a neighbour to the left, then above, so that they cost few bytes."""
    for axis in (-1, -2):
        ramp = np.arange(valid.shape[axis]).reshape((-1,) if axis == -1 else (-1, 1))
        last = np.maximum.accumulate(np.where(valid, ramp, 0), axis=axis)
        layers = np.take_along_axis(layers, np.broadcast_to(last, layers.shape), axis)
        valid = np.take_along_axis(valid, last, axis)
    return layers


def shrunk(layers: np.ndarray, factor: int) -> np.ndarray:
    height, width = layers.shape[1:]
    padded = np.pad(layers, ((0, 0), (0, -height % factor), (0, -width % factor)), mode="edge")
    c, h, w = padded.shape
    return np.rint(padded.reshape(c, h // factor, factor, w // factor, factor).mean((2, 4))).astype(np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--city-size", type=int, default=300)
    parser.add_argument("--val-size", type=int, default=160)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=rasterio.errors.NotGeoreferencedWarning)
    index: list[dict[str, object]] = []
    totals: dict[str, list[int]] = {}
    body = []
    for reader in (cloudsen12, oscd, california, sen12mscr, rondonia, belgium, biomassters, others):
        for image in reader(args.data):
            if image.split == "val":
                image = crop_middle(image, args.val_size)
            elif image.source == "oscd":
                image = crop_middle(image, args.city_size)
            if not (image.counts > 0).all(0).any():
                continue
            meta, data = blob(image)
            index.append(meta)
            body.append(data)
            total = totals.setdefault(f"{image.source} {image.split}", [0, 0, 0, *[0] * 10])
            total[0] += 1
            total[1] += len(data)
            total[2] += image.labels.size
            for code in range(10):
                total[3 + code] += int((image.labels == (code if code < 9 else 255)).sum())
    head = json.dumps(index, separators=(",", ":")).encode()
    args.out.write_bytes(struct.pack("<8sQ", b"SADMASK1", len(head)) + head + b"".join(body))
    print("source: images bytes pixels | share of labels 0..8, unknown")
    for name, total in totals.items():
        print(f"{name:20s} {total[0]:4d} {total[1]:9d} {total[2]:9d} |", *(f"{c / total[2]:.3f}" for c in total[3:]))
    print("file", args.out.stat().st_size)


if __name__ == "__main__":
    main()
