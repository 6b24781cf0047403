"""``fedkeep flower``: set up a federation on Flower."""

from __future__ import annotations

from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from fedkeep._utils.files import atomic_write
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


def proxy(options: Namespace, console: Console) -> int:
    """Forward SuperNodes' requests to the SuperLink, and none to its Control API."""
    _require_flower()
    from fedkeep.flower.logs import show_logs
    from fedkeep.flower.path_proxy import Limits, serve_proxy

    show_logs()
    console.print(f"{options.listen} forwards nodes to {options.superlink}", highlight=False, markup=False)
    serve_proxy(options.listen, options.superlink, Path(options.keys), Limits(connections=options.connections))
    return 0


def nginx(options: Namespace, console: Console) -> int:
    """Write a configuration of nginx as the proxy before the SuperLink."""
    _require_flower()
    from fedkeep.flower.keys import warn_before_expiry
    from fedkeep.flower.logs import show_logs
    from fedkeep.flower.nginx import nginx_configuration
    from fedkeep.flower.path_proxy import Limits

    file, keys = Path(options.file), Path(options.keys)
    authority = Path(options.client_ca) if options.client_ca else None
    limits = Limits(connections=options.connections)
    atomic_write(file, nginx_configuration(file, options.listen, options.superlink, keys, authority, limits))
    show_logs()
    warn_before_expiry(keys / "superlink.crt", keys / "ca.crt")
    say(console, f"wrote {file}. Start it: nginx -c {file.resolve()}")
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
