"""The options of a run configuration and of a node's own configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedkeep.errors import ConfigError
from fedkeep.options import Options, build, option


@dataclass(frozen=True)
class RunConfig(Options):
    """The run configuration: ``[tool.flwr.app.config]`` of a Flower app, changed by ``flwr run --run-config``.

    There the names are written with hyphens, as in ``state-dir``. Items of lists are separated by commas, settings by
    spaces. Methods and seeds are the recipe's.

    ``recipe``: A recipe's name, or a .toml file of the app or of the server.
    ``settings``: Changes to the recipe.
    ``sites``: How many sites take part; 0: as many as the recipe's partition has clients.
    ``deadline``: Seconds that a site has for one call.
    ``wait``: Seconds to wait while too few sites are connected.
    ``largest_reply``: The largest allowed size of a reply, in megabytes.
    ``max_examples``: The most examples that a site may say it has. Methods weigh clients by their examples.
    ``out``: The run folder on the server; default: a new one under ``runs/``.
    ``state_dir``: The folder of the sites' states, unless a node-config names another.
    ``data``: The server's data set; ``none``: it has none; default: the recipe's.
    ``data_dir``: The folder of local data sets.
    ``device``: The server's device, ``cpu`` or ``cuda``.
    ``allow_code``: Let the recipe import its model.
    ``use``: Files or modules with the user's methods.
    ``log``: Where the server logs metrics, instead of the recipe's ``log``.
    """

    recipe: str = option("demo", "a recipe's name, or a .toml file of the app or of the server")
    settings: str = option("", "changes to the recipe, such as run.rounds=3 run.min_clients=2")
    sites: int = option(0, "sites that take part; 0: as many as the recipe's partition has clients", low=0)
    deadline: float = option(3600.0, "seconds that a site has for one call before it is lost for the round", low=0.1)
    wait: float = option(600.0, "seconds to wait where too few sites are connected before the run stops", low=0.0)
    largest_reply: float = option(1000.0, "largest size of one reply, in megabytes", low=0.001)
    max_examples: int = option(10_000_000, "most examples that a site may say it has", low=1)
    out: str = option("", "run folder on the server, continued if it is there; default: a new one under runs/")
    state_dir: str = option("runs/sites", "folder in which sites store states, unless their node-config names another")
    data: str = option(
        "", "the server's data set, whose test images it uses; none: it has none, and sites test; default: the recipe's"
    )
    data_dir: str = option("", "folder of local data sets; default: $FEDKEEP_DATA")
    device: str = option("cpu", "device of the server: cpu or cuda")
    allow_code: bool = option(False, "let the recipe import its model as package.module:function")
    use: str = option("", "files or modules with methods of your own, with commas between them")
    log: str = option("", "where the server logs metrics, such as tensorboard or wandb; default: the recipe's log")


@dataclass(frozen=True)
class NodeConfig(Options):
    """A site's configuration: its node-config, ``flower-supernode --node-config 'site="a" data="/data/a"'``.

    ``site``: The site's name; default: its ``partition_id``.
    ``data``: The site's own data.
    ``data_dir``: The folder of local data sets.
    ``generator``: The folder of the run's generator of images.
    ``partition_id``: For test runs: which of the recipe's clients the site stands for; -1: the site has data of its
        own.
    ``num_partitions``: For test runs: how many clients the recipe must have; 0: any number.
    ``state_dir``: The folder in which the site stores states between calls.
    ``device``: The site's device, ``cpu`` or ``cuda``.
    ``threads``: PyTorch threads.
    ``allow_code``: Let the recipe import its model.
    ``use``: Files or modules with the user's methods.
    """

    site: str = option("", "the site's name; default: its partition-id")
    data: str = option("", "its own data: Parquet files, a folder of images, or a Hub id; default: the recipe's data")
    data_dir: str = option("", "folder of local data sets; default: the run configuration's, or $FEDKEEP_DATA")
    generator: str = option("", "folder of the run's generator of images, if it has one")
    partition_id: int = option(
        -1, "for test runs: which of the recipe's clients it stands for; -1: it has data of its own"
    )
    num_partitions: int = option(0, "for test runs: how many clients the recipe must have; 0: any number", low=0)
    state_dir: str = option("runs/sites", "folder in which the site stores states between calls")
    device: str = option("cpu", "cpu or cuda")
    threads: int = option(1, "PyTorch threads", low=1)
    allow_code: bool = option(False, "let the recipe import its model as package.module:function")
    use: str = option("", "files or modules with methods of your own, with commas between them")

    def check(self) -> None:
        """Raise `ConfigError` for a site without a name or without data."""
        if not self.site:
            raise ConfigError('this site has no name. Give it one in its node-config, such as site="clinic-a".')
        if not self.data and self.partition_id < 0:
            raise ConfigError(
                f'site {self.site} has no data. Name them in its node-config, data="/path/to/its/data", or for a '
                "test run which of the recipe's clients it is, partition-id=0 num-partitions=3."
            )


INHERITED = ("data_dir", "state_dir")
"""Options of the run configuration that nodes without data of their own inherit, as in a simulation.

A real site inherits nothing, and no node inherits what code it runs: who starts a run is not responsible for a site.
"""


def read_run_config(given: Mapping[str, Any]) -> RunConfig:
    """Return a run configuration.

    ``given``: The options by name, written with hyphens or underscores.
    """
    return build(RunConfig, _underscored(given), "the run configuration")


def read_node_config(node: Mapping[str, Any], run: Mapping[str, Any]) -> NodeConfig:
    """Return a site's configuration, from its node-config and, for a test run, the options that it inherits."""
    given, inherited = _underscored(node), {}
    if "partition_id" in given:
        given.setdefault("site", str(given["partition_id"]))
        if not given.get("data"):
            inherited = {name: value for name, value in _underscored(run).items() if name in INHERITED and value != ""}
    if "site" in given:
        given["site"] = str(given["site"])  # Flower reads site=1 as a number
    config = build(NodeConfig, inherited | given, "the node-config")
    return replace(config, state_dir=str(Path(config.state_dir).expanduser()))


def own_code(config: RunConfig | NodeConfig) -> tuple[str, ...]:
    """Return the files and modules of the user's own that a configuration names."""
    return tuple(filter(None, map(str.strip, config.use.split(","))))


def _underscored(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in given.items()}
