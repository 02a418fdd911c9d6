"""`make picture`: the first screen of a run's report, for the README.

``python -m tests.browser.picture runs/demo/report.html docs/report.png``
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

from PIL import Image

from runtime.files import write_atomic
from tests.browser.chromium import find_chromium, open_browser

WIDTH = 1200
MAX_BYTES = 300_000
_END = """
Math.ceil(document.querySelector("section.top").getBoundingClientRect().bottom + scrollY) + 20
"""


def take_picture(report: Path, picture: Path) -> None:
    """The report down to the end of its top box, light, at two pixels per CSS pixel.

    Raises ``ValueError`` without Chromium, without report, or for a picture over 300 kB.
    """
    program = find_chromium()
    if program is None:
        raise ValueError("there is no Chromium here; on Debian: apt-get install chromium")
    if not report.is_file():
        raise ValueError(f"{report}: no such file; `mtp report` writes it")
    with open_browser(program) as page:
        page.open(report, width=WIDTH)
        page.open(report, width=WIDTH, height=page.evaluate(_END))
        page.evaluate("document.getElementById('theme').hidden = true")
        image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    small = image.quantize(colors=128, dither=Image.Dither.NONE)  # flat colours: nothing is lost
    content = io.BytesIO()
    small.save(content, format="PNG", optimize=True)
    if len(content.getvalue()) > MAX_BYTES:
        raise ValueError(f"{picture}: {len(content.getvalue()):,} bytes, allowed {MAX_BYTES:,}")
    write_atomic(picture, content.getvalue())
    sys.stdout.write(f"{picture}: {image.width} x {image.height}, {len(content.getvalue()):,} B\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    try:
        take_picture(arguments.report, arguments.picture)
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
