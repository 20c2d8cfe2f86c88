"""The page in a real browser: demo, upload, run, swipe, cancel, download, errors, keyboard, 390 pixels wide."""

from __future__ import annotations

import base64
import io
import json
import shutil
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sader.viewer.settings import ServeSettings

from .conftest import LIMITS, Running, serving, write_date, write_scene

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
playwright_api = pytest.importorskip(
    "playwright.sync_api", reason="the browser tests need playwright: pip install playwright"
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium found: the browser tests were not run (Debian: apt install chromium)"
)
TOKEN = "a-token-for-the-browser-tests"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright_api.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any, server: Running) -> Iterator[Any]:
    """A page that has the server open; an error of its scripts, or a call elsewhere, fails the test."""
    yield from watched(browser, server, width=1200, height=760)


@pytest.fixture
def phone(browser: Any, server: Running) -> Iterator[Any]:
    yield from watched(browser, server, width=390, height=800)


def watched(browser: Any, server: Running, **size: int) -> Iterator[Any]:
    made = browser.new_page(viewport=size, accept_downloads=True)
    errors, far = [], []
    made.on("pageerror", lambda error: errors.append(str(error)))
    made.on("request", lambda request: far.append(request.url) if not request.url.startswith(server.url) else None)
    made.goto(server.url)
    made.wait_for_selector("body[data-ready]")
    yield made
    made.close()
    assert errors == []
    assert [url for url in far if not url.startswith(("data:", "blob:"))] == []  # it works offline


def until(page: Any, condition: str, seconds: float = 30) -> None:
    """Wait for a condition (the page's own policy forbids Playwright to do so inside it)."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"never true: {condition}"
        time.sleep(0.05)


def upload(page: Any, paths: list[Any]) -> None:
    page.set_input_files("#files", [str(path) for path in paths])
    page.wait_for_selector("#film button")


def drawn(page: Any) -> np.ndarray:
    """What the canvas shows, (H, W, 4)."""
    from PIL import Image

    until(page, "document.getElementById('map').dataset.drawn > 0")
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(150)
    data = page.evaluate("document.getElementById('map').toDataURL('image/png').split(',')[1]")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA")).astype(int)


def remove_clouds(page: Any) -> None:
    page.click("#run")
    page.wait_for_selector("#get-clear", timeout=60_000)


def test_upload_run_swipe_overlay_values_download(page, tmp_path):
    upload(page, write_scene(tmp_path, size=64))
    assert page.locator("#film button").count() == 3
    page.wait_for_selector("#film meter")
    assert "% hidden" in page.locator("#film li").first.inner_text()
    remove_clouds(page)
    assert "observed" in page.inner_text("#result-text")
    assert page.input_value("#right") == "result"

    # Swipe: the same place shows the date on one side of the handle and the result on the other.
    page.select_option("#left", "0")
    handle = page.locator("#handle")
    handle.focus()
    page.keyboard.press("Home")
    assert handle.get_attribute("aria-valuenow") == "0"
    result = drawn(page)
    page.keyboard.press("End")
    date = drawn(page)
    assert handle.get_attribute("aria-valuenow") == "100"
    assert np.abs(result - date).max() > 60  # the cloud
    box = page.locator("#map").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 3, box["y"] + 200)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 200, steps=4)
    page.mouse.up()
    assert abs(int(handle.get_attribute("aria-valuenow")) - 50) <= 1
    both, half = drawn(page), result.shape[1] // 2
    assert np.abs(both[:, : half - 5] - date[:, : half - 5]).max() == 0
    assert np.abs(both[:, half + 5 :] - result[:, half + 5 :]).max() == 0

    # Band combinations and overlays change what is seen.
    page.get_by_text("False colour", exact=True).click()
    assert np.abs(drawn(page) - both).max() > 30
    page.get_by_text("NDVI", exact=True).first.click()
    assert "NDVI" in page.inner_text("#legend")
    page.get_by_text("True colour", exact=True).click()
    page.locator("#overlays").get_by_text("Provenance").click()
    over = drawn(page)
    assert np.abs(over[:, half + 5 :] - both[:, half + 5 :]).max() > 30
    assert np.abs(over[:, : half - 5] - both[:, : half - 5]).max() == 0
    page.locator("#overlays").get_by_text("Uncertainty").click()
    assert "standard deviation" in page.inner_text("#legend")

    # Values and map coordinates under the cursor.
    page.mouse.move(box["x"] + box["width"] / 2 + 60, box["y"] + box["height"] / 2 + 30)
    page.wait_for_selector("#values table")
    assert "EPSG:32632" in page.inner_text("#place")
    assert "°" in page.inner_text("#place")
    assert page.locator("#values tbody tr").count() == 3
    assert "Result" in page.inner_text("#values")

    with page.expect_download() as found:
        page.click("#get-clear")
    import rasterio

    with rasterio.open(found.value.path()) as dataset:
        assert dataset.tags(ns="IMAGE_STRUCTURE")["LAYOUT"] == "COG"
        assert dataset.descriptions == ("B02", "B03", "B04", "B08")
    assert found.value.suggested_filename.endswith(".tif")

    # Loaded again, the page shows the same result.
    page.reload()
    page.wait_for_selector("#get-clear")
    assert page.input_value("#right") == "result"
    assert page.locator("#earlier button").count() >= 1


def small_tiles(asked: str) -> str:
    said = json.loads(asked)
    return json.dumps({**said, "inputs": {**said["inputs"], "tile": 64}})


def test_cancel(page):
    page.click("#browse")
    page.get_by_label("wide/").check()
    page.click("#open-paths")
    page.wait_for_selector("#film meter")
    # Many small tiles, so that there is something to cancel; a person has no such choice on the page.
    page.route("**/execution", lambda route: route.continue_(post_data=small_tiles(route.request.post_data)))
    page.click("#run")
    until(page, "Number(document.getElementById('progress').value) > 10")
    assert "removing clouds" in page.inner_text("#progress-text")
    page.click("#cancel")
    until(page, "document.getElementById('result-text').textContent.startsWith('Cancelled')")
    assert page.is_enabled("#run")
    assert page.locator("#get-clear").count() == 0


def test_errors_are_shown_and_bands_can_be_named(page, tmp_path):
    (tmp_path / "broken.tif").write_bytes(b"not a raster")
    page.set_input_files("#files", str(tmp_path / "broken.tif"))
    page.wait_for_selector("#error:not([hidden])")
    assert "broken.tif" in page.inner_text("#error")
    assert page.get_attribute("#error", "role") == "alert"
    page.click("#error-close")
    assert page.is_hidden("#error")

    import rasterio

    path = write_date(tmp_path / "a_2022-03-10.tif", 1)
    with rasterio.open(path, "r+") as dataset:
        dataset.descriptions = (None,) * 4
    page.set_input_files("#files", str(path))
    page.wait_for_selector("#error:not([hidden])")
    assert "have no names" in page.inner_text("#error")
    until(page, "document.activeElement.id === 'bands'")
    page.keyboard.type("bgrn")
    page.click("#read-again")
    page.wait_for_selector("#film button")
    assert page.is_hidden("#error")


def test_the_demo_is_one_click_away(page):
    page.click("#demo-big")
    page.wait_for_selector("#film button")
    assert page.locator("#film button").count() == 3
    assert page.is_hidden("#empty")
    image = drawn(page)
    assert image[..., 3].max() == 255
    assert image[..., :3].std() > 10


def test_everything_can_be_reached_by_keyboard_and_has_a_name(page, finished):
    _, job = finished
    page.goto(f"{page.url.split('#')[0]}#job={job}")
    page.reload()
    page.wait_for_selector("#get-clear")
    nameless = page.evaluate(
        """[...document.querySelectorAll('button, a, input, select, canvas, [role=slider]')].filter((node) => {
            if (node.closest('[hidden], dialog:not([open])')) return false;
            const around = node.closest('label')?.textContent.trim();
            const named = node.getAttribute('aria-label') || node.textContent.trim() || around
              || (node.id && document.querySelector(`label[for="${CSS.escape(node.id)}"]`));
            return !named;
        }).map((node) => node.outerHTML)"""
    )
    assert nameless == []
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.name"))
    assert {"files", "demo", "run", "left", "combination", "map", "handle", "get-clear"} <= reached
    page.focus("#map")
    before = drawn(page)
    page.keyboard.press("+")
    page.keyboard.press("ArrowRight")
    assert np.abs(drawn(page) - before).max() > 20
    page.wait_for_selector("#values table")  # the middle of the image is read out
    page.keyboard.press("0")
    assert np.abs(drawn(page) - before).max() <= 2


def test_a_window_of_390_pixels(phone, finished):
    _, job = finished
    phone.goto(f"{phone.url.split('#')[0]}#job={job}")
    phone.reload()
    phone.wait_for_selector("#get-clear")
    assert phone.evaluate("document.documentElement.scrollWidth") == 390
    stage = phone.locator("#stage").bounding_box()
    assert stage["width"] == 390
    assert stage["height"] > 200
    assert stage["y"] < 400  # the image is seen without scrolling
    small = phone.evaluate(
        """[...document.querySelectorAll('button, select, .downloads a, fieldset span')]
            .filter((node) => node.offsetParent && !node.closest('[hidden]'))
            .map((node) => [node.id || node.textContent, node.getBoundingClientRect()])
            .filter(([, box]) => box.height < 30 || box.right > 391 || box.left < -1).map(([name]) => name)"""
    )
    assert small == []  # large enough for a finger, and nothing runs out of the window


def test_the_page_asks_for_the_token_and_never_puts_it_into_an_address(browser, tmp_path):
    with serving(ServeSettings(data=tmp_path, port=0, token=TOKEN, limits=LIMITS)) as server:
        page = browser.new_page()
        urls: list[str] = []
        page.on("request", lambda request: urls.append(request.url))
        page.goto(server.url)
        page.wait_for_selector("#login[open]")
        page.fill("#token", "wrong")
        page.keyboard.press("Enter")
        until(page, "document.getElementById('login-error').textContent.length > 5")
        page.fill("#token", TOKEN)
        page.keyboard.press("Enter")
        page.wait_for_selector("body[data-ready]")
        assert page.is_hidden("#login")
        assert page.evaluate("document.cookie") == ""  # scripts cannot read it
        assert not any(TOKEN in url for url in urls)
        page.close()


def test_another_site_cannot_use_the_server_of_this_browser(browser, server, tmp_path):
    """A page from another origin, in a real browser: its requests change nothing and its frames stay empty."""
    page = browser.new_page()
    page.route("http://evil.example/**", lambda route: route.fulfill(body="<h1>evil</h1>", content_type="text/html"))
    page.goto("http://evil.example/")
    before = len(server.service.scenes.all())
    program = """async (url) => {
        const tries = [
            fetch(`${url}/scenes`, { method: 'POST', mode: 'no-cors', body: '{}' }),
            fetch(`${url}/scenes`, { method: 'POST', body: '{}', headers: { 'Content-Type': 'application/json' } }),
            fetch(`${url}/jobs`).then((answer) => answer.text()),
        ];
        const ended = await Promise.allSettled(tries);
        return ended.map((one) => (one.status === 'rejected' ? 'blocked' : one.value.type ?? 'read'));
    }"""
    assert page.evaluate(program, server.url) in (["opaque", "blocked", "blocked"], ["blocked", "blocked", "blocked"])
    assert len(server.service.scenes.all()) == before
    page.close()
