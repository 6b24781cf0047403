"""Every method of the package against the one suite; a new file in fedkeep/algorithms is here by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny

from fedkeep.interface import Algorithm, algorithms
from fedkeep.interface.algorithm import client_steps
from fedkeep.testing import checks_for
from fedkeep.testing.runs import asked_steps

# Other tests define methods of their own, which are known by name too.
METHODS = {name: cls for name, cls in algorithms().items() if cls.__module__.startswith("fedkeep.")}
VARIANTS: dict[str, Algorithm[Any, Any]] = {name: tiny.configured(cls) for name, cls in METHODS.items()}
VARIANTS["sfedkd-random"] = METHODS["sfedkd"](teachers=2, selection="random")  # type: ignore[call-arg]
VARIANTS["fedadkd-true-single_term-zero_logit"] = METHODS["fedadkd"](tckd="single_term", nckd_mask="zero_logit")  # type: ignore[call-arg]
VARIANTS["fedcurv-batch"] = METHODS["fedcurv"](fisher="batch")  # type: ignore[call-arg]

VARIANTS["target-repo"] = METHODS["target"](**tiny.INVERSION, compat="repo")
VARIANTS["flwf-2t-all"] = METHODS["flwf-2t"](server_classes="all", ce_classes="all", exemplars_per_class=2)  # type: ignore[call-arg]
VARIANTS["fedicarl-glfc"] = METHODS["fedicarl"](loss="glfc")  # type: ignore[call-arg]
VARIANTS["fedskf-icarl"] = METHODS["fedskf"](level="icarl", tsd="glfc", pit_turn="random")  # type: ignore[call-arg]
VARIANTS["fedskf-pass"] = METHODS["fedskf"](level="pass", tsd="recombined_sigmoid", pit="fused")  # type: ignore[call-arg]
VARIANTS["feddcl-labels"] = METHODS["feddcl"](**tiny.TOYS["feddcl"], server_loss="labels")
VARIANTS["feddcl-sliced"] = METHODS["feddcl"](**tiny.TOYS["feddcl"], head="sliced", kd_scale="none")
VARIANTS["lwf-kd-joint-tau2"] = METHODS["lwf-kd"](head="joint", kd_scale="tau2")  # type: ignore[call-arg]
VARIANTS["seqkeep-untaught"] = METHODS["seqkeep"]()


WITH_TASKS = {name: method for name, method in VARIANTS.items() if "auxiliary" not in method.needs}

WHOLE = ("fedavg", "fedcad", "sfedkd", "fedskf")
"""Methods of which all checks are quick: parallel, distilling, sequential, and with tasks."""
QUICK = {
    "two_runs_are_equal": ("round", "train"),
    "tasks": (),
    "nobody_with_examples": (),
    "common_randomness": ("round",),
    "batch_norm": ("round",),
    "lost_clients": ("round",),
    "bad_replies": ("validate_reply",),
}
"""Checks of every other method that defines one of these itself, or whatever it defines; the rest are slow tests.

What a method inherits is checked with the class that defines it.
"""
OF_VARIANTS = ("tasks",)
"""For other options of a method that stands in QUICK, and for methods that differ from another in their data only."""


def is_quick(name: str, check: str) -> bool:
    if name in WHOLE:
        return True
    if name not in METHODS:
        return check in OF_VARIANTS
    own = QUICK.get(check)
    return own is not None and (not own or not vars(METHODS[name]).keys().isdisjoint(own))


def cases() -> Iterator[Any]:
    for name, method in VARIANTS.items():
        for check_name, check in checks_for(method):
            if check_name == "memory" and name not in METHODS:
                continue  # 31 rounds, which differ little between variants
            marks = () if is_quick(name, check_name) else pytest.mark.slow
            yield pytest.param(check, id=f"{name}-{check_name}", marks=marks)


@pytest.mark.parametrize("check", list(cases()))
def test_every_method(check: Callable[[], None]) -> None:
    check()


def test_the_methods_of_the_house_are_here() -> None:
    parallel = {"fedavg", "fedavgm", "fedadam", "fedprox", "fedcurv", "scaffold", "fednova", "moon", "fedgkd", "feddkd"}
    distilling = {"fedntd", "fedlsd", "asd", "fedntd-asd", "fedcad", "fedadkd"}
    assert parallel | distilling | {"fedseq", "cwc", "sfedkd", "aver", "ebkd", "ca-mkd"} <= METHODS.keys()


@pytest.mark.parametrize("name", METHODS)
def test_every_step_is_asked_by_some_variant(name: str) -> None:
    asked = [asked_steps(variant) for variant in VARIANTS.values() if variant.name() == name]
    assert set.union(*asked) == set(client_steps(METHODS[name]))
