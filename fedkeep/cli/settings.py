"""``--set section.option=value`` for commands that run no recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedkeep.errors import ConfigError, did_you_mean
from fedkeep.experiment.overrides import parse_value
from fedkeep.options import Options, build


def read_settings(
    settings: Sequence[str], sections: Mapping[str, type[Options]], defaults: Mapping[str, dict[str, Any]] | None = None
) -> dict[str, Options]:
    """Return the options of each section, with the changes of ``--set``.

    ``defaults``: By section, defaults that replace those of the class.
    """
    tables = {name: dict((defaults or {}).get(name, {})) for name in sections}
    for setting in settings:
        path, equals, value = setting.partition("=")
        section, _, name = path.strip().partition(".")
        if not equals or not name:
            raise ConfigError(f"cannot read --set {setting!r}: write section.option=value.")
        if section not in sections:
            raise ConfigError(
                f"--set {setting}: this command has no section {section!r}.{did_you_mean(section, sections)}"
            )
        tables[section][name] = parse_value(value.strip())
    return {name: build(cls, tables[name], name) for name, cls in sections.items()}
