"""What the engine does for every method: clients that diverge or drop out, bugs in a step, a kill at any time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from interception import let_diverge, raising_in

from fedkeep.interface import Fit, algorithms
from fedkeep.interface.algorithm import client_steps
from fedkeep.testing.runs import (
    ROUNDS,
    AnyAlgorithm,
    condition,
    expect,
    expect_equal,
    expect_finite,
    expect_same_files,
    replies_with,
    undisturbed,
)
from fedkeep.trials.callbacks import OnRoundEnd
from fedkeep.trials.checkpoint import manifests
from fedkeep.trials.trial import run_trial


def last_fit(algorithm: AnyAlgorithm) -> str:
    """Return the step that a round asks for last of those that reply with a fit; if none does, with anything."""
    everything = set(client_steps(type(algorithm))) - replies_with(algorithm, type(None))
    fits = replies_with(algorithm, Fit) or everything
    return [step for number, _, step in undisturbed(algorithm).calls if number == 2 and step in fits][-1]


def diverged_client(algorithm: AnyAlgorithm) -> None:
    """Check that a client whose training diverged changes nothing anywhere, exactly as one that never came back."""
    step = last_fit(algorithm)

    def injector(number: int, client: str, name: str) -> str | None:
        return "lost it" if (number, client, name) == (2, "4", step) else None

    lost = tiny.simulation(algorithm, fault_injector=injector, cohort_size=6, training=tiny.SHORT)
    tiny.run_rounds(lost)
    refused = tiny.simulation(algorithm, cohort_size=6, training=tiny.SHORT)
    let_diverge(refused, 2, "4")
    names = [list(record["lost"]) for record in tiny.run_rounds(refused)]
    expect_equal(names, [[], ["4"], [], []], "a client whose training diverged should be refused")
    same = condition(lost) == condition(refused)
    expect(same, "a client whose training diverged should leave no trace")


def exceptions(algorithm: AnyAlgorithm) -> None:
    """Check that an exception in a step stops the run, says where, and leaves the last round."""
    whole = undisturbed(algorithm, training=tiny.SHORT)
    asked = {step: (number, client) for number, client, step in whole.calls}  # where each was asked last
    for step, (number, victim) in asked.items():
        simulation = tiny.simulation(algorithm, training=tiny.SHORT)
        records = tiny.run_rounds(simulation, number - 1)
        before, notes = condition(simulation), []
        with raising_in(simulation, step, number, victim):
            try:
                simulation.run_round()
            except ZeroDivisionError as error:
                notes = error.__notes__
        wanted = (repr(step), f"client {victim},", f"round {number}")
        told = len(notes) == 1 and all(word in notes[0] for word in wanted)
        expect(told, f"an exception in a step should come out with a note of {', '.join(wanted)}")
        expect(condition(simulation) == before, "an exception should leave everything as after the last round")
        records += tiny.run_rounds(simulation)
        expect_equal(records, whole.records, "a run should go on after an exception as if there was none")


def tasks_exception(algorithm: AnyAlgorithm) -> None:
    """Check that an exception in a task's first round leaves the last round of the task before."""
    whole = undisturbed(algorithm, tiny.simulation_with_tasks)
    simulation = tiny.simulation_with_tasks(algorithm)
    records = tiny.run_rounds(simulation, 2)
    before = condition(simulation)
    last = [(number, client, step) for number, client, step in whole.calls if number == 3][-1]

    def fail(number: int, client: str, step: str) -> None:
        if (number, client, step) == last:
            raise ZeroDivisionError("on purpose")

    simulation.settings.fault_injector = fail
    has_failed = False
    try:
        simulation.run_round()
    except ZeroDivisionError:
        has_failed = True
    simulation.settings.fault_injector = None
    expect(has_failed, "the third round should ask for the same steps in every run")
    same = condition(simulation) == before and simulation.federation.task == 1
    expect(same, "an exception as a task begins should leave everything as after the last round")
    records += tiny.run_rounds(simulation)
    expect_equal(records, whole.records, "a run should go on after an exception as if there was none")


def dropout(algorithm: AnyAlgorithm) -> None:
    """Check that clients may drop out at random, the same ones in every run."""
    first, again = (
        tiny.simulation(algorithm, cohort_size=4, rounds=8, client_dropout=0.4, training=tiny.SHORT) for _ in range(2)
    )
    records = tiny.run_rounds(first)
    lost = sum(len(record["lost"]) for record in records)
    expect(4 <= lost <= 24, f"about 13 of 32 clients should drop out, not {lost}")
    expect_finite(first.server.model)
    expect_equal(tiny.run_rounds(again, 4), records[:4], "the same clients should drop out in every run")


def run_with_copies(algorithm: AnyAlgorithm, folder: Path) -> None:
    """Run a trial to its end, with one checkpoint, after round 1; copy the folder as a kill in each round leaves it."""

    def copy(state: Any, result: Any) -> None:
        shutil.copytree(folder, killed_in(folder, result.record["round"]))

    simulation = tiny.simulation(algorithm, training=tiny.SHORT)
    run_trial(simulation, folder, [OnRoundEnd(copy)], checkpoint_share=1e-12)


def killed_in(folder: Path, round: int) -> Path:
    """Return where `run_with_copies` left the folder as a kill in a round leaves it."""
    return folder.with_name(f"{folder.name}-killed-in-{round}")


def expect_resumes_after_kill(algorithm: AnyAlgorithm, whole: Path, at: int) -> None:
    """Check that a trial killed in a round, with a checkpoint of the first, ends as the one that was not."""
    cut = killed_in(whole, at)
    saved = manifests(cut / "checkpoint")
    expect_equal(saved, ["manifest-1.json"], "there should be a checkpoint of round 1 only")
    lines = (cut / "rounds.jsonl").read_bytes().splitlines()
    expect_equal(len(lines), at, "every round before the kill should be recorded")
    run_trial(tiny.simulation(algorithm, training=tiny.SHORT), cut)
    expect_same_files(cut, whole, f"when killed in round {at} and resumed from the checkpoint of round 1")


METHODS = [tiny.configured(algorithms()[name]) for name in ("fedavg", "fedcad", "sfedkd", "fedskf", "ft-kd")]


@pytest.mark.parametrize("check", [diverged_client, exceptions, tasks_exception, dropout])
@pytest.mark.parametrize("algorithm", METHODS, ids=lambda algorithm: algorithm.name())
def test_the_engine(check: Callable[[AnyAlgorithm], None], algorithm: AnyAlgorithm) -> None:
    if check is not tasks_exception or "auxiliary" not in algorithm.needs:
        check(algorithm)


def test_killed_in_any_round_behind_its_last_checkpoint_a_run_resumes(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    scaffold = algorithms()["scaffold"]()
    run_with_copies(scaffold, whole)
    for at in range(1, ROUNDS + 1):
        expect_resumes_after_kill(scaffold, whole, at)
