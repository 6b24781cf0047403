"""A method that breaks one promise fails the check of it; one that keeps all passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from fedkeep.aggregation import weighted_mean
from fedkeep.errors import ConfigError
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.interface.privacy import Privacy
from fedkeep.losses import CrossEntropy
from fedkeep.models import Weights
from fedkeep.options import option
from fedkeep.testing import CHECKS, check_algorithm, checks_for, runs

KEPT: list[Any] = []
"""What a method must not keep: anything outside a state."""


@dataclass
class Total:
    total: Tensor = field(default_factory=lambda: torch.zeros(1))


@dataclass
class Sum:
    logits: Tensor


@dataclass(frozen=True)
class Promises(Algorithm[Total, Total]):
    """Federated averaging that breaks one promise, or none."""

    broken: str = option("none", "which promise")

    def round(self, server: Server[Total], cohort: Cohort) -> None:
        if server.task == 1 and server.round == 1:
            KEPT.clear()
        replies = getattr(self, f"_{self.broken}", self._none)(server, cohort)
        if replies:
            server.model = weighted_mean(replies)
        server.state.total = server.state.total + len(replies)

    def _none(self, server: Server[Total], cohort: Cohort) -> Any:
        return cohort.ask(self.train, server.model)

    def _nothing_learned(self, server: Server[Total], cohort: Cohort) -> Any:
        self._none(server, cohort)
        return {}

    def _always_the_same(self, server: Server[Total], cohort: Cohort) -> Any:
        self._none(server, cohort)
        server.model = {name: torch.ones_like(tensor) for name, tensor in server.model.items()}
        return {}

    def _passed_by_reference(self, server: Server[Total], cohort: Cohort) -> Any:
        KEPT[:] = server.model.values()
        return self._none(server, cohort)

    def _global_randomness(self, server: Server[Total], cohort: Cohort) -> Any:
        server.log("luck", float(torch.rand(())))
        return self._none(server, cohort)

    def _not_json(self, server: Server[Total], cohort: Cohort) -> Any:
        server.log("luck", float("nan"))
        return self._none(server, cohort)

    def _kept_outside(self, server: Server[Total], cohort: Cohort) -> Any:
        KEPT.append(0)
        server.log("rounds", float(len(KEPT)))
        return self._none(server, cohort)

    def _everybody_answers(self, server: Server[Total], cohort: Cohort) -> Any:
        replies = self._none(server, cohort)
        return {client.id: replies[client.id] for client in cohort}

    def _unchecked_reply(self, server: Server[Total], cohort: Cohort) -> Any:
        for reply in cohort.ask(self.tell, server.model).values():
            server.state.total = server.state.total + reply.logits.sum()
        return {}

    def _changed_in_place(self, server: Server[Total], cohort: Cohort) -> Any:
        server.state.total += 1
        return self._none(server, cohort)

    def _extrapolated(self, server: Server[Total], cohort: Cohort) -> Any:
        mean = weighted_mean(self._none(server, cohort))
        server.model = {name: (tensor + 0.5 * (tensor - server.model[name])) for name, tensor in mean.items()}
        return {}

    def _leak(self, server: Server[Total], cohort: Cohort) -> Any:
        KEPT.append(server.model)
        return self._none(server, cohort)

    def begin_task(self, server: Server[Total], clients: Cohort) -> None:
        if self.broken != "head_not_expanded":
            super().begin_task(server, clients)

    def predict(self, server: Server[Total], model: Weights, images: Tensor) -> Tensor:
        if self.broken == "changed_by_evaluation":
            server.model = {name: tensor * 1.01 for name, tensor in server.model.items()}
        return super().predict(server, model, images)

    @on_client
    def train(self, client: Client[Total], model: Weights) -> Fit:
        if self.broken == "drawn_from_others":
            client.rng("batches")
        if self.broken == "order_of_work":
            KEPT.append(client.id)
        examples = len(client.data["label"])
        if self.broken == "some_examples" and not examples:
            raise ValueError("no examples")
        if self.broken == "several_examples" and examples == 1:
            raise ValueError("one example")
        is_original = any(tensor is kept for tensor in model.values() for kept in KEPT)
        more = self.broken == "passed_by_reference" and is_original
        more |= self.broken == "order_of_work" and KEPT.index(client.id) % 2 == 1
        more |= self.broken == "stacked" and getattr(client, "train", None) is not None
        return client.fit(model, CrossEntropy(), epochs=3 if more else None)

    @on_client
    def tell(self, client: Client[Total], model: Weights) -> Sum:
        return Sum(client.predict(model))


BROKEN = {
    "nothing_learned": "two_runs_are_equal",
    "always_the_same": "another_seed_differs",
    "drawn_from_others": "common_randomness",
    "changed_by_evaluation": "evaluation_interval_changes_nothing",
    "unchecked_reply": "evaluating_local_models_changes_nothing",  # no model comes back
    "passed_by_reference": "codec_changes_nothing",
    "order_of_work": "order_of_work_changes_nothing",
    "stacked": "stacked_training",
    "global_randomness": "global_randomness",
    "not_json": "two_runs_are_equal",
    "kept_outside": "resume",
    "everybody_answers": "lost_clients",
    "changed_in_place": "too_few_clients",
    "some_examples": "odd_federations",
    "several_examples": "odd_federations",
    "extrapolated": "batch_norm",
    "leak": "memory",
    "head_not_expanded": "tasks",
}


@pytest.mark.slow
def test_a_method_that_keeps_all_promises_passes() -> None:
    check_algorithm(Promises)


@pytest.mark.parametrize(("broken", "name"), BROKEN.items(), ids=BROKEN)
def test_a_broken_promise_fails_its_check(broken: str, name: str) -> None:
    check = dict(checks_for(Promises(broken=broken)))[name]
    with pytest.raises(Exception) as caught:
        check()
    if isinstance(caught.value, AssertionError):
        assert "Promises" in caught.value.__notes__[0]


def test_a_reply_that_nobody_checks_fails() -> None:
    with pytest.raises(AssertionError, match="validate_reply"):
        dict(checks_for(Promises(broken="unchecked_reply")))["bad_replies"]()


@dataclass(frozen=True)
class TakesTheFirst(Algorithm):
    def round(self, server: Server, cohort: Cohort) -> None:
        server.model = next(iter(cohort.ask(self.train, server.model).values())).model

    @on_client
    def train(self, client: Client, model: Weights) -> Fit:
        return client.fit(model, CrossEntropy())


class SaysThatItAverages(TakesTheFirst):
    only_averages = True


def test_a_method_that_reads_single_models_is_told_apart_from_one_that_averages() -> None:
    with pytest.raises(AssertionError, match=r"Write only_averages = False in the class"):
        dict(checks_for(SaysThatItAverages))["only_averages"]()


def test_secure_sums_need_a_method_that_says_what_it_reads() -> None:
    secure = Privacy(secure_aggregation=True)
    with pytest.raises(ConfigError, match="Write only_averages = True in its class if it does not, or else False"):
        runs.simulation(TakesTheFirst(), privacy=secure)
    assert runs.simulation(SaysThatItAverages(), privacy=secure).run_round().record["lost"] == {}


@dataclass(frozen=True, eq=False)
class FitAndSums(Fit):
    sums: Tensor


@dataclass(frozen=True)
class AddsUp(Algorithm[Total]):
    def round(self, server: Server[Total], cohort: Cohort) -> None:
        replies = cohort.ask(self.train, server.model)
        server.state.total = sum(reply.sums for reply in replies.values()) + server.state.total
        server.model = weighted_mean(replies)

    @on_client
    def train(self, client: Client, model: Weights) -> FitAndSums:
        return FitAndSums(**vars(client.fit(model, CrossEntropy())), sums=torch.ones(3))


class AddsUpWhatFits(AddsUp):
    def validate_reply(self, server: Server[Total], reply: Any, examples: int) -> str | None:
        return None if reply.sums.shape == (3,) else "sums of another shape"


def test_what_a_reply_holds_beside_its_model_is_to_be_checked_too() -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        dict(checks_for(AddsUp))["bad_replies"]()
    dict(checks_for(AddsUpWhatFits))["bad_replies"]()


@dataclass(frozen=True, eq=False)
class FitAndRows(Fit):
    rows: Tensor


class CollectsRows(Algorithm[Total]):
    """How many rows a client sends is its own affair."""

    def round(self, server: Server[Total], cohort: Cohort) -> None:
        replies = cohort.ask(self.train, server.model)
        server.state.total = torch.cat([reply.rows for reply in replies.values()]).sum(dim=0)
        server.model = weighted_mean(replies)

    @on_client
    def train(self, client: Client[Total], model: Weights) -> FitAndRows:
        return FitAndRows(**vars(client.fit(model, CrossEntropy())), rows=torch.ones(len(client.data["label"]), 2))

    def validate_reply(self, server: Server[Total], reply: Any, examples: int) -> str | None:
        return None if reply.rows.dim() == 2 and reply.rows.shape[1] == 2 else "rows of another width"


def test_a_part_of_any_length_is_fine() -> None:
    dict(checks_for(CollectsRows))["bad_replies"]()


class TrainsOnAMemory(TakesTheFirst):
    """Beside its own examples it sees four kept ones in each step."""

    @on_client
    def train(self, client: Client, model: Weights) -> Fit:
        memory = {name: column[:4] for name, column in client.data.items()}
        return client.fit(model, CrossEntropy() + CrossEntropy(1), client.data, memory)


def test_a_second_data_set_may_be_read_as_often_as_the_method_wants() -> None:
    dict(checks_for(TrainsOnAMemory))["common_randomness"]()


class AsksOneAlone(Algorithm):
    only_averages = True

    def round(self, server: Server, cohort: Cohort) -> None:
        for client in cohort:
            server.model = client.ask(self.train, server.model).model

    @on_client
    def train(self, client: Client, model: Weights) -> Fit:
        return client.fit(model, CrossEntropy())


def test_who_asks_one_client_alone_does_not_only_average() -> None:
    with pytest.raises(Exception, match="alone"):
        dict(checks_for(AsksOneAlone))["only_averages"]()


def test_the_error_says_which_check_it_was_and_checks_can_be_skipped() -> None:
    known = [check.__name__.removeprefix("check_") for check in CHECKS]
    with pytest.raises(AssertionError) as caught:
        check_algorithm(Promises(broken="leak"), skip=[name for name in known if name != "memory"])
    assert "'memory'" in caught.value.__notes__[0]
    check_algorithm(Promises(broken="leak"), skip=known)
    with pytest.raises(ConfigError, match=r"no check 'memry'.*'memory'"):
        check_algorithm(Promises, skip=["memry"])


def test_checks_of_tasks_are_left_out_where_a_method_cannot_have_any() -> None:
    class Auxiliary(Promises):
        needs = ("auxiliary",)

    names = [name for name, _ in checks_for(Auxiliary)]
    assert "resume" in names
    assert not any(name.startswith("tasks") for name in names)


def test_names_are_told_apart() -> None:
    names = [name for name, _ in checks_for(Promises)]
    assert len(set(names)) == len(names) == len(CHECKS)
