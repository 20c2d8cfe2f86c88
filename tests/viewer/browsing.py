"""A real browser for tests: Debian's Chromium through Playwright, and helpers to inspect the page."""

from __future__ import annotations

import base64
import io
import shutil
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from .conftest import Running

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
NO_CHROMIUM = "no Chromium found: the browser tests were not run (Debian: apt install chromium)"


def new_page(browser: Any, **options: Any) -> Any:
    """Return a page that waits long enough on a busy machine."""
    page = browser.new_page(**options)
    page.set_default_timeout(90_000)
    return page


def watched(browser: Any, server: Running, **size: int) -> Iterator[Any]:
    made = new_page(browser, viewport=size, accept_downloads=True)
    errors, far = [], []
    made.on("pageerror", lambda error: errors.append(str(error)))
    made.on("request", lambda request: far.append(request.url) if not request.url.startswith(server.url) else None)
    made.goto(server.url)
    made.wait_for_selector("body[data-ready]")
    yield made
    made.close()
    assert errors == []
    assert [url for url in far if not url.startswith(("data:", "blob:"))] == []  # it works offline


def until(page: Any, condition: str, seconds: float = 90) -> None:
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
