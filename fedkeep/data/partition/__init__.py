"""Partitions: which client holds which rows of the training set."""

from collections.abc import Mapping

from fedkeep.data.partition.base import Partition, Scheme
from fedkeep.data.partition.dirichlet import Dirichlet, DirichletPerClient, ExDir, Hybrid
from fedkeep.data.partition.simple import IID, ByColumn, Sharding
from fedkeep.options import find_named, named_subclasses

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
    return named_subclasses(Scheme, lambda cls: cls.__dict__.get("name"), "Rename yours.")  # type: ignore[type-abstract]


def get_scheme(name: str) -> type[Scheme]:
    """Return a partition scheme by its name.

    ``name``: The name in recipes and on the command line; upper and lower case are the same.
    """
    advice = "To use a scheme from a file, name the file with --use FILE."
    return find_named(name, schemes(), "partition scheme", advice)
