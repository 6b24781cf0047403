"""Every method of the package against the one suite; a new file in fedkeep/algorithms is here by itself."""

from __future__ import annotations

from typing import Any

import pytest
from conformance import Conformance

from fedkeep.interface import Algorithm, algorithms

# Other tests define methods of their own, which are known by name too.
METHODS = {name: cls for name, cls in algorithms().items() if cls.__module__.startswith("fedkeep.") and not cls.needs}
VARIANTS: dict[str, Algorithm[Any, Any]] = {name: cls() for name, cls in METHODS.items()}
VARIANTS["sfedkd-random-exclude-self"] = METHODS["sfedkd"](teachers=2, selection="random", exclude_self=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("method", VARIANTS.values(), ids=VARIANTS)
class TestEveryMethod(Conformance):
    """All of `Conformance`."""


def test_the_methods_of_the_house_are_here() -> None:
    parallel = {"fedavg", "fedprox", "fedntd", "fedlsd", "fedadkd", "fedgkd", "moon", "scaffold", "fednova"}
    assert parallel | {"fedseq", "sfedkd", "aver", "ebkd", "ca-mkd"} <= METHODS.keys()
