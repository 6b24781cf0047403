"""Secure aggregation in a simulation: methods see the mean alone, and what needs more is refused."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from torch import nn

from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.errors import ConfigError
from fedkeep.interface import Cohort, Server, get_algorithm
from fedkeep.interface.privacy import Privacy
from fedkeep.privacy.secure_sum import ALONE
from fedkeep.rounds import reply_store
from fedkeep.rounds.messages import StepRequest, UpdateSum, sent_model
from fedkeep.rounds.run_settings import Defense

SECURE = Privacy(secure_aggregation=True)


@pytest.mark.parametrize(
    "method",
    ["fedavg", "fedcad", pytest.param("target", marks=pytest.mark.slow), pytest.param("moon", marks=pytest.mark.slow)],
)
def test_a_run_is_that_without_up_to_rounding(method: str) -> None:
    plain, secure = (tiny.simulation(get_algorithm(method)(), privacy=privacy) for privacy in (Privacy(), SECURE))
    tiny.run_rounds(plain)
    records = tiny.run_rounds(secure)
    for name, tensor in plain.server.model.items():
        torch.testing.assert_close(secure.server.model[name], tensor, atol=1e-6, rtol=1e-5)
    assert all(record["loss"] is None and not record["lost"] for record in records)


def test_encoded_messages_and_models_on_disk_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    models = []
    for changes in ({}, {"through_codec": True}):
        monkeypatch.setattr(reply_store, "IN_MEMORY", 0 if changes else reply_store.IN_MEMORY)
        simulation = tiny.simulation(FedAvg(), privacy=SECURE, **changes)
        tiny.run_rounds(simulation)
        models.append(simulation.server.model)
    assert tiny.equal(*models)


class Watching(FedAvg):
    only_averages = True

    def round(self, server: Server, cohort: Cohort) -> None:
        replies = cohort.ask(self.train, server.model)
        first, *others = replies.values()
        assert all(reply.model is first.model for reply in others)
        assert all((reply.num_steps, reply.loss) == (0, 0.0) for reply in replies.values())
        assert len({reply.num_examples for reply in replies.values()}) > 1
        server.model = first.model


@pytest.mark.parametrize("aggregation", ["num_examples", "uniform"])
def test_methods_see_the_mean_that_they_would_make(aggregation: Any) -> None:
    plain = tiny.simulation(FedAvg(aggregation=aggregation))
    watched = tiny.simulation(Watching(aggregation=aggregation), privacy=SECURE)
    plain.run_round()
    watched.run_round()
    for name, tensor in plain.server.model.items():
        torch.testing.assert_close(watched.server.model[name], tensor, atol=1e-6, rtol=1e-5)


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, tiny.CLASSES))


def test_running_statistics_are_averaged_and_counters_stay_as_they_were_sent() -> None:
    plain, secure = (tiny.simulation(FedAvg(), factory=batch_norm, privacy=privacy) for privacy in (Privacy(), SECURE))
    for simulation in (plain, secure):
        simulation.run_round()
    for name, tensor in secure.server.model.items():
        if name.endswith("num_batches_tracked"):
            assert (int(tensor), int(plain.server.model[name]) > 0) == (0, True)
        else:
            torch.testing.assert_close(tensor, plain.server.model[name], atol=1e-6, rtol=1e-5)


def test_networks_of_different_forms_are_refused() -> None:
    with pytest.raises(ConfigError, match="networks of their own"):
        tiny.simulation(FedAvg(), privacy=SECURE, client_factories={"1": batch_norm})


def test_a_client_whose_update_is_out_of_range_is_lost_with_the_reason() -> None:
    simulation = tiny.simulation(FedAvg(), privacy=Privacy(secure_aggregation=True, clipping_range=1e-6))
    record = simulation.run_round().record
    assert record["rolled_back"]
    assert all("larger than privacy.clipping_range=1e-06" in reason for reason in record["lost"].values())


def test_what_a_client_out_of_range_has_spent_counts() -> None:
    """That its noised update was out of range follows from its examples too."""
    privacy = Privacy(secure_aggregation=True, clipping_range=1e-6, noise_multiplier=1.0)
    simulation = tiny.simulation(FedAvg(), privacy=privacy)
    record = simulation.run_round().record
    assert record["lost"].keys() == record["privacy"]["clients"].keys()
    assert all(sum(steps.values()) > 0 for steps in record["privacy"]["clients"].values())


def test_one_client_has_nobody_to_hide_among() -> None:
    simulation = tiny.simulation(FedAvg(), privacy=SECURE)
    cohort = simulation.sample_cohort(1)
    simulation.settings.fault_injector = lambda round, client, step: "gone" if client != cohort[-1] else None
    before = simulation.server.model
    record = simulation.run_round().record
    assert record["rolled_back"]
    assert record["lost"][cohort[-1]] == ALONE
    assert tiny.equal(before, simulation.server.model)


def test_all_who_are_lost_in_the_sum_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = tiny.simulation(FedAvg(), privacy=SECURE, min_clients=2)
    lost = UpdateSum(torch.zeros(0, dtype=torch.int64), dict.fromkeys(simulation.sample_cohort(1), "gone"))
    monkeypatch.setattr(type(simulation.executor), "sum_updates", lambda *_: lost)
    record = simulation.run_round().record
    assert record["rolled_back"]
    assert record["lost"] == lost.lost


@pytest.mark.parametrize("aggregation", ["num_examples", "uniform"])
def test_clients_without_examples_hide_nobody(aggregation: Any) -> None:
    simulation = tiny.simulation(
        FedAvg(aggregation=aggregation), federation=tiny.federation((0, 0, 9)), privacy=SECURE, cohort_size=3
    )
    record = simulation.run_round().record
    assert record["rolled_back"]
    assert ALONE in record["lost"].values()


class AskingOne(FedAvg):
    only_averages = True

    def round(self, server: Server, cohort: Cohort) -> None:
        for client in cohort:
            client.ask(self.train, server.model)


@pytest.mark.parametrize(
    ("method", "changes", "reason"),
    [
        ("sfedkd", {}, "must see `model`"),
        ("fedadkd", {}, "must see `gini` of fedadkd's client step"),
        ("fedmd", {}, "client step"),
        ("fednova", {}, "number of steps"),
        ("feddf", {}, "its model"),
        ("fedavg", {"defense": Defense(loss_check="server")}, "loss_check=server measures the model of each"),
        ("fedavg", {"defense": Defense(robust_aggregation="median")}, "robust_aggregation=median compares"),
        ("fedavg", {"evaluate_local_models": True}, "evaluate_local_models evaluates"),
        ("fedavg", {"cohort_size": 1}, "Set run.cohort_size=2 or more"),
    ],
)
def test_what_needs_single_models_is_refused_with_the_reason(method: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"privacy.secure_aggregation: .*{reason}"):
        tiny.simulation(get_algorithm(method)(), privacy=SECURE, **changes)


def test_noise_on_means_and_single_clients_are_refused() -> None:
    pytest.importorskip("opacus")
    with pytest.raises(ConfigError, match="client_noise_multiplier clips"):
        tiny.simulation(FedAvg(), privacy=Privacy(secure_aggregation=True, client_noise_multiplier=1.0))
    with pytest.raises(ConfigError, match="asks one client alone"):
        tiny.simulation(AskingOne(), privacy=SECURE).run_round()


def test_the_sent_model_is_the_first_argument_of_its_form() -> None:
    form = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
    larger = {**form, "weight": torch.zeros(5, 3)}
    sent = {name: tensor + 1 for name, tensor in form.items()}

    def found(*args: object, **kwargs: object) -> object:
        return sent_model(StepRequest("0", FedAvg.train, args, kwargs, 1, 1), form)

    assert found(0.5, {"weight": form["weight"]}, larger, sent, form) is sent
    assert found(0.5, larger, model=sent) is sent
    assert found(0.5, larger) is None
