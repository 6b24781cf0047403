"""DDDR: its loss by the formula, what travels, and what it shares with FedDCL and FedAvg."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, log_softmax, softmax
from torch.nn.functional import normalize

from fedkeep.algorithms.incremental.dddr import DDDR
from fedkeep.algorithms.incremental.finetune import Finetune
from fedkeep.errors import ConfigError
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.interface import Fit
from fedkeep.models.weights import load_weights
from fedkeep.training.local_training import NetworkView, TrainJob
from fedkeep.training.party import LocalClient
from fedkeep.trials.simulation import Simulation


def method(**options: Any) -> DDDR:
    return DDDR(**{**tiny.TOYS["dddr"], **options})


def in_second_task(fed: DDDR, sizes: tuple[int, int], **changes: Any) -> tuple[Simulation, dict[str, Tensor]]:
    """Return a simulation after the first round of the second task, and the model that the first task left."""
    simulation = tiny.simulation_with_tasks(fed, tiny.stream(sizes, absent=0), rounds=1, cohort_size=5, **changes)
    tiny.run_rounds(simulation, 1)
    last = dict(simulation.server.model)
    tiny.run_rounds(simulation, 1)
    return simulation, last


def assigned(simulation: Simulation, client: str) -> TrainJob:
    """Return the training that a client is about to carry out on the server's model."""
    data, state = simulation.federation.data(client), simulation.client_states[client]
    party = LocalClient(simulation.context, client, data, state, task=2, round=9, uses={})
    asked: list[TrainJob] = []

    def noted(assignment: TrainJob) -> Fit:
        asked.append(assignment)
        return Fit(assignment.model, 0, 0, 0.0)

    party.train = noted
    simulation.algorithm.train(party, simulation.server.model)  # type: ignore[attr-defined]
    return asked[0]


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_the_loss_of_a_client_in_the_second_task(sizes: tuple[int, int]) -> None:
    fed = method(images_per_old_class=3)
    simulation, last = in_second_task(fed, sizes)
    old, tau = sizes[0], fed.tau
    assignment = assigned(simulation, "2")
    examples = simulation.federation.data("2")
    mixed, replayed = assignment.streams
    assert len(mixed.data["label"]) == len(examples["label"]) + fed.images_per_new_class * sizes[1]
    assert replayed.data["label"].tolist() == [c for c in range(old) for _ in range(fed.images_per_old_class)]
    batches = [mixed.first(len(mixed.data["label"])), replayed.first(len(replayed.data["label"]))]

    def answers(model: Any, images: Tensor) -> tuple[Tensor, Tensor]:
        network = simulation.context.runner.build(model).double()
        load_weights(network, {name: tensor.double() for name, tensor in model.items()})
        features = network.features(images.double())
        return features, network.classifier(features)

    (features, z), (_, r) = (answers(simulation.server.model, batch.data["input"]) for batch in batches)
    output = softmax(answers(last, batches[1].data["input"])[1][:, :old] / tau, -1)
    labels, past = (batch.data["label"] for batch in batches)
    hard = -log_softmax(z[:, old:], -1)[torch.arange(len(labels)), labels - old].mean()
    soft = -(output * log_softmax(r[:, :old] / tau, -1)).sum(-1).mean()
    replay = -log_softmax(r[:, :old], -1)[torch.arange(len(past)), past].mean()
    likeness = (normalize(features) @ normalize(features).T / 0.07).exp()
    contrast = 0.0
    for i in range(len(labels)):
        others = [j for j in range(len(labels)) if j != i]
        alike = [j for j in others if labels[j] == labels[i]]
        everything = likeness[i, others].sum()
        contrast -= sum((likeness[i, j] / everything).log() for j in alike) / max(1, len(alike)) / len(labels)
    network = simulation.context.runner.build(simulation.server.model)
    load_weights(network, simulation.server.model)
    networks = simulation.context.runner
    load_weights(networks.train_network, simulation.server.model)
    view = NetworkView(networks, dict(networks.train_network.named_parameters()), networks.train_network)
    loss = assignment.loss(view, batches)
    expected = hard + 0.5 * replay + 10 * soft + 1.0 * contrast
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-5)


def test_without_made_images_and_contrast_the_first_task_is_fedavg() -> None:
    stream = tiny.stream((3,), absent=0)
    mine, theirs = (
        tiny.simulation_with_tasks(fed, stream, rounds=2, cohort_size=5)
        for fed in (method(images_per_new_class=0, w_scl=0.0), Finetune())
    )
    tiny.run_rounds(mine), tiny.run_rounds(theirs)
    assert tiny.equal(mine.server.model, theirs.server.model)


def test_images_are_shown_once_a_task_beside_the_model() -> None:
    fed = method()
    simulation = tiny.simulation_with_tasks(fed, tiny.stream((2, 1), absent=0), rounds=2, cohort_size=5)
    records = tiny.run_rounds(simulation)
    sizes = [sum(t.nbytes for t in simulation.context.runner.initial.values()) - 4 * 9 * (1 - task) for task in (0, 1)]
    searched = [5 * fed.prototype_rounds * n * 16 * 4 for n in (2, 1)]
    image = 16 + 8
    downs = [records[2 * task]["down"] - searched[task] - 5 * sizes[task] for task in (0, 1)]
    assert downs[0] == 5 * max(fed.images_per_new_class, fed.images_per_old_class) * 2 * image
    assert downs[1] > 5 * max(fed.images_per_new_class, fed.images_per_old_class) * 1 * image, (
        "the new class's images and what the old model said of the old ones'"
    )
    assert [records[2 * task + 1]["down"] for task in (0, 1)] == [5 * size for size in sizes]
    for client in simulation.federation.clients:
        assert torch.equal(simulation.client_states[client].pool["input"], simulation.server.state.pool["input"])


def test_the_old_model_itself_teaches_what_is_augmented_at_random() -> None:
    from fedkeep.data import Augmentation

    simulation, last = in_second_task(method(), (2, 1), augmentation=Augmentation(horizontal_flip=True))
    teachers = [leaf for leaf in vars(assigned(simulation, "2").loss)["terms"] if "ClassSubset" in type(leaf).__name__]
    assert any(tiny.equal(getattr(term.term, "teachers", ({},))[0], last) for term in teachers)


def test_clients_of_other_networks_are_refused(tmp_path: Any) -> None:
    text = tiny.RECIPE.replace('algorithm = "fedavg"', 'algorithm = "dddr"')
    text += '\n[generator]\nname = "somewhere"\n\n[[client_models]]\nclients = ["0"]\nname = "mlp"\n'
    with pytest.raises(ConfigError, match="DDDR exchanges weights"):
        load_recipe(tiny.write_recipe(tmp_path, text), methods=["dddr"])
