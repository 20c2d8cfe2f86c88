"""Print parameters and multiply-accumulates of every preset as a Markdown table (T=3, 256x256).

Run: python benchmarks/complexity.py   (the paper states 27.10 M and 346.56 GMAC per forward for sen2_mtc_new)
"""

from __future__ import annotations

from sader.evaluation.costs import describe
from sader.models import PRESETS


def main() -> None:
    print("| preset | parameters (M) | GMAC per forward | of which condition | evaluations | GMAC per sample |")
    print("|---|---|---|---|---|---|")
    for name in PRESETS:
        model = describe(name)
        cost = model.cost
        print(
            f"| {name} | {cost.parameters / 1e6:.2f} | {cost.gmacs_forward:.1f} | {cost.gmacs_condition:.1f} "
            f"| {cost.evaluations} | {cost.gmacs_sample:.1f} |"
        )


if __name__ == "__main__":
    main()
