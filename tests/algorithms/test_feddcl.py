"""FedDCL against a round written out plainly in float64, and what must hold of its images and messages."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, log_softmax, softmax
from torch.func import functional_call

from fedkeep import seeds
from fedkeep.algorithms.drawing import Found
from fedkeep.algorithms.feddcl import FedDCL
from fedkeep.algorithms.said import Said, averaged
from fedkeep.data import Augmentation
from fedkeep.data.fingerprints import fingerprints
from fedkeep.errors import ConfigError, DataError, RunError
from fedkeep.experiment.reading import load_recipe
from fedkeep.interface import Copy, Fit
from fedkeep.interface.values import copied
from fedkeep.models import architecture
from fedkeep.models.heads import continued
from fedkeep.simulation.simulation import Simulation
from fedkeep.synthesis.diffusion.prototypes import Inversion, invert
from fedkeep.training.party import LocalClient, LocalParty

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
    engine: Simulation, start: Mapping[str, Tensor], sets: Sequence[Set], loss: Any, place: Any, passes: int
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
    before, server_before = copied(engine.client_states), copied(engine.server.model)
    tiny.played(engine, 1)
    old, new, tau = sizes[0], sizes[1], fed.tau
    network = engine.context.runner.build(engine.server.model).double()
    initial = engine.context.runner.initial
    kept = engine.server.state

    def images(columns: Mapping[str, Tensor]) -> Set:
        return engine.context.normalise(columns["image"]).double(), columns["label"]

    def made(start: int, stop: int, count: int) -> Set:
        rows = [k for k, c in enumerate(kept.pool["label"].tolist()) if start <= c < stop]
        first = [k for k in rows if k % fed.images(engine.server) < count]
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
    for name, found in ({"": engine.server.model} | {c: engine.client_states[c].model for c in own}).items():
        for key, tensor in found.items():
            torch.testing.assert_close(tensor.double(), expected[name][key], **CLOSE)


def test_prototypes_are_the_clients_mean_round_after_round() -> None:
    fed = method(proto_agg="count")
    engine = tiny.engine_with_tasks(fed, tiny.stream((3,), absent=0), rounds=1, cohort=5)
    federation = engine.federation
    tiny.played(engine, 1)
    rows = engine.context.load_generator(1).start(3)
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
    torch.testing.assert_close(engine.server.state.prototypes, [rows])


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
        searched[0] + 5 * (fed.images(engine.server) * 2 * image) + 5 * logits[0],
        5 * logits[0],
        searched[1] + 5 * (fed.images(engine.server) * 1 * image + answers) + 5 * logits[1],
        5 * logits[1],
    ]


def different(algorithm: FedDCL, **changes: Any) -> Simulation:
    """Return an engine whose clients 1 and 3 have networks of their own."""
    tasks = tiny.stream((2, 1), absent=0)

    def network(*hidden: int) -> Any:
        return lambda: architecture("mlp")(hidden=hidden).build(tiny.SHAPE, 2)  # type: ignore[call-arg]

    own = {"1": network(5), "3": network(6, 4)}
    return tiny.engine_with_tasks(algorithm, tasks, rounds=2, cohort=5, client_factories=own, **changes)


def test_a_server_that_holds_the_models_learns_the_same_as_one_that_is_told_predictions() -> None:
    told, asking = (different(method(exchange=exchange)) for exchange in ("predictions", "models"))
    one, other = tiny.played(told), tiny.played(asking)
    assert tiny.equal(told.server.model, asking.server.model)
    for client in told.federation.clients:
        assert tiny.equal(told.states[client].model, asking.states[client].model)
    same = ("correct", "test_loss", "down", "lost")
    assert [[r[name] for name in same] for r in one] == [[r[name] for name in same] for r in other]
    weights = sum(t.nbytes for client in told.federation.clients for t in asking.states[client].model.values())
    assert other[-1]["up"] == weights, "models are what leaves clients, and nothing else does"
    assert one[-1]["up"] != weights


def test_the_mean_of_what_clients_say_is_one_of_probabilities() -> None:
    said = [4 * torch.randn(6, 3, generator=torch.Generator().manual_seed(k), dtype=torch.float64) for k in range(5)]
    for tau in (1.0, 2.0):
        mean = softmax(averaged(said, tau, "prob") / tau, -1)
        torch.testing.assert_close(mean.sum(-1), torch.ones(6, dtype=torch.float64), rtol=1e-12, atol=0)
        expected = torch.stack([softmax(z / tau, -1) for z in said]).mean(0)
        torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-15)


def test_independent_pools_have_no_image_in_common() -> None:
    fed = method(pools="independent")
    engine = tiny.engine_with_tasks(fed, tiny.stream((2, 1), absent=0), rounds=1, cohort=5)
    tiny.played(engine)
    pool = engine.server.state.pool
    assert fed.images(engine.server) == 2 + 3
    clients, server = fed.part(pool, 0, 3, 2), fed.server_part(engine.server, 0, 3, 3)
    assert not torch.isin(fingerprints(clients["image"]), fingerprints(server["image"])).any()
    assert torch.equal(clients["label"].unique(), server["label"].unique())
    shared = method()
    assert torch.equal(shared.server_part(engine.server, 0, 1, 2)["image"], shared.part(pool, 0, 1, 2)["image"])


def test_images_made_anew_in_every_round_replace_all() -> None:
    engine = tiny.engine_with_tasks(method(regen="per_round"), tiny.stream((2, 1), absent=0), rounds=2, cohort=5)
    pools = []
    for _ in range(4):
        old = engine.server.state.old
        tiny.played(engine, 1)
        state = engine.server.state
        pools.append(state.pool)
        for client in engine.federation.clients:
            assert torch.equal(engine.client_states[client].pool["image"], state.pool["image"])
            assert torch.equal(engine.client_states[client].answers, state.answers)
        if engine.federation.task == 2:
            replayed = engine.algorithm.server_part(engine.server, 0, 2, 2)
            answers = engine.server.predict(old or engine.server.state.old, replayed)[:, :2]
            torch.testing.assert_close(state.answers, answers)
    first, again, grown, last = (pool["image"] for pool in pools)
    assert not torch.equal(first, again)
    assert torch.equal(again, grown[: len(again)]), "a new task adds its own"
    assert not torch.isin(fingerprints(grown), fingerprints(last)).any()


def test_a_pass_is_as_long_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {}
    for pass_len in ("longer", "shorter"):
        fed = method(pass_len=pass_len, server_cur=12, server_pre=8)
        engine = tiny.engine_with_tasks(fed, tiny.stream((1, 2), absent=0), rounds=1, cohort=5)
        tiny.played(engine, 1)
        fit, taken = LocalParty.fit, []

        def counted(self: LocalParty, *args: Any, fit: Any = fit, taken: Any = taken, **kwargs: Any) -> Any:
            found = fit(self, *args, **kwargs)
            if not self.name:
                taken.append(found.steps)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(LocalParty, "fit", counted)
            tiny.played(engine, 1)
        steps[pass_len] = taken
    assert steps == {"longer": [2 * 24 // 6], "shorter": [2 * 2]}  # two passes, six images a step


def test_inner_counts_may_be_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    fit, taken = LocalParty.fit, []

    def counted(self: LocalParty, *args: Any, **kwargs: Any) -> Any:
        found = fit(self, *args, **kwargs)
        taken.append((bool(self.name), found.steps))
        return found

    monkeypatch.setattr(LocalParty, "fit", counted)
    for inner, feedback in (({"server_passes": 3, "server_cur": 12}, 1), ({"server_loss": "labels"}, 0)):
        fed = method(inner_unit="step", feedback_passes=feedback, **inner)
        engine = tiny.engine_with_tasks(fed, tiny.stream((1, 2), absent=0), rounds=1, cohort=5)
        tiny.played(engine, 1)
        before = copied(engine.client_states)
        taken.clear()
        tiny.played(engine, 1)
        local = [(True, engine.training.epochs)] * 5
        assert taken == [*local, (False, fed.server_passes), *[(True, feedback)] * 5]
        assert not tiny.equal(before["0"].model, engine.client_states["0"].model)


def test_counts_may_be_of_a_set_as_a_whole() -> None:
    fed = method(syn_count="total", cur=5, pre=4, server_cur=7, server_pre=3)
    engine = tiny.engine_with_tasks(fed, tiny.stream((2, 1), absent=0), rounds=1, cohort=5)
    tiny.played(engine, 1)
    drawn = torch.bincount(engine.server.state.pool["label"]).tolist()
    assert drawn == [4, 4], "7 of two classes: 4 of each"
    tiny.played(engine, 1)
    pool, server = engine.server.state.pool, engine.server
    assert torch.bincount(pool["label"]).tolist() == [4, 4, 7]
    sets = fed.part(pool, 2, 3, fed.cur), fed.part(pool, 0, 2, fed.pre)
    sets += fed.server_part(server, 2, 3, fed.server_cur), fed.server_part(server, 0, 2, fed.server_pre)
    assert [torch.bincount(one["label"]).tolist() for one in sets] == [[0, 0, 5], [2, 2], [0, 0, 7], [2, 2]]


def test_made_images_are_as_bright_as_they_were_drawn() -> None:
    fed = method()
    brightening = Augmentation(brightness=1.0)
    engine = tiny.engine_with_tasks(fed, tiny.stream((2, 1), absent=0), rounds=1, cohort=5, augmentation=brightening)
    tiny.played(engine, 1)
    client = LocalClient(
        engine.context, "0", engine.federation.data("0"), engine.client_states["0"], task=1, round=9, uses={}
    )
    asked: list[Any] = []

    def noted(assignment: Any) -> Any:
        asked.append(assignment)
        return Fit(assignment.model, 0, 0, 0.0)

    client.train = noted
    fed.trained(client)
    engine.server.train = noted
    fed.distilled(engine.server, engine.server.model, torch.zeros(2 * fed.server_cur, 2), 1)
    for assignment, own in zip(asked, (len(client.data["label"]), 0), strict=True):
        (source,) = assignment.streams
        plain = engine.context.normalise(source.data["image"])
        (batch,) = source.batches(1000, merge_last=False)
        as_they_were = (batch.data["image"] == plain[batch.index]).flatten(1).all(1)
        assert bool(as_they_were[batch.index >= own].all())
        assert not as_they_were[batch.index < own].all() or not own


def test_a_client_that_comes_late_is_shown_all_that_it_missed() -> None:
    engine = tiny.engine_with_tasks(
        method(),
        tiny.stream((1, 2), absent=0),
        rounds=1,
        cohort=5,
        fault_injector=lambda number, client, step: "away" if (number, client) == (1, "3") else None,
    )
    tiny.played(engine)
    pool = engine.server.state.pool
    for client in engine.federation.clients:
        assert torch.equal(engine.client_states[client].pool["image"], pool["image"])
        assert torch.equal(engine.client_states[client].pool["label"], pool["label"])


def test_the_control_learns_the_labels_of_made_images_alone() -> None:
    engine = tiny.engine_with_tasks(method(server_loss="labels"), tiny.stream((3,), absent=0), rounds=1, cohort=5)
    other = tiny.engine_with_tasks(
        method(server_loss="labels"),
        tiny.stream((3,), absent=0),
        rounds=1,
        cohort=5,
        fault_injector=lambda number, client, step: "away" if (client, step) == ("2", "learn") else None,
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
    assert "prototypes with numbers beyond 10000" in fault(Found(rows - 3e38, counts, "toy"))
    assert "for another generator than the server's" in fault(Found(rows, counts, "another"))
    for wrong in (counts + 1, counts * 2**60, counts.float(), torch.tensor([8, -1, 0])):
        assert "counts of its examples that cannot be" in fault(Found(rows, wrong, "toy"))
    assert "logits of shape [4, 3]" in fault(Said(torch.zeros(4, 3)))


@pytest.mark.parametrize("copy", [{}, {"another": torch.zeros(1)}, {"classifier.weight": torch.zeros(3, 8)}])
def test_a_copy_that_is_no_whole_model_loses_its_client(copy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = FedDCL.send

    @functools.wraps(honest)
    def send(self: FedDCL, client: Any) -> Copy:
        said = honest(self, client)
        return Copy(copy) if client.id == "1" else said

    monkeypatch.setattr(FedDCL, "send", send)
    engine = tiny.engine_with_tasks(method(exchange="models"), tiny.stream((3,), absent=0), rounds=1, cohort=5)
    (record,) = tiny.played(engine)
    assert list(record["lost"]) == ["1"]
    assert "answered with another model: it lacks" in record["lost"]["1"]


@pytest.mark.parametrize("ensemble", ["prob", "logit"])
def test_logits_of_any_size_leave_models_finite(ensemble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = FedDCL.learn

    @functools.wraps(honest)
    def learn(self: FedDCL, client: Any) -> Said:
        said = honest(self, client)
        return Said(torch.full_like(said.logits, 3e38)) if client.id in "12" else said

    monkeypatch.setattr(FedDCL, "learn", learn)
    engine = tiny.engine_with_tasks(method(ensemble=ensemble), tiny.stream((3,), absent=0), rounds=1, cohort=5)
    (record,) = tiny.played(engine)
    assert not record["lost"]
    for model in (engine.server.model, *(engine.client_states[client].model for client in engine.federation.clients)):
        assert all(tensor.isfinite().all() for tensor in model.values())


def test_nobody_with_a_prototype_stops_the_run() -> None:
    engine = tiny.engine_with_tasks(
        method(),
        tiny.stream((3,), absent=0),
        rounds=1,
        cohort=5,
        fault_injector=lambda number, client, step: "away" if step == "search" else None,
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
        fault_injector=lambda number, client, step: "away" if (client, step) == ("1", "search") else None,
    )
    tiny.played(engine)
    assert not engine.server.state.prototypes[0][2].any()
    assert engine.server.state.prototypes[0][:2].any()


def test_a_class_that_nobody_holds_is_named() -> None:
    data = tiny.dataset(30)
    federation = tiny.by_hand(data, [torch.nonzero(data.train["label"] < 2).flatten().tolist()])
    with pytest.raises(DataError, match="no client holds an example of 'c'"):
        tiny.played(tiny.engine(method(), federation=federation, cohort=1))


def test_a_recipe_must_name_a_generator(tmp_path: Any) -> None:
    text = tiny.RECIPE.replace('algorithm = "fedavg"', 'algorithm = "feddcl"')
    with pytest.raises(ConfigError, match=r"FedDCL needs a generator of images.*generator\.name=FOLDER"):
        load_recipe(tiny.write_recipe(tmp_path, text))
