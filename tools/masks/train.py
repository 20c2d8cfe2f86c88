"""Train the mask network on one GPU for a given time.

    python train.py data.pack OUT --seconds 300 [--resume FOLDER] [--tiny]

Writes OUT/mask.safetensors (averaged weights), OUT/model.pt and OUT/optimizer.pt (to resume) every minute and
OUT/log.txt with validation scores. Needs PyTorch, NumPy and safetensors.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import math
import queue
import threading
import time
from collections.abc import Generator
from pathlib import Path

import torch
from compose import (
    CLEAR,
    HIDDEN,
    LAND,
    NOT_THICK,
    SHADOW,
    SNOW,
    THICK,
    THIN,
    UNKNOWN,
    WATER,
    Batch,
    Composer,
    ComposeSettings,
    Cut,
    Store,
    decode_pack,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sader.model.heads import HIDDEN_CLASSES, MASK_BANDS, MASK_CLASSES, MaskNetwork, MaskNetworkConfig

HIDDEN_LABELS, CLEAR_LABELS = (THICK, THIN, SHADOW, HIDDEN), (LAND, WATER, SNOW, CLEAR)
LABEL_WEIGHTS = {LAND: 1.0, THICK: 1.0, THIN: 1.5, SHADOW: 1.8, WATER: 1.5, SNOW: 1.5, CLEAR: 1.0, HIDDEN: 1.0}
MISS = 2.2
"""Weight of a missed cloud or shadow relative to a false one."""


class MaskLoss(nn.Module):
    """Negative log-probability of the set of classes that a label allows, and of hidden against visible."""

    def __init__(self) -> None:
        super().__init__()
        allowed = torch.zeros(10, len(MASK_CLASSES), dtype=torch.bool)
        for code in (LAND, THICK, THIN, SHADOW, WATER, SNOW):
            allowed[code, code] = True
        allowed[CLEAR, [LAND, WATER, SNOW]] = True
        allowed[HIDDEN, list(HIDDEN_CLASSES)] = True
        allowed[NOT_THICK, [LAND, WATER, SNOW, THIN]] = True
        allowed[9] = True
        self.register_buffer("allowed", allowed)
        self.register_buffer("weight", torch.tensor([*(LABEL_WEIGHTS.get(code, 0.5) for code in range(9)), 0.0]))
        side = torch.zeros(10)
        side[list(HIDDEN_LABELS)] = MISS
        side[list(CLEAR_LABELS)] = -1.0
        side[[WATER, SNOW]] = -3.0
        self.register_buffer("side", side)

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        code = torch.where(labels == UNKNOWN, 9, labels).long()
        log_p = scores.float().log_softmax(1)
        allowed = self.allowed[code].movedim(-1, 1)
        exact = -torch.logsumexp(log_p.masked_fill(~allowed, -1e4), 1) * self.weight[code]
        hidden = torch.logsumexp(log_p[:, 1:4], 1)
        shown = torch.logsumexp(torch.cat([log_p[:, :1], log_p[:, 4:]], 1), 1)
        side = self.side[code]
        binary = -torch.where(side > 0, hidden, shown) * side.abs()
        known = (code != 9).float()
        return ((exact + 0.5 * binary).clamp(max=20) * known).sum() / known.sum().clamp(min=1)


def real_batches(store: Store, *, four_bands: bool, alone: bool = False) -> list[Batch]:
    """Return one batch per labelled validation place: all of its dates as they are."""
    batches = []
    for place in store.places:
        if not place.source.startswith("cloudsen12"):
            continue
        dates = len(place.images)
        size = min(place.height, place.width) // 32 * 32
        cut = Cut.of([(i, 0, 0, place.height, place.width, 0, 1) for i in place.images], store.device)
        image, labels, seen = store.sample(cut, size)
        present = torch.tensor(store.present[place.images], device=store.device)
        if four_bands:
            present = present & torch.tensor(
                [b in ("B02", "B03", "B04", "B08") for b in MASK_BANDS], device=store.device
            )
        links = torch.zeros(dates, dates, device=store.device) if alone else 1 - torch.eye(dates, device=store.device)
        use = present[:, :, None, None] & seen[:, None]
        batches.append(Batch(image.masked_fill(~use, 0.0), seen, present, labels, links))
    return batches


def reference_batches(store: Store) -> list[Batch]:
    """Return one batch per labelled validation place and cloudy date: a clear date with the clouds of that date, which
    is left out, beside the others; only the clear date has labels."""
    batches = []
    for place in store.places:
        if place.source != "cloudsen12":
            continue
        best = store.clearest(place)
        size = min(place.height, place.width) // 32 * 32
        for donor in place.images:
            used = [best, *(i for i in place.images if i not in (best, donor))]
            cut = Cut.of([(i, 0, 0, place.height, place.width, 0, 1) for i in (*used, donor)], store.device)
            image, labels, seen = store.sample(cut, size)
            copied = (labels[-1] >= THICK) & (labels[-1] <= SHADOW) & seen[0]
            if donor == best or copied.float().mean() < 0.02:
                continue
            image[0] = torch.where(copied, image[-1], image[0])
            labels[0] = torch.where(copied, labels[-1], labels[0])
            labels[1:] = UNKNOWN
            present = torch.tensor([b in ("B02", "B03", "B04", "B08") for b in MASK_BANDS], device=store.device)
            present = present.expand(len(used), -1)
            use = present[:, :, None, None] & seen[:-1, None]
            links = 1 - torch.eye(len(used), device=store.device)
            batches.append(Batch(image[:-1].masked_fill(~use, 0.0), seen[:-1], present, labels[:-1], links))
    return batches


@torch.no_grad()
def validate(network: MaskNetwork, batches: list[Batch]) -> dict[str, float]:
    """Return recall, precision, false alarms and class scores over the batches."""
    confusion = torch.zeros(9, len(MASK_CLASSES), device=batches[0].images.device)
    low = torch.zeros(9, 100, device=confusion.device)
    for batch in batches:
        with torch.autocast(confusion.device.type, torch.bfloat16, enabled=confusion.is_cuda):
            scores, _ = network.scores(batch.images, batch.seen, batch.present, batch.links)
        p = scores.float().softmax(1)
        known = batch.labels != UNKNOWN
        code = batch.labels[known].long()
        best = p.argmax(1)[known]
        confusion += torch.bincount(code * 6 + best, minlength=54).reshape(9, 6)
        level = (p[:, list(HIDDEN_CLASSES)].sum(1)[known] * 100).long().clamp(max=99)
        low += torch.bincount(code * 100 + level, minlength=900).reshape(9, 100)
    confusion, low = confusion.cpu(), low.cpu()
    hidden = confusion[:, list(HIDDEN_CLASSES)].sum(1)
    total = confusion.sum(1)

    def share(part: Tensor, whole: Tensor) -> float:
        return round(float(part.sum() / whole.sum().clamp(min=1)), 4)

    is_hidden, is_clear = list(HIDDEN_LABELS), list(CLEAR_LABELS)
    above = low.flip(1).cumsum(1).flip(1)
    recalls = above[is_hidden].sum(0) / total[is_hidden].sum().clamp(min=1)
    alarms = above[is_clear].sum(0) / total[is_clear].sum().clamp(min=1)
    true, false = hidden[is_hidden].sum(), hidden[is_clear].sum()
    result = {
        "recall": share(hidden[is_hidden], total[is_hidden]),
        "alarm": share(hidden[is_clear], total[is_clear]),
        "iou": round(float(true / (total[is_hidden].sum() + false).clamp(min=1)), 4),
        "recall@.3": round(float(recalls[30]), 4),
        "alarm@.3": round(float(alarms[30]), 4),
    }
    for wanted in (0.95, 0.97, 0.98):
        level = int((recalls >= wanted).sum()) - 1
        result[f"alarm at recall {wanted}"] = round(float(alarms[max(level, 0)]), 4)
    for code, name in ((THICK, "thick"), (THIN, "thin"), (SHADOW, "shadow")):
        result[f"found {name}"] = share(hidden[code], total[code])
    for code, name in ((WATER, "water"), (SNOW, "snow")):
        result[f"alarm {name}"] = share(hidden[code], total[code])
        result[f"named {name}"] = share(confusion[code, code], total[code])
    return result


def batches_ahead(composer: Composer) -> Generator[Batch]:
    """Yield batches; on a GPU a thread composes the next ones on a stream of its own meanwhile."""
    if composer.device.type != "cuda":
        while True:
            yield composer.draw()
    ready: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=2)
    stop = threading.Event()
    consumer = torch.cuda.current_stream()

    def compose() -> None:
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(consumer)
            with torch.no_grad(), torch.cuda.stream(stream):
                while not stop.is_set():
                    batch = composer.draw()
                    stream.synchronize()
                    ready.put(batch)
        except BaseException as error:
            ready.put(error)

    thread = threading.Thread(target=compose, daemon=True)
    thread.start()
    try:
        while True:
            batch = ready.get()
            if isinstance(batch, BaseException):
                raise batch
            for part in (batch.images, batch.seen, batch.present, batch.labels, batch.links):
                part.record_stream(consumer)
            yield batch
    finally:
        stop.set()
        while thread.is_alive():  # it may be waiting for a free place in the queue
            with contextlib.suppress(queue.Empty):
                ready.get(timeout=0.05)


class Trainer:
    """Weights, their average and the optimiser, with saving and resuming."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config = MaskNetworkConfig((8, 16, 24, 32, 32), (1,) * 5) if args.tiny else MaskNetworkConfig()
        torch.manual_seed(args.seed)
        self.network = MaskNetwork(config).to(self.device, memory_format=torch.channels_last)
        decayed = [p for p in self.network.parameters() if p.ndim > 1]
        others = [p for p in self.network.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}]
        on_gpu = self.device.type == "cuda"
        rate = torch.tensor(args.lr, device=self.device) if on_gpu else args.lr
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=on_gpu, capturable=on_gpu)
        self.average = copy.deepcopy(self.network).eval().requires_grad_(False)
        self.steps = 0
        self.pairs: tuple = ()
        if args.resume:
            weights = load_file(args.resume / "mask.safetensors")
            own = self.average.state_dict()
            self.average.load_state_dict({k: weights[k].to(self.device) for k in own})
            state = {"network": self.average.state_dict(), "steps": 1000}  # averaged weights where there are no others
            if (args.resume / "model.pt").exists():
                state = torch.load(args.resume / "model.pt", map_location=self.device, weights_only=True)
            self.network.load_state_dict(state["network"])
            self.steps = state["steps"]
            path = args.resume / "optimizer.pt"
            if path.exists():
                self._load_moments(torch.load(path, map_location=self.device, weights_only=True))

    def _load_moments(self, moments: dict[str, list[Tensor]]) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for p, first, second in zip(parameters, moments["first"], moments["second"], strict=True):
            step = torch.tensor(float(self.steps), device=self.device)
            self.optimizer.state[p] = {"step": step, "exp_avg": first.float(), "exp_avg_sq": second.float()}

    def follow(self) -> None:
        """Move the averaged weights and statistics towards the current ones."""
        if not self.pairs:
            pairs = zip(self.average.state_dict().values(), self.network.state_dict().values(), strict=True)
            self.pairs = tuple(zip(*((a, b) for a, b in pairs if a.is_floating_point()), strict=True))
        decay = min(0.998, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(list(self.pairs[0]), list(self.pairs[1]), 1 - decay)

    def save(self, out: Path) -> None:
        state = {"network": self.network.state_dict(), "steps": self.steps}
        weights = {k: v.detach().float().cpu().contiguous() for k, v in self.average.state_dict().items()}
        config = json.dumps(dataclasses.asdict(self.network.config))
        save_file(weights, out / "mask.safetensors", metadata={"config": config, "steps": str(self.steps)})
        torch.save(state, out / "model.pt.tmp")
        (out / "model.pt.tmp").replace(out / "model.pt")
        order = [p for group in self.optimizer.param_groups for p in group["params"]]
        states = [self.optimizer.state[p] for p in order]
        if all("exp_avg" in s for s in states):
            first = [s["exp_avg"].bfloat16() for s in states]
            second = [s["exp_avg_sq"].bfloat16() for s in states]
            torch.save({"first": first, "second": second}, out / "optimizer.pt.tmp")
            (out / "optimizer.pt.tmp").replace(out / "optimizer.pt")


class Step:
    """One optimiser step; on a GPU captured as a CUDA graph, which all batches share."""

    def __init__(self, trainer: Trainer, criterion: MaskLoss, composer: Composer) -> None:
        self.trainer, self.criterion, self.graph = trainer, criterion, None
        if trainer.device.type != "cuda":
            return
        trainer.network.train()
        self.batch = composer.draw()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        for group in trainer.optimizer.param_groups:
            group["lr"].fill_(1e-6)
        with torch.cuda.stream(side):
            for _ in range(4):
                self.run(self.batch)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.loss = self.run(self.batch)
        self.graph = graph

    def run(self, batch: Batch) -> Tensor:
        trainer, network = self.trainer, self.trainer.network
        trainer.optimizer.zero_grad(set_to_none=True)
        on_gpu = trainer.device.type == "cuda"
        with torch.autocast(trainer.device.type, torch.bfloat16, enabled=on_gpu, cache_enabled=False):
            scores, coarse = network.scores(batch.images, batch.seen, batch.present, batch.links)
        loss = self.criterion(scores, batch.labels) + 0.3 * self.criterion(coarse, batch.labels[:, 1::4, 1::4])
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        trainer.optimizer.step()
        return loss.detach()

    def __call__(self, batch: Batch) -> Tensor:
        if self.graph is None:
            return self.run(batch)
        for name in ("images", "seen", "present", "labels", "links"):
            getattr(self.batch, name).copy_(getattr(batch, name))
        self.graph.replay()
        return self.loss


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("pack", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0, help="training time, without loading and validation")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, default=None)
    parser.add_argument("--check-every", type=float, default=60.0, help="seconds between validations")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--tiny", action="store_true", help="small network and crops, to try the program")
    return parser.parse_args()


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    log_file = open(args.out / "log.txt", "a")  # noqa: SIM115

    def log(text: str) -> None:
        print(text, flush=True)
        log_file.write(text + "\n")
        log_file.flush()

    start = time.perf_counter()
    torch.backends.cudnn.benchmark = True
    images = decode_pack(args.pack, workers=args.workers)
    trainer = Trainer(args)
    device, network = trainer.device, trainer.network
    train_store, val_store = (Store(images, split, device) for split in ("train", "val"))
    del images
    settings = ComposeSettings(size=64, sizes=(1, 1, 2, 2, 3, 3)) if args.tiny else ComposeSettings()
    composer = Composer(train_store, seed=args.seed + 1000 * trainer.steps, settings=settings)
    val_sizes = dataclasses.replace(
        settings, sizes=(3,) * (2 if args.tiny else 20), snow=0.0, water=0.0, bright=0.0, nodata=0.0
    )
    val_composer = Composer(val_store, seed=7, settings=val_sizes)
    snow_composer = Composer(val_store, seed=8, settings=dataclasses.replace(val_sizes, snow=1.0))
    coming = batches_ahead(composer)
    checks = {
        "reference, 4 bands": reference_batches(val_store),
        "real 4 bands": real_batches(val_store, four_bands=True),
        "real 4 bands, each date alone": real_batches(val_store, four_bands=True, alone=True),
        "real all bands": real_batches(val_store, four_bands=False),
        "composed": [val_composer.draw() for _ in range(1 if args.tiny else 5)],
        "composed, snow": [snow_composer.draw() for _ in range(1 if args.tiny else 2)],
    }
    count = sum(p.numel() for p in network.parameters()) / 1e6
    log(
        f"{device}: {count:.2f} M parameters, {len(train_store.meta)} images, {len(train_store.donors())} donors, "
        f"{sum(settings.sizes)} dates a step; ready after {time.perf_counter() - start:.0f} s"
    )
    criterion = MaskLoss().to(device)
    step = Step(trainer, criterion, composer)
    log(f"step ready after {time.perf_counter() - start:.0f} s")
    spent, checked, saved, running = 0.0, 0.0, 0.0, []
    while spent < args.seconds:
        began = time.perf_counter()
        progress = spent / args.seconds
        rate = min(1.0, (progress + 1e-3) / 0.03) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in trainer.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(args.lr * rate)
            else:
                group["lr"] = args.lr * rate
        network.train()
        loss = step(next(coming))
        trainer.steps += 1
        trainer.follow()
        if trainer.steps % 20 == 0:
            running.append(float(loss))
            assert math.isfinite(running[-1]), f"the loss is {running[-1]} at step {trainer.steps}"
        spent += time.perf_counter() - began
        done = spent >= args.seconds
        if spent - checked >= args.check_every or done:
            checked, recent = spent, running[-20:]
            mean = sum(recent) / max(len(recent), 1)
            log(f"step {trainer.steps} at {spent:.0f} s: loss {mean:.4f}")
            for name, batches in checks.items():
                log(f"  {name}: {json.dumps(validate(trainer.average, batches))}")
        if spent - saved >= 60 or done:
            saved = spent
            trainer.save(args.out)
    coming.close()
    if device.type == "cuda":
        log(f"memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, total {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
