"""What every method must keep when classes arrive in tasks, whether it knows of tasks or not.

Tasks of one class each, clients that hold nothing of a task, and a class of which nobody holds an example.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from fedkeep.data import TaskStream
from fedkeep.testing import federation as tiny
from fedkeep.testing import runs
from fedkeep.testing.runs import AnyAlgorithm
from fedkeep.trials.trial import run_trial

STOPS = (2, 3, 5)  # after a task, right after a task has begun, and within the last


def check_tasks(algorithm: AnyAlgorithm) -> None:
    """Check that all tasks are run, and that the model knows each task's classes."""
    whole = runs.undisturbed(algorithm, tiny.simulation_with_tasks)
    places = [(record["task"], record["round"]) for record in whole.records]
    runs.expect_equal(places, [(1, 1), (1, 2), (2, 3), (2, 4), (3, 5), (3, 6)], algorithm, "all tasks should be run")
    classes = [len(record["correct"]) for record in whole.records]
    runs.expect_equal(classes, [1, 1, 2, 2, 3, 3], algorithm, "the classes seen so far should be evaluated")
    runs.expect_settled(algorithm, whole.records, whole.model)
    for record in whole.records:
        runs.expect_json(algorithm, record)


def check_tasks_through_codec(algorithm: AnyAlgorithm) -> None:
    """Check that a second run, with all messages through the codec, leaves the same."""
    coded = tiny.simulation_with_tasks(algorithm, through_codec=True)
    one = runs.undisturbed(algorithm, tiny.simulation_with_tasks)
    runs.expect_same_run(one, tiny.run_rounds(coded), coded, "when every message goes through the codec, with tasks")


def check_tasks_order_of_work(algorithm: AnyAlgorithm) -> None:
    """Check that results do not depend on which client is quicker."""
    forward = runs.undisturbed(algorithm, tiny.simulation_with_tasks, cohort_size=5, training=tiny.SHORT)
    backward = tiny.simulation_with_tasks(algorithm, cohort_size=5, training=tiny.SHORT)
    backward.executor = runs.BackwardExecutor(backward.serial)
    records = tiny.run_rounds(backward)
    runs.expect_same_run(forward, records, backward, "when clients are asked in another order, with tasks")


def check_tasks_stacked_training(algorithm: AnyAlgorithm) -> None:
    """Check that clients trained as one stacked model learn the same, up to rounding."""
    tasks = tiny.stream((2, 1), clients=6, absent=1)
    looped, stacked = (tiny.simulation_with_tasks(algorithm, tasks, cohort_size=6, stack=stack) for stack in (1, 4))
    records = tiny.run_rounds(looped)
    runs.expect_close_run(records, looped.server.model, tiny.run_rounds(stacked), stacked)


def check_tasks_class_without_examples(algorithm: AnyAlgorithm) -> None:
    """Check a task of whose class nobody holds an example."""
    tasks = _without_examples(tiny.stream((2, 1), absent=0), 2)
    simulation = tiny.simulation_with_tasks(algorithm, tasks, rounds=2)
    if "generator" in algorithm.needs:  # what nobody has cannot be described
        runs.expect_data_error(simulation)
        return
    records = tiny.run_rounds(simulation)
    classes = [len(record["correct"]) for record in records]
    runs.expect_equal(classes, [2, 2, 3, 3], algorithm, "the classes seen so far should be evaluated")
    runs.expect_settled(algorithm, records, simulation.server.model)


def check_tasks_resume(algorithm: AnyAlgorithm) -> None:
    """Check that a trial that is stopped around a task's beginning resumes to the same bytes."""
    with tempfile.TemporaryDirectory() as folder:
        whole, stopped = Path(folder) / "whole", Path(folder) / "stopped"
        run_trial(tiny.simulation_with_tasks(algorithm, training=tiny.SHORT), whole)
        for at in STOPS:
            with suppress(runs.Stopped):
                run_trial(tiny.simulation_with_tasks(algorithm, training=tiny.SHORT), stopped, [runs.stop_after(at)])
        run_trial(tiny.simulation_with_tasks(algorithm, training=tiny.SHORT), stopped)
        runs.expect_same_files(
            algorithm, stopped, whole, f"when stopped after rounds {STOPS} of three tasks and resumed"
        )


def _without_examples(stream: TaskStream, task: int) -> TaskStream:
    """Return the stream with nobody holding anything in a task."""
    tasks = list(stream.tasks)
    partition = tasks[task - 1].partition
    nobody = replace(partition, rows=partition.rows[:0], offsets=torch.zeros_like(partition.offsets))
    tasks[task - 1] = replace(tasks[task - 1], partition=nobody)
    return replace(stream, tasks=tuple(tasks))
