"""A self-contained HTML page: pictures, masks, histograms and tables, without external resources.

Pictures are embedded as PNG and curves as SVG; the only script moves the slider of a comparison, and a content policy
forbids every address outside the file. `sader.geo.scene.report` collects the content of a scene.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sader.errors import ShapeError
from sader.figures.picture import Panel, Picture, png
from sader.files import write_atomically

HIDDEN_COLOUR = (230, 97, 1, 150)
"""Cloud and shadow over a picture: translucent orange, distinguishable with colour blindness."""
CURVES = ("#0b6e99", "#d64824", "#6a4c93")
BINS = 64


@dataclass(frozen=True)
class Figure(Panel):
    """One picture of the page, with its caption below."""

    hidden: NDArray[np.bool_] | None = None
    """(H, W): overlay of the picture that the reader can switch off."""


@dataclass(frozen=True)
class Section:
    """A heading and its content."""

    title: str
    html: str
    """HTML of the functions below, which escape their arguments."""


def data_uri(picture: Picture) -> str:
    """Return a picture (H, W, 3) as the data URI of a PNG."""
    if picture.ndim != 3 or picture.shape[2] != 3 or 0 in picture.shape:
        raise ShapeError(f"the picture has shape {picture.shape}; expected (H, W, 3) with at least one pixel.")
    return _embedded(png(picture))


def mask_uri(mask: NDArray[np.bool_]) -> str:
    """Return a mask (H, W) as the data URI of a PNG: transparent, and `HIDDEN_COLOUR` where it is True."""
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(mask, np.uint8)).convert("P")
    image.putpalette([0, 0, 0, *HIDDEN_COLOUR[:3]])
    return _embedded(png(image, transparency=bytes([0, HIDDEN_COLOUR[3]])))


def _embedded(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode("ascii")


def gallery(figures: Iterable[Figure]) -> str:
    """Return pictures side by side, as many in a row as the window holds."""
    return row_of(_figure(figure) for figure in figures)


def _figure(figure: Figure) -> str:
    height, width = figure.picture.shape[:2]
    over = ""
    if figure.hidden is not None:
        over = f'<img class="hidden" src="{mask_uri(figure.hidden)}" alt="its cloud and shadow, in orange">'
    mark = " class=marked" if figure.marked else ""
    return (
        f'<figure{mark}><div class="frame" style="aspect-ratio: {width} / {height}">'
        f'<img src="{data_uri(figure.picture)}" alt="{escape(figure.caption, quote=True)}">{over}</div>'
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
    )


def comparison(before: Figure, after: Figure) -> str:
    """Return two pictures under one slider; without scripts they are shown side by side."""
    slider = (
        '<label class="slider">before <input type="range" min="0" max="100" value="50" '
        'aria-label="Share of the width that shows the picture before"> after</label>'
    )
    return f'<div class="compare">{gallery([before, after])}{slider}</div>'


def table(rows: Iterable[Sequence[object]], *, head: Sequence[str] = ()) -> str:
    """Return a table of texts; the first cell of a row is its heading."""
    top = f"<thead><tr>{''.join(f'<th scope=col>{escape(name)}</th>' for name in head)}</tr></thead>" if head else ""
    body = "".join(
        f"<tr><th scope=row>{escape(str(first))}</th>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}</tr>"
        for first, *cells in rows
    )
    return f'<div class="wide"><table>{top}<tbody>{body}</tbody></table></div>'


def listing(texts: Iterable[str]) -> str:
    """Return a list of texts, or "none"."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else "<p>none</p>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def histogram(title: str, values: Mapping[str, NDArray[np.floating]], *, unit: str = "reflectance") -> str:
    """Return the distributions of several sets of values as curves over one axis, each normalised by its count.

    The axis covers the middle 99 % of all values; values outside count in the outermost bins. NaN and infinity are left
    out.
    """
    finite = {name: np.asarray(v, np.float64)[np.isfinite(v)] for name, v in values.items()}
    filled = {name: v for name, v in finite.items() if v.size}
    if not filled:
        return f"<figure><figcaption>{escape(title)}: no values</figcaption></figure>"
    together = np.concatenate(list(filled.values()))
    low, high = (float(x) for x in np.percentile(together, (0.5, 99.5)))
    high = max(high, low + 1e-4)
    width, height, foot = 320, 130, 22
    lines, legend = [], []
    shares = {n: np.histogram(v.clip(low, high), bins=BINS, range=(low, high))[0] / v.size for n, v in filled.items()}
    tallest = max(float(share.max()) for share in shares.values())
    for (name, share), colour in zip(shares.items(), CURVES * len(shares), strict=False):
        points = []
        for number, part in enumerate(share):
            y = height - (height - 8) * part / tallest
            points += [f"{width * number / BINS:.1f},{y:.1f}", f"{width * (number + 1) / BINS:.1f},{y:.1f}"]
        lines.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        middle = float(np.median(filled[name]))
        legend.append(f'<span style="color: {colour}">&#9632;</span> {escape(name)} (median {middle:.3f})')
    axis = (
        f'<line x1="0" y1="{height}" x2="{width}" y2="{height}" stroke="currentColor"/>'
        f'<text x="0" y="{height + 16}">{low:.3f}</text>'
        f'<text x="{width}" y="{height + 16}" text-anchor="end">{high:.3f} {escape(unit)}</text>'
    )
    return (
        f'<figure><svg viewBox="0 0 {width} {height + foot}" role="img" aria-label="{escape(title, quote=True)}">'
        f"{''.join(lines)}{axis}</svg><figcaption><b>{escape(title)}</b><br>{'<br>'.join(legend)}</figcaption></figure>"
    )


def row_of(parts: Iterable[str]) -> str:
    """Return figures side by side, as many in a row as the window holds."""
    return f'<div class="gallery">{"".join(parts)}</div>'


def page(title: str, sections: Iterable[Section], *, subtitle: str = "") -> str:
    """Return the HTML of the page."""
    body = "".join(f"<section><h2>{escape(section.title)}</h2>{section.html}</section>" for section in sections)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p></header>"
        '<input type="checkbox" id="clouds" checked><label for="clouds">show cloud and shadow in orange</label>'
        f"<main>{body}</main><script>{SCRIPT}</script></body></html>\n"
    )


def save_page(text: str, path: str | Path) -> Path:
    """Write the page atomically and return its path."""
    target = Path(path)
    write_atomically(target, text.encode())
    return target


POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

STYLE = """
:root { color-scheme: light dark; --line: #8884; --mark: #d64824 }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1100px; padding: 1rem }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
header p { margin: .2rem 0 1rem; overflow-wrap: anywhere }
.gallery { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 250px), 1fr)) }
figure { margin: 0; min-width: 0 } figcaption { font-size: .85rem; overflow-wrap: anywhere }
.frame { position: relative; border: 1px solid var(--line) } .marked .frame { outline: 3px solid var(--mark) }
.frame img { width: 100%; height: 100%; position: absolute; inset: 0; image-rendering: auto }
.frame .hidden { display: none; image-rendering: pixelated } #clouds:checked ~ main .hidden { display: block }
svg { width: 100%; height: auto } svg text { font-size: 12px; fill: currentColor }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .9rem }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere } thead + tbody td { white-space: nowrap } th[scope=row] { font-weight: 600; min-width: 7rem }
.slider { display: none; align-items: center; gap: .6rem } .slider input { flex: 1; min-width: 0 }
.live .slider { display: flex } .live { max-width: 640px } .live .gallery { display: grid; grid-template: 1fr / 1fr }
.live .gallery > figure { grid-area: 1 / 1 }
@media print { .slider, #clouds, label { display: none } section { break-inside: avoid } }
""".strip()

SCRIPT = """
for (const box of document.querySelectorAll(".compare")) {
  const slider = box.querySelector("input"), after = box.querySelectorAll("figure")[1].querySelector(".frame");
  const captions = box.querySelectorAll("figcaption");
  captions[0].style.textAlign = "left"; captions[1].style.textAlign = "right";
  const move = () => { after.style.clipPath = `inset(0 0 0 ${slider.value}%)` };
  slider.addEventListener("input", move); box.classList.add("live"); move();
}
""".strip()
