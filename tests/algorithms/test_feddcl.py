"""FedDCL against a round written out plainly in float64, and what must hold of its images and messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, log_softmax, softmax
from torch.func import functional_call

from fedkeep import seeds
from fedkeep.algorithms.feddcl import FedDCL, Found
from fedkeep.algorithms.ft_kd import Said
from fedkeep.engine.embedded import Embedded
from fedkeep.errors import ConfigError, DataError, RunError
from fedkeep.experiment.recipe import load_recipe
from fedkeep.interface.values import copied
from fedkeep.models.heads import continued
from fedkeep.synthesis.diffusion.prototypes import Inversion, invert

CLOSE = {"rtol": 2e-4, "atol": 2e-5}  # float32 against float64, over some steps
Set = tuple[Tensor, Tensor]  # normalised images in float64, and labels


def method(**options: Any) -> FedDCL:
    return FedDCL(**{**tiny.TOYS["feddcl"], **options})


def batches(data: Set, rng: torch.Generator, size: int, passes: int | None) -> Iterator[Tensor]:
    done = 0
    while passes is None or done < passes:
        order = torch.randperm(len(data[1]), generator=rng)
        yield from torch.split(order, size)
        done += 1


def descend(
    engine: Embedded, start: Mapping[str, Tensor], sets: Sequence[Set], loss: Any, place: Any, passes: int
) -> Any:
    """Return a model after SGD with momentum and decay; ``place`` is (client, first use of the batch orders)."""
    settings, (client, use) = engine.training, place
    rngs = [seeds.generator(0, "batches", task=2, round=1, client=client, use=use + k) for k in range(len(sets))]
    weights = {name: tensor.detach().double() for name, tensor in start.items()}
    velocity = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    others = [batches(data, rng, settings.batch_size, None) for data, rng in zip(sets[1:], rngs[1:], strict=True)]
    for rows in batches(sets[0], rngs[0], settings.batch_size, passes):
        drawn = [rows, *(next(other) for other in others)]
        live = {name: tensor.requires_grad_() for name, tensor in weights.items()}
        value = loss(live, drawn)
        slopes = torch.autograd.grad(value, list(live.values()))
        for name, slope in zip(list(weights), slopes, strict=True):
            weight = weights[name].detach()
            velocity[name] = settings.momentum * velocity[name] + slope + settings.weight_decay * weight
            weights[name] = weight - settings.lr * velocity[name]
    return {name: tensor.detach() for name, tensor in weights.items()}


def among(logits: Tensor, start: int, stop: int, p: Tensor, tau: float) -> Tensor:
    """Return the mean cross-entropy with probabilities p among some classes."""
    return -(p * log_softmax(logits[:, start:stop] / tau, -1)).sum(-1).mean()


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
@pytest.mark.parametrize(
    "options", [{}, {"server_cur": 2, "server_pre": 5}, {"w_kd": 3.0, "w_ce_pre": 0.5, "tau": 1.0}]
)
def test_a_round_of_the_second_task(sizes: tuple[int, int], options: dict[str, Any]) -> None:
    fed = method(**options)
    engine = tiny.engine_with_tasks(fed, tiny.stream(sizes, absent=0), rounds=1, cohort=5)
    tiny.played(engine, 1)
    before, server_before = copied(engine.states), copied(engine.server.model)
    tiny.played(engine, 1)
    old, new, tau = sizes[0], sizes[1], fed.tau
    network = engine.place.networks.build(engine.server.model).double()
    initial = engine.place.networks.initial
    kept = engine.server.state

    def images(columns: Mapping[str, Tensor]) -> Set:
        return engine.place.normalise(columns["image"]).double(), columns["label"]

    def made(start: int, stop: int, count: int) -> Set:
        rows = [k for k, c in enumerate(kept.pool["label"].tolist()) if start <= c < stop]
        first = [k for k in rows if k % fed.images < count]
        return images({name: column[first] for name, column in kept.pool.items()})

    def said(model: Mapping[str, Tensor], data: Set) -> Tensor:
        whole = {name: tensor.double() for name, tensor in model.items()}
        short = len(whole["classifier.weight"])
        padded = {**whole}
        if short < old + new:
            padded["classifier.weight"] = torch.cat((whole["classifier.weight"], torch.zeros(old + new - short, 8)))
            padded["classifier.bias"] = torch.cat((whole["classifier.bias"], torch.zeros(old + new - short)))
        return functional_call(network, padded, (data[0],)).detach()[:, :short]

    current, earlier = made(old, old + new, fed.server_cur), made(0, old, fed.server_pre)
    own, told = {}, []
    for client in engine.federation.clients:
        examples, fresh, replay = (
            images(engine.federation.data(client)),
            made(old, old + new, fed.cur),
            made(0, old, fed.pre),
        )
        mixed = torch.cat((examples[0], fresh[0])), torch.cat((examples[1], fresh[1]))
        teacher = softmax(said(before[client].model, replay) / tau, -1)

        def loss(w: Any, drawn: Any, mixed: Any = mixed, replay: Any = replay, teacher: Any = teacher) -> Tensor:
            rows, others = drawn
            z, r = (functional_call(network, w, (data[0][k],)) for data, k in ((mixed, rows), (replay, others)))
            hard = -log_softmax(z[:, old:], -1)[torch.arange(len(rows)), mixed[1][rows] - old].mean()
            past = -log_softmax(r[:, :old], -1)[torch.arange(len(others)), replay[1][others]].mean()
            return hard + fed.w_ce_pre * past + fed.w_kd * among(r, 0, old, teacher[others], tau)

        start = continued(before[client].model, initial)
        own[client] = descend(engine, start, [mixed, replay], loss, (client, 0), engine.training.epochs)
        told.append(said(own[client], current)[:, old:])
    mean = torch.stack([softmax(z / tau, -1) for z in told]).mean(0)
    past = softmax(said(server_before, earlier) / tau, -1)
    torch.testing.assert_close(softmax(kept.answers.double() / tau, -1), past, **CLOSE)

    sets = [(current, mean, old, old + new), (earlier, past, 0, old)]
    sets.sort(key=lambda one: len(one[0][1]), reverse=True)

    def distilled(w: Any, drawn: Any) -> Tensor:
        parts = zip(sets, drawn, strict=True)
        return sum(  # type: ignore[return-value]
            among(functional_call(network, w, (data[0][rows],)), a, b, p[rows], tau) for (data, p, a, b), rows in parts
        )

    both = [one[0] for one in sets]
    expected = {"": descend(engine, continued(server_before, initial), both, distilled, ("", 0), fed.server_passes)}
    for client in engine.federation.clients:
        expected[client] = descend(engine, own[client], both, distilled, (client, 2), fed.feedback_passes)
    for name, found in ({"": engine.server.model} | {c: engine.states[c].model for c in own}).items():
        for key, tensor in found.items():
            torch.testing.assert_close(tensor.double(), expected[name][key], **CLOSE)


def test_prototypes_are_the_clients_mean_round_after_round() -> None:
    fed = method(proto_agg="count")
    engine = tiny.engine_with_tasks(fed, tiny.stream((3,), absent=0), rounds=1, cohort=5)
    federation = engine.federation
    tiny.played(engine, 1)
    rows = engine.place.load_generator().start(3)
    settings = Inversion(fed.proto_steps, fed.proto_batch, "adamw")
    for use in range(fed.proto_rounds):
        found = []
        for client in federation.clients:
            data = federation.data(client)
            rng = seeds.generator(0, "prototypes", task=1, round=1, client=client, use=use)
            found.append(invert(tiny.ToyGenerator(), rows, data["image"], data["label"], settings, rng))
        for c in range(3):
            counts = [one.counts[c].item() for one in found]
            rows[c] = sum(n * one.prototypes[c] for n, one in zip(counts, found, strict=True)) / sum(counts)
    torch.testing.assert_close(engine.server.state.prototypes, rows)


def test_images_are_shown_once_a_task_and_weights_never_leave() -> None:
    fed = method()
    engine = tiny.engine_with_tasks(fed, tiny.stream((2, 1), absent=0), rounds=2, cohort=5)
    records = tiny.played(engine)
    image = 16 + 8
    logits = [4 * (fed.server_cur * n) * n for n in (2, 1)]
    prototype = 16 * 4
    searched = [5 * fed.proto_rounds * n * prototype for n in (2, 1)]
    assert [r["up"] for r in records] == [
        searched[0] + 5 * fed.proto_rounds * (2 * 8 + 3) + 5 * logits[0],
        5 * logits[0],
        searched[1] + 5 * fed.proto_rounds * (1 * 8 + 3) + 5 * logits[1],
        5 * logits[1],
    ]
    answers = 4 * (fed.server_pre * 2) * 2
    assert [r["down"] for r in records] == [
        searched[0] + 5 * (fed.images * 2 * image) + 5 * logits[0],
        5 * logits[0],
        searched[1] + 5 * (fed.images * 1 * image + answers) + 5 * logits[1],
        5 * logits[1],
    ]


def test_a_client_that_comes_late_is_shown_all_that_it_missed() -> None:
    engine = tiny.engine_with_tasks(
        method(),
        tiny.stream((1, 2), absent=0),
        rounds=1,
        cohort=5,
        lose=lambda number, client, step: "away" if (number, client) == (1, "3") else None,
    )
    tiny.played(engine)
    pool = engine.server.state.pool
    for client in engine.federation.clients:
        assert torch.equal(engine.states[client].pool["image"], pool["image"])
        assert torch.equal(engine.states[client].pool["label"], pool["label"])


def test_the_control_learns_the_labels_of_made_images_alone() -> None:
    engine = tiny.engine_with_tasks(method(server_loss="labels"), tiny.stream((3,), absent=0), rounds=1, cohort=5)
    other = tiny.engine_with_tasks(
        method(server_loss="labels"),
        tiny.stream((3,), absent=0),
        rounds=1,
        cohort=5,
        lose=lambda number, client, step: "away" if (client, step) == ("2", "learn") else None,
    )
    tiny.played(engine), tiny.played(other)
    assert tiny.equal(engine.server.model, other.server.model)


def test_replies_that_cannot_be_lose_their_client() -> None:
    engine = tiny.engine_with_tasks(method(), tiny.stream((3,), absent=0), rounds=1, cohort=5)
    tiny.played(engine)
    rows, counts = torch.zeros(3, *tiny.SHAPE), torch.tensor([2, 0, 5])

    def fault(reply: Any) -> str:
        return str(engine.algorithm.fault(engine.server, reply, 7))

    assert fault(Found(rows, counts, "toy")) == "None"
    assert "of shape [2, 1, 4, 4] in torch.float32, not [3, 1, 4, 4]" in fault(Found(rows[:2], counts, "toy"))
    assert "in torch.float64" in fault(Found(rows.double(), counts, "toy"))
    assert "for another generator than the server's" in fault(Found(rows, counts, "another"))
    for wrong in (counts + 1, counts * 2**60, counts.float(), torch.tensor([8, -1, 0])):
        assert "counts of its examples that cannot be" in fault(Found(rows, wrong, "toy"))
    assert "logits of shape [4, 3]" in fault(Said(torch.zeros(4, 3)))


def test_nobody_with_a_prototype_stops_the_run() -> None:
    engine = tiny.engine_with_tasks(
        method(),
        tiny.stream((3,), absent=0),
        rounds=1,
        cohort=5,
        lose=lambda number, client, step: "away" if step == "search" else None,
    )
    with pytest.raises(RunError, match="no client found a prototype"):
        tiny.played(engine)


def test_a_class_whose_only_holder_is_away_keeps_its_first_row() -> None:
    data = tiny.dataset(30)
    rows = [torch.nonzero((data.train["label"] == 2) == last).flatten().tolist() for last in (False, True)]
    engine = tiny.engine(
        method(),
        federation=tiny.by_hand(data, rows),
        cohort=2,
        rounds=1,
        lose=lambda number, client, step: "away" if (client, step) == ("1", "search") else None,
    )
    tiny.played(engine)
    assert not engine.server.state.prototypes[2].any()
    assert engine.server.state.prototypes[:2].any()


def test_a_class_that_nobody_holds_is_named() -> None:
    data = tiny.dataset(30)
    federation = tiny.by_hand(data, [torch.nonzero(data.train["label"] < 2).flatten().tolist()])
    with pytest.raises(DataError, match="no client holds an example of 'c'"):
        tiny.played(tiny.engine(method(), federation=federation, cohort=1))


def test_a_recipe_must_name_a_generator(tmp_path: Any) -> None:
    text = tiny.RECIPE.replace('algorithm = "fedavg"', 'algorithm = "feddcl"')
    with pytest.raises(ConfigError, match=r"FedDCL needs a generator of images.*generator\.name=FOLDER"):
        load_recipe(tiny.write_recipe(tmp_path, text))
