"""The page in a real browser: demo, upload, run, swipe, cancel, download, errors, keyboard, 390 pixels wide."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sader.viewer.settings import ServeSettings

from .browsing import drawn, new_page, until, upload, watched
from .conftest import LIMITS, Running, serving, write_date, write_scene

TOKEN = "a-token-for-the-browser-tests"


@pytest.fixture
def page(browser: Any, server: Running) -> Iterator[Any]:
    """A page that has the server open; an error of its scripts, or a call elsewhere, fails the test."""
    yield from watched(browser, server, width=1200, height=760)


@pytest.fixture
def phone(browser: Any, server: Running) -> Iterator[Any]:
    yield from watched(browser, server, width=390, height=800)


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
    assert "expected error" in page.inner_text("#legend")

    # Values and map coordinates under the cursor.
    page.mouse.move(box["x"] + box["width"] / 2 + 60, box["y"] + box["height"] / 2 + 30)
    page.wait_for_selector("#values table")
    assert "EPSG:32632" in page.inner_text("#place")
    until(page, "document.getElementById('place').textContent.includes('°')")  # the server's answer for this pixel
    assert page.locator("#values tbody tr").count() == 3
    assert "Result" in page.inner_text("#values")

    with page.expect_download() as found:
        page.click("#get-clear")
    import rasterio

    with rasterio.open(found.value.path()) as dataset:
        assert dataset.tags(ns="IMAGE_STRUCTURE")["LAYOUT"] == "COG"
        assert dataset.descriptions == ("B02", "B03", "B04", "B08")
    assert found.value.suggested_filename in {f"sader_2022-03-{day}_clear.tif" for day in (10, 15, 20)}
    with page.expect_download() as found:
        page.click("#get-report")
    assert found.value.suggested_filename.endswith("_report.html")

    # Loaded again, the page shows the same result.
    page.reload()
    page.wait_for_selector("#get-clear")
    assert page.input_value("#right") == "result"
    assert page.locator("#earlier button").count() >= 1


def changed(page: Any, before: np.ndarray, columns: slice, seconds: float = 30) -> None:
    """Wait until some columns of the canvas differ from before: masks are estimated first."""
    end = time.monotonic() + seconds
    while np.abs(drawn(page)[:, columns] - before[:, columns]).max() <= 60:
        assert time.monotonic() < end, "the image does not change"


def test_the_button_is_in_view_and_masks_can_be_drawn_over_every_date(browser, server):
    for page in watched(browser, server, width=1280, height=800):
        page.click("#demo-big")
        page.wait_for_selector("#film meter")
        box = page.locator("#run").bounding_box()
        assert box["y"] + box["height"] <= 800
        plain = drawn(page)
        page.locator("#overlays").get_by_text("Clouds").click()
        assert "cloud or shadow" in page.inner_text("#legend")
        half = plain.shape[1] // 2
        for side in (slice(0, half - 5), slice(half + 5, None)):
            changed(page, plain, side)
        over = drawn(page)
        page.get_by_text("More settings").click()
        page.fill("#growth", "20")
        page.keyboard.press("Tab")
        changed(page, over, slice(None))
        over = drawn(page)
        page.select_option("#haze", "keep")
        changed(page, over, slice(None))
        page.locator("#overlays").get_by_text("None").click()
        assert np.abs(drawn(page) - plain).max() == 0


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
    page.keyboard.type("blue,green,red,nir")
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


def spoken(page: Any) -> list[tuple[str, str, bool]]:
    """(role, name, can be focused) of everything in the accessibility tree: the input of a screen reader."""
    session = page.context.new_cdp_session(page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()
    found = []
    for node in nodes:
        if not node.get("ignored"):
            facts = {one["name"]: one["value"].get("value") for one in node.get("properties", [])}
            name = node.get("name", {}).get("value", "")
            found.append((node["role"]["value"], name, bool(facts.get("focusable"))))
    return found


def test_the_accessibility_tree(page, finished):
    _, job = finished
    page.goto(f"{page.url.split('#')[0]}#job={job}")
    page.reload()
    page.wait_for_selector("#get-clear")
    page.wait_for_selector("#film meter")
    tree = spoken(page)
    nameless = [node for node in tree if node[2] and not node[1].strip() and node[0] not in ("RootWebArea", "generic")]
    assert nameless == []
    roles = {role for role, _, _ in tree}
    assert {"main", "banner", "complementary", "heading", "slider", "application", "status"} <= roles
    assert any(role == "button" and "percent hidden" in name for role, name, _ in tree)
    # The mouse makes no reader talk; keys do, and say what is under the middle of the image.
    box = page.locator("#map").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2 + 90, box["y"] + 90)
    page.wait_for_selector("#values table")
    assert page.text_content("#spoken") == ""
    page.focus("#map")
    page.keyboard.press("+")
    until(page, "document.getElementById('spoken').textContent.includes('B04')")
    assert page.text_content("#spoken").startswith("column ")
    # What has the focus is seen to have it.
    for name in ("#run", "#handle", "#left", "#background", "#map"):
        page.focus(name)
        page.keyboard.press("Shift")  # the browser draws the ring for who uses the keyboard
        style = "(node) => [getComputedStyle(node).outlineStyle, parseFloat(getComputedStyle(node).outlineWidth)]"
        kind, width = page.locator(name).evaluate(style)
        assert kind != "none", name
        assert width >= 2, name


def test_the_focus_and_the_progress_of_a_run_by_keyboard(page):
    page.click("#browse")
    page.get_by_label("wide/").check()
    page.click("#open-paths")
    page.wait_for_selector("#film meter")
    page.route("**/execution", lambda route: route.continue_(post_data=small_tiles(route.request.post_data)))
    page.focus("#run")
    page.keyboard.press("Enter")
    until(page, "document.activeElement.id === 'cancel'")  # not lost with the button that rests
    until(page, "document.getElementById('progress-spoken').textContent.includes('percent')")
    assert page.get_attribute("#progress-spoken", "role") == "status"
    assert page.get_attribute("#progress-text", "role") is None  # it changes with every second
    page.keyboard.press("Enter")  # cancel
    until(page, "document.getElementById('result-text').textContent.startsWith('Cancelled')")
    until(page, "document.activeElement.id === 'run'")


def luminance(colour: str) -> float:
    """Relative luminance of "#rrggbb" (WCAG 2.2)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_have_enough_contrast(page, scheme):
    page.emulate_media(color_scheme=scheme)
    names = ("ink", "muted", "paper", "card", "accent", "accent-ink", "soft", "bad", "bad-soft", "focus", "edge")
    read = "(name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim()"
    colour = {name: page.evaluate(read, name) for name in names}

    def contrast(one: str, other: str) -> float:
        high, low = sorted((luminance(colour[one]), luminance(colour[other])), reverse=True)
        return (high + 0.05) / (low + 0.05)

    for text, ground in (
        ("ink", "card"), ("ink", "paper"), ("muted", "card"), ("muted", "paper"), ("muted", "soft"), ("accent", "card"),
        ("accent-ink", "accent"), ("bad", "bad-soft"), ("accent", "soft"), ("bad", "card"),
    ):  # fmt: skip
        assert contrast(text, ground) >= 4.5, (text, ground)
    for line, ground in (("focus", "card"), ("focus", "paper"), ("edge", "card"), ("edge", "paper")):
        assert contrast(line, ground) >= 3, (line, ground)


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


def test_the_token_is_entered_on_the_page_and_never_in_a_url(browser, tmp_path):
    with serving(ServeSettings(data=tmp_path, port=0, token=TOKEN, limits=LIMITS)) as server:
        page = new_page(browser)
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
    page = new_page(browser)
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


EVIL = '<img src=x onerror="window.evil=1">'


def test_names_of_files_and_bands_are_text_on_the_page(page, server, tmp_path):
    """File names are text, not markup."""
    for number, name in enumerate((f"{EVIL}_2022-03-10.tif", "'\"><script>window.evil=1<_script>_2022-03-15.tif")):
        write_date(server.data / EVIL / name, number)
    page.click("#browse")
    page.get_by_label(f"{EVIL}/").check()
    page.click("#open-paths")
    page.wait_for_selector("#film meter")
    assert page.inner_text("#scene-title") == EVIL
    titles = [button.get_attribute("title") for button in page.locator("#film button").all()]
    assert f"{EVIL}_2022-03-10.tif" in titles
    remove_clouds(page)
    import rasterio

    path = write_date(tmp_path / "a_2022-03-10.tif", 1)
    with rasterio.open(path, "r+") as dataset:
        dataset.descriptions = (EVIL, "B03", "B04", "B08")
    page.set_input_files("#files", str(path))
    until(page, "document.getElementById('scene-title').textContent === 'Uploaded scene'")
    page.goto(f"{server.url}/#job=<img src=x onerror=window.evil=1>")
    page.reload()
    page.wait_for_selector("#error:not([hidden])")
    assert page.evaluate("window.evil") is None
    assert page.locator("img[src=x], #film script").count() == 0


def test_names_of_files_are_text_in_a_report(browser, tmp_path):
    """The report has no policy of a server: escaping is all that stands between a name and a script."""
    from sader.cli.main import main

    files = [write_date(tmp_path / f"{EVIL}_2022-03-{10 + n}.tif", n) for n in range(2)]
    out = tmp_path / "clear.tif"
    with pytest.raises(SystemExit) as ended:
        main(["remove", *map(str, files), "-o", str(out), "--report", str(tmp_path / "r.html")])
    assert not ended.value.code
    page = new_page(browser)
    far: list[str] = []
    page.on("request", lambda request: far.append(request.url))
    page.goto((tmp_path / "r.html").as_uri())
    assert page.evaluate("window.evil") is None
    assert page.locator("img[src=x]").count() == 0
    assert EVIL in page.inner_text("body")
    assert [url for url in far if not url.startswith(("data:", "file:"))] == []
    page.close()
