"""Reply steps and callbacks of the user's own take part like the built-in ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import tiny

import fedkeep
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.cli import main
from fedkeep.errors import RunError
from fedkeep.experiment.plugins import import_user_code, instances_of
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.rounds.messages import Fault
from fedkeep.rounds.reply_step import Reply, ReplyStep, Round
from fedkeep.trials.checkpoint import Checkpoint
from fedkeep.trials.simulation import Simulation

FILE = """
from dataclasses import dataclass, field
from fedkeep.rounds.messages import Fault
from fedkeep.rounds.reply_step import ReplyStep

@dataclass
class Seen:
    losses: dict[str, float] = field(default_factory=dict)

class NoRepeatedLoss(ReplyStep):
    def __init__(self):
        self.kept = Seen()

    def receive(self, round, reply):
        if getattr(reply.value, "loss", None) == self.kept.losses.get(reply.client, -1.0):
            raise Fault("answered with the loss of its last reply")
"""


@dataclass
class Norms:
    largest: dict[str, float] = field(default_factory=dict)


class FirstIsRefused(ReplyStep):
    """Refuses the first model of each client, and remembers whose came."""

    kept: Norms

    def __init__(self) -> None:
        self.kept = Norms()

    def screen(self, round: Round, replies: Sequence[Reply]) -> Iterable[tuple[Reply, Fault]]:
        for reply in replies:
            if reply.client not in self.kept.largest:
                self.kept.largest[reply.client] = 1.0
                yield reply, Fault("answered for the first time")

    def record(self, round: Round) -> dict[str, Any]:
        return {"known": len(self.kept.largest)}


def stepped() -> Simulation:
    simulation = tiny.simulation(FedAvg(), rounds=4, cohort_size=len(tiny.SIZES))
    simulation.take_steps([FirstIsRefused()])
    return simulation


def test_a_step_with_memory_is_in_the_record_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    simulation = stepped()
    (first,) = tiny.run_rounds(simulation, 1)
    assert first["known"] == len(tiny.SIZES) == len(first["refused"])
    Checkpoint(tmp_path).save(simulation, {})
    other = stepped()
    Checkpoint(tmp_path).restore(other)
    (second,) = tiny.run_rounds(other, 1)
    assert not second["lost"]
    with pytest.raises(RunError, match=r"with the reply steps .*FirstIsRefused"):
        Checkpoint(tmp_path).restore(tiny.simulation(FedAvg(), rounds=4))


def test_a_round_that_fails_leaves_the_memory_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = stepped()
    monkeypatch.setattr(FirstIsRefused, "accepted", lambda *_: 1 / 0)
    tiny.run_rounds(simulation, 1)
    kept = dict(tiny.step(simulation, FirstIsRefused).kept.largest)
    tiny.step(simulation, FirstIsRefused).kept.largest.pop("0")
    with pytest.raises(ZeroDivisionError):
        simulation.run_round()
    assert tiny.step(simulation, FirstIsRefused).kept.largest == {c: n for c, n in kept.items() if c != "0"}


def test_a_reason_against_a_step_is_said_before_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FirstIsRefused, "reason_against", lambda self, state: f"not with {state.algorithm.name()}.")
    with pytest.raises(fedkeep.FedKeepError, match="not with fedavg"):
        stepped()


def test_a_step_of_a_used_file_is_new_for_each_trial(tmp_path: Path) -> None:
    file = tmp_path / "own_step.py"
    file.write_text(FILE)
    import_user_code([str(file)])
    first, second = (instances_of(ReplyStep, [str(file)]) for _ in range(2))
    assert [step.name for step in first] == ["NoRepeatedLoss"]
    assert first[0] is not second[0]


class Halve(fedkeep.Callback):
    """Ends a trial after two rounds, and measures half of its number."""

    def on_round_end(self, state: Any, result: Any) -> Any:
        return result.record["round"] == 2, {"half": result.record["round"] / 2}


def test_a_callback_measures_and_ends_a_trial(tmp_path: Path) -> None:
    recipe = load_recipe(tiny.write_recipe(tmp_path), methods=["fedavg", "fedseq"], rounds=4)
    run = fedkeep.run(recipe, out=tmp_path / "run", callbacks=[Halve()])
    for trial in run.trials:
        assert [row["measured"]["half"] for row in trial.rounds] == [0.5, 1.0]
        assert trial.finished
        assert trial.rounds_planned == 2
        assert (trial.path / "confusion.json").exists()
    assert "log.half" in (tmp_path / "run" / "results.csv").read_text().splitlines()[0]
    assert "| half, round 2 |" in (tmp_path / "run" / "table.md").read_text()
    assert run.compare("FedSeq", "FedAvg", "log.half").reason == ""
    assert "FedSeq and FedAvg recorded no hlaf" in run.compare("FedSeq", "FedAvg", "log.hlaf").reason


def test_the_round_with_which_a_callback_ends_a_trial_is_evaluated(tmp_path: Path) -> None:
    recipe = load_recipe(tiny.write_recipe(tmp_path), methods=["fedseq"], settings=["run.evaluate_every=3"], rounds=9)
    ended = fedkeep.run(recipe, out=tmp_path / "ended", callbacks=[Halve()]).trials
    planned = fedkeep.run(replace(recipe, run=replace(recipe.run, rounds=2)), out=tmp_path / "planned").trials
    for trial, other in zip(ended, planned, strict=True):
        assert list(trial.evaluated) == list(other.evaluated) == [2]
        assert trial.last == other.last


def test_a_callback_may_end_a_trial_before_its_last_task(tmp_path: Path) -> None:
    recipe = load_recipe(tiny.write_recipe(tmp_path), methods=["fedavg"], settings=["tasks.num_tasks=2"], rounds=3)
    (trial,) = fedkeep.run(recipe, out=tmp_path / "run", callbacks=[Halve()]).trials
    assert (trial.rounds_done, trial.confusions) == (2, ())


def test_a_callback_of_a_used_file_is_taken_and_in_python_only_those_that_are_given(tmp_path: Path) -> None:
    file = tmp_path / "own_callback.py"
    body = "    def on_round_end(self, state, result):\n        return True, {}\n"
    file.write_text(f"import fedkeep\n\nclass Ends(fedkeep.Callback):\n{body}")
    recipe = str(tiny.write_recipe(tmp_path))
    shown = ["--methods", "fedavg", "--rounds", "3", "--seeds", "0", "--quiet"]
    assert main(["run", recipe, "--use", str(file), "--out", str(tmp_path / "typed"), *shown]) == 0
    assert len((tmp_path / "typed/trials/fedavg-seed0/rounds.jsonl").read_text().splitlines()) == 1
    machine = fedkeep.Machine(use=(str(file),))
    run = fedkeep.run(load_recipe(recipe, methods=["fedavg"], rounds=3), out=tmp_path / "run", machine=machine)
    assert run.trials[0].rounds_planned == 3


def test_what_is_no_callback_and_no_step_is_told_at_once() -> None:
    with pytest.raises(fedkeep.FedKeepError) as refused:
        fedkeep.run("demo", callbacks=[Halve], steps=[3, Halve()])
    for part in (
        "the class Halve: give an object, Halve()",
        "steps holds 3, which is no fedkeep.ReplyStep",
        "Halve object",
    ):
        assert part in str(refused.value)
    with pytest.raises(fedkeep.FedKeepError, match="steps is a list, not"):
        fedkeep.run("demo", steps=FirstIsRefused())


def test_an_exception_names_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FirstIsRefused, "screen", lambda self, round, replies: {}[round])
    with pytest.raises(KeyError) as raised:
        stepped().run_round()
    assert raised.value.__notes__ == ["It was raised by the reply step FirstIsRefused."]


class Fails(fedkeep.Callback):
    def on_round_end(self, state: Any, result: Any) -> None:
        if state.algorithm.name() == "fedavg":
            raise KeyError("gone")


def test_a_callback_that_fails_is_named_and_ends_its_trial_alone(tmp_path: Path) -> None:
    recipe = load_recipe(tiny.write_recipe(tmp_path), methods=["fedavg", "fedseq"], seeds=[0, 1], rounds=2)
    with pytest.raises(RunError) as raised:
        fedkeep.run(recipe, out=tmp_path / "run", callbacks=[Fails()])
    assert str(raised.value) == (
        "the callback Fails raised KeyError: 'gone'. It ended FedAvg with seed 0, FedAvg with seed 1. Finished rounds "
        f"are saved. Continue with: fedkeep.resume({str(tmp_path / 'run')!r}, callbacks=...) in Python"
    )
    assert isinstance(raised.value.__cause__, KeyError), "its traceback is shown"
    ended, also_ended, fedseq, _ = fedkeep.read_run(tmp_path / "run").trials
    assert ended.rounds_done == also_ended.rounds_done == 1, "finished rounds are kept"
    assert fedseq.finished


@pytest.mark.parametrize(("losses", "rounds"), [([3.0, 2.0, 2.5, 2.5, 1.0], 4), ([3.0, None, None, 1.0], 3)])
def test_early_stopping_waits_for_evaluations_without_a_lower_loss(losses: list[Any], rounds: int) -> None:
    callback, stops = fedkeep.EarlyStopping(patience=2), []
    state: Any = tiny.simulation(FedAvg())
    callback.on_trial_begin(state)
    for loss in losses:
        outcome = callback.on_round_end(state, fedkeep_result(loss))
        stops.append(bool(outcome and outcome[0]))
    assert stops.index(True) + 1 == rounds


def fedkeep_result(loss: float | None) -> Any:
    from fedkeep.rounds.state import RoundResult

    return RoundResult({"test_loss": loss}, {})
