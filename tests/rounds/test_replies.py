"""Replies are checked before they are used: each alone, against the others, and over rounds."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from interception import record_fits
from torch import nn

from fedkeep._utils.noise_stream import NoiseStream
from fedkeep.aggregation.mean import effective_steps
from fedkeep.algorithms.incremental.fedewc import FedEWC
from fedkeep.algorithms.incremental.fedicarl import FediCaRL
from fedkeep.algorithms.incremental.fedskf import FedSKF
from fedkeep.algorithms.incremental.flwf2t import FLwF2T
from fedkeep.algorithms.parallel.fedadkd import FedADKD
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.parallel.fednova import FedNova
from fedkeep.algorithms.sequential.fedseq import FedSeq
from fedkeep.algorithms.sequential.sfedkd import SFedKD
from fedkeep.errors import RunError
from fedkeep.interface import Fit
from fedkeep.interface.algorithm import invalid_counts
from fedkeep.interface.privacy import Privacy
from fedkeep.models import Weights
from fedkeep.models.networks import MLP
from fedkeep.rounds.messages import Fault, FaultKind, StepRequest
from fedkeep.rounds.reply_step import set_aside
from fedkeep.rounds.round import RoundState
from fedkeep.rounds.run_settings import Defense
from fedkeep.testing.runs import wrap_steps
from fedkeep.training.evaluation import ModelCheck
from fedkeep.trials.checkpoint import Checkpoint
from fedkeep.trials.simulation import Simulation
from fedkeep.trials.trial import JsonlWriter, run_trial
from fedkeep.trust import plausibility_check
from fedkeep.trust.standing import Standing
from fedkeep.trust.updates import Updates

Lie = Callable[[Fit, Weights], Fit]


def scaled(factor: float) -> Lie:
    def lie(fit: Fit, sent: Weights) -> Fit:
        return replace(fit, model={name: sent[name] + factor * (fit.model[name] - sent[name]) for name in sent})

    return lie


def output(**changes: Any) -> Lie:
    return lambda fit, sent: replace(fit, **changes)


def strict_json(file: Path) -> Any:
    """Return the only line of a file, in which there is no number that standard JSON does not have."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number of JSON")

    return json.loads(file.read_text(), parse_constant=refuse)


def let_lie(simulation: Simulation, lie: Lie, client: str, rounds: range) -> None:
    """Let a client's trainings in some rounds be lied about."""

    def wrap(task: Any) -> Any:
        @functools.wraps(task.step)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            reply = task.step(*args, **kwargs)
            return lie(reply, args[1]) if isinstance(reply, Fit) else reply

        return wrapped if task.client == client and simulation.finished + 1 in rounds else task.step

    wrap_steps(simulation, wrap)


@pytest.mark.parametrize("method", [FedAvg(), FedSeq()])
@pytest.mark.parametrize("first", [1, 2])
def test_a_huge_update_is_refused_and_ruins_nothing(method: Any, first: int) -> None:
    simulation = tiny.simulation(method, cohort_size=6, rounds=3)
    client = simulation.sample_cohort(first)[0]
    let_lie(simulation, scaled(1e30), client, range(first, first + 1))
    records = tiny.run_rounds(simulation)
    refused = records[first - 1]
    assert list(refused["lost"]) == refused["refused"] == [client]
    assert "an update of norm" in refused["lost"][client]
    assert all(not record["lost"] for record in records if record is not refused)
    assert tiny.finite(simulation.server.model)


def test_buffers_are_compared_too() -> None:
    def lie(fit: Fit, sent: Weights) -> Fit:
        return replace(fit, model=fit.model | {"running": torch.full((3,), 1e20)})

    hidden = tiny.network

    def network() -> Any:
        built = hidden()
        built.register_buffer("running", torch.ones(3))
        return built

    simulation = tiny.simulation(FedAvg(), cohort_size=6, rounds=1, factory=network)
    client = simulation.sample_cohort(1)[0]
    let_lie(simulation, lie, client, range(1, 2))
    assert "buffers with a change" in tiny.run_rounds(simulation)[0]["lost"][client]


@pytest.mark.parametrize(
    ("method", "lie", "reason"),
    [
        (FedNova(), output(num_steps=10**9), "in 1000000000 steps"),
        (FedNova(), output(num_steps=-1), "num_steps -1"),
        (FedAvg(), output(num_examples=-1), "num_examples -1"),
        (FedAvg(), output(num_examples=10**6), "trained on 1000000 examples"),
        (FedAvg(), output(num_examples=-(10**400)), "num_examples beyond -1e+300, which must be 0 to inf"),
        (FedNova(), output(num_steps=-(10**400)), "num_steps beyond -1e+300"),
        (FedNova(), output(num_steps=10**400), "a model trained in 1000"),
        (FedAvg(), output(num_examples=10**5000), "what cannot be checked (ValueError: Exceeds the limit"),
        (FedADKD(), output(gini=-1.0), "gini -1, which must be 0 to 1"),
        (FedADKD(), output(gini=1.5), "gini 1.5"),
        (FedAvg(), output(loss=1e308), "loss beyond 1e+300, which must be -3.40282e+38 to 3.40282e+38"),
        (FedAvg(), output(loss=-1e39), "loss -1e+39"),
    ],
)
def test_numbers_that_cannot_be_are_refused(method: Any, lie: Lie, reason: str) -> None:
    simulation = tiny.simulation(method, cohort_size=4, rounds=2)
    client = simulation.sample_cohort(1)[0]
    let_lie(simulation, lie, client, range(1, 2))
    first, _ = tiny.run_rounds(simulation)
    assert reason in first["lost"][client]


@pytest.mark.parametrize("steps", [0, 1, 5, 7])
def test_steps_that_count_are_those_that_the_examples_need(steps: int) -> None:
    """Normalised averaging divides by them: who says 1 counts six times as much."""
    methods = FedNova(), FedAvg()
    simulations = [tiny.simulation(method, cohort_size=6, rounds=1) for method in methods]
    for simulation in simulations:
        let_lie(simulation, output(num_steps=steps), "4", range(1, 2))
    nova, plain = (tiny.run_rounds(simulation)[0] for simulation in simulations)
    held = tiny.SIZES[4]
    assert tiny.TRAINING.num_steps(held, batch_norm=False) == 6
    assert nova["lost"] == {"4": f"answered with a model trained in {steps} steps, and its {held} examples need 6"}
    assert not plain["lost"], "other methods may give `fit` other epochs, and do not use the number"


@pytest.mark.parametrize("changes", [{}, {"privacy": Privacy(noise_multiplier=0.5)}])
def test_honest_steps_are_those_that_the_examples_need(changes: dict[str, Any]) -> None:
    simulation = tiny.simulation(FedNova(), federation=tiny.federation((9, 1, 6, 0, 7, 23)), cohort_size=6, **changes)
    assert not any(record["lost"] for record in tiny.run_rounds(simulation))


@pytest.mark.parametrize("loss", [1e308, -1e308])
def test_a_loss_that_nobody_checked_is_null_in_the_record(loss: float, tmp_path: Path) -> None:
    simulation = tiny.simulation(FedAvg(), cohort_size=6, rounds=1, defense=Defense(check_replies=False))
    let_lie(simulation, output(loss=loss), "4", range(1, 2))
    run_trial(simulation, tmp_path)
    assert strict_json(tmp_path / "rounds.jsonl")["loss"] is None


def test_a_test_loss_that_is_not_finite_is_null_in_the_record(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "rounds.jsonl")
    writer.write({"round": 1, "test_loss": math.nan, "evaluation_models": {"moving": {"test_loss": [-math.inf, 0.5]}}})
    writer.file.close()
    expected = {"round": 1, "test_loss": None, "evaluation_models": {"moving": {"test_loss": [None, 0.5]}}}
    assert strict_json(tmp_path / "rounds.jsonl") == expected


@pytest.mark.parametrize("name", ["find_nonfinite", "find_out_of_range"])
def test_a_check_that_fails_refuses_the_reply_and_not_the_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check = getattr(plausibility_check, name)

    def fail_for_one(reply: Fit) -> Any:
        if reply.num_examples == tiny.SIZES[3]:
            raise OverflowError("too large")
        return check(reply)

    monkeypatch.setattr(plausibility_check, name, fail_for_one)
    (record,) = tiny.run_rounds(tiny.simulation(FedAvg(), cohort_size=6, rounds=1))
    assert record["lost"] == {"3": "answered with what cannot be checked (OverflowError: too large)"}


UNTRUE = [
    ("private steps at x", 1, Privacy(), "on which clients of this run spend none"),
    ("private steps at 0.5", 1, Privacy(), "on which clients of this run spend none"),
    ("private label counts", 0, Privacy(), "on which clients of this run spend none"),
    ("private change", 1, Privacy(counts_epsilon=1.0), "on which clients of this run spend none"),
    ("private change", 101, Privacy(prototypes_noise_multiplier=1.0), "101 times in a step, where 0 to 100"),
    ("private label counts", 2, Privacy(counts_epsilon=1.0), "2 times in a step, where 0 to 1 are possible"),
    ("private means", 1, Privacy(confidences_epsilon=1.0), "on which clients of this run spend none"),
    *(
        (f"private steps at {rate}", 0, Privacy(noise_multiplier=1.0), "on which clients of this run spend none")
        for rate in ("x", "nan", "inf", "0.0", "-0.5", "1.5", "1e-1", "")
    ),
    ("private steps at 0.5", -1, Privacy(noise_multiplier=1.0), "-1 times in a step"),
    ("private steps at 0.5", 37, Privacy(noise_multiplier=1.0), "37 times in a step, where 0 to 36 are possible"),
    ("private steps at 0.5", 10**400, Privacy(noise_multiplier=1.0), "beyond 1e+300 times in a step"),
]


@pytest.mark.parametrize(("name", "count", "privacy", "reason"), UNTRUE, ids=[name for name, *_ in UNTRUE])
def test_what_no_step_spends_of_its_privacy_is_refused(name: str, count: int, privacy: Privacy, reason: str) -> None:
    pytest.importorskip("opacus")

    def wrap(task: StepRequest) -> Any:
        @functools.wraps(task.step)
        def wrapped(client: Any, *args: Any) -> Any:
            reply = task.step(client, *args)
            client._uses[name] = count
            return reply

        return wrapped if task.client == "1" else task.step

    simulation = tiny.simulation(FedAvg(), cohort_size=6, rounds=1, privacy=privacy)
    wrap_steps(simulation, wrap)
    (record,) = tiny.run_rounds(simulation)
    assert record["refused"] == ["1"]
    assert record["lost"]["1"].startswith(f"answered with privacy spent on {name!r}")
    assert reason in record["lost"]["1"]
    told = record.get("privacy", {}).get("clients", {})
    assert "1" not in told, "what cannot be is not counted"
    assert len(told) == (5 if privacy.noise_multiplier else 0)


@pytest.mark.parametrize("told", [1e12, 3e38])
def test_label_counts_with_noise_are_of_no_more_examples_than_noise_makes(told: float) -> None:
    def wrap(task: StepRequest) -> Any:
        @functools.wraps(task.step)
        def wrapped(*args: Any) -> Any:
            return torch.full((tiny.CLASSES,), told)

        return wrapped if (task.client, task.step.__name__) == ("1", "send_label_counts") else task.step

    simulation = tiny.simulation(SFedKD(), cohort_size=6, rounds=1, privacy=Privacy(counts_epsilon=0.01))
    wrap_steps(simulation, wrap)
    (record,) = tiny.run_rounds(simulation)
    assert list(record["lost"]) == ["1"]
    assert "examples, where noise makes 12009 at most" in record["lost"]["1"], "9, and 40 / 0.01 in each of 3 classes"


def test_noise_never_makes_more_examples_than_are_believed() -> None:
    for epsilon in (1e-3, 0.5, 3.0):
        stream = NoiseStream(bytes(32))
        for _ in range(50):
            noised = torch.tensor([10.0 + stream.laplace(Fraction(epsilon)) for _ in range(7)]).clamp(min=0)
            assert invalid_counts(noised, 7, 70, epsilon) is None
        assert invalid_counts(noised + 80 / epsilon // 1, 7, 70, epsilon) is not None


@pytest.mark.parametrize("method", [FedAvg(), FedSKF(pit="off"), FLwF2T(), FedEWC()], ids=repr)
def test_a_client_that_keeps_nothing_trains_on_the_examples_of_its_task_alone(method: Any) -> None:
    """A client without any of the task's classes must not have the weight of its earlier ones."""
    simulation = tiny.simulation_with_tasks(method, tiny.stream((2, 1), absent=2), cohort_size=5, rounds=1)
    federation = simulation.federation.for_task(2)
    client = next(name for name in federation.clients if not federation.num_examples(name))
    earlier = federation.total_examples(client)
    assert earlier
    let_lie(simulation, output(num_examples=earlier), client, range(2, 3))
    first, second = tiny.run_rounds(simulation)
    assert not first["lost"]
    assert list(second["lost"]) == [client]
    reason = f"trained on {earlier} examples, and it has 0 in this task; the method does not say `keeps_examples`"
    assert reason in second["lost"][client]


@pytest.mark.parametrize(
    "method",
    [FediCaRL(), FedSKF(level="icarl", pit="off"), FLwF2T(exemplars_per_class=2, ce_classes="all")],
    ids=repr,
)
def test_a_client_that_keeps_examples_counts_them(method: Any) -> None:
    simulation = tiny.simulation_with_tasks(method, tiny.stream((2, 1), absent=2), cohort_size=5, rounds=1)
    trained = record_fits(simulation)
    assert not any(record["lost"] for record in tiny.run_rounds(simulation))
    task = simulation.federation
    assert any(one.task == 2 and one.fit.num_examples > task.num_examples(one.client) for one in trained)


def test_steps_are_counted_without_a_loop() -> None:
    def summed(steps: int, momentum: float) -> float:
        velocity = distance = 0.0
        for _ in range(steps):
            velocity = momentum * velocity + 1
            distance += velocity
        return distance

    for momentum in (0.0, 0.5, 0.9, 0.999999, 1.0):
        for steps in (0, 1, 2, 7, 1000):
            assert effective_steps(steps, momentum) == pytest.approx(summed(steps, momentum), rel=1e-12)
    assert all(effective_steps(steps, 0.0) == steps for steps in range(100))
    began = time.perf_counter()
    assert effective_steps(10**18, 0.9) == pytest.approx(1e19, rel=1e-9)
    assert time.perf_counter() - began < 1


def test_a_replayed_model_is_refused_and_an_idle_client_is_not() -> None:
    old: dict[int, Fit] = {}

    def lie(fit: Fit, sent: Weights) -> Fit:
        return old.setdefault(0, fit)

    settings = {"cohort_size": len(tiny.SIZES), "rounds": 3}
    simulation = tiny.simulation(FedSeq(), **settings)
    let_lie(simulation, lie, "1", range(1, 4))
    records = tiny.run_rounds(simulation)
    assert [list(record["lost"]) for record in records] == [[], ["1"], ["1"]]
    assert "had answered with before" in records[1]["lost"]["1"]


def test_a_client_refused_again_and_again_is_set_aside() -> None:
    defense = Defense(refusals=2)
    simulation = tiny.simulation(FedAvg(), cohort_size=len(tiny.SIZES), rounds=4, defense=defense)
    let_lie(simulation, scaled(1e30), "2", range(1, 5))
    records = tiny.run_rounds(simulation)
    assert [list(record["lost"]) for record in records] == [["2"], ["2"], [], []]
    assert ["2" in record["cohort"] for record in records] == [True, True, False, False]
    assert [record.get("set_aside") for record in records] == [None, None, ["2"], ["2"]]
    assert tiny.step(simulation, Standing).kept.times == {"2": 2}


def test_after_a_reply_that_the_loss_check_refused_a_client_is_not_drawn_for_a_while() -> None:
    defense = Defense(loss_check="server", backoff=1)
    simulation = tiny.simulation(FedAvg(), cohort_size=len(tiny.SIZES), rounds=8, defense=defense)
    vars(simulation.server)["check"] = ModelCheck(simulation.context, simulation.federation.server_data, 4)
    let_lie(simulation, scaled(-3.0), "2", range(1, 9))
    records = tiny.run_rounds(simulation)
    assert [number for number, record in enumerate(records, 1) if "2" in record["cohort"]] == [1, 3, 6], "twice as long"
    assert [number for number, record in enumerate(records, 1) if "set_aside" in record] == [2, 4, 5, 7, 8]
    assert tiny.step(simulation, Standing).kept.times == {"2": 3}


def end_round(standing: Standing, refused: Sequence[str], useful: Sequence[str] = ("a",), defense: Any = None) -> None:
    """Let a round end in which the loss check refused some clients' replies."""
    simulation = tiny.simulation(FedAvg(), defense=defense or Defense(backoff=0))
    state = RoundState(simulation, 1, ["a", "b"], [standing])
    state.attendance.refused = {client: Fault("", FaultKind.LOSS) for client in refused}
    state.attendance.answered = {*refused, *useful}
    standing.end_round(state, {})


def test_a_client_that_is_not_drawn_for_a_while_is_not_asked_either(tmp_path: Path) -> None:
    simulation = tiny.simulation(FedAvg(), cohort_size=2)
    standing = tiny.step(simulation, Standing)
    end_round(standing, ["1"], defense=Defense(backoff=2))
    state = RoundState(simulation, 1, ["0", "1"], simulation.steps)
    state.start([StepRequest("1", FedAvg.train, (), {}, 1, 1)])
    assert "is not asked for 2 more rounds" in state.lost["1"].text
    Checkpoint(tmp_path).save(simulation, {})
    other = tiny.simulation(FedAvg(), cohort_size=2)
    Checkpoint(tmp_path).restore(other)
    standing = tiny.step(other, Standing)
    assert standing.kept.backoffs == {"1": 2}, "a resume goes on with them"
    end_round(standing, [])
    end_round(standing, [])
    assert not standing.set_aside(other)
    standing.kept.backoffs = {"1": 2}
    standing.begin_round(other, other.settings.run.rounds + 1)
    assert not standing.set_aside(other), "a task has begun"


def test_rounds_out_are_doubled_for_each_refusal_that_was_not_made_up_for() -> None:
    standing, out = Standing(), []
    for refused in [True, False, True, *[True] * 6]:
        useful = ["a"] if refused else ["a", "b"]
        end_round(standing, ["b"] if refused else [], useful, Defense(backoff=8))
        out.append(standing.kept.backoffs["b"])
    assert out == [8, 7, 8, 16, 32, 64, 128, 128, 128]


def test_accepted_replies_make_up_for_refused_ones() -> None:
    standing, simulation = Standing(), tiny.simulation(FedAvg(), defense=Defense(refusals=2, backoff=0))
    for refused in ([True, False, False, False, False], [True, False, True, False, True]):
        for one in refused:
            end_round(standing, ["b"] if one else [], ["a"] if one else ["a", "b"])
        assert ("b" in standing.set_aside(simulation)) == (sum(refused) > 1)
        assert standing.kept.times == ({"b": 2.5} if sum(refused) > 1 else {})
    end_round(standing, ["a"], [], Defense(backoff=2))
    assert standing.kept.times == {"b": 2.5}, "if no reply could be used, no client is blamed"
    assert not standing.kept.backoffs


def test_who_is_not_set_aside_takes_the_place() -> None:
    simulation = tiny.simulation(FedAvg(), cohort_size=2)
    before = {number: simulation.sample_cohort(number) for number in range(1, 9)}
    tiny.step(simulation, Standing).kept.times = {"2": 3}
    for number, cohort in before.items():
        after = simulation.sample_cohort(number, set_aside(simulation.steps, simulation))
        assert len(after) == 2
        assert "2" not in after
        assert [client for client in cohort if client != "2"] == after[: sum(client != "2" for client in cohort)]
    tiny.step(simulation, Standing).kept.times = dict.fromkeys(simulation.federation.clients, 3)
    assert simulation.sample_cohort(1, set_aside(simulation.steps, simulation)) == before[1], (
        "if all were set aside, the model is at fault"
    )


def test_a_model_that_no_longer_answers_stops_the_run(tmp_path: Path) -> None:
    def ruin(simulation: Simulation) -> None:
        def wrap(task: Any) -> Any:
            @functools.wraps(task.step)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                fit = task.step(*args, **kwargs)
                return replace(fit, model={name: tensor * float("nan") for name, tensor in fit.model.items()})

            return wrapped if simulation.finished >= 2 else task.step

        wrap_steps(simulation, wrap)

    for _ in range(2):  # it stays stopped when it is resumed
        simulation = tiny.simulation(FedAvg(), rounds=9, defense=Defense(refused_rounds=3))
        ruin(simulation)
        with pytest.raises(RunError, match=r"stopped after round [56].*The model is that of round 2"):
            run_trial(simulation, tmp_path / "trial")
    assert tiny.step(simulation, Standing).kept.times == {}, "the model's fault is no client's"


def test_what_is_known_of_replies_is_in_the_checkpoint(tmp_path: Path) -> None:
    simulation = tiny.simulation(FedSeq(), cohort_size=6, rounds=3)
    client = simulation.sample_cohort(1)[1]
    let_lie(simulation, scaled(1e30), client, range(1, 2))
    tiny.run_rounds(simulation, 1)
    Checkpoint(tmp_path).save(simulation, {})
    other = tiny.simulation(FedSeq(), cohort_size=6, rounds=3)
    Checkpoint(tmp_path).restore(other)
    assert [step.kept for step in other.steps] == [step.kept for step in simulation.steps]
    assert tiny.step(other, Standing).kept.times == {client: 1}
    assert len(tiny.step(other, Updates).kept.norms) == 5


def wide() -> nn.Module:
    return MLP(hidden=(128,)).build(tiny.SHAPE, tiny.CLASSES)


def classifier(model: Weights) -> str:
    return [name for name, tensor in model.items() if tensor.dim() > 1][-1]


def wide_from_zero() -> nn.Module:
    built = wide()
    nn.init.zeros_(built.get_parameter(classifier(built.state_dict())))
    return built


def at_random(fit: Fit, sent: Weights) -> Fit:
    rng = torch.Generator().manual_seed(1)
    return replace(fit, model={name: t.std() * torch.randn(t.shape, generator=rng) for name, t in fit.model.items()})


def exchanged_rows(fit: Fit, sent: Weights) -> Fit:
    """Another class for each output, the rest as it was trained."""
    name = classifier(fit.model)
    return replace(fit, model=fit.model | {name: fit.model[name].roll(1, 0)})


@pytest.mark.parametrize("lie", [at_random, exchanged_rows])
@pytest.mark.parametrize(("method", "first"), [(FedAvg(), 1), (FedSeq(), 2)])
def test_weights_that_have_nothing_of_those_that_were_sent_are_refused(method: Any, first: int, lie: Lie) -> None:
    simulation = tiny.simulation(method, cohort_size=5, rounds=3, factory=wide)
    client = simulation.sample_cohort(first)[0]
    let_lie(simulation, lie, client, range(first, first + 1))
    refused = tiny.run_rounds(simulation)[first - 1]
    assert list(refused["lost"]) == refused["refused"] == [client]
    assert "have nothing of those that it was sent" in refused["lost"][client]
    assert len(tiny.step(simulation, Updates).kept.similarities) == 14


def test_one_large_client_among_small_ones_is_no_stranger() -> None:
    """After so many steps with so strong a weight decay little of the model that it was sent is left."""
    simulation = tiny.simulation(
        FedAvg(),
        cohort_size=6,
        federation=tiny.federation((1000, 30, 30, 30, 30, 30)),
        factory=lambda: MLP(hidden=(128, 64)).build(tiny.SHAPE, tiny.CLASSES),
        training=replace(tiny.TRAINING, epochs=20, batch_size=30, lr=0.05, weight_decay=0.1),
    )
    (record,) = tiny.run_rounds(simulation, 1)
    assert not record["lost"]
    large, *small = sorted(tiny.step(simulation, Updates).kept.similarities)
    assert large < 0.15
    assert min(small) > 0.9, "the others' are usual"


def test_layers_that_begin_at_zero_refuse_nobody() -> None:
    simulation = tiny.simulation(FedAvg(), cohort_size=5, rounds=2, factory=wide_from_zero)
    assert not any(record["lost"] for record in tiny.run_rounds(simulation))
    assert min(tiny.step(simulation, Updates).kept.similarities[:5]) == 0.0


def test_the_first_hop_of_a_sequence_may_not_be_huge() -> None:
    simulation = tiny.simulation(FedSeq(), cohort_size=6, rounds=1)
    client = simulation.sample_cohort(1)[0]
    let_lie(simulation, scaled(80.0), client, range(1, 2))
    (record,) = tiny.run_rounds(simulation)
    assert list(record["lost"]) == [client]
    assert "before others have shown what is usual" in record["lost"][client]
