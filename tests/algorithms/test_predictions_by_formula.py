"""Methods that exchange predictions, against whole rounds written out plainly in float64."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import tiny
import torch
from byhand import Hand, Model, hand_of
from interception import record_fits
from torch import Tensor, log_softmax, softmax

from fedkeep._utils import seeds
from fedkeep.algorithms.heterogeneous.ewc_kd import EWCKD
from fedkeep.algorithms.heterogeneous.fedgems import FedGEMS
from fedkeep.algorithms.heterogeneous.fedmd import FedMD
from fedkeep.algorithms.heterogeneous.ft_kd import FTKD
from fedkeep.algorithms.heterogeneous.logit_exchange import LogitReply
from fedkeep.algorithms.heterogeneous.lwf_kd import LwFKD
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.parallel.feddf import FedDF
from fedkeep.losses import ClassSubset, CrossEntropy
from fedkeep.trials.simulation import Simulation

ROUNDS = 2
CLOSE = {"rtol": 2e-4, "atol": 2e-5}  # float32 against float64, over some steps


def public(hand: Hand) -> tuple[Tensor, Tensor]:
    server = hand.simulation.federation.server_data
    return hand.simulation.context.normalise(server["input"]).double(), server["label"]


def learn(
    hand: Hand,
    start: Mapping[str, Tensor],
    output: Tensor,
    location: tuple[int, str, int],
    kind: str,
    epochs: int = 1,
) -> Model:
    """Return the model after passes over the public set; ``location`` names the batch orders: round, client, use."""
    images, labels = public(hand)
    number, client, use = location
    order = seeds.rng(hand.simulation.settings.seed, "batches", task=1, round=number, client=client, use=use)
    weights = {name: tensor.detach().clone() for name, tensor in start.items()}
    velocity = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    tau = getattr(hand.simulation.algorithm, "tau", 1.0)
    for _ in range(epochs):
        rows = torch.randperm(len(images), generator=order)
        for batch in torch.split(rows, hand.training.batch_size):
            live = {name: tensor.requires_grad_() for name, tensor in weights.items()}
            own = hand.logits(live, images[batch])
            divergence = -(softmax(output[batch] / tau, -1) * log_softmax(own / tau, -1)).sum(-1).mean()
            if kind == "kd":
                loss = divergence
            elif kind == "mse":
                loss = ((own - output[batch]) ** 2).mean()
            else:
                true = -log_softmax(own, -1)[torch.arange(len(batch)), labels[batch]].mean()
                loss = 0.75 * true + 0.25 * divergence
            for name, gradient in zip(list(weights), torch.autograd.grad(loss, list(live.values())), strict=True):
                weight = weights[name].detach()
                velocity[name] = (
                    hand.training.momentum * velocity[name] + gradient + hand.training.weight_decay * weight
                )
                weights[name] = weight - hand.training.lr * velocity[name]
    return {name: tensor.detach() for name, tensor in weights.items()}


def compare(simulation: Simulation, model: Model) -> None:
    tiny.run_rounds(simulation)
    for name, tensor in simulation.server.model.items():
        torch.testing.assert_close(tensor.double(), model[name], **CLOSE)


def test_feddf() -> None:
    simulation = tiny.simulation(FedDF(epochs=2), rounds=ROUNDS)
    hand = hand_of()
    hand.simulation = simulation
    model = hand.initial
    images, _ = public(hand)
    for number, cohort in hand.cohorts(ROUNDS):
        trained = {client: hand.train(client, number, model, hand.cross_entropy) for client in cohort}
        output = torch.stack([hand.taught(one, images) for one in trained.values()]).mean(0)
        model = learn(hand, hand.by_count(trained), output, (number, "", 0), "kd", epochs=2)
    compare(simulation, model)


@pytest.mark.parametrize("method", [FTKD(), FTKD(tau=1.0), FedMD(), FedGEMS()], ids=repr)
def test_own_models_and_a_consensus(method: FTKD) -> None:
    simulation = tiny.simulation(method, rounds=ROUNDS, client_factories={})
    hand = hand_of()
    hand.simulation = simulation
    kind = {"FedMD": "mse", "FedGEMS": "labelled"}.get(type(method).__name__, "kd")
    model, own = hand.initial, {}
    images, labels = public(hand)
    for number, cohort in hand.cohorts(ROUNDS):
        for client in cohort:
            own[client] = hand.train(client, number, own.get(client, hand.initial), hand.cross_entropy)
        text = [hand.taught(own[client], images) for client in cohort]
        tau = getattr(method, "tau", 1.0)
        if isinstance(method, FedGEMS):
            chances = torch.stack([softmax(output / tau, -1) for output in text])
            sure = 1 / -(chances * chances.log()).sum(-1)
            together = tau * ((sure.exp() / sure.exp().sum(0))[..., None] * chances).sum(0).log()
            before = hand.taught(model, images)
            consensus = torch.where((before.argmax(-1) == labels)[:, None], before, together)
        elif kind == "kd":
            consensus = tau * torch.stack([softmax(output / tau, -1) for output in text]).mean(0).log()
        else:
            consensus = torch.stack(text).mean(0)
        model = learn(hand, model, consensus, (number, "", 0), kind)
        if isinstance(method, FedGEMS):
            consensus = hand.taught(model, images)
        # The client's training drew the first batch order of the round, and digesting the second.
        own |= {client: learn(hand, own[client], consensus, (number, client, 1), kind) for client in cohort}
    compare(simulation, model)
    for client, expected in own.items():
        for name, tensor in simulation.client_states[client].model.items():
            torch.testing.assert_close(tensor.double(), expected[name], **CLOSE)


def test_without_passes_feddf_is_fedavg() -> None:
    one, two = tiny.simulation(FedDF(epochs=0)), tiny.simulation(FedAvg())
    tiny.run_rounds(one), tiny.run_rounds(two)
    assert tiny.equal(one.server.model, two.server.model)


def test_weights_never_leave_and_public_images_are_sent_once() -> None:
    simulation = tiny.simulation(FTKD(), cohort_size=6, rounds=3)
    records = tiny.run_rounds(simulation)
    rows = len(simulation.federation.server_data["label"])
    logits = rows * tiny.CLASSES * 4
    assert [record["up"] for record in records] == [6 * logits] * 3
    images = sum(column.nbytes for column in simulation.federation.server_data.values())
    assert [record["down"] for record in records] == [6 * (logits + images), 6 * logits, 6 * logits]


def test_a_client_that_says_too_little_is_lost_by_name() -> None:
    simulation = tiny.simulation(FTKD())
    output = LogitReply(torch.zeros(5, tiny.CLASSES))
    assert "not [6, 3] in float32" in str(simulation.algorithm.validate_reply(simulation.server, output, 9))
    assert simulation.algorithm.validate_reply(simulation.server, LogitReply(torch.zeros(6, tiny.CLASSES)), 9) is None


def test_models_that_stay_at_home_are_evaluated_where_asked() -> None:
    simulation = tiny.simulation(FTKD(), rounds=2, evaluate_local_models=True)
    records = tiny.run_rounds(simulation)
    assert [[local_model["client"] for local_model in record["local_models"]] for record in records] == [
        r["cohort"] for r in records
    ]
    last = records[-1]["local_models"][0]
    model = simulation.client_states[last["client"]].model
    assert last["correct"] == simulation.evaluate(model, last["client"]).correct
    assert last["previous"] is None


@pytest.mark.parametrize("cls", [FTKD, LwFKD, EWCKD])
def test_the_head_says_with_which_classes_labels_compete(cls: type[FTKD]) -> None:
    assert [cls(head=head).head for head in ("joint", "sliced")] == ["joint", "sliced"]  # type: ignore[arg-type]
    simulations = [
        tiny.simulation_with_tasks(cls(head=head), tiny.stream((2, 1), absent=0), rounds=1, cohort_size=5)  # type: ignore[arg-type]
        for head in ("joint", "sliced")
    ]
    losses = []
    for simulation in simulations:
        fits = record_fits(simulation)
        tiny.run_rounds(simulation)
        losses += [one.loss for one in fits if (one.client, one.task) == ("1", 2) and not one.data]
    joint, sliced = (getattr(loss, "terms", (loss,))[0] for loss in losses)
    assert isinstance(joint, CrossEntropy)
    assert isinstance(sliced, ClassSubset)
    assert not tiny.equal(simulations[0].server.model, simulations[1].server.model)


def test_squared_temperature_is_a_factor_of_the_distillation() -> None:
    for scale, factor in (("none", 1.0), ("tau2", 9.0)):
        simulation = tiny.simulation(FTKD(tau=3.0, kd_scale=scale), rounds=1)  # type: ignore[arg-type]
        fits = record_fits(simulation)
        tiny.run_rounds(simulation)
        assert {one.loss.term.factor for one in fits if isinstance(one.loss, ClassSubset)} == {factor}  # type: ignore[attr-defined]


def test_a_client_in_no_cohort_of_a_task_keeps_what_it_consolidated() -> None:
    """Its model has no outputs for the task's classes, by which its examples could be judged."""
    simulation = tiny.simulation_with_tasks(EWCKD(), tiny.stream((1, 2), absent=0), rounds=1, cohort_size=3)
    (first,) = tiny.run_rounds(simulation, 1)
    before = {client: simulation.client_states[client].consolidation for client in first["cohort"]}
    (second,) = tiny.run_rounds(simulation, 1)
    waited = set(first["cohort"]) - set(second["cohort"])
    both = set(first["cohort"]) & set(second["cohort"])
    assert waited
    assert both
    for client in before:
        same = tiny.equal(simulation.client_states[client].consolidation.fisher, before[client].fisher)
        assert same is (client in waited), client
