"""A matplotlib figure as a piece of HTML: inline SVG that scales, follows the page's colours and says what it shows."""

from __future__ import annotations

import io
import re
from html import escape
from typing import TYPE_CHECKING

from fedkeep.reporting.plots import COLOURS, GRID, INK, MUTED, PAPER, theme

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The page defines these in light and dark; a figure is drawn in the light ones.
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--paper"} | {
    colour: f"--m{index}" for index, colour in enumerate(COLOURS)
}


def inline(figure: Figure, name: str, alt: str) -> str:
    """Return a figure as an ``<svg>`` element for the page.

    Parameters
    ----------
    figure
        Drawn in the colours of `fedkeep.reporting.plots`, which become CSS variables here.
    name
        Sets this figure's ids apart from those of the others on the page.
    alt
        What the figure shows, for those who do not see it; any text.
    """
    file = io.StringIO()
    with theme():
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    body = embed(file.getvalue(), name, alt)
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, f"var({variable})")
    return body


def embed(text: str, name: str, alt: str) -> str:
    """Return SVG text as an element that lies in a page without touching the rest of it, and scales to its place."""
    head = re.search(r"<svg[^>]*?viewBox=\"([^\"]+)\"[^>]*>", text)
    if head is None:
        raise ValueError("The figure is no SVG with a viewBox.")
    body = text[head.end() : text.rindex("</svg>")]
    # Inside a page, matplotlib's style would hold for everything, and its addresses and fonts are of no use.
    body = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->|<defs>\s*</defs>", "", body, flags=re.S)
    body = re.sub(r"font-family:[^;\"]*;?\s*", "", body).replace("xlink:href", "href")
    body = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", body)
    used = set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", body))
    body = re.sub(r"\s+id=\"([^\"]+)\"", lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", body)
    body = re.sub(r"(url\(#|href=\"#)", rf"\g<1>{name}-", body)
    body = re.sub(r"<g>\s*</g>", "", body)
    body = re.sub(r"\n\s*", "\n", body)
    return f'<svg viewBox="{head[1]}" role="img" aria-label="{escape(alt)}">{body}</svg>'
