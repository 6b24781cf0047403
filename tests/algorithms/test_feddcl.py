"""FedDCL against a round written out plainly in float64, and what must hold of its images and messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import tiny
import torch
from interception import record_fits
from torch import Tensor, log_softmax, softmax
from torch.func import functional_call

from fedkeep._utils import seeds
from fedkeep.algorithms.heterogeneous.feddcl import FedDCL
from fedkeep.algorithms.heterogeneous.logit_exchange import LogitReply, mean_logits
from fedkeep.algorithms.incremental.generated_replay import PrototypeReply
from fedkeep.data import Augmentation
from fedkeep.errors import ConfigError, DataError, RunError
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.generation.prototypes import PrototypeSearch, search_prototypes
from fedkeep.interface import Fit
from fedkeep.interface.pytree import copy_containers, iter_instances
from fedkeep.losses.distillation import SubsetDistillation
from fedkeep.models import get_architecture
from fedkeep.models.heads import expand_like
from fedkeep.training.party import LocalClient
from fedkeep.trials.simulation import Simulation

CLOSE = {"rtol": 2e-4, "atol": 2e-5}  # float32 against float64, over some steps
Set = tuple[Tensor, Tensor]  # normalised images in float64, and labels


def method(**options: Any) -> FedDCL:
    return FedDCL(**{**tiny.TOYS["feddcl"], **options})


def images_per_class(fed: FedDCL) -> int:
    """Return how many images of each class the pool has."""
    return max(
        fed.images_per_new_class,
        fed.images_per_old_class,
        fed.server_images_per_class,
    )


def batches(data: Set, rng: torch.Generator, size: int, epochs: int | None) -> Iterator[Tensor]:
    done = 0
    while epochs is None or done < epochs:
        order = torch.randperm(len(data[1]), generator=rng)
        yield from torch.split(order, size)
        done += 1


def descend(
    simulation: Simulation, start: Mapping[str, Tensor], sets: Sequence[Set], loss: Any, location: Any, epochs: int
) -> Any:
    """Return a model after SGD with momentum and decay; ``location`` is (client, first use of the batch orders)."""
    settings, (client, use) = simulation.settings.training, location
    rngs = [seeds.rng(0, "batches", task=2, round=1, client=client, use=use + k) for k in range(len(sets))]
    weights = {name: tensor.detach().double() for name, tensor in start.items()}
    velocity = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    others = [batches(data, rng, settings.batch_size, None) for data, rng in zip(sets[1:], rngs[1:], strict=True)]
    for rows in batches(sets[0], rngs[0], settings.batch_size, epochs):
        sampled = [rows, *(next(other) for other in others)]
        live = {name: tensor.requires_grad_() for name, tensor in weights.items()}
        value = loss(live, sampled)
        gradients = torch.autograd.grad(value, list(live.values()))
        for name, slope in zip(list(weights), gradients, strict=True):
            weight = weights[name].detach()
            velocity[name] = settings.momentum * velocity[name] + slope + settings.weight_decay * weight
            weights[name] = weight - settings.lr * velocity[name]
    return {name: tensor.detach() for name, tensor in weights.items()}


def among(logits: Tensor, start: int, stop: int, p: Tensor, fed: FedDCL) -> Tensor:
    """Return the mean cross-entropy with probabilities p of some classes, among these or among all."""
    tau, scale = fed.tau, fed.tau**2 if fed.kd_scale == "tau2" else 1.0
    if fed.head == "joint":
        return -scale * (p * log_softmax(logits / tau, -1)[:, start:stop]).sum(-1).mean()
    return -scale * (p * log_softmax(logits[:, start:stop] / tau, -1)).sum(-1).mean()


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"server_images_per_class": 5},
        {"w_kd": 3.0, "tau": 1.0},
        {"kd_scale": "none", "w_kd": 3.0},
        {"head": "sliced"},
        {"head": "sliced", "kd_scale": "none", "server_images_per_class": 5},
    ],
    ids=str,
)
def test_a_round_of_the_second_task(sizes: tuple[int, int], options: dict[str, Any]) -> None:
    fed = method(**options)
    simulation = tiny.simulation_with_tasks(fed, tiny.stream(sizes, absent=0), rounds=1, cohort_size=5)
    tiny.run_rounds(simulation, 1)
    before, server_before = copy_containers(simulation.client_states), copy_containers(simulation.server.model)
    tiny.run_rounds(simulation, 1)
    old, new, tau = sizes[0], sizes[1], fed.tau
    network = simulation.context.runner.build(simulation.server.model).double()
    initial = simulation.context.runner.initial
    kept = simulation.server.state

    def images(columns: Mapping[str, Tensor]) -> Set:
        return simulation.context.normalise(columns["input"]).double(), columns["label"]

    def result(start: int, stop: int, count: int) -> Set:
        rows = [k for k, c in enumerate(kept.pool["label"].tolist()) if start <= c < stop]
        first = [k for k in rows if k % images_per_class(fed) < count]
        return images({name: column[first] for name, column in kept.pool.items()})

    def output(model: Mapping[str, Tensor], data: Set) -> Tensor:
        whole = {name: tensor.double() for name, tensor in model.items()}
        short = len(whole["classifier.weight"])
        padded = {**whole}
        if short < old + new:
            padded["classifier.weight"] = torch.cat((whole["classifier.weight"], torch.zeros(old + new - short, 8)))
            padded["classifier.bias"] = torch.cat((whole["classifier.bias"], torch.zeros(old + new - short)))
        return functional_call(network, padded, (data[0],)).detach()[:, :short]

    current, earlier = (
        result(old, old + new, fed.server_images_per_class),
        result(0, old, fed.server_images_per_class),
    )
    own, shown = {}, []
    for client in simulation.federation.clients:
        examples, fresh, replay = (
            images(simulation.federation.data(client)),
            result(old, old + new, fed.images_per_new_class),
            result(0, old, fed.images_per_old_class),
        )
        mixed = torch.cat((examples[0], fresh[0])), torch.cat((examples[1], fresh[1]))
        teacher = softmax(output(before[client].model, replay) / tau, -1)

        def loss(w: Any, sampled: Any, mixed: Any = mixed, replay: Any = replay, teacher: Any = teacher) -> Tensor:
            rows, others = sampled
            z, r = (functional_call(network, w, (data[0][k],)) for data, k in ((mixed, rows), (replay, others)))
            skip, until = (0, None) if fed.head == "joint" else (old, old)
            hard = -log_softmax(z[:, skip:], -1)[torch.arange(len(rows)), mixed[1][rows] - skip].mean()
            past = -log_softmax(r[:, :until], -1)[torch.arange(len(others)), replay[1][others]].mean()
            return hard + past + fed.w_kd * among(r, 0, old, teacher[others], fed)

        start = expand_like(before[client].model, initial)
        own[client] = descend(
            simulation, start, [mixed, replay], loss, (client, 0), simulation.settings.training.epochs
        )
        shown.append(output(own[client], current)[:, old:])
    mean = torch.stack([softmax(z / tau, -1) for z in shown]).mean(0)
    past = softmax(output(server_before, earlier) / tau, -1)
    torch.testing.assert_close(softmax(kept.old_logits.double() / tau, -1), past, **CLOSE)

    sets = [(current, mean, old, old + new), (earlier, past, 0, old)]
    sets.sort(key=lambda one: len(one[0][1]), reverse=True)

    def distilled(w: Any, sampled: Any) -> Tensor:
        parts = zip(sets, sampled, strict=True)
        return sum(  # type: ignore[return-value]
            among(functional_call(network, w, (data[0][rows],)), a, b, p[rows], fed) for (data, p, a, b), rows in parts
        )

    both = [one[0] for one in sets]
    expected = {
        "": descend(simulation, expand_like(server_before, initial), both, distilled, ("", 0), fed.server_epochs)
    }
    for client in simulation.federation.clients:
        expected[client] = descend(simulation, own[client], both, distilled, (client, 2), fed.feedback_epochs)
    for name, found in ({"": simulation.server.model} | {c: simulation.client_states[c].model for c in own}).items():
        for key, tensor in found.items():
            torch.testing.assert_close(tensor.double(), expected[name][key], **CLOSE)


@pytest.mark.parametrize("options", [{}, {"server_loss": "labels"}], ids=str)
def test_the_heads_part_with_the_second_task(options: dict[str, Any]) -> None:
    joint, sliced = (
        tiny.simulation_with_tasks(method(head=head, **options), tiny.stream((2, 1), absent=0), rounds=2, cohort_size=5)
        for head in ("joint", "sliced")
    )
    tiny.run_rounds(joint, 2), tiny.run_rounds(sliced, 2)
    assert tiny.equal(joint.server.model, sliced.server.model)
    for client in joint.federation.clients:
        assert tiny.equal(joint.client_states[client].model, sliced.client_states[client].model)
    tiny.run_rounds(joint, 1), tiny.run_rounds(sliced, 1)
    assert tiny.equal(joint.server.model, sliced.server.model) == ("server_loss" in options), "its labels are among all"
    for client in joint.federation.clients:
        assert not tiny.equal(joint.client_states[client].model, sliced.client_states[client].model)


def test_prototypes_are_the_clients_mean_round_after_round() -> None:
    fed = method(prototype_aggregation="count")
    simulation = tiny.simulation_with_tasks(fed, tiny.stream((3,), absent=0), rounds=1, cohort_size=5)
    federation = simulation.federation
    tiny.run_rounds(simulation, 1)
    rows = simulation.context.load_generator().initial_prototypes(3)
    settings = PrototypeSearch(fed.prototype_steps, fed.prototype_batch_size)
    for use in range(fed.prototype_rounds):
        found, counts = [], []
        for client in federation.clients:
            data = federation.data(client)
            rng = seeds.rng(0, "prototypes", task=1, round=1, client=client, use=use)
            found.append(search_prototypes(tiny.ToyGenerator(), rows, data["input"], data["label"], settings, rng)[0])
            counts.append(torch.bincount(data["label"], minlength=3))
        for c in range(3):
            held = [of[c].item() for of in counts]
            rows[c] = sum(n * one[c] for n, one in zip(held, found, strict=True)) / sum(held)
    torch.testing.assert_close(simulation.server.state.prototypes, [rows])


def test_images_are_shown_once_a_task_and_weights_never_leave() -> None:
    fed = method()
    simulation = tiny.simulation_with_tasks(fed, tiny.stream((2, 1), absent=0), rounds=2, cohort_size=5)
    records = tiny.run_rounds(simulation)
    image = 16 + 8
    logits = [4 * (fed.server_images_per_class * n) * n for n in (2, 1)]
    prototype = 16 * 4
    searched = [5 * fed.prototype_rounds * n * prototype for n in (2, 1)]
    assert [r["up"] for r in records] == [
        searched[0] + 5 * fed.prototype_rounds * (2 * 8 + 3) + 5 * logits[0],
        5 * logits[0],
        searched[1] + 5 * fed.prototype_rounds * (1 * 8 + 3) + 5 * logits[1],
        5 * logits[1],
    ]
    answers = 4 * (fed.server_images_per_class * 2) * 2
    assert [r["down"] for r in records] == [
        searched[0] + 5 * (images_per_class(fed) * 2 * image) + 5 * logits[0],
        5 * logits[0],
        searched[1] + 5 * (images_per_class(fed) * 1 * image + answers) + 5 * logits[1],
        5 * logits[1],
    ]


def different(algorithm: FedDCL, **changes: Any) -> Simulation:
    """Return a simulation whose clients 1 and 3 have networks of their own."""
    tasks = tiny.stream((2, 1), absent=0)

    def network(*hidden: int) -> Any:
        return lambda: get_architecture("mlp")(hidden=hidden).build(tiny.SHAPE, 2)  # type: ignore[call-arg]

    own = {"1": network(5), "3": network(6, 4)}
    return tiny.simulation_with_tasks(algorithm, tasks, rounds=2, cohort_size=5, own=own, **changes)


def test_the_mean_of_what_clients_say_is_one_of_probabilities() -> None:
    output = [4 * torch.randn(6, 3, generator=torch.Generator().manual_seed(k), dtype=torch.float64) for k in range(5)]
    for tau in (1.0, 2.0):
        mean = softmax(mean_logits(output, tau, "prob") / tau, -1)
        torch.testing.assert_close(mean.sum(-1), torch.ones(6, dtype=torch.float64), rtol=1e-12, atol=0)
        expected = torch.stack([softmax(z / tau, -1) for z in output]).mean(0)
        torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-15)


def test_an_epoch_is_as_long_as_the_larger_set() -> None:
    simulation = tiny.simulation_with_tasks(
        method(server_images_per_class=12),
        tiny.stream((1, 2), absent=0),
        rounds=1,
        cohort_size=5,
    )
    tiny.run_rounds(simulation, 1)
    fits = record_fits(simulation)
    tiny.run_rounds(simulation, 1)
    taken = [one.fit.num_steps for one in fits if not one.client]
    assert taken == [2 * 24 // 6], "two epochs over 24 images of two classes, six a step"


def test_made_images_are_as_bright_as_they_were_drawn() -> None:
    fed = method()
    brightening = Augmentation(brightness=1.0)
    simulation = tiny.simulation_with_tasks(
        fed, tiny.stream((2, 1), absent=0), rounds=1, cohort_size=5, augmentation=brightening
    )
    tiny.run_rounds(simulation, 1)
    data, state = simulation.federation.data("0"), simulation.client_states["0"]
    client = LocalClient(simulation.context, "0", data, state, task=1, round=9, uses={})
    asked: list[Any] = []

    def noted(assignment: Any) -> Any:
        asked.append(assignment)
        return Fit(assignment.model, 0, 0, 0.0)

    client.train = noted
    fed.train(client)
    simulation.server.train = noted
    fed.distill_into(simulation.server, simulation.server.model, torch.zeros(2 * fed.server_images_per_class, 2), 1)
    for assignment, own in zip(asked, (len(client.data["label"]), 0), strict=True):
        (source,) = assignment.streams
        plain = simulation.context.normalise(source.data["input"])
        (batch,) = source.batches(1000, merge_last=False)
        as_they_were = (batch.data["input"] == plain[batch.index]).flatten(1).all(1)
        assert bool(as_they_were[batch.index >= own].all())
        assert not as_they_were[batch.index < own].all() or not own


def test_a_client_that_comes_late_is_shown_all_that_it_missed() -> None:
    simulation = tiny.simulation_with_tasks(
        method(),
        tiny.stream((1, 2), absent=0),
        rounds=1,
        cohort_size=5,
        fault_injector=lambda number, client, step: "away" if (number, client) == (1, "3") else None,
    )
    tiny.run_rounds(simulation)
    pool = simulation.server.state.pool
    for client in simulation.federation.clients:
        assert torch.equal(simulation.client_states[client].pool["input"], pool["input"])
        assert torch.equal(simulation.client_states[client].pool["label"], pool["label"])


def test_a_teacher_that_missed_a_task_tells_old_classes_apart_and_nothing_else() -> None:
    simulation = tiny.simulation_with_tasks(
        method(),
        tiny.stream((1, 1, 1), absent=0),
        rounds=1,
        cohort_size=5,
        fault_injector=lambda number, client, step: "away" if (number, client) == (2, "3") else None,
    )
    recorded = record_fits(simulation)
    tiny.run_rounds(simulation)

    def joint_terms(client: str) -> list[SubsetDistillation]:
        loss = next(one.job.loss for one in recorded if (one.task, one.client) == (3, client))
        return [term for term in iter_instances(loss, SubsetDistillation) if term.dataset_index == 1]

    assert [(term.start, term.stop) for term in joint_terms("2")] == [(0, 2)]
    assert not joint_terms("3")


def test_a_client_that_was_lost_has_no_own_model_to_evaluate() -> None:
    simulation = tiny.simulation_with_tasks(
        method(),
        tiny.stream((1, 2), absent=0),
        rounds=1,
        cohort_size=5,
        evaluate_local_models=True,
        fault_injector=lambda number, client, step: "refused" if (number, client, step) == (2, "3", "train") else None,
    )
    records = tiny.run_rounds(simulation)
    assert records[1]["lost"] == {"3": "refused"}
    assert sorted(one["client"] for one in records[1]["local_models"]) == ["0", "1", "2", "4"]


def test_the_control_learns_the_labels_of_made_images_alone() -> None:
    simulation = tiny.simulation_with_tasks(
        method(server_loss="labels"), tiny.stream((3,), absent=0), rounds=1, cohort_size=5
    )
    other = tiny.simulation_with_tasks(
        method(server_loss="labels"),
        tiny.stream((3,), absent=0),
        rounds=1,
        cohort_size=5,
        fault_injector=lambda number, client, step: "away" if (client, step) == ("2", "train") else None,
    )
    tiny.run_rounds(simulation), tiny.run_rounds(other)
    assert tiny.equal(simulation.server.model, other.server.model)


def test_replies_that_cannot_be_lose_their_client() -> None:
    simulation = tiny.simulation_with_tasks(method(), tiny.stream((3,), absent=0), rounds=1, cohort_size=5)
    tiny.run_rounds(simulation)
    rows, counts = torch.zeros(3, *tiny.SHAPE), torch.tensor([2, 0, 5])

    def fault(reply: Any) -> str:
        return str(simulation.algorithm.validate_reply(simulation.server, reply, 7))

    assert fault(PrototypeReply(rows, counts, "toy")) == "None"
    assert "of shape [2, 1, 4, 4] in torch.float32, not [3, 1, 4, 4]" in fault(PrototypeReply(rows[:2], counts, "toy"))
    assert "in torch.float64" in fault(PrototypeReply(rows.double(), counts, "toy"))
    assert "prototypes with numbers beyond 10000" in fault(PrototypeReply(rows - 3e38, counts, "toy"))
    assert "for another generator than the server's" in fault(PrototypeReply(rows, counts, "another"))
    for wrong in (counts + 1, counts * 2**60, counts.float(), torch.tensor([8, -1, 0])):
        assert "counts of its examples that cannot be" in fault(PrototypeReply(rows, wrong, "toy"))
    assert "logits of shape [4, 3]" in fault(LogitReply(torch.zeros(4, 3)))


def test_logits_of_any_size_leave_models_finite() -> None:
    def enlarge(client: Any, reply: LogitReply) -> LogitReply:
        return LogitReply(torch.full_like(reply.logits, 3e38)) if client.id in "12" else reply

    simulation = tiny.simulation_with_tasks(method(), tiny.stream((3,), absent=0), rounds=1, cohort_size=5)
    tiny.change_replies(simulation, "train", enlarge)
    (record,) = tiny.run_rounds(simulation)
    assert not record["lost"]
    for model in (
        simulation.server.model,
        *(simulation.client_states[client].model for client in simulation.federation.clients),
    ):
        assert all(tensor.isfinite().all() for tensor in model.values())


def test_nobody_with_a_prototype_stops_the_run() -> None:
    simulation = tiny.simulation_with_tasks(
        method(),
        tiny.stream((3,), absent=0),
        rounds=1,
        cohort_size=5,
        fault_injector=lambda number, client, step: "away" if step == "search" else None,
    )
    with pytest.raises(RunError, match="no client found a prototype"):
        tiny.run_rounds(simulation)


def test_a_class_whose_only_holder_is_away_keeps_its_first_row() -> None:
    data = tiny.dataset(30)
    rows = [torch.nonzero((data.train["label"] == 2) == last).flatten().tolist() for last in (False, True)]
    simulation = tiny.simulation(
        method(),
        federation=tiny.by_hand(data, rows),
        cohort_size=2,
        rounds=1,
        fault_injector=lambda number, client, step: "away" if (client, step) == ("1", "search") else None,
    )
    tiny.run_rounds(simulation)
    assert not simulation.server.state.prototypes[0][2].any()
    assert simulation.server.state.prototypes[0][:2].any()


def test_a_class_that_nobody_holds_is_named() -> None:
    data = tiny.dataset(30)
    federation = tiny.by_hand(data, [torch.nonzero(data.train["label"] < 2).flatten().tolist()])
    with pytest.raises(DataError, match="no client holds an example of 'c'"):
        tiny.run_rounds(tiny.simulation(method(), federation=federation, cohort_size=1))


def test_a_recipe_must_name_a_generator(tmp_path: Any) -> None:
    text = tiny.RECIPE.replace('algorithm = "fedavg"', 'algorithm = "feddcl"')
    with pytest.raises(ConfigError, match=r"FedDCL needs a generator of images.*generator\.name=FOLDER"):
        load_recipe(tiny.write_recipe(tmp_path, text))
