"""Import the user's own methods, models and partition schemes from files and modules."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from fedkeep.errors import ConfigError
from fedkeep.interface import Algorithm
from fedkeep.interface.method_checks import check_method

_PREFIX = "fedkeep_used_"
"""What the names of modules begin with that were imported from files."""


def import_user_code(names: Iterable[str]) -> None:
    """Import files and modules, whose classes are then available by name.

    Pass only names that the user has typed, never names from a recipe.

    ``names``: Files such as ``folder/method.py`` or modules such as ``package.module``.
    """
    for name in names:
        path = Path(name)
        if path.suffix == ".py":
            _import_file(path)
        else:
            try:
                _check_methods(importlib.import_module(name))
            except ModuleNotFoundError as error:
                if error.name is not None and not name.startswith(error.name):
                    raise
                raise ConfigError(
                    f"--use {name}: there is no such module. Give a path to a .py file, or install it."
                ) from error


def why_not_importable(value: Any, *, elsewhere: bool = False) -> str | None:
    """Return why another process cannot import a class or function by its name; None if it can.

    ``elsewhere``: Whether the process is on another machine, where the main program is another.
    Returns: Such as ``Net is defined in a notebook``.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module is None or name is None:
        return f"{value!r:.60} is an object, not a class or function of a file"
    if "<lambda>" in name:
        return "a lambda has no name"
    if "<" in name:
        return f"{name.rpartition('.')[2]} is defined inside a function"
    if module == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        return f"{name} is defined in a notebook or an interactive session"
    if module == "__main__" and elsewhere:
        return f"{name} is defined in the script that was started, and nodes of a Ray cluster import only modules"
    return None


def modules_of(values: Iterable[Any]) -> list[str]:
    """Return what `import_user_code` has to import so that classes of the user's exist in another process.

    ``values``: Classes, which `why_not_importable` passes.
    Returns: Modules and files, without the main program, which Python imports itself.
    """
    found: dict[str, None] = {}
    for value in values:
        module = sys.modules.get(value.__module__)
        if module is None or value.__module__ == "__main__":
            continue
        imported_from = str(module.__file__) if value.__module__.startswith(_PREFIX) else value.__module__
        found[imported_from] = None
    return list(found)


def _check_methods(module: ModuleType) -> None:
    """Check the methods that a module defines; one that others are derived from need not be complete."""
    for value in vars(module).values():
        own = isinstance(value, type) and issubclass(value, Algorithm) and value.__module__ == module.__name__
        if own and not (value.__subclasses__() and getattr(value, "__abstractmethods__", None)):
            check_method(value)


def _import_file(path: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"--use {path}: there is no such file.")
    name = f"{_PREFIX}{path.stem}"
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path.resolve()):
        return
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise ConfigError(f"--use {path}: this is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        _check_methods(module)
    except BaseException:
        del sys.modules[name]  # otherwise a second import would seem to succeed
        raise
