"""Put trained weights into the package: set their default steps, complete their card, renew the checksums.

python tools/ship_weights.py runs/b/model.safetensors --name sader-s2-rgbn --steps 1 --card card.json
python tools/ship_weights.py runs/paper/model.safetensors --name sader-paper --steps 4 --start median
python tools/ship_weights.py --guide runs/g/guide.safetensors --name sader-guide-rgbn
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path

import torch

from sader.checkpoint import CHECKSUM_FILE, WEIGHTS_DIR, load_checkpoint, save_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", help="model.safetensors of a training run")
    parser.add_argument("--guide", type=Path, help="guide.safetensors of a guide's run")
    parser.add_argument("--name", required=True, help="name to ship under")
    parser.add_argument("--steps", type=int, default=1, help="default number of sampling steps")
    parser.add_argument("--start", choices=["zero", "median"], help="start of the sampling; default: the checkpoint's")
    parser.add_argument("--card", type=Path, help="JSON with keys to add to the card (training_data, licence, ...)")
    given = parser.parse_args()
    if given.guide is not None:
        target = WEIGHTS_DIR / "guides" / f"{given.name}.safetensors"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(given.guide, target)
    elif given.checkpoint is not None:
        loaded = load_checkpoint(given.checkpoint)
        extra = json.loads(given.card.read_text()) if given.card else {}
        sampling = {"steps": given.steps} | ({} if given.start is None else {"start": given.start})
        config = loaded.config.replace(name=given.name, diffusion=sampling)
        card = loaded.card | extra
        train = card.get("train")
        if isinstance(train, dict) and train.get("init"):  # a path of the training machine means nothing elsewhere
            card["train"] = train | {"init": Path(train["init"]).name}
            card["parent"] = str(card.get("parent", "")).rpartition("/")[2]
        target = WEIGHTS_DIR / f"{given.name}.safetensors"
        save_checkpoint(target, loaded.model, config, card=card, dtype=torch.float16)
    else:
        parser.error("name a checkpoint, or --guide FILE")
    files = sorted(WEIGHTS_DIR.rglob("*.safetensors"))
    lines = [f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.relative_to(WEIGHTS_DIR).as_posix()}" for f in files]
    (WEIGHTS_DIR / CHECKSUM_FILE).write_text("\n".join(lines) + "\n")
    print(f"wrote {target} ({target.stat().st_size / 2**20:.1f} MiB)")


if __name__ == "__main__":
    main()
