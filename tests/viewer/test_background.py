"""The background map: only when asked for, from one host, in the right place; and simply absent without a network."""

from __future__ import annotations

import io
import re
import time
from typing import Any

import numpy as np
import pytest

from sader.geo.grid import Grid
from sader.viewer.problems import NotFoundError
from sader.viewer.security.guard import CSP, TILE_HOST
from sader.viewer.worker.mercator import MOST_ERROR, WORLD, mercator_fit

from .browsing import drawn, new_page, until
from .conftest import write_date

GRIDS = {
    "small": Grid("EPSG:32632", (10, 0, 600000, 0, -10, 5100000), 64, 64),
    "whole tile": Grid("EPSG:32632", (10, 0, 600000, 0, -10, 5100000), 10980, 10980),
    "far north": Grid("EPSG:32633", (10, 0, 400000, 0, -10, 8700000), 10980, 10980),
    "date line": Grid("EPSG:32660", (10, 0, 800000, 0, -10, 1900000), 10980, 10980),
    "date line in degrees": Grid("EPSG:4326", (1e-4, 0, 179.5, 0, -1e-4, 10), 10980, 8000),
    "turned": Grid("EPSG:32632", (8, 6, 600000, 6, -8, 5100000), 2000, 3000),
    "Europe": Grid("EPSG:3035", (100, 0, 3000000, 0, -100, 4000000), 20000, 20000),
}
ONLINE = "Object.defineProperty(Navigator.prototype, 'onLine', { get: () => %s, configurable: true })"


def by_polynomial(fit: dict[str, Any], x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """What the page computes: (n, 2) column and row."""
    u, v = (x - fit["centre"][0]) / fit["half"][0], (y - fit["centre"][1]) / fit["half"][1]
    k, found = 0, np.zeros((len(x), 2))
    for i in range(fit["degree"] + 1):
        for j in range(fit["degree"] + 1 - i):
            found += np.outer(u**i * v**j, [fit["columns"][k], fit["rows"][k]])
            k += 1
    return found


@pytest.mark.parametrize("name", GRIDS)
def test_the_map_agrees_with_proj(name):
    """Points of the scene and around it, through PROJ to Web Mercator, come back to their own pixel."""
    from rasterio.warp import transform

    grid = GRIDS[name]
    fit = mercator_fit(grid)
    assert fit["error"] <= MOST_ERROR
    random = np.random.default_rng(0)
    columns, rows = random.uniform(-0.2, 1.2, (2, 500)) * [[grid.width], [grid.height]]
    a, b, c, d, e, f = grid.transform
    x, y = transform(grid.crs, "EPSG:3857", a * columns + b * rows + c, d * columns + e * rows + f)
    # Either side of the date line is the same place.
    x = np.asarray(x) + 2 * WORLD * np.round((fit["centre"][0] - np.asarray(x)) / (2 * WORLD))
    found = by_polynomial(fit, x, np.asarray(y))
    assert np.abs(found - np.stack([columns, rows], axis=-1)).max() < MOST_ERROR


@pytest.mark.parametrize(
    "grid",
    [
        Grid("", (1, 0, 0, 0, 1, 0), 64, 64),
        Grid("EPSG:3413", (100, 0, -1000000, 0, -100, 1000000), 20000, 20000),
        Grid("EPSG:4326", (0.1, 0, -180, 0, -0.1, 90), 3600, 1800),
    ],
    ids=["nowhere", "pole", "world"],
)
def test_there_is_no_map_where_it_would_be_wrong(grid):
    with pytest.raises(NotFoundError):
        mercator_fit(grid)


def test_the_policy_allows_pictures_of_one_host_and_nothing_else(server):
    assert re.findall(r"https?://[^ ;]+", CSP) == [TILE_HOST]
    assert f"img-src 'self' {TILE_HOST};" in CSP
    assert f'const TILES = "{TILE_HOST}"' in server.client.get("/static/background.js").text


class Tiles:
    """A tile server whose colours encode the location: red the column of the scene, green the row."""

    def __init__(self, grid: Grid) -> None:
        self.grid, self.asked, self.referrers = grid, [], []

    def answer(self, route: Any) -> None:
        from PIL import Image
        from rasterio.warp import transform

        self.asked.append(route.request.url)
        self.referrers.append(route.request.headers.get("referer"))
        zoom, column, row = (int(part) for part in re.search(r"/(\d+)/(\d+)/(\d+)\.png$", route.request.url).groups())
        size = 2 * WORLD / 2**zoom / 256
        px, py = np.meshgrid(np.arange(256) + 0.5, np.arange(256) + 0.5)
        x, y = -WORLD + (column * 256 + px) * size, WORLD - (row * 256 + py) * size
        east, north = transform("EPSG:3857", self.grid.crs, x.ravel(), y.ravel())
        a, _, c, _, e, f = self.grid.transform
        columns, rows = (np.asarray(east) - c) / a, (np.asarray(north) - f) / e
        shown = np.stack([columns + 96, rows + 96, np.full(columns.shape, 60)], axis=-1).clip(0, 255)
        buffer = io.BytesIO()
        Image.fromarray(np.rint(shown).astype(np.uint8).reshape(256, 256, 3)).save(buffer, format="PNG")
        headers = {"Access-Control-Allow-Origin": "*", "Content-Type": "image/png"}
        route.fulfill(status=200, body=buffer.getvalue(), headers=headers)


@pytest.fixture
def world(browser, server):
    """A page whose calls elsewhere come to us; `online` is what the browser believes."""
    opened = []

    def start(*, online: bool, answer: Any, path: str = "") -> tuple[Any, list[str]]:
        page = new_page(browser, viewport={"width": 1200, "height": 760})
        page.add_init_script(ONLINE % str(online).lower())
        page.route(f"{TILE_HOST}/**", answer)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{server.url}/{path}")
        page.wait_for_selector("body[data-ready]")
        opened.append((page, errors))
        return page, errors

    yield start
    for page, errors in opened:
        page.close()
        assert errors == []


def test_the_map_comes_when_it_is_asked_for_and_lies_under_the_scene(world, server):
    tiles = Tiles(GRIDS["small"])
    page, _ = world(online=True, answer=tiles.answer, path=f"#scene={server.scene('small')}")
    page.wait_for_selector("#film meter")
    before = drawn(page)
    assert tiles.asked == []  # the map is off
    assert page.is_hidden("#credit")
    page.get_by_label("Background map").check()
    page.wait_for_selector("#credit:not([hidden])")
    shown = drawn(page)
    scale = shown.shape[0] / 64  # the scene fits the frame's height
    columns = (np.arange(shown.shape[1]) + 0.5) / scale + (64 - shown.shape[1] / scale) / 2
    beside, end = (columns < -1) | (columns > 65), time.monotonic() + 60
    while (shown[:, beside, 2] == 60).mean() <= 0.9 and time.monotonic() < end:  # tiles are drawn as they come
        shown = drawn(page)
    assert "OpenStreetMap" in page.inner_text("#credit")
    assert set(tiles.referrers) == {f"{server.url}/"}  # the page, not what it shows
    assert all(re.fullmatch(rf"{re.escape(TILE_HOST)}/\d+/\d+/\d+\.png", url) for url in tiles.asked)

    # Beside the scene the map tells its own place: it must be the pixel that the page believes to be there.
    rows = (np.arange(shown.shape[0]) + 0.5) / scale
    column, row = np.meshgrid(columns, rows)
    map_seen = (shown[..., 2] == 60) & beside
    assert map_seen[:, beside].mean() > 0.9  # labels hide a little
    off = np.maximum(np.abs(shown[..., 0] - 96 - column), np.abs(shown[..., 1] - 96 - row))[map_seen]
    assert (off <= 0.75).mean() > 0.999  # half a step of the colours and a quarter pixel; the rest is edges of labels
    inside = (column > 1) & (column < 63) & (row > 1) & (row < 63)
    assert np.abs(shown - before)[inside].max() == 0  # the scene covers it

    # A little nearer, the same holds (other tiles, another zoom); off means off.
    asked = len(tiles.asked)
    page.click("#zoom-out")
    end = time.monotonic() + 60
    while len(tiles.asked) == asked:
        assert time.monotonic() < end, "no tiles of the other zoom"
        page.wait_for_timeout(50)
    page.get_by_label("Background map").uncheck()
    page.click("#fit")
    assert page.is_hidden("#credit")
    assert np.abs(drawn(page) - before).max() == 0


def test_a_map_that_does_not_come_is_no_error(world, server):
    page, _ = world(online=True, answer=lambda route: route.abort(), path=f"#scene={server.scene('small')}")
    page.wait_for_selector("#film meter")
    before = drawn(page)
    page.get_by_label("Background map").check()
    page.wait_for_timeout(800)
    assert np.abs(drawn(page) - before).max() == 0
    assert page.is_hidden("#credit")
    assert page.is_hidden("#error")


def test_offline_the_map_is_not_offered(world, server):
    asked = []
    page, _ = world(online=False, answer=lambda route: asked.append(route), path=f"#scene={server.scene('small')}")
    page.wait_for_selector("#film meter")
    assert page.get_by_label("Background map").is_disabled()
    # The network comes back.
    page.evaluate(f"{ONLINE % 'true'}; window.dispatchEvent(new Event('online'))")
    until(page, "!document.getElementById('background').disabled")
    assert asked == []


def test_a_scene_without_a_place_and_the_demo_have_no_map(world, server, tmp_path):
    page, _ = world(online=True, answer=lambda route: route.abort())
    page.click("#demo-big")
    page.wait_for_selector("#film button")
    assert page.get_by_label("Background map").is_disabled()  # its location is synthetic
    path = write_date(tmp_path / "a_2022-03-10.tif", 1, crs=None)
    page.set_input_files("#files", str(path))
    until(page, "document.getElementById('scene-title').textContent === 'Uploaded scene'")
    assert page.is_hidden("#background-choice")
    scene = server.scene("small")
    assert server.client.get(f"/scenes/{scene}/mercator").json()["error"] < MOST_ERROR


def test_pictures_of_other_hosts_are_refused_by_the_policy(world, server):
    asked = []
    page, _ = world(online=True, answer=lambda route: route.abort())
    page.route("https://elsewhere.example/**", lambda route: asked.append(route.request.url) or route.abort())
    program = """(address) => new Promise((resolve) => {
        const seen = (event) => resolve(event.effectiveDirective);
        document.addEventListener('securitypolicyviolation', seen, { once: true });
        const image = new Image();
        image.src = address;
        setTimeout(() => resolve('allowed'), 1500);
    })"""
    assert page.evaluate(program, "https://elsewhere.example/a.png") == "img-src"
    assert page.evaluate(program, f"{TILE_HOST.replace('tile.', 'evil.tile.')}/1/0/0.png") == "img-src"
    blocked = "(address) => fetch(address).then(() => 'allowed', () => 'blocked')"
    assert page.evaluate(blocked, f"{TILE_HOST}/1/0/0.png") == "blocked"  # pictures only
    assert asked == []
