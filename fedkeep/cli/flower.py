"""``fedkeep flower``: set up a federation on Flower, such as a small app for a user's own project."""

import re
import shlex
import ssl
import time
from argparse import Namespace
from dataclasses import replace
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console

from fedkeep._utils.files import atomic_write
from fedkeep.cli.run import recipe_of
from fedkeep.cli.text import say
from fedkeep.errors import ConfigError, MissingExtra, RunError
from fedkeep.experiment.recipe import Recipe
from fedkeep.experiment.run import as_argument
from fedkeep.flower.config import RunConfig
from fedkeep.options import as_table


def new(options: Namespace, console: Console) -> int:
    """Write a Flower app for a recipe."""
    _require_flower()
    recipe = recipe_of(options)
    folder = create_app(Path(options.folder), recipe, options.sites)
    nodes = options.sites or recipe.partition.num_clients or 2
    app = shlex.quote(str(as_argument(folder)))
    command = f"flwr run {app} --stream --federation-config 'num-supernodes={nodes} client-resources-num-cpus=1'"
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

    for path in make_keys(Path(options.folder), options.sites, options.hosts):
        say(console, str(path))
    return 0


def _require_flower() -> None:
    if find_spec("flwr") is None:
        raise MissingExtra("fedkeep flower", "flower")


def clock(options: Namespace, console: Console) -> int:
    """Compare this machine's clock with the server's; the exit code is 1 if Flower does not bear the difference."""
    said, is_borne = describe_clock(options.superlink, options.root_certificates)
    say(console, said)
    return int(not is_borne)


APP = '''\
"""The Flower app of this project: FedKeep's client and server. Import your own methods here, from files beside it."""

from fedkeep.flower.apps import client, server

__all__ = ["client", "server"]
'''


def create_app(folder: Path, recipe: Recipe, sites: int) -> Path:
    """Write ``pyproject.toml``, ``recipe.toml`` and ``fedkeep_app.py`` into a folder.

    ``folder``: A new or empty folder.
    ``sites``: How many sites take part. In a simulation the recipe's data are split over as many clients. 0: as many as
        the recipe has clients.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"{folder} exists and is not empty. Choose another folder.")
    if sites:
        recipe = _with_sites(recipe, sites)
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-") or "federation"
    atomic_write(folder / "recipe.toml", replace(recipe, paper={}).to_toml())
    atomic_write(folder / "fedkeep_app.py", APP)
    atomic_write(folder / "pyproject.toml", tomli_w.dumps(_project(name, recipe.title, sites)))
    return folder


def _with_sites(recipe: Recipe, sites: int) -> Recipe:
    if "num_clients" not in type(recipe.partition).__dataclass_fields__:
        raise ConfigError(f"the partition {recipe.partition.name!r} cannot be made for {sites} sites. Omit --sites.")
    cohort, least = min(recipe.run.cohort_size, sites), min(recipe.run.min_clients, sites)
    run = replace(recipe.run, cohort_size=cohort, min_clients=least)
    return replace(recipe, partition=replace(recipe.partition, num_clients=sites), run=run)


def _project(name: str, title: str, sites: int) -> dict[str, Any]:
    config = as_table(RunConfig(recipe="recipe.toml", sites=sites))
    project = {"name": name, "version": "1.0.0", "description": title, "license": "Apache-2.0"}
    app = {
        "publisher": name,
        "fab-include": ["*.py", "recipe.toml"],
        "components": {"serverapp": "fedkeep_app:server", "clientapp": "fedkeep_app:client"},
        "config": {option.replace("_", "-"): value for option, value in config.items()},
    }
    needed = [f"fedkeep[flower]=={version('fedkeep')}"]
    return {"project": {**project, "dependencies": needed}, "tool": {"flwr": {"app": app}}}


AHEAD, BEHIND = 5.0, 305.0  # seconds that Flower 1.41 bears: SYSTEM_TIME_TOLERANCE, and TIMESTAMP_TOLERANCE with it


def describe_clock(superlink: str, authority: str | None) -> tuple[str, bool]:
    """Say how far this machine's clock is from a server's, which its answers tell, and whether Flower bears that.

    ``authority``: The file of the server's authority; None for a server without TLS.
    """
    host, _, digits = superlink.rpartition(":")
    if not host or not digits.isdecimal() or int(digits) > 65535:
        raise ConfigError(f"{superlink!r} is no address. Give HOST:PORT, such as fl.example.org:8000.")
    port, connection = int(digits), HTTPConnection(host, int(digits), timeout=10)
    if authority is not None:
        try:
            connection = HTTPSConnection(host, port, timeout=10, context=ssl.create_default_context(cafile=authority))
        except OSError as error:
            raise ConfigError(f"--root-certificates {authority}: {error}.") from None
    try:
        began = time.time()
        connection.request("GET", "/")
        told = connection.getresponse().getheader("Date")
        ahead = (began + time.time()) / 2 - parsedate_to_datetime(str(told)).timestamp() - 0.5  # of whole seconds
    except ssl.SSLCertVerificationError as error:
        raise RunError(
            f"{superlink} shows a certificate that is refused here: {error.verify_message}. If it is called expired or "
            "not yet valid, look at this machine's clock first."
        ) from None
    except (OSError, HTTPException) as error:
        raise RunError(f"{superlink} does not answer: {error}. Is its proxy running, and the address right?") from None
    except (TypeError, ValueError):
        raise RunError(f"{superlink} does not tell the time. Compare the clocks by hand, with `date -u`.") from None
    finally:
        connection.close()
    apart = f"this machine's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's"
    if -BEHIND < ahead < AHEAD:
        return f"{apart}: near enough", True
    return (
        f"{apart}. Flower lets in nobody whose clock is more than {AHEAD:.0f} s ahead or {BEHIND:.0f} s behind, and "
        "does not say so. Set both clocks, such as with `timedatectl set-ntp true`.",
        False,
    )
