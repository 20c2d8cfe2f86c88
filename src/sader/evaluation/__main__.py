"""`python -m sader.evaluation MODEL... --data SHARDS`: the same as `sader evaluate`, with argparse alone."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from sader.errors import SaderError
from sader.evaluation.methods import MASKS
from sader.evaluation.run import TASKS, EvaluationRequest, run_evaluation
from sader.evaluation.summary import markdown


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0, or 2 where the input is at fault."""
    parser = argparse.ArgumentParser(prog="python -m sader.evaluation", description="Score models on known truth.")
    parser.add_argument("models", nargs="*", help="shipped names, checkpoint files or classical names")
    parser.add_argument("--data", nargs="+", type=Path, required=True, help="shards or folders of scenes")
    parser.add_argument("--task", default="clean", choices=TASKS)
    parser.add_argument("--mask", default="true", choices=MASKS)
    parser.add_argument("--steps", default=None)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--guide", help="of the resampling: none, mean, conv, mae")
    parser.add_argument("--dates", type=int, default=None)
    parser.add_argument("--limit", type=int, default=None, help="items per place")
    parser.add_argument("--split", default="val", choices=("val", "train", "all", "test"))
    parser.add_argument("--dataset", default=None, help="--data is this public dataset (sader data list)")
    parser.add_argument("--sampler", default="leak_free")
    parser.add_argument("--protocol", default=None, help="mtc_stretch beside reflectance, or reflectance alone")
    parser.add_argument("--lists", default=None, help="folder, frozen, hash, or a list file")
    parser.add_argument("--partial", action="store_true", help="use the places on disk")
    parser.add_argument("--coverage", default="auto", help="SEN12MS-CR-TS: auto, masks, rules or a table")
    parser.add_argument("--clouds", nargs="*", type=Path, default=[], help="labelled places to take clouds from")
    parser.add_argument("--lpips", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--rules", action="store_true", help="also classical methods with rule-based masks")
    parser.add_argument("--pictures", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--json", action="store_true", dest="as_json")
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args(arguments))
    as_json = options.pop("as_json")
    for name in ("models", "data", "clouds"):
        options[name] = tuple(options[name])
    try:
        request = EvaluationRequest(**options)
        result = run_evaluation(request, lambda done, name: print(f"{done:4d} {name}", file=sys.stderr))
    except SaderError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps({**result.facts, **result.summary.as_dict()}, indent=2))
    else:
        print(markdown(result.summary, title=request.dataset or request.task))
    return 0


if __name__ == "__main__":
    sys.exit(main())
