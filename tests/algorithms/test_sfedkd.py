"""SFedKD: what its paper says about teachers, beside what every method must keep (`fedkeep.testing`)."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from interception import record_fits
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from fedkeep.algorithms.sequential.fedseq import FedSeq
from fedkeep.algorithms.sequential.sfedkd import SFedKD
from fedkeep.algorithms.sequential.teachers import PreviousRound
from fedkeep.data import Augmentation
from fedkeep.models import Weights
from fedkeep.rounds.messages import StepRequest
from fedkeep.testing.runs import wrap_steps
from fedkeep.training.local_training import NetworkView
from fedkeep.trials.simulation import Simulation

MODEL = 4 * (16 * 8 + 8 + 8 * 3 + 3)  # bytes of `tiny.network`
FIT = 3 * 8  # examples, steps and loss of a reply
COUNTS = 4 * tiny.CLASSES


class Spy:
    """Who taught whom, and what every client left."""

    def __init__(self, simulation: Simulation) -> None:
        self.teachers: dict[tuple[int, str], list[Weights]] = {}
        self.weights: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        self._recorded = record_fits(simulation)

        def note(request: StepRequest) -> Any:
            if request.step.__name__ == "prepare":
                teachers, rule = request.args
                self.teachers[request.round, request.client] = teachers
                assert (rule is None) is (not teachers)
                if rule is not None:
                    self.weights[request.round, request.client] = rule.target, rule.nontarget
            return request.step

        wrap_steps(simulation, note)

    @property
    def incoming(self) -> dict[tuple[int, str], Weights]:
        return {(one.round, one.client): one.model for one in self._recorded}

    @property
    def left(self) -> dict[tuple[int, str], Weights]:
        return {(one.round, one.client): one.fit.model for one in self._recorded}


def names_of(teachers: list[Weights], left: dict[tuple[int, str], Weights], round: int) -> list[str]:
    """Return whose models of a round these are: the very tensors, not equal ones."""

    def same(one: Weights, other: Weights) -> bool:
        return all(one[name] is other[name] for name in one)

    return [
        next(name for (r, name), model in left.items() if r == round and same(model, teacher)) for teacher in teachers
    ]


def test_without_teachers_it_is_fedseq_bit_for_bit() -> None:
    one, two = tiny.simulation(SFedKD(teachers=0), rounds=6), tiny.simulation(FedSeq(), rounds=6)
    assert tiny.run_rounds(one) == tiny.run_rounds(two)
    assert tiny.equal(one.server.model, two.server.model)


def test_its_first_round_is_fedseqs_first_round() -> None:
    taught, plain = tiny.simulation(SFedKD()), tiny.simulation(FedSeq())
    ours, theirs = tiny.run_rounds(taught, 1)[0], tiny.run_rounds(plain, 1)[0]
    assert tiny.equal(taught.server.model, plain.server.model)
    assert ours | {"up": 0} == theirs | {"up": 0}
    assert ours["up"] == theirs["up"] + 3 * COUNTS
    tiny.run_rounds(taught, 1)
    tiny.run_rounds(plain, 1)
    assert not tiny.equal(taught.server.model, plain.server.model), "the second round has teachers"


def test_teachers_are_the_last_rounds_graduates_throughout_the_round() -> None:
    simulation = tiny.simulation(SFedKD(teachers=2), rounds=5, cohort_size=4)
    spy = Spy(simulation)
    records = tiny.run_rounds(simulation)
    cohorts = [record["cohort"] for record in records]
    assert all(spy.teachers[1, client] == [] for client in cohorts[0])
    for number, cohort in enumerate(cohorts[1:], start=2):
        chosen = [names_of(spy.teachers[number, client], spy.left, number - 1) for client in cohort]
        assert len(chosen[0]) == len(set(chosen[0])) == 2
        assert set(chosen[0]) <= set(cohorts[number - 2])
        assert all(names == chosen[0] for names in chosen), "one teacher set serves the whole round"
        told = records[number - 1]["log"]
        assert told["teachers"] == chosen[0]
        for kind, name in enumerate(("target_weights", "nontarget_weights")):
            of_clients = torch.stack([spy.weights[number, client][kind] for client in cohort])  # a row for each student
            assert told[name] == pytest.approx(of_clients.mean(0).tolist(), abs=1e-4)


def test_a_graduate_is_caught_right_after_its_client_trained() -> None:
    simulation = tiny.simulation(SFedKD(teachers=9), cohort_size=4)
    spy = Spy(simulation)
    (record,) = tiny.run_rounds(simulation, 1)
    state: PreviousRound = simulation.server.state
    assert list(state.models) == record["cohort"]
    for before, after in zip(record["cohort"], record["cohort"][1:], strict=False):
        assert state.models[before] is spy.left[1, before]
        sent, graduate = spy.incoming[1, after], state.models[before]
        assert all(sent[name] is graduate[name] for name in graduate)
    assert simulation.server.model is state.models[record["cohort"][-1]]
    tiny.run_rounds(simulation, 1)
    assert len(spy.teachers[2, simulation.sample_cohort(2)[0]]) == 4, "no more teachers than graduates"


def test_lost_clients_do_not_teach() -> None:
    victim = tiny.simulation(SFedKD(), cohort_size=4).sample_cohort(1)[1]
    lose = lambda number, client, step: "gone" if (number, client, step) == (1, victim, "train") else None  # noqa: E731
    simulation = tiny.simulation(SFedKD(teachers=9), cohort_size=4, fault_injector=lose)
    spy = Spy(simulation)
    tiny.run_rounds(simulation, 2)
    taught = names_of(spy.teachers[2, simulation.sample_cohort(2)[0]], spy.left, 1)
    assert len(taught) == 3
    assert victim not in taught


def test_clients_without_examples_do_not_teach() -> None:
    simulation = tiny.simulation(SFedKD(), federation=tiny.federation((6, 0, 9)), cohort_size=3)
    tiny.run_rounds(simulation)
    assert set(simulation.server.state.models) == {"0", "2"}


def test_a_taught_local_training_is_the_papers_loss_written_out() -> None:
    """CE + tau^2 (sum_k g_k NT_k + 3 sum_k h_k TC_k), teachers asked in every batch, nothing folded, plainly."""
    method = SFedKD(teachers=2, tau=2.0, kd_scale="tau2")
    simulation = tiny.simulation(method, cohort_size=4)
    spy = Spy(simulation)
    tiny.run_rounds(simulation, 2)
    student = simulation.sample_cohort(2)[0]
    teachers, (target, nontarget) = spy.teachers[2, student], spy.weights[2, student]
    assert target.sum().item() == pytest.approx(3)
    assert nontarget.sum().item() == pytest.approx(1)
    data = simulation.federation.data(student)
    images, labels = simulation.context.normalise(data["input"]), data["label"]

    def parts(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return (ln [p_y, q_y], ln p~), of float64 logits."""
        p = (logits.double() / method.tau).softmax(-1)
        own = p.gather(1, y[:, None])
        others = p[torch.arange(tiny.CLASSES) != y[:, None]].view(len(y), -1)
        return torch.cat([own, 1 - own], 1).log(), (others / others.sum(1, keepdim=True)).log()

    def loss(network: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
        logits = network(x)
        total = cross_entropy(logits, y).double()
        binary, others = parts(logits, y)
        for teacher, h, g in zip(teachers, target.tolist(), nontarget.tolist(), strict=True):
            with torch.no_grad():
                output = parts(torch.func.functional_call(answering, dict(teacher), (x,)), y)
            tc = kl_div(binary, output[0], log_target=True, reduction="batchmean")
            nt = kl_div(others, output[1], log_target=True, reduction="batchmean")
            total = total + method.tau**2 * (h * tc + g * nt)
        return total

    network, answering = simulation.context.runner.build().train(), simulation.context.runner.build()
    network.load_state_dict(dict(spy.incoming[2, student]))
    training = tiny.TRAINING
    optimiser = torch.optim.SGD(
        network.parameters(), training.lr, momentum=training.momentum, weight_decay=training.weight_decay
    )
    from fedkeep._utils import seeds

    order = seeds.rng(0, "batches", task=1, round=2, client=student)
    for _ in range(training.epochs):
        for rows in torch.randperm(len(labels), generator=order).split(training.batch_size):
            optimiser.zero_grad()
            loss(network, images[rows], labels[rows]).backward()
            optimiser.step()
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(spy.left[2, student][name], tensor, rtol=1e-4, atol=2e-6)
    # The same loop without teachers ends elsewhere.
    assert not torch.allclose(
        log_softmax(network(images), 1), log_softmax(logits_of(simulation, spy, student), 1), atol=1e-2
    )


def logits_of(simulation: Any, spy: Spy, student: str) -> Tensor:
    """Return what the model that came in says: far from what the trained one says."""
    return simulation.context.runner.logits(
        spy.incoming[2, student], simulation.context.normalise(simulation.federation.data(student)["input"])
    )


@pytest.mark.parametrize(
    ("changes", "target", "nontarget"),
    [
        ({"nontarget_weighting": "uniform"}, None, 0.5),
        ({"target_weighting": "uniform"}, 1.5, None),
        (
            {"nontarget_weighting": "uniform", "target_weighting": "uniform", "w_target": 4.0, "w_nontarget": 2.0},
            2.0,
            1.0,
        ),
    ],
)
def test_uniform_ablations(changes: dict[str, Any], target: float | None, nontarget: float | None) -> None:
    reference = tiny.simulation(SFedKD(teachers=2), cohort_size=4)
    changed = tiny.simulation(SFedKD(teachers=2, **changes), cohort_size=4)
    default_spy, spy = Spy(reference), Spy(changed)
    tiny.run_rounds(reference, 2)
    tiny.run_rounds(changed, 2)
    student = reference.sample_cohort(2)[0]
    default = default_spy.weights[2, student]
    for got, wanted, before in zip(spy.weights[2, student], (target, nontarget), default, strict=True):
        assert not torch.allclose(before, before.mean()), "the two teachers differ in distance"
        torch.testing.assert_close(got, before if wanted is None else torch.full((2,), wanted))
    assert not tiny.equal(reference.server.model, changed.server.model)


def test_near_teachers_lead_on_the_target_part_and_far_ones_on_the_rest() -> None:
    """Eqs. 5 and 6: g_k = d_k / sum d on the non-target part, h_k = (1 / d_k) / sum (1 / d) times 3 on the target."""
    counts = {"student": [5, 3, 2], "near": [4, 3, 3], "far": [1, 2, 7]}
    p = {name: torch.tensor(row, dtype=torch.float64) / sum(row) for name, row in counts.items()}
    d = torch.stack([(p[name] - p["student"]).norm() for name in ("near", "far")])
    method = SFedKD(w_target=3.0, metric="l2")
    tensors = {name: torch.tensor(row, dtype=torch.float64) for name, row in counts.items()}
    rule = method.weigh_teachers("student", ["near", "far"], tensors)
    assert rule is not None
    inverse = 1 / (d + 1e-4)  # epsilon
    torch.testing.assert_close(rule.target.double(), 3 * inverse / inverse.sum(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rule.nontarget.double(), d / d.sum(), rtol=1e-5, atol=1e-6)


def test_one_teacher_weighs_the_same_in_every_ablation() -> None:
    models = []
    for changes in (
        {},
        {"nontarget_weighting": "uniform"},
        {"target_weighting": "uniform"},
        {"nontarget_weighting": "uniform", "target_weighting": "uniform"},
    ):
        simulation = tiny.simulation(SFedKD(teachers=1, **changes))
        tiny.run_rounds(simulation)
        models.append(simulation.server.model)
    assert all(tiny.equal(model, models[0]) for model in models)


def test_random_selection_differs_and_is_reproducible() -> None:
    def chosen(**changes: Any) -> list[list[str]]:
        seed = changes.pop("seed", 0)
        simulation = tiny.simulation(SFedKD(teachers=2, **changes), cohort_size=5, rounds=7, seed=seed)
        spy = Spy(simulation)
        tiny.run_rounds(simulation)
        return [names_of(spy.teachers[r, simulation.sample_cohort(r)[0]], spy.left, r - 1) for r in range(2, 8)]

    sampled = chosen(selection="random")
    assert sampled == chosen(selection="random")
    assert sampled != chosen(selection="greedy")
    assert sampled != chosen(selection="random", seed=1)
    assert all(len(set(names)) == 2 for names in sampled)
    assert len({tuple(names) for names in sampled}) > 2, "drawn anew in every round"


@pytest.mark.parametrize("teachers", [1, 2, 5])
def test_bytes_are_those_counted_by_hand(teachers: int) -> None:
    """Down: one model, K teachers and K weights for each part. Up: one model; label counts once in a client's life."""
    simulation = tiny.simulation(SFedKD(teachers=teachers), cohort_size=4, rounds=5)
    output: set[str] = set()
    for number, record in enumerate(tiny.run_rounds(simulation), start=1):
        k = 0 if number == 1 else min(teachers, 4)
        new = set(record["cohort"]) - output
        output |= new
        assert record["down"] == 4 * (MODEL + k * MODEL + 2 * k * 4)
        assert record["up"] == 4 * (MODEL + FIT) + len(new) * COUNTS


def test_with_both_parts_weighing_nothing_it_trains_like_fedseq() -> None:
    muted, plain = tiny.simulation(SFedKD(w_target=0.0, w_nontarget=0.0)), tiny.simulation(FedSeq())
    tiny.run_rounds(muted)
    tiny.run_rounds(plain)
    for name, tensor in plain.server.model.items():
        torch.testing.assert_close(muted.server.model[name], tensor, rtol=1e-5, atol=1e-6)


def test_with_augmentation_teachers_see_what_the_student_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unsettled teachers, under an augmentation that happens to change nothing, teach what settled ones teach."""
    settled = tiny.simulation(SFedKD(teachers=2))
    tiny.run_rounds(settled, 2)
    asked: list[int] = []
    frozen = NetworkView.teacher_logits
    monkeypatch.setattr(NetworkView, "teacher_logits", lambda *arguments: asked.append(1) or frozen(*arguments))
    unsettled = tiny.simulation(SFedKD(teachers=2), augmentation=tiny.UNMOVED)
    tiny.run_rounds(unsettled, 2)
    assert asked, "the teachers answered in every batch"
    for name, tensor in settled.server.model.items():
        torch.testing.assert_close(unsettled.server.model[name], tensor, rtol=0, atol=1e-5)


def test_with_augmentation_runs_are_reproducible_and_differ_from_those_without() -> None:
    simulations = [
        tiny.simulation(SFedKD(), augmentation=Augmentation(horizontal_flip=on, crop_padding=int(on)), through_codec=c)
        for on, c in ((True, False), (True, True), (False, False))
    ]
    records = [tiny.run_rounds(simulation) for simulation in simulations]
    assert records[0] == records[1]
    assert records[0] != records[2]
