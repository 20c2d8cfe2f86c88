"""Score systems on TriClear and write docs/results.md with its tables, figures and files.

    python benchmarks/results.py predict sader-paper@4+1 sader-paper@4+0 --data triclear
    python benchmarks/results.py predict emrdm=runs/emrdm/model.safetensors --data triclear
    python benchmarks/results.py page --data triclear
    python benchmarks/results.py page

`predict` writes WORK/predictions/SET/NAME.npz, one array for each item, on a GPU if there is one. NAME is MODEL,
MODEL@STEPS, MODEL@STEPS,GUIDE or MODEL@STEPS,START (zero or median). `page` scores these files and the controls as
`sader compare` does, keeps finished scores in WORK/scores, and writes

    benchmarks/results/SET/items.csv      the main metrics of every item and method
    benchmarks/results/samples.csv        training samples of the models, from the cards of their weights
    benchmarks/results/SET/table.md       means with intervals, tests and costs
    docs/results.md                       the tables between its marks; the text is not changed
    docs/images/results-{quality,pictures}.jpg
    benchmarks/results/README.md          learning curve, resampling, guides; resampling.jpg, systems.jpg

Methods without a file of predictions keep their rows of items.csv. Pictures are drawn where all of their methods have
one. Without --data nothing is scored.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sader.checkpoint import Checkpoint, find_checkpoint, load_checkpoint, read_header, shipped
from sader.data.items import Item
from sader.data.shards import fingerprint
from sader.evaluation.costs import Cost, model_cost
from sader.evaluation.data import open_data
from sader.evaluation.evaluate import chosen_metrics, score_methods
from sader.evaluation.figures import Point, draw_gallery, draw_pareto, example_of
from sader.evaluation.methods import RemoverMethod, StoredMethod, make_method, store_predictions
from sader.evaluation.report import Report, markdown, table_lines
from sader.evaluation.reproduce.setting import digest
from sader.evaluation.request import DataRequest
from sader.evaluation.scoring import Method, Results, load, save
from sader.evaluation.scoring import Row as ScoreRow
from sader.evaluation.statistics import Comparison, MethodSummary, compare_rows, summarise
from sader.files import file_digest, write_atomically
from sader.inference.remover import CloudRemover, RemoverOptions
from sader.method.diffusion import Denoiser
from sader.method.guides import GUIDES
from sader.models import BASELINES, ModelConfig, baseline_config, get_system, model_from_dict

ROOT = Path(__file__).parents[1]
PAPER = "sader-paper"
OWN = f"{PAPER}@4+1"
"""The paper's sampling: the row that all others are tested against."""
SHOWN = ("psnr", "psnr_unbiased", "ssim", "lpips", "sharpness")
FORMATS = {"psnr": ".2f", "psnr_unbiased": ".2f", "ssim": ".3f", "lpips": ".3f", "sharpness": ".2f"}
SNAPSHOT = "samples_"
"""Start of the names of states of the paper's network, followed by the samples they have seen."""
PAGED = ("4+0", "4+1", "5+0", "5+1")
"""Steps of the paper's network on the page; a start from 0 is on the page with those of `OWN` only."""
STARTS = ("zero", "median")
SIDE = 128
"""Pixels along a side for which costs are counted."""
WITHOUT_MASKS = ("median", "flat_colour (rules)", "masked_median (rules)", "local_ridge_blend (rules)")
WITH_MASKS = ("masked_median", "local_ridge_blend")
TRUTH = "flat_colour_of_truth"
MASKED = " (true masks)"
"""End of the name of a row whose model is given the true masks, where a table has both."""
PICTURED = ("masked_median (rules)", "local_ridge_blend (rules)", "sader-s2-rgbn", f"{PAPER}@4+0", OWN)

PICTURES = ("sen12mscr/ROIs1970_fall_85", "oscd/bordeaux", "bigearthnet/p110")
"""Starts of the names of the items in the pictures; the first item of each is drawn."""


@dataclass(frozen=True)
class Set:
    """A set of items and how its methods are given masks."""

    name: str
    folder: str
    task: str
    mask: str
    controls: tuple[str, ...] = ()

    def items(self, data: Path, limit: int | None) -> Sequence[Item]:
        """Return the items, all four bands."""
        return open_data(DataRequest((data / self.folder,), split="all", limit=limit)).items(self.task, None)


SETS = {
    each.name: each
    for each in (
        Set("paper-128", "test/paper-128", "paper", "own", (*WITHOUT_MASKS, *WITH_MASKS, TRUTH)),
        Set("clean-128", "test/clean-128", "clean", "own", (*WITHOUT_MASKS, TRUTH)),
        Set("clean-128-masks", "test/clean-128", "clean", "true", WITH_MASKS),
        Set("val-128", "val/paper-128", "paper", "own"),
    )
}


class Row(NamedTuple):
    """What the name of a row says: MODEL, MODEL@STEPS, MODEL@STEPS,GUIDE or MODEL@STEPS,START."""

    model: str
    steps: str | None
    guide: str | None
    """Of the resampling; None = the model's own."""
    start: str | None
    """Of the sampling, zero or median; None = the model's own."""


def parse_name(text: str) -> Row:
    """Return the parts of the name of a row."""
    model, _, rest = text.partition("@")
    steps, *words = rest.split(",")
    known = {"guide": GUIDES, "start": STARTS}
    parts = {what: next((word for word in words if word in names), None) for what, names in known.items()}
    return Row(model, steps or None, **parts)


def seen_by(model: str) -> int | None:
    """Return the samples that the name of a state of the paper's network says; None for other models."""
    return int(model.removeprefix(SNAPSHOT)) if model.startswith(SNAPSHOT) else None


def label_of(name: str) -> str:
    """Return the name of a row as the page prints it."""
    model, steps, guide, start = parse_name(name)
    seen = seen_by(model)
    if model == PAPER or seen:
        more = [f"state after {seen:,} samples"] if seen else []
        more += [f"guide {guide}"] if guide else []
        more += ["start 0, as printed" if start == "zero" else f"start {start}"] if start else []
        return ", ".join([f"SADER {steps or '4+1'}", *more])
    return get_system(model).label if model in BASELINES else name


# ------------------------------------------------------------------------------------------------ predictions


def predict(given: argparse.Namespace) -> None:
    """Write the predictions of the named models on the items of the sets; finished files are kept."""
    for text in given.names:
        name, _, weights = text.partition("=")
        model, steps, guide, start = parse_name(name)
        options = RemoverOptions(guide=guide, backend=given.backend)
        checkpoint = with_start(load_checkpoint(find_checkpoint(weights or model)), start)
        remover = CloudRemover(checkpoint, device=given.device, options=options)
        for chosen in map(SETS.__getitem__, given.sets):
            file = given.work / "predictions" / chosen.name / f"{name}.npz"
            if file.exists():
                print(f"{file} exists")
                continue
            method, started = RemoverMethod(remover, mask=chosen.mask, steps=steps), time.perf_counter()
            images = {item.name: method(item) for item in chosen.items(given.data, given.limit)}
            store_predictions(file, images)
            print(f"wrote {file}: {len(images)} items in {time.perf_counter() - started:.1f} s", flush=True)


def with_start(checkpoint: Checkpoint, start: str | None) -> Checkpoint:
    """Return a checkpoint whose sampling starts from zero or the median; None changes nothing."""
    if start is None or not isinstance(checkpoint.config, ModelConfig) or not isinstance(checkpoint.model, Denoiser):
        return checkpoint
    config = checkpoint.config.replace(diffusion={"start": start})
    return replace(checkpoint, model=Denoiser(checkpoint.model.network, config.diffusion).eval(), config=config)


# ------------------------------------------------------------------------------------------------ scores


def scored(chosen: Set, given: argparse.Namespace) -> Results:
    """Return the results of a set: controls and predictions, scored where they are missing, and stored rows."""
    rows = {} if given.limit else stored_rows(chosen, given)
    if given.data is not None:
        rows |= new_rows(chosen, given)
    names = [name for name in chosen.controls if name in rows]
    names += sorted((name for name in rows if name not in names), key=row_order)
    return Results(
        [row for name in names for row in rows[name]], {name: cost_of(name, given.weights) for name in names}
    )


def stored_rows(chosen: Set, given: argparse.Namespace) -> dict[str, list[ScoreRow]]:
    """Return method -> its rows in items.csv."""
    path, found = given.out / "benchmarks" / "results" / chosen.name / "items.csv", {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                scores = {key: float(line[key]) for key in SHOWN}
                row = plain_row(line["item"], line["place"], chosen.task, line["method"], scores)
                found.setdefault(line["method"], []).append(row)
    return found


def plain_row(item: str, place: str, task: str, method: str, scores: Mapping[str, float]) -> ScoreRow:
    """Return a row of what items.csv holds; dates, cover, pixels and times are not stored."""
    kept = {key: scores[key] for key in SHOWN} | {"seconds_per_megapixel": float("nan")}
    return ScoreRow(item, place, task, method, 0, float("nan"), 0, kept)


def new_rows(chosen: Set, given: argparse.Namespace) -> dict[str, list[ScoreRow]]:
    """Return method -> its rows, for the controls and every file of predictions."""
    files = sorted((given.work / "predictions" / chosen.name).glob("*.npz"))
    items = chosen.items(given.data, given.limit)
    data = {"items": fingerprint([str(given.data / chosen.folder)]), "limit": given.limit, "mask": chosen.mask}
    metrics, rows = chosen_metrics(None), {}
    for name, file in [*((name, None) for name in chosen.controls), *((file.stem, file) for file in files)]:
        key = digest({**data, "metrics": metrics, "method": name if file is None else file_digest(file)})
        folder = given.work / "scores" / chosen.name / name.replace(" ", "-")
        found = load(folder)
        if found is None or found.facts.get("key") != key:
            print(f"scoring {chosen.name} {name}", file=sys.stderr, flush=True)
            own = items if file is None else predicted_items(items, file)
            method = make_method(name) if file is None else StoredMethod(file)
            found = replace(score_methods(own, {name: method}, metrics), facts={"key": key})
            save(found, folder)
        rows[name] = [plain_row(row.item, row.group, row.task, row.method, row.scores) for row in found.rows]
    return rows


def predicted_items(items: Sequence[Item], file: Path) -> list[Item]:
    """Return the items that a file of predictions holds."""
    with np.load(file, allow_pickle=False) as arrays:
        return [item for item in items if item.name in arrays.files]


def complete(results: Results) -> Results:
    """Return the results of the methods that were scored on every item, without those of another guide."""
    items = {row.item for row in results.rows}
    counts = Counter(row.method for row in results.rows)
    kept = {name for name in counts if counts[name] == len(items) and parse_name(name).guide is None}
    return replace(results, rows=[row for row in results.rows if row.method in kept])


def on_page(results: Results) -> Results:
    """Return the results of the methods that stand on the page: those that are complete, without some samplings."""

    def paged(name: str) -> bool:
        _, steps, _, start = parse_name(name)
        return steps is None or (steps in PAGED and (start is None or steps == parse_name(OWN).steps))

    found = complete(results)
    return replace(found, rows=[row for row in found.rows if paged(row.method)])


def row_order(name: str) -> tuple[int, str]:
    """Return the place of a row: other systems, the product's model, states of the paper's network, the last one."""
    model = parse_name(name).model
    return 3 if model == PAPER else 2 if seen_by(model) else 1 if model in shipped() else 0, name


def cost_of(name: str, weights: Mapping[str, str]) -> Cost:
    """Return the counted cost of a row by its name; zero for a method without a known network."""
    model, steps, guide, _ = parse_name(name)
    model = PAPER if seen_by(model) else model
    if model in BASELINES:
        return model_cost(baseline_config(model), steps=steps, size=SIDE)
    if model not in shipped() and model not in weights:
        return Cost()
    config = model_from_dict(read_header(find_checkpoint(weights.get(model, model)))["config"])
    return model_cost(config, steps=steps, options=RemoverOptions(guide=guide), size=SIDE)


# ------------------------------------------------------------------------------------------------ tables


def main_table(results: Results, *, against: str, samples: Mapping[str, int]) -> list[str]:
    """Return the table of a task: means over places, cost, and tests over places against one of the rows."""
    summary = summarise(results.rows)
    against = against if against in results.methods else ""
    tests = comparisons(results, against) if against else {}
    bold = best_without_masks(summary.methods)
    heading = ["", "PSNR dB", "bias removed", "SSIM", "LPIPS", "sharpness", "evaluations, GMAC", "samples"]
    heading += [f"p against {title_of(against)}"] if against else []
    rows = []
    for method in summary.methods:
        cost, name = results.costs.get(method.method, Cost()), method.method
        numbers = [number(method.over_groups[key], key, bold=bold.get(key) == name) for key in SHOWN]
        run = f"{cost.evaluations}, {cost.gmacs_sample:.0f}" if cost.parameters else "-"
        model = parse_name(name).model
        seen = samples.get(model, seen_by(model))
        rows.append([title_of(name), *numbers, run, f"{seen:,}" if seen else "-"])
        if against:
            rows[-1].append(p_text(tests[name].p_places) if name in tests else "")
    return table_lines(heading, rows)


def title_of(name: str) -> str:
    """Return the first cell of a row; controls say which masks they use."""
    if name in WITH_MASKS or name.endswith(MASKED):
        return f"{label_of(name.removesuffix(MASKED)).replace('_', ' ')}, true masks"
    if name == TRUTH:
        return "flat colour of the truth"
    return label_of(name).replace("_", " ").replace(" (rules)", ", rules")


def best_without_masks(methods: Iterable[MethodSummary]) -> dict[str, str]:
    """Return metric -> the best method that gets neither true masks nor the truth."""
    fair = [m for m in methods if m.method not in (*WITH_MASKS, TRUTH) and not m.method.endswith(MASKED)]
    signs = {"psnr": 1, "psnr_unbiased": 1, "ssim": 1, "lpips": -1}
    return {key: max(fair, key=lambda m: sign * m.over_groups[key]).method for key, sign in signs.items() if fair}


def comparisons(results: Results, against: str, metric: str = "psnr_unbiased") -> dict[str, Comparison]:
    """Return method -> its paired comparison with `against`."""
    return {each.method: each for each in compare_rows(results.rows, against=against, metrics=[metric])}


def number(value: float, metric: str, *, bold: bool = False) -> str:
    """Return a mean as text."""
    text = f"{value:{FORMATS[metric]}}" if np.isfinite(value) else "-"
    return f"**{text}**" if bold else text


def p_text(value: float) -> str:
    """Return a p value as text."""
    return "< .001" if value < 0.001 else f"{value:.3f}"


def plain_table(results: Results, names: Sequence[str], *, against: str) -> list[str]:
    """Return a table of means over places on the items that all `names` were scored on, tested against one of them."""
    own = {name: {row.item for row in results.rows if row.method == name} for name in names}
    shared = set.intersection(*own.values()) if own else set()
    chosen = replace(results, rows=[row for row in results.rows if row.method in names and row.item in shared])
    tests = comparisons(chosen, against)
    rows = [
        [
            title_of(m.method),
            *(number(m.over_groups[key], key) for key in SHOWN),
            p_text(tests[m.method].p_places) if m.method in tests else "",
        ]
        for m in summarise(chosen.rows).methods
    ]
    places = len({row.group for row in chosen.rows})
    heading = ["", "PSNR dB", "bias removed", "SSIM", "LPIPS", "sharpness", f"p against {title_of(against)}"]
    return [f"{len(shared)} items in {places} places.", "", *table_lines(heading, rows)]


# ------------------------------------------------------------------------------------------------ figures


def quality_figure(results: Results, file: Path) -> None:
    """Draw quality (bias removed, mean over places) against parameters and cost, without earlier states."""
    points = [
        Point(
            name=title_of(method.method),
            quality=method.over_groups["psnr_unbiased"],
            parameters=results.costs[method.method].parameters / 1e6,
            gmacs=results.costs[method.method].gmacs_sample,
        )
        for method in summarise(results.rows).methods
        if method.method not in (*WITH_MASKS, TRUTH) and not seen_by(parse_name(method.method).model)
    ]
    title = "TriClear test/paper-128, no masks: PSNR with band bias removed; GMAC of 3 x 128 x 128 pixels"
    save_picture(draw_pareto(points, title=title, quality="PSNR dB, bias removed"), file)


def pictures_figure(items: Mapping[str, Item], methods: Mapping[str, Method], results: Results, file: Path) -> None:
    """Draw dates, target, results and errors of some items."""
    images = {title_of(name): [method(item) for item in items.values()] for name, method in methods.items()}
    scores = {(row.item, title_of(row.method)): row.scores["psnr"] for row in results.rows if row.method in methods}
    examples = [replace(example_of(item), name=name) for name, item in items.items()]
    save_picture(draw_gallery(examples, images, title="TriClear test/paper-128, no masks given", scores=scores), file)


def resampling_figure(items: Mapping[str, Item], before: Method, after: Method, file: Path) -> None:
    """Draw for some items the target, 4+0, 4+1, the change, and both errors."""
    from sader.figures.picture import Panel, compose, error_picture, heat_picture, stretch_limits, true_colour

    rows = []
    for name, item in items.items():
        limits = stretch_limits([item.clear], bands=item.bands)
        first, second = before(item), after(item)
        change = np.abs(second - first).mean(0)
        rows.append(
            [
                Panel(true_colour(item.clear, bands=item.bands, limits=limits), f"target ({name})"),
                Panel(true_colour(first, bands=item.bands, limits=limits), "4+0"),
                Panel(true_colour(second, bands=item.bands, limits=limits), "4+1"),
                Panel(heat_picture(change, full_scale=0.05), "change by resampling"),
                Panel(error_picture(first, item.clear, bands=item.bands, full_scale=0.05), "error of 4+0"),
                Panel(error_picture(second, item.clear, bands=item.bands, full_scale=0.05), "error of 4+1"),
            ]
        )
    note = "Change and errors: black 0, pale yellow 0.05 reflectance."
    save_picture(compose(rows, title="Where resampling acts", note=note, panel_width=176), file)


def save_picture(figure: object, file: Path) -> None:
    """Write a figure as JPEG."""
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.convert("RGB").save(file, quality=88)  # type: ignore[attr-defined]


def chosen_items(items: Sequence[Item], names: Sequence[str]) -> dict[str, Item]:
    """Return the items whose names start with one of `names`, the first each."""
    found = {}
    for name in names:
        item = next((item for item in items if item.name.startswith(name)), None)
        if item is not None:
            found[item.name] = item
    return found


# ------------------------------------------------------------------------------------------------ page


def page(given: argparse.Namespace) -> None:
    """Score what is missing and write the page and its files."""
    beside, images = given.out / "benchmarks" / "results", given.out / "docs" / "images"
    samples = training_samples(beside / "samples.csv", given)
    results = {name: scored(chosen, given) for name, chosen in SETS.items() if has_rows(chosen, given)}
    for name, found in results.items():
        if name != "val-128":
            write_files(complete(found), SETS[name], beside / name)
    main, clean = results["paper-128"], [results[name] for name in ("clean-128", "clean-128-masks") if name in results]
    tables = {"paper": main_table(on_page(main), against=OWN, samples=samples)}
    if clean:
        tables["clean"] = main_table(both_masks(clean), against="sader-s2-rgbn", samples={})
    fill_page(given.out / "docs" / "results.md", tables)
    quality_figure(on_page(main), images / "results-quality.jpg")
    if given.data is not None:
        write_pictures(main, given, images, beside)
    sections = {"resampling": [n for n in main.methods if parse_name(n).model == PAPER and not parse_name(n).guide]}
    tried = {parse_name(n)._replace(guide=None) for n in main.methods if parse_name(n).guide}
    sections["guides"] = [n for n in main.methods if parse_name(n)._replace(guide=None) in tried]
    tables = {name: plain_table(main, names, against=OWN) for name, names in sections.items() if len(names) > 1}
    if "val-128" in results:
        states = results["val-128"].methods
        for name, start in (("curve", None), ("curve from 0", "zero")):
            same = [state for state in states if parse_name(state).start == start]
            tables |= {name: plain_table(results["val-128"], same, against=same[-1])} if len(same) > 1 else {}
    fill_page(beside / "README.md", tables)


def write_pictures(main: Results, given: argparse.Namespace, images: Path, beside: Path) -> None:
    """Draw the pictures of the page whose methods all have predictions."""
    folder, items = given.work / "predictions" / "paper-128", SETS["paper-128"].items(given.data, given.limit)
    shown = chosen_items(items, given.pictures) or {items[0].name: items[0]}

    def methods(names: Sequence[str]) -> dict[str, Method]:
        """Return name -> its predictions; nothing where one of them is missing."""
        files = {name: folder / f"{name}.npz" for name in names if name not in SETS["paper-128"].controls}
        if not all(file.exists() for file in files.values()):
            return {}
        return {name: StoredMethod(files[name]) if name in files else make_method(name) for name in names}

    if pictured := methods([name for name in PICTURED if name in main.methods]):
        pictures_figure(shown, pictured, main, images / "results-pictures.jpg")
    if systems := methods([name for name in main.methods if name in (*BASELINES, OWN)]):
        pictures_figure(shown, systems, main, beside / "systems.jpg")
    if resampled := methods([f"{PAPER}@4+0", OWN]):
        resampling_figure(shown, *resampled.values(), beside / "resampling.jpg")


def both_masks(results: Sequence[Results]) -> Results:
    """Return the results without and with given masks as one table; models with masks get another name."""
    first, *more = map(complete, results)
    rows, costs = list(first.rows), dict(first.costs)
    for other in more:
        names = {name: name if name in WITH_MASKS else f"{name}{MASKED}" for name in other.methods}
        rows += [replace(row, method=names[row.method]) for row in other.rows]
        costs |= {names[name]: cost for name, cost in other.costs.items() if name in names}
    return Results(rows, costs)


def has_rows(chosen: Set, given: argparse.Namespace) -> bool:
    """Return whether the set has stored rows, or items with controls or predictions."""
    if (given.out / "benchmarks" / "results" / chosen.name / "items.csv").exists():
        return True
    predictions = any((given.work / "predictions" / chosen.name).glob("*.npz"))
    return given.data is not None and (given.data / chosen.folder).exists() and (predictions or bool(chosen.controls))


def training_samples(path: Path, given: argparse.Namespace) -> dict[str, int]:
    """Return model -> training samples: those stored, and those of the weights at hand, which are stored too."""
    found = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            found = {line["model"]: int(line["samples"]) for line in csv.DictReader(file)}
    found |= {name: count for name in (PAPER, *BASELINES) if (count := samples_of(name, given))}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("model", "samples"), *sorted(found.items())])
    return found


def samples_of(name: str, given: argparse.Namespace) -> int | None:
    """Return the training samples that the card of a system's weights states; None without its weights."""
    if name not in shipped() and name not in given.weights:
        return None
    card = read_header(find_checkpoint(given.weights.get(name, name)))["card"]
    return card.get("samples", card.get("series_seen"))


def write_files(results: Results, chosen: Set, folder: Path) -> None:
    """Write table.md with all tests and costs, and items.csv with the main metrics of every item."""
    against = OWN if OWN in results.methods else None
    tests = compare_rows(results.rows, against=against, metrics=SHOWN[:4]) if against else []
    title = f"TriClear {chosen.folder}, task {chosen.task}, masks of the models: {chosen.mask}"
    report = Report(title, results, summarise(results.rows), tests, metric="psnr_unbiased")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "table.md", markdown(report).encode())
    heading = ["item", "place", "method", *SHOWN]
    with (folder / "items.csv").open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(heading)
        for row in results.rows:
            lines.writerow([row.item, row.group, row.method, *(f"{row.scores[key]:.6g}" for key in SHOWN)])


def fill_page(file: Path, tables: Mapping[str, Sequence[str]]) -> None:
    """Replace what stands between `<!-- NAME -->` and `<!-- end -->` for each table that is there."""
    text = file.read_text(encoding="utf-8")
    for name, lines in tables.items():
        start, _, rest = text.partition(f"<!-- {name} -->\n")
        _, _, after = rest.partition("<!-- end -->")
        if rest:
            text = "".join([start, f"<!-- {name} -->\n", "\n".join(lines), "\n<!-- end -->", after])
    write_atomically(file, text.encode())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--data", type=Path, help="folder of `sader data benchmark`")
    shared.add_argument("--work", type=Path, default=Path("runs/results"), help="folder of predictions and scores")
    shared.add_argument("--limit", type=int, help="items of each place")
    one = commands.add_parser("predict", parents=[shared], help="write predictions")
    one.add_argument("names", nargs="+", metavar="NAME[=WEIGHTS]")
    one.add_argument("--sets", nargs="+", default=["paper-128"], choices=SETS)
    one.add_argument("--device")
    one.add_argument("--backend", default="torch", choices=["torch", "accelerated"])
    one.set_defaults(run=predict)
    two = commands.add_parser("page", parents=[shared], help="score and write the page")
    two.add_argument("--weights", nargs="*", default=[], metavar="MODEL=FILE", help="weights of models by name")
    two.add_argument("--pictures", nargs="*", default=PICTURES, help="starts of the names of pictured items")
    two.add_argument("--out", type=Path, default=ROOT, help="folder with docs/ and benchmarks/")
    two.set_defaults(run=page)
    given = parser.parse_args(arguments)
    if given.run is page:
        given.weights = dict(text.split("=", 1) for text in given.weights)
    elif given.data is None:
        parser.error("predict needs --data, the folder of `sader data benchmark`")
    given.run(given)


if __name__ == "__main__":
    main()
