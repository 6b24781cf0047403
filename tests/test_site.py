"""The documentation site: it is built without a warning, loads nothing from elsewhere, and can be used by everybody.

CHROMIUM names the browser's program, AXE the file axe.min.js of the npm package axe-core; without them accessibility is
not checked.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site() -> Path:
    pytest.importorskip("mkdocstrings", reason="the extra docs is not installed")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run([sys.executable, "tools/site_source.py"], cwd=ROOT, check=True)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", "build/mkdocs.yml"]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return ROOT / "build" / "site"


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 60
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]*\bsrc=\"?(https?:[^\s\">]+)", text)
        loaded += re.findall(r"<link[^>]*rel=\"?(?:stylesheet|preconnect|preload)[^>]*href=\"?(https?:[^\s\">]+)", text)
        assert not loaded, page
        assert 'class="mermaid"' not in text, "diagrams would be drawn by a script from elsewhere"


def test_the_search_needs_no_server(site: Path) -> None:
    """A page that is opened as a file may load scripts, and neither JSON nor a Worker."""
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert index.startswith("var __index")
    for page in (site / "index.html", site / "docs" / "data.html"):
        scripts = re.findall(r"<script[^>]*\bsrc=\"?([^\s\">]+)", page.read_text(encoding="utf-8"))
        assert [(page.parent / name).resolve() for name in scripts if "worker" in name] == [site / "iframe-worker.js"]


FIRST = {  # what people look for: the page that the search finds first
    "missing values": "docs/data.html",
    "class imbalance": "docs/which-method.html",
    "my own csv": "docs/data.html",
    "Hugging Face model": "docs/how-to/initial-model.html",
    "early stopping": "docs/how-to/resume.html",
    "regression": "docs/data.html",
}


def test_what_people_look_for_is_found_first_in_a_page_that_is_opened_as_a_file(site: Path) -> None:
    pytest.importorskip("playwright", reason="Playwright is not installed")
    sys.path.append(str(ROOT / "tools"))
    from screenshots import CHROMIUM, browser

    if not Path(CHROMIUM).is_file():
        pytest.skip("CHROMIUM names no Chromium")
    with browser() as chromium:
        for words, first in FIRST.items():
            page = chromium.new_page()
            page.goto((site / "index.html").as_uri())
            page.click("[data-md-component=search-query]")
            page.keyboard.type(words)
            page.wait_for_selector(f".md-search-result__item:first-child > a[href*='{first}']", timeout=20_000)
            page.close()


def test_every_page_is_accessible_and_none_is_wider_than_a_phone(site: Path) -> None:
    pytest.importorskip("playwright", reason="Playwright is not installed")
    sys.path.append(str(ROOT / "tools"))
    from screenshots import CHROMIUM, browser

    axe = os.environ.get("AXE", "")
    if not Path(CHROMIUM).is_file() or not Path(axe).is_file():
        pytest.skip("AXE names no axe.min.js (npm pack axe-core), or CHROMIUM no Chromium")
    found: dict[str, list[str]] = {}
    with browser() as chromium:
        for scheme in ("light", "dark"):
            phone = {"width": 390, "height": 844} if scheme == "dark" else {"width": 1280, "height": 900}
            context = chromium.new_context(color_scheme=scheme, viewport=phone, bypass_csp=True)
            for path in sorted(set(site.rglob("*.html")) - {site / "404.html"}):  # which needs a server
                page = context.new_page()
                page.goto(path.as_uri())
                page.add_script_tag(path=axe)
                for fault in page.evaluate("axe.run()")["violations"]:
                    name = f"{path.relative_to(site)} ({scheme})"
                    found.setdefault(name, []).append(f"{fault['id']}: {fault['nodes'][0]['html'][:200]}")
                if page.evaluate("document.documentElement.scrollWidth") > phone["width"]:
                    found.setdefault(str(path.relative_to(site)), []).append("wider than the screen")
                page.close()
            context.close()
    assert not found, "\n".join(f"{page}: {faults}" for page, faults in found.items())
