"""Federated learning that keeps what it has learned.

>>> import fedkeep
>>> run = fedkeep.run("demo", methods=[fedkeep.FedSeq(), fedkeep.SFedKD(teachers=3)], rounds=20)  # doctest: +SKIP

Names are imported when they are first used, so that ``import fedkeep`` is quick; ``__init__.pyi`` lists them.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

_MODULES = {
    alias.name: str(node.module)
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""By public name, the module that defines it."""

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("fedkeep")
    if name not in _MODULES:
        raise AttributeError(f"module 'fedkeep' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
