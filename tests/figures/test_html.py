"""The HTML report: its content, that it needs no external resources, and what is refused before the work."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sader.cli.main import main
from sader.errors import OutputError, ShapeError
from sader.figures.html import (
    HIDDEN_COLOUR,
    Figure,
    Section,
    comparison,
    data_uri,
    gallery,
    histogram,
    listing,
    mask_uri,
    page,
    save_page,
    table,
)

EVIL = "<script>alert('x')</script>&\""


class Page(HTMLParser):
    """Tags, texts and addresses of a page; tags that are never closed fail."""

    VOID = frozenset({"meta", "img", "input", "br", "link", "line", "polyline"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(text)
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.words += data + " "

    def pictures(self) -> list[str]:
        return [str(attributes["src"]) for tag, attributes in self.tags if tag == "img"]


def decoded(uri: str) -> Image.Image:
    assert uri.startswith("data:image/png;base64,")
    return Image.open(io.BytesIO(base64.b64decode(uri.split(",", 1)[1])))


# ------------------------------------------------------------------------------------------------ the parts


def test_pictures_come_back_pixel_by_pixel():
    picture = np.random.default_rng(0).integers(0, 256, (5, 7, 3)).astype(np.uint8)
    assert np.array_equal(np.asarray(decoded(data_uri(picture)).convert("RGB")), picture)
    with pytest.raises(ShapeError, match="expected \\(H, W, 3\\)"):
        data_uri(picture[..., 0])


def test_masks_are_see_through_where_clear():
    mask = np.zeros((4, 6), bool)
    mask[1, 2:5] = True
    pixels = np.asarray(decoded(mask_uri(mask)).convert("RGBA"))
    assert (pixels[mask] == HIDDEN_COLOUR).all()
    assert (pixels[~mask][:, 3] == 0).all()


def test_everything_given_is_escaped():
    figure = Figure(np.zeros((2, 2, 3), np.uint8), EVIL)
    html = gallery([figure]) + comparison(figure, figure) + table([(EVIL, EVIL)], head=(EVIL,)) + listing([EVIL])
    html += histogram(EVIL, {EVIL: np.ones(3)}, unit=EVIL)
    text = page(EVIL, [Section(EVIL, html)], subtitle=EVIL)
    found = Page(text)
    assert [tag for tag, _ in found.tags].count("script") == 1, "only our own"
    assert found.words.count(EVIL) >= 8


def test_histograms_count_every_value_and_show_the_median():
    values = np.r_[np.full(30, 0.1), np.full(70, 0.3), np.nan]
    html = histogram("B02", {"result": values, "nothing": np.array([np.nan])})
    assert "median 0.300" in html
    assert "nothing" not in html
    points = re.findall(r'points="([^"]+)"', html)
    assert len(points) == 1
    heights = [130 - float(point.split(",")[1]) for point in points[0].split()][::2]
    assert heights[0] / heights[-1] == pytest.approx(30 / 70, rel=0.01)
    assert sum(height > 0.1 for height in heights) == 2
    assert "no values" in histogram("B02", {"result": np.array([np.nan])})
    assert "polyline" in histogram("flat", {"result": np.zeros(9)})


def test_a_page_is_whole_or_not_there(tmp_path, monkeypatch):
    target = save_page(page("a", []), tmp_path / "a.html")
    assert Page(target.read_text()).words.split()[0] == "a"
    full = OSError(28, "No space left")
    monkeypatch.setattr("sader.files.os.replace", lambda part, whole: (_ for _ in ()).throw(full))
    with pytest.raises(OutputError, match="the disk is full"):
        save_page("new", tmp_path / "b.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html"]


# ------------------------------------------------------------------------------------------------ of a scene


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny network with an error head, as a checkpoint file."""
    import torch

    from sader.checkpoint import save_checkpoint
    from sader.models import build_model, get_preset

    network = {"widths": (16, 32), "blocks": (1, 1), "fusion_width": 16, "key_width": 8, "emb_width": 16, "kernel": 3,
               "cloud_widths": (8,), "refinement_widths": (8,)}  # fmt: skip
    config = get_preset("small").replace(name="tiny", network=network)
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_checkpoint(path, build_model(config), config, card={"licence": f"free {EVIL}"})
    return path


@pytest.fixture(scope="module")
def dates(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three dates with masks beside them; the second is stored with another offset than the first."""
    rasterio = pytest.importorskip("rasterio")
    folder = tmp_path_factory.mktemp("secret folder")
    (folder / "masks").mkdir()
    paths = []
    from sader.data.synthetic.scene import make_series

    series = make_series(1, size=(48, 64), coverage=(0.5, 0.1, 0.5))
    for number, image in enumerate(series.cloudy):
        shift = 1000 if number == 1 else 0
        counts = np.rint(image * 10000 + shift).clip(1).astype(np.uint16)
        path = folder / f"S2_2022-0{number + 3}-10.tif"
        with rasterio.open(
            path, "w", driver="GTiff", count=4, height=48, width=64, dtype="uint16", nodata=0, crs="EPSG:32632",
            transform=rasterio.Affine(10, 0, 600000, 0, -10, 5100000),
        ) as file:  # fmt: skip
            file.write(counts)
            file.descriptions = series.bands
            file.scales, file.offsets = (1e-4,) * 4, (-1e-4 * shift,) * 4
        with rasterio.open(
            folder / "masks" / f"{path.stem}_mask.tif", "w", driver="GTiff", count=1, height=48, width=64,
            dtype="uint8", crs="EPSG:32632", transform=rasterio.Affine(10, 0, 600000, 0, -10, 5100000),
        ) as file:  # fmt: skip
            file.write(series.cloud_mask[number].astype(np.uint8), 1)
        paths.append(path)
    return paths


def remove(model: Path, capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    status = 0
    try:
        main(["remove", "--model", str(model), "--device", "cpu", *map(str, arguments)])
    except SystemExit as error:
        status = int(error.code or 0)
    out, err = capsys.readouterr()
    return status, out, " ".join(err.split())


def test_a_report_holds_all_and_asks_for_nothing(model, dates, tmp_path, capsys):
    html = tmp_path / "out.html"
    status, printed, err = remove(
        model, capsys, *dates, "-o", tmp_path / "c.tif", "--report", html, "--reference", "2022-04-10", "--json",
        "--mask", dates[0].parent / "masks",
    )  # fmt: skip
    assert status == 0, err
    report = json.loads(printed)
    names = [Path(path).name for path in report["files"]]
    assert names == ["c.tif", "c_uncertainty.tif", "c_provenance.tif", "c.json", "out.html"]
    text = html.read_text(encoding="utf-8")
    found = Page(text)
    for title in ("Result", "Dates", "Provenance", "Uncertainty", "Distributions", "Settings", "Model", "Files"):
        assert title in found.words
    # before, after, three dates with their masks, provenance, uncertainty
    assert len(found.pictures()) == 2 + 2 * 3 + 2
    assert {decoded(uri).size for uri in found.pictures()} == {(64, 48)}
    assert text.count("<svg") == 4, "one histogram for each band"
    share = report["pixels"]["reconstructed"] / (48 * 64)
    assert f"{share:.1%} reconstructed" in found.words
    assert hashlib.sha256((tmp_path / "c.tif").read_bytes()).hexdigest() in text
    assert "EPSG:32632, pixels of 10 x 10" in found.words
    assert f"free {EVIL}" in found.words, "the card is text, not HTML"
    assert "given" in found.words
    assert "the model's own" not in found.words.split("Settings")[0]
    # Nothing is fetched, and nobody learns where the sender keeps files.
    addresses = [str(v) for _, given in found.tags for k, v in given.items() if k in ("src", "href", "action")]
    assert all(address.startswith("data:") for address in addresses)
    assert "url(" not in text
    assert "default-src 'none'" in text
    assert "secret folder" not in text
    assert str(tmp_path) not in text


def reported(output: Path, html: Path, dates: list[Path], *, reference: str) -> tuple[object, ...]:
    """The options of a run with given masks and a report."""
    masks = dates[0].parent / "masks"
    return ("-o", output, "--report", html, "--reference", reference, "--no-item", "--mask", masks)


def test_the_result_is_drawn_in_the_coding_of_the_cleaned_date(model, dates, tmp_path, capsys):
    """Kept pixels look the same before and after, though the first date is stored with another offset."""
    rasterio = pytest.importorskip("rasterio")
    html = tmp_path / "out.html"
    assert remove(model, capsys, *dates, *reported(tmp_path / "c.tif", html, dates, reference="2022-04-10"))[0] == 0
    before, after = (np.asarray(decoded(uri).convert("RGB")) for uri in Page(html.read_text()).pictures()[:2])
    with rasterio.open(tmp_path / "c_provenance.tif") as file:
        kept = file.read(1) == 1
    assert kept.any()
    assert np.array_equal(before[kept], after[kept])


def test_without_reference_the_result_stands_alone(model, dates, tmp_path, capsys):
    html = tmp_path / "out.html"
    assert remove(model, capsys, *dates, *reported(tmp_path / "c.tif", html, dates, reference="none"))[0] == 0
    found = Page(html.read_text())
    assert "A new image of all dates" in found.words
    assert "clear pixels of all dates (median" in found.words
    assert not any(given.get("type") == "range" for _, given in found.tags)


def test_a_wrong_report_is_refused_before_the_work(model, dates, tmp_path, capsys):
    status, _, err = remove(model, capsys, *dates, "-o", tmp_path / "c.tif", "--report", tmp_path / "r.pdf")
    assert (status, err) == (2, f"OutputError: the report is {tmp_path / 'r.pdf'}; expected a name that ends in .html.")
    status, _, err = remove(model, capsys, tmp_path / "cube.zarr", "-o", tmp_path / "c.zarr", "--report", "r.html")
    assert status == 2
    assert "--report cannot be used with a Zarr store" in err
    assert not list(tmp_path.iterdir())
