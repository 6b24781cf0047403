"""Take the documentation's pictures of the report, in headless Chromium.

    python tools/screenshots.py RUN

RUN is a run folder or an archive. It needs Playwright (``pip install playwright``) and Chromium: ``CHROMIUM`` names its
program, by default /usr/bin/chromium. It writes the report in light and dark, on a wide and a narrow screen, and with
``--pdf FILE`` also as it prints on A4. docs/report.md shows them, from ``fedkeep run --seeds 0,1 --rounds 40``.
"""

from __future__ import annotations

import argparse
import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from fedkeep.reporting.html import write_report
from fedkeep.reporting.run_folder import read_run

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PICTURES = {  # name: width, height, colour scheme
    "report-light.png": (1280, 1560, "light"),
    "report-dark.png": (1280, 1560, "dark"),
    "report-phone.png": (390, 1560, "light"),
}


@contextmanager
def browser() -> Iterator[Any]:
    """Start headless Chromium with a fresh profile."""
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, headless=True, args=ARGUMENTS)
        try:
            yield chromium
        finally:
            chromium.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="a run folder, or an archive of one")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"), help="folder of the pictures")
    parser.add_argument("--pdf", type=Path, help="also print the report on A4, into this file")
    parser.add_argument("--whole", action="store_true", help="whole pages, not only their beginning")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, browser() as chromium:
        report = write_report(read_run(options.run), Path(folder) / "report.html")
        for name, (width, height, scheme) in PICTURES.items():
            page = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(report.as_uri())
            picture = Image.open(io.BytesIO(page.screenshot(full_page=options.whole)))
            # A third of the bytes, and thin lines keep their colours.
            picture.convert("RGB").quantize(224, Image.Quantize.MAXCOVERAGE).save(options.out / name, optimize=True)
            page.close()
        if options.pdf:
            page = chromium.new_page()
            page.goto(report.as_uri())
            page.pdf(path=options.pdf, prefer_css_page_size=True)


if __name__ == "__main__":
    main()
