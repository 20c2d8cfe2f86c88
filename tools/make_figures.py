"""Draw the figures of docs/ from the built-in scene and the shipped weights.

Run: python tools/make_figures.py [NAME ...]      (all figures take about two minutes on two cores)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import sader
from sader.checkpoint import shipped_guide
from sader.data.synthetic.scene import SyntheticSeries, demo_scene
from sader.demo import demo_scene as real_scene
from sader.figures.picture import (
    Panel,
    Picture,
    compose,
    error_picture,
    heat_picture,
    mask_picture,
    stretch_limits,
    true_colour,
)
from sader.method.diffusion import MeanReverting, sample
from sader.method.guides import make_guide
from sader.method.losses import CloudAwareLoss, CloudAwareLossConfig, cloud_thickness
from sader.method.resampling import Resampler, ResamplerConfig, cloud_cover, fuse, outlier_mask
from sader.model.blocks import to_model_range, to_reflectance

IMAGES = Path(__file__).parents[1] / "docs" / "images"
ROWS, COLUMNS = slice(0, 256), slice(128, 384)
"""Drawn part of the scene: thick cloud, thin cloud, shadow, fields and a road."""
WIDE = 210
"""Width of a panel in pixels."""


def scene() -> SyntheticSeries:
    """Return the drawn part of the built-in scene."""
    whole = demo_scene()
    return SyntheticSeries(
        cloudy=np.ascontiguousarray(whole.cloudy[..., ROWS, COLUMNS]),
        clear=np.ascontiguousarray(whole.clear[..., ROWS, COLUMNS]),
        cloud_mask=np.ascontiguousarray(whole.cloud_mask[..., ROWS, COLUMNS]),
        days=whole.days,
        bands=whole.bands,
        reference=whole.reference,
    )


def colours(series: SyntheticSeries) -> Callable[[NDArray[np.floating]], Picture]:
    """Return a function that draws an image with the stretch of the truth."""
    limits = stretch_limits([series.clear], bands=series.bands)
    return lambda image: true_colour(image, bands=series.bands, limits=limits)


def save(name: str, rows: list[list[Panel]]) -> None:
    """Write a figure as PNG with 256 colours."""
    target = IMAGES / f"{name}.png"
    compose(rows, panel_width=WIDE).quantize(256).save(target, format="PNG", optimize=True)
    print(f"wrote {target.name}: {target.stat().st_size / 1000:.0f} kB")


def diffusion() -> None:
    """The forward process of the paper at growing noise levels, without and with noise."""
    series = scene()
    process = MeanReverting(sader.get_preset("sen2_mtc_new").diffusion)
    clear = to_model_range(torch.from_numpy(series.clear))[None]
    mean = to_model_range(torch.from_numpy(series.cloudy))[None]
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(0))
    show = colours(series)
    rows: list[list[Panel]] = [[], []]
    for level in (0.0, 0.1, 0.3, 1.0, 40.0):
        sigma = torch.tensor([level])
        scale = 1 / (1 + process.config.alpha * level)
        for row, one in zip(rows, (0 * noise, noise), strict=True):
            state = scale * process.noised(clear, mean, sigma, one)[0, 0]
            kind = "no noise" if row is rows[0] else "with noise"
            row.append(Panel(show(to_reflectance(state).numpy()), f"sigma {level:g}, {kind}"))
    save("diffusion", rows)


def loss() -> None:
    """Thickness of the clouds and pixel weights of the loss."""
    series = scene()
    clear = to_model_range(torch.from_numpy(series.clear))[None]
    cloudy = to_model_range(torch.from_numpy(series.cloudy))[None]
    show = colours(series)
    above = [Panel(show(image), f"date {number + 1}") for number, image in enumerate(series.cloudy)]
    below = [Panel(heat_picture(cloud_thickness(cloudy, clear)[0, 0].numpy(), full_scale=1.0), "thickness A")]
    for form in ("linear", "sigmoid"):
        config = CloudAwareLossConfig(weight_form=form)
        touched, untouched = CloudAwareLoss(config).pixel_weights(cloudy, clear)
        below.append(Panel(heat_picture(touched[0, 0].numpy(), full_scale=1.3), f"cloud weight, {form}"))
    below.append(Panel(mask_picture(untouched[0, 0].bool().numpy()), "cloud-free pixels (white)"))
    save("loss", [[*above, Panel(show(series.clear), "target")], below])


def dates() -> None:
    """Weights over dates of the shipped network, and the composite."""
    series = scene()
    remover = sader.CloudRemover.from_pretrained("sader-s2-rgbn", device="cpu")
    show = colours(series)
    with torch.inference_mode():
        condition = remover.denoiser.network.condition(
            to_model_range(torch.from_numpy(series.cloudy))[None],
            cloud=torch.from_numpy(series.cloud_mask)[None].float(),
            reference=torch.tensor([series.reference]),
        )
    assert condition.weights is not None
    weights = condition.weights[0].numpy()
    composite = to_reflectance(condition.mean[0, 0]).numpy()
    named = [f"date {number + 1}" for number in range(len(series.cloudy))]
    above = [
        Panel(show(image), name + (" (to be cleaned)" if number == series.reference else ""), number == 0)
        for number, (image, name) in enumerate(zip(series.cloudy, named, strict=True))
    ]
    above.append(Panel(show(composite), "composite"))
    below = [
        Panel(heat_picture(one, full_scale=1.0), f"weight of {name}")
        for one, name in zip(weights, [*named, "the fill"], strict=True)
    ]
    save("dates", [above, below])


def resampling() -> None:
    """Outliers of the paper's resampling at each step of "4+1" on the scene of `sader demo`, and the fused images."""
    series = real_scene()
    remover = sader.CloudRemover.from_pretrained("sader-paper", device="cpu")
    process, cloudy = remover.denoiser.config, to_model_range(torch.from_numpy(series.cloudy))[None]
    cloud = torch.from_numpy(series.cloud_mask)[None].float()
    found: list[tuple[float, Tensor, Tensor]] = []

    def watched(previous: Tensor, candidate: Tensor, mean: Tensor, *, noise_mean: float, **given: Any) -> Tensor:
        fused = fuse(previous, candidate, mean, noise_mean=noise_mean, **given)
        config = given["config"]
        mask = outlier_mask(
            previous, candidate, mean, criterion=config.criterion, fraction=given["fraction"], floor=config.floor
        )
        found.append((noise_mean / process.alpha, mask[0, 0], fused[0]))
        return fused

    with torch.inference_mode():
        condition = remover.denoiser.network.condition(cloudy)
        generator = torch.Generator().manual_seed(0)
        sample(
            partial(remover.denoiser, condition=condition),
            condition.mean,
            lambda draw: torch.randn(condition.mean.shape, generator=generator),
            remover.denoiser.sigmas(4),
            alpha=process.alpha,
            initial=remover.denoiser.initial(condition),
            correction=Resampler(
                ResamplerConfig.named("paper"),
                make_guide("mae", bands=len(series.bands), weights=shipped_guide("mae", series.bands)),
                present=condition.present,
                cloud_cover=cloud_cover(cloud, torch.ones_like(cloud, dtype=torch.bool)),
                fuse=watched,
            ),
        )
    show = colours(series)
    dates = [Panel(show(image), f"date {number + 1}") for number, image in enumerate(series.cloudy)]
    dates.append(Panel(show(series.cloudy.mean(axis=0)), "mean of the dates"))
    above = [Panel(mask_picture(mask.numpy()), f"outliers at sigma {level:.3g}") for level, mask, _ in found]
    below = [Panel(show(to_reflectance(image).numpy()), f"fused, sigma {level:.3g}") for level, _, image in found]
    save("resampling", [dates, above, below])


def uncertainty() -> None:
    """Expected error beside the true error."""
    series = scene()
    remover = sader.CloudRemover.from_pretrained("sader-s2-rgbn", device="cpu")
    result = remover.predict(series.cloudy, reference=series.reference, cloud_mask=series.cloud_mask)
    assert result.spread is not None
    show = colours(series)
    stated = result.spread[:3].mean(axis=0)
    panels = [
        Panel(show(result.clear), "result"),
        Panel(mask_picture(~result.kept), "reconstructed pixels (white)"),
        Panel(heat_picture(stated, full_scale=0.02), "expected error (yellow: 0.02)"),
        Panel(
            error_picture(result.clear, series.clear, bands=series.bands, full_scale=0.02), "true error (yellow: 0.02)"
        ),
    ]
    save("uncertainty", [panels])


def limits() -> None:
    """Failure cases: ground hidden on all dates, a single date, estimated masks, several steps."""
    series = scene()
    remover = sader.CloudRemover.from_pretrained("sader-s2-rgbn", device="cpu")
    show = colours(series)
    reference = series.reference
    truth = Panel(show(series.clear), "truth")

    def result(name: str, cloudy: NDArray[np.float32], mask: NDArray[np.bool_] | None, **options: int) -> Panel:
        image = remover(cloudy, reference=reference, cloud_mask=mask, **options)
        hidden = series.cloud_mask[reference or 0] if mask is None else mask[reference or 0]
        error = float(np.abs(image - series.clear)[:, hidden].mean())
        return Panel(show(image), f"{name}: error {error:.3f}")

    everywhere = series.cloud_mask.copy()
    everywhere[:, 60:190, 60:190] = True
    cloudy = series.cloudy.copy()
    cloudy[:, :, 60:190, 60:190] = 0.6
    unseen = result("no date shows it", cloudy, everywhere)
    save("limits_hidden", [[Panel(show(cloudy[0]), "date to be cleaned"), unseen, truth]])
    alone = result("one date", series.cloudy[:1], series.cloud_mask[:1])
    three = result("three dates", series.cloudy, series.cloud_mask)
    save("limits_dates", [[alone, three, truth]])
    masked = replace(three, caption=three.caption.replace("three dates", "true masks"))
    stepped = replace(three, caption=three.caption.replace("three dates", "one step"))
    save("limits_masks", [[masked, result("estimated masks", series.cloudy, None), truth]])
    save("limits_steps", [[stepped, result("four steps", series.cloudy, series.cloud_mask, steps=4), truth]])


def first_page() -> None:
    """The scene of `sader demo` before and after, without masks, as a JPEG of two large panels."""
    series = real_scene()
    clear = sader.CloudRemover.from_pretrained("sader-s2-rgbn").predict(series.cloudy, reference=0).clear
    draw, target = colours(series), IMAGES / "before-after.jpg"
    panels = [Panel(draw(series.cloudy[0]), "before"), Panel(draw(clear), "after")]
    compose([panels], panel_width=512).convert("RGB").save(target, quality=88)
    print(f"wrote {target.name}: {target.stat().st_size / 1000:.0f} kB")


FIGURES = {one.__name__: one for one in (first_page, diffusion, loss, dates, resampling, uncertainty, limits)}


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in FIGURES]
    if unknown:
        sys.exit(f"no figure {', '.join(unknown)}; known: {', '.join(FIGURES)}")
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name in names or FIGURES:
        FIGURES[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
