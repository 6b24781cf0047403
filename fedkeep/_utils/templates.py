"""The Jinja templates of pages, cards and tables. They lie beside the modules that fill them in."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from fedkeep._utils import escaping

if TYPE_CHECKING:
    from jinja2 import Template


@cache  # it stays compiled
def template(package: str, name: str, **syntax: Any) -> Template:
    """Return a template of a package; what it names and is not given is an error.

    ``syntax``: As a `jinja2.Environment` takes it, where it is not that of the others.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    options = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True} | syntax
    loader, is_page = PackageLoader("fedkeep", package), name.endswith(".html.jinja")
    environment = Environment(loader=loader, undefined=StrictUndefined, autoescape=is_page, **options)
    environment.filters |= {"escaped": escaping.markdown, "prose": escaping.prose}
    return environment.get_template(name)
