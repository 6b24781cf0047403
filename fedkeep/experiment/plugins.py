"""Import the user's own methods, models and partition schemes from files and modules."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

from fedkeep.errors import ConfigError


def import_user_code(names: Iterable[str]) -> None:
    """Import files and modules, whose classes are then available by name.

    Pass only names that the user has typed, never names from a recipe.

    Parameters
    ----------
    names : Iterable[str]
        Files such as ``folder/method.py`` or modules such as ``package.module``.

    Raises
    ------
    ConfigError
        If there is no such file or module. An error inside it is not caught.
    """
    for name in names:
        path = Path(name)
        if path.suffix == ".py":
            _import_file(path)
        else:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                if error.name is not None and not name.startswith(error.name):
                    raise
                raise ConfigError(
                    f"--use {name}: there is no such module. Give a path to a .py file, or install it."
                ) from error


def _import_file(path: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"--use {path}: there is no such file.")
    name = f"fedkeep_used_{path.stem}"
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
    except BaseException:
        del sys.modules[name]  # otherwise a second import would seem to succeed
        raise
