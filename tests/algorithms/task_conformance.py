"""What every method must keep when classes arrive in tasks, whether it knows of tasks or not.

Tasks of one class each, clients that hold nothing of a task, and a class of which nobody holds an example.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conformance import Killed, Method, about, condition, raise_at, undisturbed, work_backwards
from torch import Tensor

from fedkeep.data import TaskStream
from fedkeep.errors import DataError
from fedkeep.interface.codec import encode
from fedkeep.interface.pytree import keystr, tree_leaves_with_path
from fedkeep.simulation.callbacks import OnRoundEnd
from fedkeep.simulation.trial import run_trial

STOPS = (2, 3, 5)  # after a task, right after a task has begun, and within the last


class TaskConformance:
    """The suite; each test takes ``method``, a configured `Algorithm`."""

    def test_it_plays_all_tasks(self, method: Method) -> None:
        whole = undisturbed(method, tiny.engine_with_tasks)
        records = whole.records
        assert [(record["task"], record["round"]) for record in records] == [
            (1, 1),
            (1, 2),
            (2, 3),
            (2, 4),
            (3, 5),
            (3, 6),
        ]
        assert [len(record["correct"]) for record in records] == [1, 1, 2, 2, 3, 3]
        assert not any(record["undone"] or record["lost"] for record in records)
        assert tiny.finite(whole.model)
        for record in records:
            assert json.loads(json.dumps(record, allow_nan=False)) == record

    def test_two_runs_are_equal_through_the_codec_too(self, method: Method) -> None:
        one, two = undisturbed(method, tiny.engine_with_tasks), tiny.engine_with_tasks(method, through_codec=True)
        assert one.records == tiny.played(two)
        assert encode(one.model) == encode(two.server.model)
        assert contents(one.server) == contents(two.server.state)
        assert contents(one.clients) == contents(two.client_states)

    def test_results_do_not_depend_on_the_order_of_work(self, method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
        forward = tiny.engine_with_tasks(method, cohort=5, training=tiny.SHORT)
        records = tiny.played(forward)
        work_backwards(monkeypatch)
        backward = tiny.engine_with_tasks(method, cohort=5, training=tiny.SHORT)
        assert tiny.played(backward) == records
        assert encode(forward.server.model) == encode(backward.server.model)

    def test_clients_trained_as_one_stacked_model_learn_the_same(self, method: Method) -> None:
        tasks = tiny.stream((2, 1), clients=6, absent=1)
        looped, stacked = (tiny.engine_with_tasks(method, tasks, cohort=6, stack=stack) for stack in (1, 4))
        for one, other in zip(tiny.played(looped), tiny.played(stacked), strict=True):
            assert one["loss"] == about(other["loss"])
        for name, tensor in looped.server.model.items():
            torch.testing.assert_close(stacked.server.model[name], tensor, rtol=1e-3, atol=1e-5)

    def test_a_class_of_which_nobody_holds_an_example(self, method: Method) -> None:
        engine = tiny.engine_with_tasks(method, without_examples(tiny.stream((2, 1), absent=0), 2), rounds=2)
        if "generator" in method.needs:  # what nobody has cannot be described
            with pytest.raises(DataError, match="no client holds an example of"):
                tiny.played(engine)
            return
        records = tiny.played(engine)
        assert [len(record["correct"]) for record in records] == [2, 2, 3, 3]
        assert not any(record["lost"] for record in records)
        assert tiny.finite(engine.server.model)

    def test_stopped_or_killed_it_resumes_to_the_same_bytes(self, method: Method, tmp_path: Path) -> None:
        whole, stopped, killed = (tmp_path / name for name in ("whole", "stopped", "killed"))

        def copy(state: Any, result: Any) -> None:
            if result.record["round"] == STOPS[-1]:
                shutil.copytree(whole, killed)

        engine = tiny.engine_with_tasks(method, training=tiny.SHORT)
        run_trial(engine, whole, [OnRoundEnd(copy)], checkpoint_share=1e-12)
        for at in STOPS:
            with pytest.raises(Killed):
                run_trial(tiny.engine_with_tasks(method, training=tiny.SHORT), stopped, [raise_at(at)])
        for folder in (stopped, killed):
            run_trial(tiny.engine_with_tasks(method, training=tiny.SHORT), folder)
            for name in ("rounds.jsonl", "model.safetensors"):
                assert (folder / name).read_bytes() == (whole / name).read_bytes(), name

    def test_an_exception_as_a_task_begins_leaves_the_last_round(
        self, method: Method, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole, engine = undisturbed(method, tiny.engine_with_tasks), tiny.engine_with_tasks(method)
        records = tiny.played(engine, 2)
        before = condition(engine)

        def fail(*args: Any) -> None:
            raise ZeroDivisionError("on purpose")

        with monkeypatch.context() as patch:
            patch.setattr(type(method), "round", fail)
            with pytest.raises(ZeroDivisionError):
                engine.run_round()
        assert condition(engine) == before
        assert engine.federation.task == 1
        assert records + tiny.played(engine) == whole.records


def contents(value: Any) -> list[tuple[str, Any]]:
    """Return all that is in a value, comparable; unlike its bytes, whichever tensors happen to be the same object."""
    leaves = tree_leaves_with_path(value)
    return [(keystr(path), tiny.bits(leaf) if isinstance(leaf, Tensor) else leaf) for path, leaf in leaves]


def without_examples(stream: TaskStream, task: int) -> TaskStream:
    """Return the stream with nobody holding anything in a task."""
    tasks = list(stream.tasks)
    partition = tasks[task - 1].partition
    nobody = replace(partition, rows=partition.rows[:0], offsets=torch.zeros_like(partition.offsets))
    tasks[task - 1] = replace(tasks[task - 1], partition=nobody)
    return replace(stream, tasks=tuple(tasks))
