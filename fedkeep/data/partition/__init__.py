"""Partitions: which client holds which rows of the training set."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fedkeep.data.partition.base import Partition, Scheme
from fedkeep.data.partition.dirichlet import Dirichlet, DirichletPerClient, ExDir, Hybrid
from fedkeep.data.partition.simple import IID, ByColumn, Sharding
from fedkeep.errors import ConfigError, did_you_mean

__all__ = [
    "IID",
    "ByColumn",
    "Dirichlet",
    "DirichletPerClient",
    "ExDir",
    "Hybrid",
    "Partition",
    "Scheme",
    "Sharding",
    "get_scheme",
    "schemes",
]


def schemes() -> Mapping[str, type[Scheme]]:
    """Return every partition scheme, the user's own included, by its name in recipes and on the command line."""
    found: dict[str, type[Scheme]] = {}
    pending = list(Scheme.__subclasses__())
    for scheme in pending:
        pending.extend(scheme.__subclasses__())
        if "name" in scheme.__dict__:
            found[scheme.name] = scheme
    return MappingProxyType(found)


def get_scheme(name: object) -> type[Scheme]:
    """Return a partition scheme by its name.

    ``name``: The name in recipes and on the command line, as it was read.
    """
    known = schemes()
    if not isinstance(name, str) or name not in known:
        raise ConfigError(
            f"there is no partition scheme {name!r}.{did_you_mean(str(name), known)} To use a scheme from a file, name "
            "the file with --use FILE."
        )
    return known[name]
