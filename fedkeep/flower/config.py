"""What a run configuration and a node's own configuration may say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedkeep.errors import ConfigError, did_you_mean
from fedkeep.options import Options, build, option


@dataclass(frozen=True)
class RunConfig(Options):
    """The run configuration: ``[tool.flwr.app.config]`` of a Flower app, changed by ``flwr run --run-config``.

    There its names are written with hyphens. Lists are written with commas, settings with spaces.
    """

    recipe: str = option("demo", "a recipe's name, or a .toml file of the app or of the server")
    methods: str = option("", "methods to run instead of the recipe's, such as fedavg,sfedkd")
    seeds: str = option("", "seeds to run instead of the recipe's, such as 0,1")
    rounds: int = option(0, "rounds to run instead of the recipe's; 0: the recipe's", low=0)
    settings: str = option("", "changes to the recipe, such as training.lr=0.05 run.cohort=3")
    sites: int = option(0, "sites that take part; 0: as many as the recipe's partition has clients", low=0)
    min_clients: int = option(0, "a round with fewer answering sites is undone; 0: the recipe's minimum", low=0)
    deadline: float = option(3600.0, "seconds that a site has for one call before it is lost for the round", low=0.1)
    wait: float = option(600.0, "seconds to wait where too few sites are connected before the run stops", low=0.0)
    largest_reply: float = option(1000.0, "megabytes that one answer may have", low=0.001)
    out: str = option("", "run folder on the server, continued if it is there; default: a new one under runs/")
    state_dir: str = option("runs/sites", "folder of what sites keep, unless their node-config names another")
    data: str = option("", "the server's data set, of which it uses the test images; default: the recipe's")
    data_dir: str = option("", "folder of local data sets; default: $FEDKEEP_DATA")
    device: str = option("cpu", "device of the server: cpu or cuda")
    allow_code: bool = option(False, "let the recipe import its model as package.module:function")
    use: str = option("", "files or modules with methods of your own, with commas between them")


@dataclass(frozen=True)
class NodeConfig(Options):
    """Where a site works: its node-config, ``flower-supernode --node-config 'site="a" data="/data/a"'``."""

    site: str = option("", "the site's name; default: its partition-id")
    data: str = option("", "its own data: Parquet files, a folder of images, or a Hub id; default: the recipe's data")
    data_dir: str = option("", "folder of local data sets; default: the run configuration's, or $FEDKEEP_DATA")
    generator: str = option("", "folder of the run's generator of images, if it has one; of each task's, with commas")
    partition_id: int = option(-1, "for trials: which of the recipe's clients it is; -1: all of its data are its own")
    num_partitions: int = option(0, "for trials: how many clients there are; 0: not checked", low=0)
    state_dir: str = option("runs/sites", "folder of what the site keeps between calls")
    device: str = option("cpu", "cpu or cuda")
    threads: int = option(1, "PyTorch threads", low=1)
    allow_code: bool = option(False, "let the recipe import its model as package.module:function")
    use: str = option("", "files or modules with methods of your own, with commas between them")

    def check(self) -> None:
        if not self.site:
            raise ConfigError('this site has no name. Give it one in its node-config, such as site="clinic-a".')
        if not self.data and self.partition_id < 0:
            raise ConfigError(
                f'site {self.site} has no data. Name them in its node-config, data="/path/to/its/data", or for a '
                "trial which of the recipe's clients it is, partition-id=0 num-partitions=3."
            )


INHERITED = ("data_dir", "state_dir")
"""What the run configuration says for the nodes of a trial too, which have no data of their own, as in a simulation.

Never for a real site, and never what code it runs: whoever starts a run is not whoever answers for a site.
"""


def read_run_config(given: Mapping[str, Any]) -> RunConfig:
    """Return a run configuration; raise `ConfigError` for a name or a value that it cannot have."""
    return build(RunConfig, _underscored(given), "the run configuration")


def read_node_config(node: Mapping[str, Any], run: Mapping[str, Any]) -> NodeConfig:
    """Return where a site works, from its node-config and, where that is silent, the run configuration."""
    own = _underscored(node)
    known = set(NodeConfig.__dataclass_fields__)
    for name in own:
        if name not in known:
            raise ConfigError(f"the node-config: there is no option {name!r}.{did_you_mean(name, known)}")
    shared = {}
    if "partition_id" in own:
        own.setdefault("site", str(own["partition_id"]))
        if not own.get("data"):
            shared = {name: value for name, value in _underscored(run).items() if name in INHERITED and value != ""}
    return build(NodeConfig, shared | {name: _text(name, value) for name, value in own.items()}, "the node-config")


def _text(name: str, value: Any) -> Any:
    return str(value) if name == "site" else value  # site=1 is a name too


def _underscored(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in given.items()}
