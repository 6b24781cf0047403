"""Methods that are each other's special cases, and give the same weights to the last bit when they are.

Equal weights alone could come from methods that do nothing: every test says too where the two part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import tiny
import torch
from interception import record_fits
from torch import Tensor, nn

from fedkeep.aggregation.mean import effective_steps, normalised_mean
from fedkeep.algorithms.parallel.fedadkd import FedADKD
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.parallel.fedgkd import FedGKD
from fedkeep.algorithms.parallel.fedlsd import FedLSD
from fedkeep.algorithms.parallel.fednova import FedNova
from fedkeep.algorithms.parallel.fedntd import FedNTD
from fedkeep.algorithms.parallel.fedprox import FedProx
from fedkeep.algorithms.parallel.moon import MOON
from fedkeep.algorithms.parallel.scaffold import SCAFFOLD
from fedkeep.algorithms.sequential.aver import AVER, CAMKD, EBKD
from fedkeep.algorithms.sequential.fedseq import FedSeq
from fedkeep.algorithms.sequential.seqkeep import SeqKeep
from fedkeep.algorithms.sequential.sfedkd import SFedKD
from fedkeep.interface import Algorithm, Fit
from fedkeep.losses import FullKL, PerTeacher, WeightRule
from fedkeep.losses.decoupled import decoupled_loss, log_split, merge
from fedkeep.models import Weights
from fedkeep.options import option
from fedkeep.training.local_training import NetworkView

AnyAlgorithm = Algorithm[Any, Any]
EVEN = tiny.federation((10,) * 6)
TAUGHT = [AVER, EBKD, CAMKD]


def final(method: AnyAlgorithm, rounds: int = 4, **changes: Any) -> Weights:
    simulation = tiny.simulation(method, rounds=rounds, **changes)
    tiny.run_rounds(simulation)
    return simulation.server.model


def distance(one: Weights, other: Weights) -> float:
    """Return the largest difference between two models."""
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize(
    ("special", "plain", "different"),
    [
        (FedProx(mu=0.0), FedAvg(), FedProx(mu=0.5)),
        (FedProx(mu=0.0, aggregation="uniform"), FedAvg(aggregation="uniform"), FedProx(mu=0.0)),
        (FedNTD(w_nontarget=0.0), FedAvg(), FedNTD()),
        (FedLSD(w_full=0.0), FedAvg(), FedLSD()),
        (MOON(mu=0.0), FedAvg(), MOON(mu=1.0)),
        (FedGKD(w_full=0.0), FedAvg(aggregation="uniform"), FedGKD()),
        (FedADKD(w_target=0.0, w_nontarget=0.0), FedAvg(aggregation="uniform"), FedADKD()),
        (FedADKD(w_target=0.0), FedNTD(tau=1.0, aggregation="uniform"), FedADKD()),
        (FedADKD(w_target=0.0, w_nontarget=2.5), FedNTD(w_nontarget=2.5, tau=1.0, aggregation="uniform"), FedNTD()),
        (FedADKD(w_target=0.0, aggregation="num_examples"), FedNTD(tau=1.0), FedNTD(tau=2.0)),
        (FedADKD(w_target=0.0, phi="off"), FedADKD(w_target=0.0), FedADKD(phi="off")),
        (FedGKD(window=9), FedGKD(window=4), FedGKD(window=2)),
        (SFedKD(teachers=0), FedSeq(), SFedKD()),
        (SeqKeep(), FedSeq(), SeqKeep(w_nontarget=3.0)),
        *((cls(teachers=0), FedSeq(), cls(teachers=2)) for cls in TAUGHT),
    ],
    ids=repr,
)
def test_special_cases_are_equal_bit_for_bit(
    special: AnyAlgorithm, plain: AnyAlgorithm, different: AnyAlgorithm
) -> None:
    reference = final(plain)
    assert tiny.equal(final(special), reference)
    assert not tiny.equal(final(different), reference)


@pytest.mark.parametrize("method", [FedGKD(), SCAFFOLD(), FedADKD(phi="on"), MOON()], ids=repr)
def test_first_rounds(method: AnyAlgorithm) -> None:
    """In its first round a method with memory is one without; from the second round on it is not."""
    plain: dict[str, AnyAlgorithm] = {
        "fedgkd": FedAvg(aggregation="uniform"),
        "scaffold": FedAvg(),
        "fedadkd": FedADKD(phi="off"),
        "moon": MOON(),
    }
    one, two = tiny.simulation(method, cohort_size=6), tiny.simulation(plain[method.name()], cohort_size=6)
    tiny.run_rounds(one, 1)
    tiny.run_rounds(two, 1)
    assert tiny.equal(one.server.model, two.server.model)
    two.client_states.clear()  # MOON against one that forgets
    tiny.run_rounds(one, 1)
    tiny.run_rounds(two, 1)
    assert not tiny.equal(one.server.model, two.server.model)


def test_in_scaffolds_first_round_control_variates_are_found_but_change_nothing() -> None:
    one, two = (
        tiny.simulation(SCAFFOLD(aggregation="uniform"), cohort_size=6),
        tiny.simulation(FedAvg(aggregation="uniform"), cohort_size=6),
    )
    tiny.run_rounds(one, 1)
    tiny.run_rounds(two, 1)
    assert tiny.equal(one.server.model, two.server.model)
    assert any(bool(tensor.any()) for tensor in one.server.state.c.values())


# FedADKD


@dataclass(frozen=True)
class Even(FedADKD):
    """FedADKD with one weight for all clients."""

    title = "even"
    weight: float = option(1.0, "the weight")

    def balance_weights(self, clients: Sequence[str], known: Mapping[str, float]) -> dict[str, float]:
        return dict.fromkeys(clients, self.weight)


def test_fedadkd_off_is_one_weight_for_all() -> None:
    off = final(FedADKD(phi="off", w_target=2.0))
    assert tiny.equal(off, final(Even(w_target=2.0)))
    assert not tiny.equal(off, final(Even(w_target=2.0, weight=0.5)))


def test_fedadkd_of_clients_with_one_class_each_is_fedadkd_off() -> None:
    """Their impurity is 0, which leaves phi undefined: 1 for all; and known only after each has been heard."""
    data = tiny.dataset(30)
    pure = tiny.by_hand(data, [torch.nonzero(data.train["label"] == c).flatten().tolist() for c in range(3)])
    on, off = (final(FedADKD(phi=phi), federation=pure) for phi in ("on", "off"))  # type: ignore[arg-type]
    assert tiny.equal(on, off)


@pytest.mark.parametrize(
    ("delta", "gini", "phi"),
    [
        (0.0, (0.9, 0.5, 0.0, 0.75), (1.674419, 0.930233, 0.0, 1.395349)),
        (1.0, (0.9, 0.5, 0.0, 0.75), (1.597710, 1.009288, 0.0, 1.393002)),
        (10.0, (0.9, 0.5, 0.0, 0.75), (1.477339, 1.149593, 0.0, 1.373067)),
    ],
)
def test_balance_weights(delta: float, gini: tuple[float, ...], phi: tuple[float, ...]) -> None:
    known = {str(i): g for i, g in enumerate(gini)}
    got = FedADKD(delta=delta).balance_weights(list(known), known)
    assert list(got.values()) == pytest.approx(phi, abs=1e-6)
    assert sum(got.values()) == pytest.approx(len(phi))
    turned = FedADKD(delta=delta).balance_weights(list(reversed(known)), known)
    assert turned == pytest.approx(got), "whoever stands first"


@pytest.mark.parametrize(
    ("delta", "balanced", "others"),
    [(0.0, 3.33, 0.74), (1.0, 2.81, 0.80), (10.0, 1.89, 0.90), (100.0, 1.41, 0.95)],
)
def test_one_balanced_client_among_nine(delta: float, balanced: float, others: float) -> None:
    known = {"iid": 0.9} | {str(i): 0.2 for i in range(9)}
    got = FedADKD(delta=delta).balance_weights(list(known), known)
    assert got["iid"] == pytest.approx(balanced, abs=0.005)
    assert got["3"] == pytest.approx(others, abs=0.005)


def test_small_delta_tends_to_the_printed_formula() -> None:
    known = {"a": 0.9, "b": 0.5, "c": 0.75}
    printed = FedADKD(delta=0.0).balance_weights(list(known), known)
    assert FedADKD(delta=1e-7).balance_weights(list(known), known) == pytest.approx(printed, abs=1e-6)


@pytest.mark.parametrize("delta", [0.0, 1.0])
def test_no_balance_anywhere_weighs_all_alike(delta: float) -> None:
    zeros = dict.fromkeys("abc", 0.0)
    assert FedADKD(delta=delta).balance_weights(list("abc"), zeros) == dict.fromkeys("abc", 1.0)
    assert FedADKD(phi="off", delta=delta).balance_weights(["a", "b"], {"a": 0.9}) == {"a": 1.0, "b": 1.0}


def test_clients_without_a_known_impurity_count_as_balanced() -> None:
    known = {"a": 0.2, "b": 0.6, "elsewhere": 0.7}
    weights = FedADKD(delta=0.0).balance_weights(["a", "new"], known)
    assert weights == pytest.approx({"a": 2 * 0.2 / 1.2, "new": 2 * 1.0 / 1.2})
    everyone_new = FedADKD().balance_weights(["x", "y", "z"], {})
    assert everyone_new == pytest.approx({"x": 1.0, "y": 1.0, "z": 1.0})


def test_fedadkds_clients_send_how_balanced_they_are() -> None:
    simulation = tiny.simulation(FedADKD(), cohort_size=6)
    tiny.run_rounds(simulation, 1)
    assert len(simulation.server.state.gini) == 6
    for client, gini in simulation.server.state.gini.items():
        counts = simulation.federation.data(client)["label"].bincount(minlength=tiny.CLASSES).double()
        assert gini == pytest.approx(1 - float((counts / counts.sum()).square().sum()), abs=1e-12)


# FedNova


def test_effective_steps() -> None:
    assert effective_steps(10, 0.9) == pytest.approx(41.38, abs=0.005)
    assert effective_steps(7, 0.0) == 7
    assert effective_steps(1, 0.5) == pytest.approx(1)
    for steps, momentum in ((5, 0.5), (12, 0.99), (4, 1.0)):
        # Each step moves by a velocity v <- rho v + 1.
        velocity = moved = 0.0
        for _ in range(steps):
            velocity = momentum * velocity + 1
            moved += velocity
        assert effective_steps(steps, momentum) == pytest.approx(moved)


def test_fednova_with_equal_steps_is_fedavg() -> None:
    two_steps = tiny.federation((7, 8, 9, 10, 7, 12))  # of up to six examples each
    assert tiny.equal(final(FedNova(), federation=two_steps), final(FedAvg(), federation=two_steps))
    assert not tiny.equal(final(FedNova()), final(FedAvg()))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_normalised_mean_is_the_papers_formula(momentum: float) -> None:
    generator = torch.Generator().manual_seed(3)

    def draw() -> Weights:
        return {"w": torch.randn(4, 3, generator=generator), "b": torch.randn(3, generator=generator)}

    start = draw()
    replies = {str(n): Fit(draw(), n, steps, 0.0) for n, steps in ((7, 2), (20, 5), (5, 2), (9, 0))}
    trained = [reply for reply in replies.values() if reply.num_steps]
    total = sum(reply.num_examples for reply in trained)
    p = [reply.num_examples / total for reply in trained]
    a = [sum((1 - momentum ** (k + 1)) / (1 - momentum) for k in range(reply.num_steps)) for reply in trained]
    reach = sum(x * y for x, y in zip(p, a, strict=True))
    got = normalised_mean(start, replies, momentum)
    for name, w in start.items():
        moves = [pi / ai * (w - r.model[name]).double() for pi, ai, r in zip(p, a, trained, strict=True)]
        expected = w.double() - reach * torch.stack(moves).sum(0)
        torch.testing.assert_close(got[name].double(), expected, rtol=1e-5, atol=1e-5)


def test_normalised_mean_of_nobody_is_the_start() -> None:
    start = {"w": torch.ones(2)}
    assert tiny.equal(normalised_mean(start, {"0": Fit({"w": torch.zeros(2)}, 3, 0, 0.0)}, 0.9), start)


def test_fednova_averages_batch_norms_statistics_as_fedavg_does() -> None:
    """Carried on as parameters are, running variances end below zero here."""

    class Dim(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images.flatten(1) / 10

    def small() -> nn.Module:
        return nn.Sequential(Dim(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, tiny.CLASSES))

    uneven = tiny.federation((3, 40, 3, 60))
    training = replace(tiny.TRAINING, epochs=10)
    nova, plain = (
        final(method, rounds=1, factory=small, federation=uneven, cohort_size=4, training=training)
        for method in (FedNova(), FedAvg())
    )
    assert 0 < nova["2.running_var"].min() < 0.4
    for name in ("2.running_mean", "2.running_var", "2.num_batches_tracked"):
        assert torch.equal(nova[name], plain[name])
    assert not torch.equal(nova["2.weight"], plain["2.weight"])


# SCAFFOLD


@pytest.mark.parametrize("momentum", [0.5, 0.0])
def test_control_variates_are_the_papers(momentum: float) -> None:
    """Two rounds by formula, in float64, from the models that clients left."""
    training = replace(tiny.TRAINING, momentum=momentum, lr_decay=0.5)
    simulation = tiny.simulation(SCAFFOLD(), cohort_size=4, training=training)
    own: dict[str, dict[str, Tensor]] = {}
    c = {name: torch.zeros_like(w).double() for name, w in simulation.server.model.items()}
    recorded = record_fits(simulation)

    for number in (1, 2):
        start = simulation.server.model
        (record,) = tiny.run_rounds(simulation, 1)
        left = {(one.round, one.client): one.fit for one in recorded}
        moved = {name: torch.zeros_like(tensor) for name, tensor in c.items()}
        for client in record["cohort"]:
            reply = left[number, client]
            steps = reply.num_steps
            if momentum:
                steps = sum((1 - momentum ** (k + 1)) / (1 - momentum) for k in range(reply.num_steps))  # type: ignore
            rate = training.lr * training.lr_decay ** (number - 1) * steps
            before = own.get(client, {name: torch.zeros_like(tensor) for name, tensor in c.items()})
            after = {n: before[n] - c[n] + (start[n] - reply.model[n]).double() / rate for n in c}
            moved = {n: moved[n] + after[n] - before[n] for n in c}
            own[client] = after
        c = {n: c[n] + moved[n] / 6 for n in c}  # M / N times the mean over M
        for name, tensor in simulation.server.state.c.items():
            torch.testing.assert_close(tensor.double(), c[name], rtol=1e-4, atol=1e-5)
        for client, expected in own.items():
            for name, tensor in simulation.client_states[client].c.items():
                torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-4, atol=1e-5)


def test_scaffold_that_stands_still_keeps_its_control_variates() -> None:
    simulation = tiny.simulation(SCAFFOLD(), training=replace(tiny.TRAINING, lr_decay=0.0))
    tiny.run_rounds(simulation, 1)
    learned = simulation.server.model
    tiny.run_rounds(simulation)
    assert tiny.finite(simulation.server.state.c)
    assert distance(simulation.server.model, learned) < 1e-6


# Aggregation


AGGREGATING = [FedAvg, FedProx, FedNTD, FedLSD, FedADKD, FedGKD, MOON, SCAFFOLD]


@pytest.mark.parametrize("cls", AGGREGATING)
def test_aggregations_agree_on_equal_clients_only(cls: Any) -> None:
    uniform, num_examples = cls(aggregation="uniform"), cls(aggregation="num_examples")
    assert tiny.equal(final(uniform, rounds=2, federation=EVEN), final(num_examples, rounds=2, federation=EVEN))
    assert not tiny.equal(final(uniform, rounds=2), final(num_examples, rounds=2))


# Distillation in sequence


def test_with_one_teacher_averaging_entropy_and_confidence_agree() -> None:
    one = [final(cls(teachers=1)) for cls in TAUGHT]
    assert tiny.equal(one[0], one[1])
    assert tiny.equal(one[0], one[2])
    several = [final(cls(teachers=3)) for cls in TAUGHT]
    assert not tiny.equal(several[0], several[1])
    assert not tiny.equal(several[0], several[2])
    assert not tiny.equal(several[1], several[2])


def test_seqkeep_evaluates_the_moving_average_of_fedseq() -> None:
    models = []
    for method, which in ((SeqKeep(ema_decay=0.7), "last"), (FedSeq(), "moving"), (FedSeq(), "round")):
        simulation = tiny.simulation(method, evaluation_models=(which,), ema_decay=0.7)
        tiny.run_rounds(simulation, 4)
        models.append(simulation.evaluation_model(which))
    assert tiny.equal(models[0], models[1])
    assert not tiny.equal(models[0], models[2])


def test_a_weight_of_zero_trains_like_fedseq() -> None:
    plain = final(FedSeq())
    for cls in TAUGHT:
        assert distance(final(cls(w_full=0.0)), plain) < 1e-5


class Tied(WeightRule):
    """SFedKD's weights, the non-target ones times q_y of each teacher and example."""

    def __init__(self, inner: PerTeacher) -> None:
        self.inner = inner

    def __call__(self, teachers: Tensor, labels: Tensor, tau: float) -> tuple[Tensor, Tensor]:
        target, nontarget = self.inner(teachers, labels, tau)
        return target, nontarget * log_split(teachers, labels, tau).rest.exp()


def uniform_sfedkd(**options: Any) -> SFedKD:
    return SFedKD(nontarget_weighting="uniform", target_weighting="uniform", w_target=1.0, w_nontarget=1.0, **options)


def test_uniform_sfedkd_tied_to_q_is_averaging() -> None:
    generator = torch.Generator().manual_seed(1)
    teachers = 3 * torch.randn(4, 9, 5, generator=generator, dtype=torch.float64)
    student = torch.randn(9, 5, generator=generator, dtype=torch.float64)
    labels = torch.arange(9) % 5
    counts = {str(i): torch.tensor([5.0, 3, i, 1, 0]) for i in range(5)}
    rule = uniform_sfedkd().weigh_teachers("4", list("0123"), counts)
    assert isinstance(rule, PerTeacher)
    exact = PerTeacher(rule.target.double(), rule.nontarget.double())

    def loss(chosen: WeightRule) -> Tensor:
        return decoupled_loss(student, labels, merge(teachers, labels, *chosen(teachers, labels, 4.0), 4.0), 4.0)

    torch.testing.assert_close(loss(Tied(exact)), loss(FullKL(1.0)), rtol=1e-7, atol=1e-9)
    assert not torch.allclose(loss(exact), loss(FullKL(1.0)), rtol=1e-2)


class TiedSFedKD(SFedKD):
    """SFedKD whose weights are tied to q."""

    title = "tied"

    def weigh_teachers(self, *given: Any) -> Any:
        rule = super().weigh_teachers(*given)
        return None if rule is None else Tied(rule)


def test_a_round_of_uniform_sfedkd_tied_to_q_is_a_round_of_averaging() -> None:
    averaged = final(AVER(teachers=2), rounds=2)
    uniform = uniform_sfedkd(teachers=2)
    assert distance(final(uniform, rounds=2), averaged) > 1e-3
    assert tiny.equal(final(TiedSFedKD(**vars(uniform)), rounds=2), averaged), "bit for bit"


# Augmentation: teachers must see what the student sees


@pytest.mark.parametrize(
    "method", [*(cls(teachers=2) for cls in TAUGHT), FedNTD(), FedLSD(), FedADKD(), FedGKD(), MOON()], ids=repr
)
def test_teachers_asked_in_every_batch_teach_the_same(method: AnyAlgorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under an augmentation that happens to change nothing; through the codec, unsettled objectives and all."""
    settled = final(method, rounds=2)
    asked: list[str] = []
    for name in ("teacher_logits", "teacher_features"):
        ask = getattr(NetworkView, name)
        monkeypatch.setattr(NetworkView, name, lambda *a, ask=ask, name=name: asked.append(name) or ask(*a))
    unsettled = final(method, rounds=2, augmentation=tiny.UNMOVED, through_codec=True)
    assert asked
    assert distance(settled, unsettled) < 1e-5
