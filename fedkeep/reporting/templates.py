"""HTML pages from this folder's templates, which share one style sheet."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


def page(template: str, context: Mapping[str, Any]) -> str:
    """Return a page as HTML text; what the context lacks and the template names is an error."""
    return _environment().get_template(template).render(context)


@cache
def script() -> dict[str, str]:
    """Return the script of the report, and its hash, by which a page allows this script and no other."""
    text = files("fedkeep.reporting").joinpath("report.js").read_text(encoding="utf-8")
    digest = b64encode(sha256(text.encode()).digest()).decode()
    return {"text": text, "hash": f"sha256-{digest}"}


@cache  # it keeps the templates compiled
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    folder = files("fedkeep.reporting")
    loader = FunctionLoader(lambda name: folder.joinpath(name).read_text(encoding="utf-8"))
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
