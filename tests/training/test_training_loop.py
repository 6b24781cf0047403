"""The one training loop against loops written by hand, and the rest of the toolbox against the slow way."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, log_softmax

from fedkeep._utils import seeds
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.data import Augmentation
from fedkeep.errors import ConfigError, FedKeepError, ValueRefused
from fedkeep.interface import Fit, Training
from fedkeep.interface.training_settings import SGD, Parametrization
from fedkeep.losses import Batch, CrossEntropy, LinearTerm, Loss, ModelView, Scaled
from fedkeep.models import Weights
from fedkeep.training.local_training import BatchStream, TrainJob, fit
from fedkeep.training.model_runner import ModelRunner
from fedkeep.training.party import LocalClient
from fedkeep.training.vmap_training import VmapTrainer

CPU = torch.device("cpu")


class Normed(nn.Module):
    """Batch norm, and a dropout that the other tests switch off."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(8, tiny.CLASSES)

    def features(self, images: Tensor) -> Tensor:
        return self.dropout(torch.relu(self.norm(self.first(images.flatten(1)))))

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images))


class Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, tiny.CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


@dataclass(frozen=True, eq=False)
class Watching(Loss):
    """Cross-entropy on all data sets that notes what it was given."""

    seen: list[list[list[int]]] = field(default_factory=list)

    def __call__(self, student: ModelView, batches: Sequence[Batch]) -> Tensor:
        self.seen.append([batch.index.tolist() for batch in batches])
        return sum((CrossEntropy(on)(student, batches) for on in range(len(batches))), torch.zeros(()))


@dataclass(frozen=True)
class OfFeatures(Loss):
    """Cross-entropy on batches whose first label is even; of others the features' size alone, without classifier."""

    def __call__(self, student: ModelView, batches: Sequence[Batch]) -> Tensor:
        if int(batches[0].data["label"][0]) % 2 == 0:
            return CrossEntropy()(student, batches)
        return student.features(batches[0]).square().mean()


def columns(count: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "input": torch.randn(count, *tiny.SHAPE, generator=generator),
        "label": torch.randint(tiny.CLASSES, (count,), generator=generator),
    }


def source(data: dict[str, Tensor], order: int = 1) -> BatchStream:
    return BatchStream(
        data, lambda images: images, Augmentation(), torch.Generator().manual_seed(order), torch.Generator()
    )


def trained(
    networks: ModelRunner,
    training: Training,
    *data: dict[str, Tensor],
    objective: Loss | None = None,
    round: int = 1,
    seed: int = 0,
    parametrization: Parametrization | None = None,
    model: Weights | None = None,
) -> Fit:
    sources = [source(d, order) for order, d in enumerate(data, start=1)]
    objective, model = objective or CrossEntropy(), model or networks.initial
    created = TrainJob(model, objective, sources, training.epochs, round, seed, parametrization=parametrization)
    return fit(networks, created, training)


def by_hand(
    networks: ModelRunner, training: Training, data: dict[str, Tensor], *, round: int = 1, fused: bool = False
) -> dict[str, Tensor]:
    """Train as a PyTorch tutorial would, on batches in the same order."""
    network = networks.build()
    network.load_state_dict(dict(networks.initial))
    network.train()
    lr = training.lr * training.lr_decay ** (round - 1)
    optimiser = torch.optim.SGD(
        network.parameters(), lr=lr, momentum=training.momentum, weight_decay=training.weight_decay, fused=fused
    )
    order = torch.Generator().manual_seed(1)
    for _ in range(training.epochs):
        rows = torch.randperm(len(data["label"]), generator=order)
        for start in range(0, len(rows), training.batch_size):
            batch = rows[start : start + training.batch_size]
            optimiser.zero_grad()
            cross_entropy(network(data["input"][batch]), data["label"][batch]).backward()
            if training.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(network.parameters(), training.max_grad_norm)
            optimiser.step()
    return network.state_dict()


def joined(parts: Sequence[list[int]]) -> list[int]:
    return [row for part in parts for row in part]


SETTINGS = {
    "plain": Training(epochs=3, batch_size=4, lr=0.1),
    "momentum": Training(epochs=3, batch_size=4, lr=0.1, momentum=0.9),
    "weight decay": Training(epochs=3, batch_size=4, lr=0.1, weight_decay=0.1),
    "clipping": Training(epochs=3, batch_size=4, lr=0.1, max_grad_norm=0.2),
    "decay by round": Training(epochs=3, batch_size=4, lr=0.1, lr_decay=0.5),
    "everything": Training(
        epochs=3, batch_size=4, lr=0.1, momentum=0.9, weight_decay=0.1, max_grad_norm=0.2, lr_decay=0.9
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("count", [11, 12, 3, 1])
def test_fit_is_a_plain_loop(name: str, count: int) -> None:
    networks, training, data = ModelRunner(tiny.network, 0, CPU), SETTINGS[name], columns(count)
    result = trained(networks, training, data, round=3)
    assert tiny.equal(result.model, by_hand(networks, training, data, round=3, fused=True))
    for tensor, expected in zip(
        result.model.values(), by_hand(networks, training, data, round=3).values(), strict=True
    ):
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-7)
    assert result.num_examples == count
    assert result.num_steps == 3 * -(-count // 4)


@pytest.mark.parametrize("name", ["momentum", "weight decay", "everything"])
def test_what_an_objective_does_not_use_stays_as_it_is_with_its_momentum(name: str) -> None:
    networks, training, data = ModelRunner(tiny.network, 0, CPU), SETTINGS[name], columns(11)
    result = trained(networks, training, data, objective=OfFeatures())
    network = networks.build()
    network.load_state_dict(dict(networks.initial))
    optimiser = torch.optim.SGD(
        network.parameters(), lr=training.lr, momentum=training.momentum, weight_decay=training.weight_decay
    )
    order, used = torch.Generator().manual_seed(1), []
    for _ in range(training.epochs):
        for rows in torch.randperm(11, generator=order).split(training.batch_size):
            optimiser.zero_grad()  # to None, so that SGD leaves out what got no gradient
            used.append(int(data["label"][rows[0]]) % 2 == 0)
            features = network.features(data["input"][rows])
            loss = cross_entropy(network.classifier(features), data["label"][rows]) if used[-1] else None
            (features.square().mean() if loss is None else loss).backward()
            if training.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(network.parameters(), training.max_grad_norm)
            optimiser.step()
    assert any(used)
    assert not all(used[used.index(True) :]), "a classifier with momentum is left out"
    for n, expected in network.state_dict().items():
        torch.testing.assert_close(result.model[n], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("factory", [tiny.network, Normed])
@pytest.mark.parametrize("name", SETTINGS)
def test_weights_that_are_computed_as_they_are_are_trained_as_they_are(name: str, factory: Any) -> None:
    networks, data = ModelRunner(factory, 0, CPU), columns(11)
    plain = trained(networks, SETTINGS[name], data, round=3)
    computed = trained(networks, SETTINGS[name], data, round=3, parametrization=dict)
    assert (computed.num_steps, computed.num_examples, computed.loss) == (
        plain.num_steps,
        plain.num_examples,
        plain.loss,
    )
    assert tiny.equal(computed.model, plain.model), "batch norm's statistics too"


def test_what_is_trained_may_be_something_else() -> None:
    """A network of weights 2 v + u of its classifier learns v and u, and nobody trains them as its own weights."""
    networks, data, training = ModelRunner(tiny.network, 0, CPU), columns(11), SETTINGS["momentum"]
    head, given = "classifier.weight", dict(networks.initial) | {"u": torch.ones(tiny.CLASSES, 8)}

    def parametrization(held: Weights) -> dict[str, Tensor]:
        return {n: 2 * t + held["u"] if n == head else t for n, t in held.items() if n != "u"}

    result = trained(networks, training, data, parametrization=parametrization, model=given).model
    network, live = networks.build(), {n: t.clone().requires_grad_() for n, t in given.items()}
    optimiser = torch.optim.SGD(live.values(), lr=training.lr, momentum=training.momentum)
    order = torch.Generator().manual_seed(1)
    for _ in range(training.epochs):
        for rows in torch.randperm(11, generator=order).split(training.batch_size):
            optimiser.zero_grad()
            cross_entropy(
                functional_call(network, parametrization(live), (data["input"][rows],)), data["label"][rows]
            ).backward()
            optimiser.step()
    assert result.keys() == live.keys()
    for n, tensor in live.items():
        torch.testing.assert_close(result[n], tensor.detach(), rtol=1e-5, atol=1e-7)
        assert not result[n].requires_grad
    assert torch.equal(given["u"], torch.ones(tiny.CLASSES, 8)), "the given model stays as it was"


def test_computed_weights_that_are_not_the_networks_are_refused() -> None:
    networks = ModelRunner(tiny.network, 0, CPU)
    with pytest.raises(ValueRefused, match="it lacks"):
        trained(
            networks,
            SETTINGS["plain"],
            columns(11),
            parametrization=lambda held: {n: t for n, t in held.items() if n != "classifier.bias"},
        )


def test_computed_weights_are_not_stacked() -> None:
    networks, training = ModelRunner(tiny.network, 0, CPU), SETTINGS["plain"]
    doubled = {"parametrization": lambda held: {n: 2 * t for n, t in held.items()}}
    alone = [trained(networks, training, columns(11, k), **doubled) for k in (1, 2)]
    group = [
        TrainJob(networks.initial, CrossEntropy(), [source(columns(11, k))], training.epochs, 1, 0, **doubled)
        for k in (1, 2)
    ]
    together = VmapTrainer(networks, training).fit(group)
    for one, other in zip(together, alone, strict=True):
        assert isinstance(one, Fit)
        assert tiny.equal(one.model, other.model)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "plain"])
def test_every_setting_matters(name: str) -> None:
    networks, data = ModelRunner(tiny.network, 0, CPU), columns(11)
    plain, changed = (trained(networks, SETTINGS[n], data, round=3).model for n in ("plain", name))
    assert not tiny.equal(plain, changed)


def test_the_loss_is_the_mean_over_steps() -> None:
    networks, data = ModelRunner(tiny.network, 0, CPU), columns(6)
    one = trained(networks, Training(epochs=1, batch_size=6, lr=0.1), data)
    assert one.loss == pytest.approx(
        cross_entropy(networks.logits(networks.initial, data["input"]), data["label"]).item()
    )
    still = trained(networks, Training(epochs=1, batch_size=4, lr=0.0), data)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(1))
    output = networks.logits(networks.initial, data["input"])
    steps = [cross_entropy(output[rows], data["label"][rows]).item() for rows in order.split(4)]
    assert still.loss == pytest.approx(sum(steps) / 2)


def test_the_given_model_and_data_stay_as_they_were() -> None:
    networks, data = ModelRunner(tiny.network, 0, CPU), columns(9)
    before = {name: tensor.clone() for name, tensor in networks.initial.items()}
    pixels = data["input"].clone()
    first = trained(networks, SETTINGS["everything"], data)
    kept = {name: tensor.clone() for name, tensor in first.model.items()}
    trained(networks, SETTINGS["plain"], columns(9, seed=4))
    assert tiny.equal(networks.initial, before)
    assert torch.equal(data["input"], pixels)
    assert tiny.equal(first.model, kept), "the next training reuses the network, not the result"


def test_every_pass_sees_each_example_once_in_a_new_order_and_the_short_batch_is_kept() -> None:
    networks, watching = ModelRunner(tiny.network, 0, CPU), Watching()
    trained(networks, Training(epochs=2, batch_size=4, lr=0.1), columns(9), objective=watching)
    seen = [step[0] for step in watching.seen]
    assert [len(rows) for rows in seen] == [4, 4, 1, 4, 4, 1]
    passes = [joined(seen[:3]), joined(seen[3:])]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(9))
    assert passes[0] != passes[1] != sorted(passes[1])


def test_several_data_sets_are_drawn_side_by_side() -> None:
    networks, watching = ModelRunner(tiny.network, 0, CPU), Watching()
    training = Training(epochs=2, batch_size=4, lr=0.1)
    trained(networks, training, columns(10), columns(6, seed=3), columns(50, seed=4), objective=watching)
    first, short, long = zip(*watching.seen, strict=True)
    assert [len(rows) for rows in first] == [4, 4, 2] * 2, "a pass ends with the first"
    assert [len(rows) for rows in short] == [4, 2] * 3, "the others start over, in a new order"
    assert sorted(joined(short[:2])) == sorted(joined(short[2:4])) == list(range(6))
    assert joined(short[:2]) != joined(short[2:4])
    assert [len(rows) for rows in long] == [4] * 6
    assert len(set(joined(long))) == 24, "a long one goes on where it stopped"


def test_a_pass_may_end_with_the_shortest_and_batches_have_sizes_of_their_own() -> None:
    watching, training = Watching(), Training(epochs=2, batch_size=4, lr=0.1)
    simulation = tiny.simulation(FedAvg(), training=training)
    sets = columns(10), columns(6, seed=3), columns(50, seed=4)
    assert (
        simulation.server.fit(
            simulation.server.model, watching, *sets, batch_sizes=(0, 3), epoch_ends_with="shortest"
        ).num_steps
        == 4
    )
    first, short, long = zip(*watching.seen, strict=True)
    assert [len(rows) for rows in first] == [4, 4] * 2
    assert [len(rows) for rows in short] == [3, 3] * 2
    assert sorted(joined(short[:2])) == sorted(joined(short[2:])) == list(range(6))
    assert [len(rows) for rows in long] == [4] * 4, "the recipe's, where no size is given"
    assert set(joined(long[:2])) != set(joined(long[2:])), "all begin anew, in a new order"
    assert simulation.server.fit(simulation.server.model, Watching(), *sets[:2], batch_sizes=(3,)).num_steps == 8
    with pytest.raises(ValueError, match="2 batch sizes for 1 data sets"):
        simulation.server.fit(simulation.server.model, watching, sets[0], batch_sizes=(1, 2))


def test_a_second_data_set_changes_nothing_about_the_first() -> None:
    networks = ModelRunner(tiny.network, 0, CPU)
    alone, beside = (
        trained(networks, SETTINGS["plain"], columns(10)),
        trained(networks, SETTINGS["plain"], columns(10), columns(6)),
    )
    assert tiny.equal(alone.model, beside.model), "cross-entropy reads the first only"


def test_an_empty_second_data_set_is_refused_in_words() -> None:
    networks = ModelRunner(tiny.network, 0, CPU)
    with pytest.raises((FedKeepError, ValueError), match=r"data set 2.*no examples"):
        trained(networks, SETTINGS["plain"], columns(10), columns(0))


def test_no_examples_no_steps() -> None:
    networks = ModelRunner(tiny.network, 0, CPU)
    result = trained(networks, SETTINGS["plain"], columns(0))
    assert (result.num_examples, result.num_steps, result.loss) == (0, 0, 0.0)
    assert tiny.equal(result.model, networks.initial)


def test_batch_norm_never_sees_a_batch_of_one() -> None:
    networks, watching = ModelRunner(Normed, 0, CPU), Watching()
    training = Training(epochs=2, batch_size=4, lr=0.1)
    result = trained(networks, training, columns(9), columns(5), objective=watching)
    assert [[len(rows) for rows in step] for step in watching.seen] == [[4, 5]] * 1 + [[5, 5]] + [[4, 5]] + [[5, 5]]
    assert result.num_steps == 4
    assert result.model["norm.num_batches_tracked"].item() == 8, "two data sets, four steps"
    assert not torch.equal(result.model["norm.running_mean"], networks.initial["norm.running_mean"])
    watching.seen.clear()
    trained(networks, training, columns(9), columns(1), objective=watching)
    assert [[len(rows) for rows in step] for step in watching.seen] == [[4, 2], [5, 2]] * 2, "the only one twice"
    alone = trained(networks, training, columns(1))
    assert alone.num_steps == 0
    assert tiny.equal(alone.model, networks.initial)


@pytest.mark.parametrize("count", [*range(10), 12, 13])
@pytest.mark.parametrize("factory", [tiny.network, Normed])
def test_steps_are_known_from_the_number_of_examples(factory: Any, count: int) -> None:
    networks = ModelRunner(factory, 0, CPU)
    for batch_size in (2, 3, 4):
        training = Training(epochs=2, batch_size=batch_size, lr=0.1)
        needed = training.num_steps(count, batch_norm=networks.has_batch_norm)
        assert trained(networks, training, columns(count)).num_steps == needed


def test_batch_norm_state_starts_from_the_model_that_came_in() -> None:
    networks, training = ModelRunner(Normed, 0, CPU), Training(epochs=1, batch_size=4, lr=0.1)
    first = trained(networks, training, columns(8))
    assert tiny.equal(trained(networks, training, columns(8)).model, first.model)


def test_dropout_is_deterministic_by_seed() -> None:
    networks, training = ModelRunner(Forgetful, 0, CPU), SETTINGS["plain"]
    one, again, other = (trained(networks, training, columns(9), seed=seed).model for seed in (5, 5, 6))
    assert tiny.equal(one, again)
    assert not tiny.equal(one, other)


def test_dropout_differs_between_rounds_and_clients_but_not_between_runs() -> None:
    noise: list[int] = []

    class Noted(Forgetful):
        def forward(self, images: Tensor) -> Tensor:
            if self.training:
                noise.append(torch.default_generator.initial_seed())
            return super().forward(images)

    federation = tiny.federation((4, 4, 4))
    first = tiny.run_rounds(tiny.simulation(FedAvg(), factory=Noted, federation=federation, rounds=2))
    run, noise = noise, []
    assert len(set(run)) == 6, "three clients, two rounds"
    assert tiny.run_rounds(tiny.simulation(FedAvg(), factory=Forgetful, federation=federation, rounds=2)) == first


@pytest.mark.parametrize(
    "augmentation", [Augmentation(), Augmentation(horizontal_flip=True, crop_padding=1, cutout=1, rotation=5)]
)
def test_a_whole_run_leaves_every_global_generator_alone(augmentation: Augmentation) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    tiny.run_rounds(
        tiny.simulation(FedAvg(), factory=lambda: Normed(0.5), augmentation=augmentation, evaluate_local_models=True)
    )
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), before[1], strict=True))  # noqa: NPY002
    assert random.getstate() == before[2]


def test_an_exception_in_training_gives_the_global_generator_back() -> None:
    @dataclass(frozen=True, eq=False)
    class Failing(Loss):
        def __call__(self, student: ModelView, batches: Sequence[Batch]) -> Tensor:
            torch.rand(3)
            raise ZeroDivisionError

    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        trained(ModelRunner(tiny.network, 0, CPU), SETTINGS["plain"], columns(4), objective=Failing())
    assert torch.equal(torch.get_rng_state(), before)


# The rest of the toolbox, on the server, which has the same one as a client


def server(factory: Callable[[], nn.Module] = tiny.network, count: int = 70) -> Any:
    party = tiny.simulation(FedAvg(), factory=factory).server
    party.begin_round(task=1, round=2)
    party.data = columns(count)
    return party


@pytest.mark.parametrize("factory", [tiny.network, Normed], ids=["mlp", "batch norm"])
def test_fisher_is_the_mean_of_squared_gradients_one_by_one(factory: Callable[[], nn.Module]) -> None:
    party = server(factory)
    got = party.fisher(party.model)
    network = party.network(party.model).double()
    expected = {name: torch.zeros_like(weight) for name, weight in network.named_parameters()}
    for image, label in zip(party.data["input"].double(), party.data["label"], strict=True):
        network.zero_grad()
        log_softmax(network(image[None]), -1)[0, label].backward()
        for name, weight in network.named_parameters():
            expected[name] += weight.grad**2 / len(party.data["label"])
    assert got.keys() == expected.keys()
    for name, value in got.items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-4, atol=1e-8)


def test_fisher_of_some_examples_draws_them_by_name() -> None:
    party = server()
    got = party.fisher(party.model, 5)
    chosen = torch.randperm(70, generator=seeds.rng(0, "fisher", task=1, round=2))[:5]
    other = server()
    other.data = {name: column[chosen] for name, column in other.data.items()}
    for name, value in other.fisher(party.model, 99).items():
        torch.testing.assert_close(got[name], value)
    assert not torch.equal(party.fisher(party.model, 5)["classifier.bias"], got["classifier.bias"]), "the next five"


def test_fisher_of_batches_does_not_depend_on_the_order_in_which_examples_are_stored() -> None:
    """Clients' examples are stored class after class, of which the mean gradient of a batch would be far larger."""
    traces = []
    for order in (lambda labels: torch.arange(len(labels)), torch.argsort):
        party = server()
        party.data = {name: column[order(party.data["label"])] for name, column in party.data.items()}
        traces.append(sum(float(value.sum()) for value in party.fisher(party.model, batch=10).values()))
    assert traces[1] == pytest.approx(traces[0], rel=0.3)


def test_fisher_without_examples_is_zero() -> None:
    party = server(count=0)
    assert not any(value.any() for value in party.fisher(party.model).values())


@pytest.mark.parametrize("factory", [tiny.network, Normed], ids=["mlp", "batch norm"])
def test_predicting_in_parts_is_predicting_the_whole(factory: Callable[[], nn.Module]) -> None:
    party = server(factory)
    logits, features = party.predict(party.model), party.features(party.model)
    network = party.network(party.model)
    assert not network.training
    torch.testing.assert_close(logits, network(party.data["input"]).detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(features, network.features(party.data["input"]).detach(), rtol=1e-6, atol=1e-6)
    party.context.runner.eval_batch_size = 7
    torch.testing.assert_close(party.predict(party.model), logits, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(party.features(party.model), features, rtol=1e-6, atol=1e-6)
    assert not logits.requires_grad
    assert party.predict(party.model, columns(0)).shape == (0, tiny.CLASSES)
    assert party.features(party.model, columns(0)).shape == (0, 8)


def test_predicting_moves_no_running_statistics() -> None:
    party = server(Normed)
    before = {name: tensor.clone() for name, tensor in party.model.items()}
    party.predict(party.model)
    party.features(party.model)
    party.fisher(party.model)
    assert tiny.equal(party.model, before)


def test_a_network_with_tied_weights_can_be_evaluated() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, tiny.CLASSES)
            self.b.weight = self.a.weight

        def forward(self, images: Tensor) -> Tensor:
            return self.c(self.b(torch.relu(self.a(images.flatten(1)))))

    simulation = tiny.simulation(FedAvg(), factory=Tied)
    assert not any(record["lost"] for record in tiny.run_rounds(simulation))
    assert torch.equal(simulation.server.model["a.weight"], simulation.server.model["b.weight"])


def test_randomness_of_a_party_is_named() -> None:
    party = server()
    first, second = party.rng("x").initial_seed(), party.rng("x").initial_seed()
    assert first == seeds.derive(0, "x", task=1, round=2)
    assert second == seeds.derive(0, "x", task=1, round=2, use=1)
    party.begin_round(task=1, round=2)
    assert party.rng("x").initial_seed() == first


def test_bfloat16_trains_the_same_weights_a_little_coarser() -> None:
    networks, data = ModelRunner(tiny.network, 0, CPU), columns(24)
    fine, coarse = (
        trained(networks, Training(epochs=3, batch_size=4, lr=0.1, precision=precision), data)
        for precision in ("float32", "bfloat16")
    )
    assert coarse.loss == pytest.approx(fine.loss, rel=0.02)
    for name, tensor in coarse.model.items():
        assert tensor.dtype == torch.float32
        assert not torch.equal(tensor, fine.model[name]), "it was computed otherwise"
        torch.testing.assert_close(tensor, fine.model[name], rtol=0.1, atol=0.02)


def test_made_images_are_not_brightened() -> None:
    simulation = tiny.simulation(FedAvg(), augmentation=Augmentation(brightness=1.0))
    data = simulation.federation.data("0")
    created = torch.arange(len(data["label"])) % 2 == 1
    client = LocalClient(simulation.context, "0", data, None, task=1, round=1, uses={})
    (source,) = client.train_job(simulation.server.model, CrossEntropy(), {**data, "generated": created}).streams
    (batch,) = source.batches(1000, merge_last=False)
    assert "generated" not in batch.data
    as_they_were = (batch.data["input"] == simulation.context.normalise(data["input"])[batch.index]).flatten(1).all(1)
    assert torch.equal(as_they_were, created[batch.index])


@pytest.mark.parametrize(("name", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)])
def test_adam_is_that_of_pytorch(name: Any, kind: Any) -> None:
    networks, data = ModelRunner(tiny.network, 0, CPU), columns(11)
    training = Training(
        epochs=3,
        batch_size=4,
        lr=0.02,
        optimizer=name,
        betas=(0.8, 0.95),
        weight_decay=0.1,
        max_grad_norm=0.5,
    )
    network = networks.build()
    network.load_state_dict(dict(networks.initial))
    network.train()
    optimizer = kind(network.parameters(), lr=0.02, betas=(0.8, 0.95), weight_decay=0.1)
    for (batch,) in TrainJob(networks.initial, CrossEntropy(), [source(data, 1)], 3, 1, 0).steps(4, False):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(batch.data["input"]), batch.data["label"]).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        optimizer.step()
    result = trained(networks, training, data).model
    for key, expected in network.state_dict().items():
        torch.testing.assert_close(result[key], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("training", "scheduler"),
    [
        (Training(lr=0.1, lr_decay=0.9), lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9)),
        (
            Training(lr=0.1, lr_schedule="cosine", lr_rounds=8, lr_min=0.01),
            lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8, 0.01),
        ),
    ],
)
def test_schedules_are_those_of_pytorch(training: Training, scheduler: Any) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    schedule = scheduler(optimizer)
    for round in range(1, 9):
        assert training.lr_in_round(round) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()


def test_an_option_without_effect_is_refused() -> None:
    for options, message in (
        ({"optimizer": "adam", "momentum": 0.9}, "momentum is of SGD"),
        ({"lr_schedule": "cosine", "lr_decay": 0.9}, "lr_decay has no effect"),
        ({"betas": (0.9,)}, "betas are two numbers"),
        ({"optimizer": "adamm"}, "Did you mean 'adam'"),
    ):
        with pytest.raises(ConfigError, match=message):
            Training(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr_min": 0.1}, "lr_min has no effect with lr_schedule = exponential"),
        ({"lr_rounds": 5}, "lr_rounds has no effect with lr_schedule = exponential"),
        ({"betas": (0.5, 0.9)}, "betas has no effect with optimizer = sgd"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SGD(**options)


def test_a_loss_times_a_number_is_scaled() -> None:
    networks = ModelRunner(Normed, 0, CPU)
    training = Training(epochs=1, batch_size=4, lr=0.1)
    for loss in (0.5 * CrossEntropy(), CrossEntropy() * 0.5):
        found = trained(networks, training, columns(9), objective=loss)
        assert tiny.equal(
            found.model, trained(networks, training, columns(9), objective=Scaled(0.5, CrossEntropy())).model
        )
    with pytest.raises(TypeError):
        CrossEntropy() * "2"  # type: ignore[operator]


def test_a_linear_term_without_gradient_changes_nothing() -> None:
    networks = ModelRunner(Normed, 0, CPU)
    training = Training(epochs=1, batch_size=4, lr=0.1)
    found = trained(networks, training, columns(9), objective=CrossEntropy() + LinearTerm({}))
    assert tiny.equal(found.model, trained(networks, training, columns(9), objective=CrossEntropy()).model)


@pytest.mark.parametrize("value", [0.3, torch.tensor(0.3, dtype=torch.float64), np.float64(0.3)])
def test_numbers_of_any_library_are_logged(value: Any) -> None:
    server = tiny.simulation(FedAvg()).server
    server.log("norm", value)
    assert server.logged == {"norm": 0.3}
    server.log("norms", torch.tensor([1.0, 2.0]))
    assert server.logged["norms"] == [1.0, 2.0]
    for wrong in ({"a": 1}, torch.zeros(2, 2), None, [[1.0]], "text"):
        with pytest.raises(ConfigError, match=r"server\.log\('norm', \.\.\.\) takes a number, or a list of numbers"):
            server.log("norm", wrong)
