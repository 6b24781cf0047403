"""Every method of the package against the one suite; a new file in fedkeep/algorithms is here by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from conformance import ROUNDS, Conformance, resumes_behind_its_checkpoint, undisturbed
from task_conformance import TaskConformance

from fedkeep.interface import Algorithm, algorithms
from fedkeep.interface.algorithm import client_steps

# Other tests define methods of their own, which are known by name too.
METHODS = {name: cls for name, cls in algorithms().items() if cls.__module__.startswith("fedkeep.")}
VARIANTS: dict[str, Algorithm[Any, Any]] = {name: tiny.configured(cls) for name, cls in METHODS.items()}
VARIANTS["sfedkd-random"] = METHODS["sfedkd"](teachers=2, selection="random")  # type: ignore[call-arg]
VARIANTS["fedadkd-single_term-zero_logit"] = METHODS["fedadkd"](tckd="single_term", nckd_mask="zero_logit")  # type: ignore[call-arg]
VARIANTS["fedcurv-batch"] = METHODS["fedcurv"](fisher="batch")  # type: ignore[call-arg]
VARIANTS["cwc-mas"] = METHODS["cwc"](importance="mas")  # type: ignore[call-arg]
VARIANTS["cwc-si"] = METHODS["cwc"](importance="si")  # type: ignore[call-arg]

VARIANTS["fedicarl-memory-global-random"] = METHODS["fedicarl"](memory=9, scope="global", selection="random")  # type: ignore[call-arg]
VARIANTS["fedicarl-nearest_mean"] = METHODS["fedicarl"](classify="nearest_mean")  # type: ignore[call-arg]
VARIANTS["target-repo"] = METHODS["target"](**tiny.INVERSION, compat="repo")
VARIANTS["flwf-2t-all"] = METHODS["flwf-2t"](server_slice="all", ce_slice="all", per_class=2)  # type: ignore[call-arg]
VARIANTS["fedicarl-glfc"] = METHODS["fedicarl"](loss="glfc")  # type: ignore[call-arg]
VARIANTS["fedskf-icarl"] = METHODS["fedskf"](level="icarl", tsd="glfc", pit_turn="random")  # type: ignore[call-arg]
VARIANTS["fedskf-pass"] = METHODS["fedskf"](level="pass", tsd="glfc", pit="aligned")  # type: ignore[call-arg]
VARIANTS["fedpass-global"] = METHODS["fedpass"](scope="global", radius="latest")  # type: ignore[call-arg]
VARIANTS["feddcl-labels"] = METHODS["feddcl"](**tiny.TOYS["feddcl"], server_loss="labels")
VARIANTS["feddcl-joint-tau2"] = METHODS["feddcl"](**tiny.TOYS["feddcl"], head="joint", kd_scale="tau2")
VARIANTS["lwf-kd-joint-tau2"] = METHODS["lwf-kd"](head="joint", kd_scale="tau2")  # type: ignore[call-arg]


@pytest.mark.parametrize("method", VARIANTS.values(), ids=VARIANTS)
class TestEveryMethod(Conformance):
    """All of `Conformance`."""


WITH_TASKS = {name: method for name, method in VARIANTS.items() if "auxiliary" not in method.needs}


@pytest.mark.parametrize("method", WITH_TASKS.values(), ids=WITH_TASKS)
class TestEveryMethodWithTasks(TaskConformance):
    """All of `TaskConformance`."""


def test_the_methods_of_the_house_are_here() -> None:
    parallel = {"fedavg", "fedavgm", "fedadam", "fedprox", "fedcurv", "scaffold", "fednova", "moon", "fedgkd", "feddkd"}
    distilling = {"fedntd", "fedlsd", "asd", "fedntd-asd", "fedcad", "fedadkd"}
    assert parallel | distilling | {"fedseq", "cwc", "sfedkd", "aver", "ebkd", "ca-mkd"} <= METHODS.keys()


@pytest.mark.parametrize("name", METHODS)
def test_every_step_is_asked_by_some_variant(name: str) -> None:
    asked = {step for v in VARIANTS.values() if v.name() == name for _, _, step in undisturbed(v).calls}
    assert asked == set(client_steps(METHODS[name]))


@pytest.mark.parametrize("at", range(1, ROUNDS + 1))
def test_killed_in_any_round_behind_its_last_checkpoint_a_run_resumes(
    at: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    resumes_behind_its_checkpoint(VARIANTS["scaffold"], at, tmp_path, tmp_path_factory)
