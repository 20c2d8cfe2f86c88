"""Quality against time for several numbers of sampling steps, on shards: a table and a figure.

Run: python benchmarks/steps_quality.py MODEL --data SHARDS [--steps 1,2,4,4+1,5+1,8] [--limit 4] [--out FOLDER]
Figure from the numbers, on another machine: python benchmarks/steps_quality.py --draw FOLDER/steps_quality.json

Writes FOLDER/steps_quality.json and, where Pillow is installed, FOLDER/steps_quality.png.

One evaluation of the network is `sader remove --steps 1`. Times are of whole items, with the condition of the dates.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sader.evaluation.data import open_data
from sader.evaluation.evaluate import other_bands, shared_bands
from sader.evaluation.methods import make_method
from sader.evaluation.request import DataRequest
from sader.evaluation.scoring import score_items

if TYPE_CHECKING:
    from PIL import Image

STEPS = "1,2,4,4+1,5+1,8"


class StepRow(NamedTuple):
    """One number of steps."""

    steps: str
    psnr: float
    ssim: float
    seconds: float
    """Per megapixel."""


def measure(model: str, data: Sequence[Path], *, steps: Sequence[str], mask: str, limit: int | None) -> list[StepRow]:
    """Return the scores over all items, one row per number of steps; all of them run in turn on each item."""
    methods = {count: make_method(model, mask=mask, steps=count) for count in steps}
    opened = open_data(DataRequest(tuple(data), limit=limit))
    items = opened.items("clean", shared_bands(methods), other_bands(methods, opened))
    print(f"{model}, {len(items)} items, masks: {mask}")
    rows = score_items(items, methods, ("psnr", "ssim"))
    found = []
    for count in steps:
        own = [row.scores for row in rows if row.method == count]
        found.append(
            StepRow(
                count,
                statistics.fmean(one["psnr"] for one in own),
                statistics.fmean(one["ssim"] for one in own),
                statistics.median(one["seconds_per_megapixel"] for one in own),
            )
        )
    return found


def draw(rows: Sequence[StepRow], title: str) -> Image.Image:
    """Return the figure: PSNR over the time relative to the first row."""
    from PIL import Image, ImageDraw, ImageFont

    width, height, left, top, right, bottom = 720, 480, 70, 50, 690, 420
    figure = Image.new("RGB", (width, height), (255, 255, 255))
    pen = ImageDraw.Draw(figure)
    small, large = ImageFont.load_default(13), ImageFont.load_default(17)
    pen.text((12, 10), title, fill=(0, 0, 0), font=large)
    pen.rectangle((left, top, right, bottom), outline=(0, 0, 0))
    times = [row.seconds / rows[0].seconds for row in rows]  # relative: independent of the machine
    across = round_ticks(0, max(times) * 1.1)
    margin = max(0.1 * (max(row.psnr for row in rows) - min(row.psnr for row in rows)), 0.1)
    up = round_ticks(min(row.psnr for row in rows) - margin, max(row.psnr for row in rows) + margin)

    def place(time: float, psnr: float) -> tuple[float, float]:
        x = left + (time - across[0]) / (across[-1] - across[0]) * (right - left)
        return x, bottom - (psnr - up[0]) / (up[-1] - up[0]) * (bottom - top)

    for time in across:
        x, _ = place(time, up[0])
        pen.line((x, top, x, bottom), fill=(215, 215, 215))
        pen.text((x, bottom + 6), f"{time:g}", fill=(0, 0, 0), font=small, anchor="ma")
    for psnr in up:
        _, y = place(0, psnr)
        pen.line((left, y, right, y), fill=(215, 215, 215))
        pen.text((left - 8, y), f"{psnr:g}", fill=(0, 0, 0), font=small, anchor="rm")
    pen.rectangle((left, top, right, bottom), outline=(0, 0, 0))
    unit = "time relative to " + ("one step" if rows[0].steps == "1" else f"steps {rows[0].steps}")
    pen.text(((left + right) / 2, bottom + 26), unit, fill=(0, 0, 0), font=small, anchor="ma")
    pen.text((left + 6, top + 4), "PSNR dB", fill=(0, 0, 0), font=small)
    for row, time in zip(rows, times, strict=True):
        x, y = place(time, row.psnr)
        pen.ellipse((x - 5, y - 5, x + 5, y + 5), fill=(30, 90, 170))
        pen.text((x + 9, y), row.steps, fill=(0, 0, 0), font=small, anchor="lm")
    return figure


def round_ticks(low: float, high: float) -> list[float]:
    """Return four to eight multiples of 1, 2 or 5 times a power of ten that enclose the range."""
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= (high - low) / 6)
    return [round(step * k, 9) for k in range(math.floor(low / step), math.ceil(high / step) + 1)]


def report(rows: Sequence[StepRow]) -> None:
    """Print the table."""
    print("| steps | PSNR dB | SSIM | s / megapixel | time of one step = 1 |\n|---|---|---|---|---|")
    for row in rows:
        ratio = row.seconds / rows[0].seconds
        print(f"| {row.steps} | {row.psnr:.3f} | {row.ssim:.4f} | {row.seconds:.3f} | {ratio:.2f} |", flush=True)


def main(arguments: list[str] | None = None) -> list[StepRow]:
    """Print the table, write the numbers and the figure and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="sader-s2-rgbn")
    parser.add_argument("--data", type=Path, nargs="+")
    parser.add_argument("--steps", default=STEPS)
    parser.add_argument("--mask", default="true", choices=("true", "reference", "own"))
    parser.add_argument("--limit", type=int, help="items per place")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the results")
    parser.add_argument("--draw", type=Path, help="only draw the figure of this file of numbers")
    given = parser.parse_args(arguments)
    if given.draw is not None:
        facts = json.loads(given.draw.read_text())
        rows = [StepRow(**row) for row in facts["rows"]]
        figure = given.draw.with_suffix(".png")
        draw(rows, facts["title"]).save(figure)
        report(rows)
        print(f"wrote {figure}")
        return rows
    if not given.data:
        parser.error("--data is needed: shards with known scenes")
    rows = measure(given.model, given.data, steps=given.steps.split(","), mask=given.mask, limit=given.limit)
    report(rows)
    name = Path(given.model).stem if Path(given.model).is_file() else given.model
    title = f"{name}: quality and time of sampling steps ({'GPU' if on_gpu() else 'CPU'})"
    given.out.mkdir(parents=True, exist_ok=True)
    numbers = given.out / "steps_quality.json"
    numbers.write_text(json.dumps({"title": title, "rows": [row._asdict() for row in rows]}, indent=1))
    print(f"wrote {numbers}")
    if importlib.util.find_spec("PIL") is not None:
        draw(rows, title).save(given.out / "steps_quality.png")
        print(f"wrote {given.out / 'steps_quality.png'}")
    return rows


def on_gpu() -> bool:
    """Whether the models ran on a GPU, which they do where there is one."""
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    main()
