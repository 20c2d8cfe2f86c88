"""A scene of 2500 pixels: the server sends reduced squares, the value is that of the right pixel, nothing waits."""

from __future__ import annotations

import re
import threading
import time
from urllib.parse import parse_qs, urlparse

import httpx
import numpy as np
import pytest

from sader.viewer.settings import Limits, ServeSettings

from .browsing import drawn, new_page, until
from .conftest import serving

HEIGHT, WIDTH = 2400, 2500


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A server with one large scene, whose numbers tell their row (B02) and column (B03)."""
    import rasterio

    data = tmp_path_factory.mktemp("large")
    (data / "scene").mkdir()
    rows, columns = np.mgrid[:HEIGHT, :WIDTH].astype(np.uint16)
    ground = np.random.default_rng(0).uniform(500, 1500, (HEIGHT // 50, WIDTH // 50)).astype(np.uint16)
    ground = ground.repeat(50, 0).repeat(50, 1)
    options = {
        "driver": "GTiff", "count": 4, "height": HEIGHT, "width": WIDTH, "dtype": "uint16", "crs": "EPSG:32632",
        "transform": rasterio.Affine(10, 0, 600000, 0, -10, 5100000), "nodata": 0, "tiled": True, "compress": "lzw",
    }  # fmt: skip
    for number, day in enumerate(("2022-03-10", "2022-05-13")):
        with rasterio.open(data / "scene" / f"S2_{day}.tif", "w", **options) as dataset:
            dataset.write(np.stack([1000 + rows, 1000 + columns, ground + 100 * number, ground + 2000]))
            dataset.descriptions = ("B02", "B03", "B04", "B08")
    with serving(ServeSettings(data=data, port=0, limits=Limits(scenes=20))) as running:
        yield running


def shown_value(page):
    """(column, row) stated by the page, and those encoded in the value."""
    text = page.inner_text("#place")
    said = tuple(int(number) for number in re.search(r"column (\d+), row (\d+)", text).groups())
    cells = page.locator("#values tbody tr").first.locator("td").all_inner_texts()
    return said, (round(float(cells[1]) * 10000) - 1000, round(float(cells[0]) * 10000) - 1000)


@pytest.mark.slow
def test_the_page_with_a_large_scene(browser, large):
    page = new_page(browser, viewport={"width": 1200, "height": 760})
    squares: list[dict[str, list[str]]] = []
    sizes: list[int] = []

    def note(answer):
        if "/layers/" in answer.url:
            squares.append(parse_qs(urlparse(answer.url).query))
            sizes.append(int(answer.headers["content-length"]))

    page.on("response", note)
    page.goto(f"{large.url}/#scene={large.scene('scene')}")
    page.wait_for_selector("#film button")
    image = drawn(page)
    assert image[..., 3].max() == 255
    # The whole scene is seen at a quarter: four squares for each side, and one small picture for each date.
    assert {int(square["factor"][0]) for square in squares} <= {4, 8}
    assert len(squares) <= 10
    assert sum(sizes) < 4 * 2**20

    box = page.locator("#map").bounding_box()
    scale = box["height"] / HEIGHT
    for across, down in ((0.02, 0.97), (0.5, 0.5), (0.98, 0.03), (0.31, 0.77)):
        x = box["x"] + box["width"] / 2 + (across - 0.5) * WIDTH * scale
        y = box["y"] + down * HEIGHT * scale
        page.mouse.move(x, y)
        page.wait_for_timeout(200)
        page.wait_for_selector("#values table")
        until(page, "document.getElementById('place').textContent.includes('°')")
        said, found = shown_value(page)
        assert found == said  # the number is that of the pixel which is named
        assert abs(said[0] - across * WIDTH) <= 1.5 / scale  # and that is the one under the cursor, to a screen pixel
        assert abs(said[1] - down * HEIGHT) <= 1.5 / scale

    # At full size, far from the corner: squares of the scene itself, and the very pixel.
    squares.clear()
    page.focus("#map")
    for _ in range(8):
        page.keyboard.press("+")
    for _ in range(200):  # squares of the sizes passed on the way may be drawn first
        drawn(page)
        if "1" in {square["factor"][0] for square in squares}:
            break
        page.wait_for_timeout(100)
    assert "1" in {square["factor"][0] for square in squares}
    assert len(squares) <= 60
    page.mouse.move(box["x"] + 300, box["y"] + 200)
    for _ in range(50):  # the value follows the cursor by one request
        page.wait_for_timeout(200)
        said, found = shown_value(page)
        if found == said:
            break
    assert found == said
    page.close()


def test_pictures_and_values_do_not_wait_for_the_clouds(large):
    """Estimating the clouds of a large scene takes seconds; images and values do not wait."""
    scene = large.scene("scene")
    with large.service.finder._busy:  # as if it were at work
        for factor, column in ((8, 0), (4, 1), (1, 4)):
            asked = {"factor": factor, "column": column, "row": 0}
            assert large.client.get(f"/scenes/{scene}/layers/0", params=asked, timeout=60).status_code == 200
        said = large.client.get(f"/scenes/{scene}/values", params={"column": 2499, "row": 2399}, timeout=60).json()
    assert said["dates"][0][:2] == [0.3399, 0.3499]


def test_a_value_goes_before_the_squares_that_wait(large, monkeypatch):
    """A fast zoom requests many squares; the value under the cursor overtakes them."""
    scene = large.scene("scene")
    ended: list[str] = []
    waiting: list[bool] = []
    """Low priority or not, of every request that has reached the reader."""
    honest = large.service.reader.call

    def counted(*words, low_priority=False, **named):
        waiting.append(low_priority)
        return honest(*words, low_priority=low_priority, **named)

    def until(condition):
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, waiting
            time.sleep(0.01)

    monkeypatch.setattr(large.service.reader, "call", counted)

    def ask(name, path, **asked):
        with httpx.Client(base_url=large.url, timeout=60) as client:
            assert client.get(f"/scenes/{scene}/{path}", params=asked).status_code == 200
        ended.append(name)

    with large.service.reader._busy:  # the child is at work on something else meanwhile
        squares = [(column, row) for column in range(4) for row in range(4)]
        calls = [
            threading.Thread(target=ask, args=("square", "layers/0"), kwargs={"column": column, "row": row})
            for column, row in squares
        ]
        for call in calls:
            call.start()
        until(lambda: sum(waiting) == len(squares))
        value = threading.Thread(target=ask, args=("value", "values"), kwargs={"column": 5, "row": 5})
        value.start()
        until(lambda: not all(waiting))
        time.sleep(0.2)  # from the call to its place at the lock
    for call in (*calls, value):
        call.join(timeout=60)
    assert len(ended) == len(squares) + 1
    assert ended.index("value") <= 3  # behind the one whose turn it was, not behind sixteen


def test_what_a_large_scene_shows_as_black_and_white_is_close_to_that_of_all_its_pixels(large, monkeypatch):
    from sader.geo.read.sources import open_sources
    from sader.viewer.worker import pictures

    sources = open_sources(sorted((large.data / "scene").glob("*.tif")), notice=lambda text: None)
    some = pictures.shared_limits(sources, sources[0].grid, ("B04", "B03", "B02"))
    monkeypatch.setattr(pictures, "SAMPLE_EDGE", 2500)
    every = pictures.shared_limits(sources, sources[0].grid, ("B04", "B03", "B02"))
    assert np.abs(np.subtract(some, every)).max() < 0.02
