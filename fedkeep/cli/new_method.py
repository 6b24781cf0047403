"""``fedkeep new-method``: write a method of the user's own and its test, which pass and are to be changed."""

import keyword
import re
import sys
from argparse import Namespace
from importlib import resources
from pathlib import Path

from rich.console import Console

from fedkeep._utils.files import atomic_write
from fedkeep.cli.text import say
from fedkeep.errors import ConfigError, RunError
from fedkeep.interface import algorithms


def write(options: Namespace, console: Console) -> int:
    """Write a method and its test."""
    name: str = options.name
    if not name.isidentifier() or keyword.iskeyword(name) or not name[0].isupper():
        raise ConfigError(f"NAME is the name of a Python class, such as MyMethod, not {name!r}.")
    if name.lower() in algorithms():
        raise ConfigError(f"there is a method {name.lower()!r} already (fedkeep methods). Choose another name.")
    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    if module in sys.stdlib_module_names:
        raise ConfigError(
            f"{module}.py would stand in the way of Python's own module {module!r}, which other code imports. Choose "
            f"another name, such as {name}Method."
        )
    folder = Path(options.out)
    kind = "sequential" if options.sequential else "parallel"
    files = {folder / f"{module}.py": kind, folder / f"test_{module}.py": "test"}
    for path in files:
        if path.exists():
            raise RunError(f"{path} exists. Choose another name, or another folder with --out.")
    for path, template in files.items():
        text = resources.files("fedkeep.cli").joinpath(f"templates/{template}.txt").read_text(encoding="utf-8")
        atomic_write(path, text.format(name=name, module=module))
    method, test = files
    say(console, f"wrote {method} and {test}. Try them:")
    run = f"fedkeep run --use {method} --methods {'fedseq' if options.sequential else 'fedavg'},{name.lower()}"
    say(console, f"  {run}\n  python -m pytest {test}")
    return 0
