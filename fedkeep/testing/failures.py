"""What may go wrong: a stop, a kill, clients that are lost or reply with something broken, bugs in a step."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedkeep._utils.digests import digest_of
from fedkeep.interface import Fit
from fedkeep.testing import federation as tiny
from fedkeep.testing.interception import (
    FAULTS,
    Stopped,
    break_replies,
    let_diverge,
    raising_in,
    replies_with,
    stop_after,
)
from fedkeep.testing.runs import (
    ROUNDS,
    AnyAlgorithm,
    asked_steps,
    condition,
    expect,
    expect_equal,
    expect_finite,
    last_fit,
    last_step,
    undisturbed,
)
from fedkeep.trials.callbacks import OnRoundEnd
from fedkeep.trials.checkpoint import Checkpoint, manifests
from fedkeep.trials.trial import run_trial

FILES = ("rounds.jsonl", "model.safetensors", "result.json")


def check_resume(algorithm: AnyAlgorithm) -> None:
    """Check that a trial, stopped after every round or killed behind its last checkpoint, ends with the same bytes."""
    with tempfile.TemporaryDirectory() as folder:
        whole, stopped = Path(folder) / "whole", Path(folder) / "stopped"
        run_with_copies(algorithm, whole)
        lines = (whole / "rounds.jsonl").read_bytes().splitlines()
        for at in range(1, ROUNDS + 1):
            with suppress(Stopped):
                run_trial(tiny.simulation(algorithm, training=tiny.SHORT), stopped, [stop_after(at)])
            found = (stopped / "rounds.jsonl").read_bytes().splitlines()
            expect_equal(found, lines[:at], algorithm, f"records should be the same when stopped after round {at}")
            expect(not (stopped / "result.json").exists(), algorithm, "a stopped trial should have no result")
        run_trial(tiny.simulation(algorithm, training=tiny.SHORT), stopped)
        expect_same_files(algorithm, stopped, whole, "when stopped after every round and resumed")
        expect_resumes_after_kill(algorithm, whole, ROUNDS - 1)


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
    expect_equal(saved, ["manifest-1.json"], algorithm, "there should be a checkpoint of round 1 only")
    lines = (cut / "rounds.jsonl").read_bytes().splitlines()
    expect_equal(len(lines), at, algorithm, "every round before the kill should be recorded")
    run_trial(tiny.simulation(algorithm, training=tiny.SHORT), cut)
    expect_same_files(algorithm, cut, whole, f"when killed in round {at} and resumed from the checkpoint of round 1")


def expect_same_files(algorithm: AnyAlgorithm, folder: Path, whole: Path, why: str) -> None:
    """Check that two trials left the same bytes."""
    for name in FILES:
        same = (folder / name).read_bytes() == (whole / name).read_bytes()
        expect(same, algorithm, f"{name} should hold the same bytes {why}; all that is kept belongs into a state")


def check_checkpoint(algorithm: AnyAlgorithm) -> None:
    """Check that a checkpoint restores every state."""
    first, second = (tiny.simulation(algorithm, training=tiny.SHORT) for _ in range(2))
    tiny.run_rounds(first, 2)
    with tempfile.TemporaryDirectory() as folder:
        records = {"rounds.jsonl": digest_of(b"records")}
        Checkpoint(Path(folder)).save(first, records)
        restored = Checkpoint(Path(folder)).restore(second)
    expect_equal(restored, records, algorithm, "a checkpoint should hold the digests of the records")
    same = condition(second) == condition(first)
    expect(same, algorithm, "a checkpoint should restore the model and all states")
    expect_equal(
        tiny.run_rounds(second), tiny.run_rounds(first), algorithm, "records should be the same from a checkpoint"
    )


def check_lost_clients(algorithm: AnyAlgorithm) -> None:
    """Check that a client may be lost in each step, and the round goes on with the others."""
    calls = undisturbed(algorithm).calls
    for step in asked_steps(algorithm):
        made = [(number, client) for number, client, name in calls if name == step]
        victims = dict(reversed(made))  # the first of each round
        odd = max(number % 2 for number in victims)  # every second round, so that whole ones follow
        lost = {number: victim for number, victim in victims.items() if number % 2 == odd}
        simulation = tiny.simulation(algorithm, fault_injector=_failing(lost, step), training=tiny.SHORT)
        records = tiny.run_rounds(simulation)
        for record in records:
            number = record["round"]
            wanted = {lost[number]: "lost it"} if number in lost else {}
            why = f"in round {number} only client {lost.get(number)} should be lost, in {step!r}"
            expect_equal(record["lost"], wanted, algorithm, why)
            expect(not record["rolled_back"], algorithm, f"round {number} should go on without the lost client")
        expect_finite(algorithm, simulation.server.model)


def check_bad_replies(algorithm: AnyAlgorithm) -> None:
    """Check that broken replies are refused with a reason, and the round goes on."""
    only_fits = set() if replies_with(algorithm, Fit) else {"loss", "name"}  # faults that other replies cannot have
    for faults in (("nan", "shape", "name"), ("inf", "type", "loss")):
        bad = {client: fault for client, fault in zip("435", faults, strict=True) if fault not in only_fits}
        simulation = tiny.simulation(algorithm, cohort_size=6, rounds=3, training=tiny.SHORT)
        break_replies(simulation, 2, bad)
        records = tiny.run_rounds(simulation)
        for record, wanted in zip(records, [set(), set(bad), set()], strict=True):
            why = f"in round {record['round']} exactly the broken replies should be refused; see `validate_reply`"
            expect_equal(set(record["lost"]), wanted, algorithm, why)
        for client, fault in bad.items():
            reason = records[1]["lost"][client]
            expect(FAULTS[fault] in reason, algorithm, f"a refusal should name {FAULTS[fault]!r}, not be {reason!r}")
        expect(not records[1]["rolled_back"], algorithm, "a round should go on without those whose reply was refused")
        expect_finite(algorithm, simulation.server.model)


def check_diverged_client(algorithm: AnyAlgorithm) -> None:
    """Check that a client whose training diverged changes nothing anywhere, exactly as one that never came back."""
    injector = _failing({2: "4"}, last_fit(algorithm))
    lost = tiny.simulation(algorithm, fault_injector=injector, cohort_size=6, training=tiny.SHORT)
    tiny.run_rounds(lost)
    refused = tiny.simulation(algorithm, cohort_size=6, training=tiny.SHORT)
    let_diverge(refused, 2, "4")
    names = [list(record["lost"]) for record in tiny.run_rounds(refused)]
    expect_equal(names, [[], ["4"], [], []], algorithm, "a client whose training diverged should be refused")
    same = condition(lost) == condition(refused)
    expect(same, algorithm, "a client whose training diverged should leave no trace")


def check_too_few_clients(algorithm: AnyAlgorithm) -> None:
    """Check that a round with too few clients changes nothing, whenever they are lost."""
    second = tiny.simulation(algorithm).sample_cohort(2)
    at_once: Injector = lambda number, client, step: "gone" if number == 2 else None  # noqa: E731
    late = _failing({2: second[-1]}, last_step(algorithm))
    for injector in (at_once, late):
        simulation = tiny.simulation(algorithm, min_clients=3, fault_injector=injector, training=tiny.SHORT)
        tiny.run_rounds(simulation, 1)
        before = condition(simulation)
        (record,) = tiny.run_rounds(simulation, 1)
        expect(record["rolled_back"] is True, algorithm, "a round with fewer than `min_clients` should be rolled back")
        expect(bool(record["lost"]), algorithm, "who was lost should be in the record")
        same = condition(simulation) == before | {"finished": 2}
        expect(same, algorithm, "a round that is rolled back should change nothing; never change a state in place")
        if injector is at_once:
            later = [record["rolled_back"] for record in tiny.run_rounds(simulation)]
            expect_equal(later, [False, False], algorithm, "later rounds should go on")


def check_exceptions(algorithm: AnyAlgorithm) -> None:
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
        expect(told, algorithm, f"an exception in a step should come out with a note of {', '.join(wanted)}")
        expect(
            condition(simulation) == before, algorithm, "an exception should leave everything as after the last round"
        )
        records += tiny.run_rounds(simulation)
        expect_equal(records, whole.records, algorithm, "a run should go on after an exception as if there was none")


Injector = Callable[[int, str, str], str | None]


def _failing(victims: Mapping[int, str], step: str) -> Injector:
    """Let a step fail for the victim of each round that has one."""
    return lambda number, client, name: "lost it" if (victims.get(number), step) == (client, name) else None
