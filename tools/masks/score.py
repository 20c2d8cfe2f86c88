"""Score cloud masks on validation places: recall, precision, IoU, false alarms, and the PSNR of the composite.

    python tools/masks/score.py SHARDS... --clouds CLOUDSEN12_SHARDS --network mask.safetensors [--model NAME ...]

Items are those of `sader evaluate` ("clean this date": real clouds pasted onto a clear date), cut to `--size` pixels.
Masks are scored on the reference date and on the other dates that have labels. The composite is the same for every
method: that of the first model, with the method's masks given for all dates.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from sader import CloudRemover
from sader.bands import BANDS_RGBN
from sader.data.cloud_rules import estimate_cloud_mask
from sader.data.items import Item, clean_this_date
from sader.data.shards import SeriesRecord, read_shards
from sader.inference.masks import used_mask
from sader.model.heads import MaskNetwork, MaskNetworkConfig, band_sources, hidden_probability

Masks = Callable[[Item], dict[str, np.ndarray]]
"""(Item) -> masks bool (T, H, W) by the name of the method or setting."""


def load_network(path: Path) -> MaskNetwork:
    """Return the network of a file that `train.py` wrote."""
    with safe_open(path, "pt") as file:
        options = json.loads(file.metadata()["config"])
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    network = MaskNetwork(MaskNetworkConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}))
    network.load_state_dict({name: value.float() for name, value in weights.items()})
    return network.eval()


@torch.inference_mode()
def probability(network: MaskNetwork, item: Item) -> torch.Tensor:
    """Return the probability (1, T, H, W) of cloud or shadow."""
    sources = band_sources(item.bands)
    dates, _, height, width = item.cloudy.shape
    multiple = network.config.multiple
    rows, columns = height + -height % multiple, width + -width % multiple
    images = torch.zeros(1, dates, len(sources), rows, columns)
    for band, source in enumerate(sources):
        if source is not None:
            images[0, :, band, :height, :width] = torch.from_numpy(item.cloudy[:, source])
    seen = torch.zeros(1, dates, rows, columns, dtype=torch.bool)
    seen[0, :, :height, :width] = torch.from_numpy(item.valid)
    present = torch.tensor([[source is not None for source in sources]])
    return hidden_probability(network(images, seen, present), dim=2)[..., :height, :width]


def network_masks(network: MaskNetwork, name: str, settings: list[tuple[float, int]]) -> Masks:
    def masks(item: Item) -> dict[str, np.ndarray]:
        found = probability(network, item)
        valid = torch.from_numpy(item.valid)[None]
        unknown = torch.full(found.shape, torch.nan)
        return {
            f"{name} {level}+{growth}": used_mask(found, valid, unknown, threshold=level, growth=growth)[0].numpy()
            > 0.5
            for level, growth in settings
        }

    return masks


def model_masks(remover: CloudRemover, name: str) -> Masks:
    def masks(item: Item) -> dict[str, np.ndarray]:
        at = [item.bands.index(band) for band in remover.bands]
        found = remover.estimate_cloud(item.cloudy[:, at], valid=item.valid, reference=item.reference)
        return {name: found > 0.5}

    return masks


def plain_masks(item: Item) -> dict[str, np.ndarray]:
    return {"true": item.cloud_mask, "rules": estimate_cloud_mask(item.cloudy, item.bands, valid=item.valid)}


def cut_records(paths: list[Path], size: int) -> Iterator[SeriesRecord]:
    """Yield the records cut to the `size` pixels around the middle of what they cover."""
    for record in read_shards(paths):
        rows, columns = (np.flatnonzero((record.dn[:, 0] > 0).any(0).any(axis)) for axis in (1, 0))
        top, left = (max(int(span[0] + span[-1] + 1 - size) // 2, 0) for span in (rows, columns))
        box = (..., slice(top, top + size), slice(left, left + size))
        labels = None if record.labels is None else np.ascontiguousarray(record.labels[box])
        yield replace(record, dn=np.ascontiguousarray(record.dn[box]), labels=labels)


def composite_psnr(remover: CloudRemover, item: Item, masks: np.ndarray) -> tuple[float, float]:
    """Return the PSNR on the scored pixels and the share of the clear reference pixels that changed."""
    at = [item.bands.index(band) for band in remover.bands]
    assert item.reference is not None
    clear = remover.predict(item.cloudy[:, at], reference=item.reference, cloud_mask=masks, valid=item.valid).clear
    truth, own = item.clear[at], item.cloudy[item.reference, at]
    error = float(np.mean((clear - truth)[:, item.scored].astype(np.float64) ** 2))
    changed = (np.abs(clear - own) > 1e-6).any(0)[item.kept]
    return -10 * np.log10(max(error, 1e-12)), float(changed.mean()) if changed.size else np.nan


def counts(item: Item, masks: np.ndarray) -> np.ndarray:
    """Return hits, misses, false alarms and correct clear pixels of the reference date and of the other dates."""
    result = np.zeros((2, 4))
    for date in range(len(masks)):
        known = item.valid[date]
        own = date == item.reference
        if not own and not item.label_known:
            continue
        true, found = item.cloud_mask[date][known], masks[date][known]
        result[0 if own else 1] += [
            (true & found).sum(),
            (true & ~found).sum(),
            (~true & found).sum(),
            (~true & ~found).sum(),
        ]
    return result


def figures(total: np.ndarray) -> str:
    hit, miss, false, right = total
    parts = (
        hit / max(hit + miss, 1),
        hit / max(hit + false, 1),
        hit / max(hit + miss + false, 1),
        false / max(false + right, 1),
    )
    return " ".join(f"{part:.3f}" for part in parts)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shards", type=Path, nargs="+")
    parser.add_argument("--clouds", type=Path, required=True)
    parser.add_argument("--network", type=Path, action="append", default=[])
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--settings", default="0.5+2,0.3+2,0.2+2", help="threshold+growth, ...")
    parser.add_argument("--limit", type=int, default=1, help="items per place")
    parser.add_argument("--places", type=int, default=None, help="places per source")
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--all-bands", action="store_true", help="give the network every band there is")
    parser.add_argument("--no-composite", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    models = {name: CloudRemover.from_pretrained(name, device="cpu") for name in args.model or ["sader-s2-rgbn"]}
    remover = next(iter(models.values()))
    settings = [(float(a), int(b)) for a, b in (part.split("+") for part in args.settings.split(","))]
    methods: list[Masks] = [plain_masks, *(model_masks(model, name) for name, model in models.items())]
    methods += [network_masks(load_network(path), path.parent.name, settings) for path in args.network]
    everything: dict[str, list[tuple[float, float]]] = {}
    for shards in args.shards:
        records = list(cut_records([shards], args.size))[: args.places]
        donors = list(read_shards([args.clouds]))
        bands = None if args.all_bands else BANDS_RGBN
        totals: dict[str, np.ndarray] = {}
        scores: dict[str, list[tuple[float, float]]] = {}
        for item in clean_this_date(records, donors=donors, bands=bands, limit=args.limit):
            found = {name: masks for method in methods for name, masks in method(item).items()}
            line = []
            for name, masks in found.items():
                totals[name] = totals.get(name, 0) + counts(item, masks)
                if not args.no_composite:
                    scores.setdefault(name, []).append(composite_psnr(remover, item, masks))
                    line.append(f"{scores[name][-1][0]:.2f}")
            print(f"  {item.name} {item.cloudy.shape} scored {item.scored.mean():.2f}:", *line, flush=True)
        print(f"{shards}\n  method: PSNR changed | reference: recall precision IoU alarms | other dates: the same")
        for name, total in totals.items():
            mean = np.nanmean(scores[name], axis=0) if name in scores else (np.nan, np.nan)
            everything.setdefault(name, []).append(tuple(mean))
            print(f"  {name:24s} {mean[0]:6.2f} {mean[1]:.3f} | {figures(total[0])} | {figures(total[1])}", flush=True)
    print(
        "mean over sources:",
        {name: [round(float(v), 3) for v in np.nanmean(rows, 0)] for name, rows in everything.items()},
    )


if __name__ == "__main__":
    main()
