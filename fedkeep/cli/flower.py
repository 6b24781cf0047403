"""``fedkeep flower``: set up a federation on Flower."""

from __future__ import annotations

from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from fedkeep.cli.run import recipe_of
from fedkeep.cli.text import say
from fedkeep.errors import MissingExtra


def new(options: Namespace, console: Console) -> int:
    """Write a Flower app for a recipe."""
    _require_flower()
    from fedkeep.flower.app_template import create_app

    recipe = recipe_of(options)
    folder = create_app(Path(options.folder), recipe, options.sites)
    nodes = options.sites or recipe.partition.num_clients or 2
    command = f"flwr run {folder} --stream --federation-config 'num-supernodes={nodes} client-resources-num-cpus=1'"
    lines = (
        f"wrote {folder}/: pyproject.toml, recipe.toml, fedkeep_app.py",
        "",
        "a test run on this machine:",
        "  export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 FLWR_TELEMETRY_ENABLED=0",
        f"  {command}",
        "on several machines: docs/deploy.md",
    )
    say(console, "\n".join(lines))
    return 0


def keys(options: Namespace, console: Console) -> int:
    """Make keys and certificates for a test federation."""
    _require_flower()
    from fedkeep.flower.keys import make_keys

    for path in make_keys(Path(options.folder), options.sites, options.hosts, options.days):
        say(console, str(path))
    return 0


def _require_flower() -> None:
    if find_spec("flwr") is None:
        raise MissingExtra("fedkeep flower", "flower")


def clock(options: Namespace, console: Console) -> int:
    """Compare this machine's clock with the server's; the exit code is 1 if Flower does not bear the difference."""
    from fedkeep.flower.clock import describe_clock

    said, is_borne = describe_clock(options.superlink, options.root_certificates)
    say(console, said)
    return int(not is_borne)
