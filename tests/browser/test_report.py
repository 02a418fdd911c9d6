"""The report as a reader sees it, in a headless Chromium.

Not part of the default run: ``pytest -m browser``. Skipped where there is no Chromium.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mtp_train.config import ReportConfig
from mtp_train.report.page import write_page
from tests.browser.chromium import Page, find_chromium, open_browser
from tests.unit.report.run_fixture import write_run

pytestmark = pytest.mark.browser

PHONE, DESK = 360, 1280
_CHART_BOXES = """
[...document.querySelectorAll("figure svg")].map((svg) => svg.getBoundingClientRect())
  .filter((box) => box.width > 100)
  .map((box) => [box.x, box.y + scrollY, box.width, box.height])
"""
_CLIPPED_TEXTS = """
[...document.querySelectorAll("figure svg text")].filter((text) => {
  const box = text.getBoundingClientRect(), card = text.closest("figure").getBoundingClientRect();
  return box.width > 0 && (box.left < card.left || box.right > card.right);
}).map((text) => text.textContent)
"""
_SMALLEST_TEXT = """
Math.min(...[...document.querySelectorAll("figure svg text")]
  .filter((text) => text.getBoundingClientRect().width > 0)
  .map((text) => 12 * text.closest("svg").getBoundingClientRect().width
    / text.closest("svg").viewBox.baseVal.width))
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    program = find_chromium()
    if program is None:
        pytest.skip("there is no Chromium here (apt-get install chromium)")
    with open_browser(program) as page:
        yield page


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_run(tmp_path_factory.mktemp("runs") / "mine")
    write_page(root, root / "report.html", ReportConfig())
    return root / "report.html"


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_page_fits_is_quiet_and_fetches_nothing(
    browser: Page, report: Path, width: int, is_dark: bool
) -> None:
    browser.open(report, width=width, is_dark=is_dark)
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.evaluate(_CLIPPED_TEXTS) == []
    assert browser.evaluate(_SMALLEST_TEXT) > 10
    assert browser.console == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_every_chart_is_drawn(browser: Page, report: Path, width: int, is_dark: bool) -> None:
    browser.open(report, width=width, is_dark=is_dark)
    boxes = browser.evaluate(_CHART_BOXES)
    assert len(boxes) == 12
    pixels = pixels_of(browser.screenshot(full=True))
    for box in boxes:
        x, y, wide, high = (round(2 * value) for value in box)
        part = pixels[y : y + high, x : x + wide].reshape(-1, 3)
        background = part[0]
        drawn = (np.abs(part - background).sum(1) > 60).mean()
        assert 0.002 < drawn < 0.5, f"chart at {box}: {drawn:.4f} of it differs from its background"


def test_page_follows_the_system_until_told_otherwise(browser: Page, report: Path) -> None:
    brightness = []
    for is_dark in (False, True):
        browser.open(report, width=DESK, is_dark=is_dark)
        for click in ("", "document.getElementById('theme').click()"):
            browser.evaluate(click or "0")
            brightness.append(pixels_of(browser.screenshot())[4, 4].mean())
    assert [value > 128 for value in brightness] == [True, False, False, True]


def test_a_mark_tells_its_value_when_touched(browser: Page, report: Path) -> None:
    browser.open(report, width=PHONE)
    place = """
    (async () => {
      const marks = [...document.querySelectorAll(".hit")];
      const mark = marks.find((item) => item.getBoundingClientRect().width);
      mark.scrollIntoView({block: "center", behavior: "instant"});
      await new Promise((done) => setTimeout(done, 100));  // scrolling hides the tip
      const box = mark.getBoundingClientRect();
      return [box.x + box.width / 2, box.y + box.height / 2, mark.dataset.tip];
    })()
    """
    x, y, wanted = browser.evaluate(place)
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    shown = """
    (() => {
      const tip = document.getElementById("tip"), box = tip.getBoundingClientRect();
      return {text: tip.hidden ? "" : tip.textContent, left: box.left, right: box.right};
    })()
    """
    tip = browser.evaluate(shown)
    assert tip["text"] == wanted
    assert tip["left"] >= 0
    assert tip["right"] <= PHONE


def test_hostile_text_does_not_run(browser: Page, report: Path) -> None:
    browser.open(report, width=DESK)
    assert browser.evaluate("document.scripts.length") == 1
    assert browser.evaluate("document.images.length") == 0
    # an alert would block, and then nothing would answer
    browser.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    # what slipped through escaping could still not run
    slipped = (
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran=1\">')"
    )
    browser.evaluate(slipped)
    browser.evaluate("new Promise((done) => setTimeout(done, 200))")
    assert browser.evaluate("window.ran") is None


def test_a_rung_opens_and_shows_its_bounds(browser: Page, report: Path) -> None:
    browser.open(report, width=DESK)
    visible = "document.querySelector('.rung table').checkVisibility()"
    assert browser.evaluate(visible) is False
    browser.evaluate("document.querySelector('.rung summary').click()")
    assert browser.evaluate(visible) is True


def test_it_prints(browser: Page, report: Path) -> None:
    browser.open(report, width=DESK, is_dark=True)
    assert browser.pdf().startswith(b"%PDF")
    browser.call("Emulation.setEmulatedMedia", media="print")
    try:
        paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == "rgb(255, 255, 255)"
        assert browser.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    finally:
        browser.call("Emulation.setEmulatedMedia", media="")


def pixels_of(png: bytes) -> np.ndarray:
    """``[height, width, 3]``, int64, at two device pixels per CSS pixel."""
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(np.int64)
