"""The report in a real browser: what a reader can do with it, and that nothing leaves the page.

Skipped where Playwright or Chromium is missing; CHROMIUM names its program, AXE the file axe.min.js of the npm package
axe-core, with which accessibility is checked too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="Playwright is not installed: pip install playwright")
sys.path.append(str(Path(__file__).parents[2] / "tools"))

from screenshots import CHROMIUM, browser
from synthetic_run import read_run, write_demo

from fedkeep.reporting.html import write_report

pytestmark = pytest.mark.skipif(not Path(CHROMIUM).is_file(), reason=f"no Chromium at {CHROMIUM}: set CHROMIUM")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("browser")
    return write_report(read_run(write_demo(folder / "demo")), folder / "report.html").as_uri()


@pytest.fixture
def page(chromium: Any, report: str) -> Iterator[Any]:
    """The report on a screen; whatever it asks for or complains about fails the test."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    asked: list[str] = []
    complaints: list[str] = []
    opened.on("request", lambda request: asked.append(request.url))
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.goto(report)
    yield opened
    context.close()
    assert [url for url in asked if not url.startswith("data:")] == [report]
    assert complaints == []


def test_charts_can_be_read_hidden_and_smoothed(page: Any) -> None:
    assert page.locator(".chart .line").count() == 12  # three charts, three methods and an unfinished seed
    page.locator(".chart .plot").first.hover(position={"x": 300, "y": 100})
    tip = page.locator(".tip").inner_text()
    assert tip.startswith("round ")
    assert {"FedAvg", "FedSeq", "SFedKD"} <= {word for line in tip.splitlines() for word in line.split()}
    button = page.locator(".legend button", has_text="FedSeq")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert page.locator('.chart g[data-m="1"]').first.is_hidden()
    page.locator(".chart .plot").first.hover(position={"x": 301, "y": 100})
    assert "FedSeq" not in page.locator(".tip").inner_text()
    line = page.locator(".chart .line").first
    before = line.get_attribute("d")
    page.locator(".smooth input").fill("5")
    assert line.get_attribute("d") != before


def test_tables_sort_and_maps_tell_their_values(page: Any) -> None:
    column = page.locator("table.sortable").first.locator("tbody tr td:nth-child(5)")
    page.locator("table.sortable").first.locator("thead th:nth-child(5) button").click()
    values = [float(text.split()[0]) for text in column.all_inner_texts()]
    assert values == sorted(values, reverse=True)
    page.locator("table.sortable").first.locator("thead th:nth-child(5) button").click()
    assert [float(text.split()[0]) for text in column.all_inner_texts()] == sorted(values)
    page.locator(".map img").first.hover()
    assert page.locator(".tip").inner_text().startswith("class ")
    assert page.locator(".tip").inner_text().endswith(" %")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_off_or_left_white(chromium: Any, report: str, scheme: str) -> None:
    page = chromium.new_page(viewport={"width": 390, "height": 800}, color_scheme=scheme)
    page.goto(report)
    page.evaluate("document.querySelector('h1').textContent = 'demo (changed: partition.classes_per_client=2, x=3)'")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390, "only tables scroll sideways"
    sizes = page.evaluate("""[...document.querySelectorAll("main *")]
        .filter((e) => e.textContent.trim() && !e.children.length)
        .map((e) => parseFloat(getComputedStyle(e).fontSize))""")
    assert min(sizes) >= 12
    white = page.evaluate("""[...document.querySelectorAll("main, main *")]
        .filter((e) => getComputedStyle(e).backgroundColor === "rgb(255, 255, 255)").length""")
    assert (white == 0) == (scheme == "dark")
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 703, "height": 1000})  # A4 within its margins
    page.evaluate("""document.querySelectorAll("table.sortable")[0].querySelectorAll("tr")
        .forEach((row) => { while (row.cells.length < 17) row.append(row.cells[2].cloneNode(true)); })""")
    wide = page.evaluate(
        """[...document.querySelectorAll("table")].filter((e) => e.getBoundingClientRect().right > 704).length"""
    )
    assert wide == 0, "every column is on the paper"
    page.close()


def test_the_page_is_accessible(chromium: Any, report: str) -> None:
    axe = os.environ.get("AXE", "")
    if not Path(axe).is_file():
        pytest.skip("AXE names no axe.min.js (npm pack axe-core)")
    for scheme in ("light", "dark"):
        context = chromium.new_context(color_scheme=scheme, bypass_csp=True)
        page = context.new_page()
        page.goto(report)
        page.add_script_tag(path=axe)
        found = page.evaluate("axe.run()")["violations"]
        assert [(fault["id"], [node["html"][:200] for node in fault["nodes"]]) for fault in found] == []
        context.close()
