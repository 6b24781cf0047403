"""What the checks compare: a method's undisturbed run, what its clients did, and expectations that tell."""

from __future__ import annotations

import functools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_origin

import torch
from torch import Tensor

from fedkeep._utils.seeds import temporary_seed
from fedkeep._utils.type_hints import annotations_of
from fedkeep.errors import DataError
from fedkeep.interface import Algorithm
from fedkeep.interface.algorithm import client_steps
from fedkeep.interface.codec import encode
from fedkeep.interface.pytree import keystr, tree_leaves_with_path
from fedkeep.losses import Batch
from fedkeep.models import Weights
from fedkeep.rounds.executor import Executor, Future
from fedkeep.rounds.messages import Fault, StepRequest, StepResult
from fedkeep.rounds.state import SimulationState
from fedkeep.testing import federation as tiny
from fedkeep.training.local_training import BatchStream
from fedkeep.training.party import LocalClient, LocalParty
from fedkeep.trials.callbacks import Callback, OnRoundEnd
from fedkeep.trials.simulation import Simulation

AnyAlgorithm = Algorithm[Any, Any]
Step = Callable[..., Any]

ROUNDS = 4
GLOBAL_SEED = 11
"""Of the generators that nobody may read, in undisturbed runs."""


def expect(condition: bool, algorithm: AnyAlgorithm, expected: str) -> None:
    """Raise AssertionError with a method's name and what is expected of it, unless the condition holds."""
    if not condition:
        raise AssertionError(f"{type(algorithm).__name__}: {expected}")


def expect_equal(found: object, wanted: object, algorithm: AnyAlgorithm, expected: str) -> None:
    """Raise AssertionError that also says what was found instead, unless two values are equal."""
    if found != wanted:
        raise AssertionError(f"{type(algorithm).__name__}: {expected}; {_difference(found, wanted)}")


def _difference(found: object, wanted: object) -> str:
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        found, wanted = next((a, b) for a, b in zip(found, wanted, strict=True) if a != b)
    if isinstance(found, dict) and isinstance(wanted, dict):
        names = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
        found, wanted = ({name: value.get(name) for name in names} for value in (found, wanted))
    return f"found {_short(found)} instead of {_short(wanted)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 500 else f"{text[:500]}…"


@dataclass(frozen=True)
class UndisturbedRun:
    """What a run left that nothing disturbed.

    ``records``: Of all rounds.
    ``calls``: Round, client and step of everything that was asked, in order.
    ``initial``, ``model``: The server's model before and after.
    ``server``: The server's state.
    ``clients``: The clients' states.
    """

    records: list[dict[str, Any]]
    calls: list[tuple[int, str, str]]
    initial: Weights
    model: Weights
    server: Any
    clients: dict[str, Any]


@functools.lru_cache(maxsize=256)
def undisturbed(
    algorithm: AnyAlgorithm, build: Callable[..., Simulation] = tiny.simulation, **changes: Any
) -> UndisturbedRun:
    """Run a method with nobody disturbing it, once for all checks.

    ``build``: `fedkeep.testing.federation.simulation`, or the one with tasks.
    ``**changes``: What ``build`` is given besides.
    """
    calls: list[tuple[int, str, str]] = []

    def note(number: int, client: str, step: str) -> None:
        calls.append((number, client, step))

    simulation = build(algorithm, fault_injector=note, **changes)
    initial = simulation.server.model
    with temporary_seed(GLOBAL_SEED):
        records = tiny.run_rounds(simulation)
    return UndisturbedRun(
        records, calls, initial, simulation.server.model, simulation.server.state, simulation.client_states
    )


def expect_json(algorithm: AnyAlgorithm, record: dict[str, Any]) -> None:
    """Check that a record is strict JSON."""
    advice = "what `server.log` is given should be finite numbers, or lists of them"
    try:
        text = json.dumps(record, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{type(algorithm).__name__}: {advice}; {error}") from error
    expect_equal(json.loads(text), record, algorithm, advice)


def asked_steps(algorithm: AnyAlgorithm) -> set[str]:
    """Return the names of the client steps that a method asks for in an undisturbed run."""
    return {step for _, _, step in undisturbed(algorithm).calls}


def last_step(algorithm: AnyAlgorithm) -> str:
    """Return the step that a round asks for last; not a task's first or last round, which may ask everybody too."""
    return [step for number, _, step in undisturbed(algorithm).calls if number == 2][-1]


def replies_with(algorithm: Algorithm[Any, Any], kind: type[Any]) -> set[str]:
    """Return the names of a method's steps whose annotated reply is of a kind."""
    replies = {name: annotations_of(step)["return"] for name, step in client_steps(type(algorithm)).items()}
    return {name for name, reply in replies.items() if issubclass(get_origin(reply) or reply, kind)}


def condition(simulation: Simulation) -> dict[str, Any]:
    """Return all that a later round can depend on, comparable."""
    empty = encode(simulation.client_states.type())
    states = {client: encode(state) for client, state in simulation.client_states.items()}
    return {
        "finished": simulation.finished,
        "model": encode(simulation.server.model),
        "server": encode(simulation.server.state),
        "clients": {client: state for client, state in sorted(states.items()) if state != empty},
    }


def contents(value: Any) -> list[tuple[str, Any]]:
    """Return all that is in a value, comparable; unlike its bytes, whichever tensors happen to be the same object."""
    leaves = tree_leaves_with_path(value)
    return [(keystr(path), tiny.bits(leaf) if isinstance(leaf, Tensor) else leaf) for path, leaf in leaves]


def expect_same_run(one: UndisturbedRun, records: list[dict[str, Any]], other: Simulation, why: str) -> None:
    """Check that a simulation left what an undisturbed run left, bit for bit."""
    algorithm = other.algorithm
    expect_equal(records, one.records, algorithm, f"records should be the same {why}")
    expect(tiny.equal(one.model, other.server.model), algorithm, f"the model should be the same {why}")
    expect(
        contents(one.server) == contents(other.server.state), algorithm, f"the server's state should be the same {why}"
    )
    expect(
        contents(one.clients) == contents(other.client_states),
        algorithm,
        f"the clients' states should be the same {why}",
    )


def expect_close_run(looped: UndisturbedRun, records: list[dict[str, Any]], other: Simulation) -> None:
    """Check that a simulation of stacked models left what an undisturbed run left, but for rounding."""
    algorithm = other.algorithm
    for one, two in zip(looped.records, records, strict=True):
        for name in ("cohort", "lost", "examples"):
            expect_equal(two[name], one[name], algorithm, f"{name!r} should not depend on the stack")
        losses = one["loss"], two["loss"]
        is_close = losses[0] == losses[1] or (None not in losses and math.isclose(*losses, rel_tol=1e-4))
        expect(is_close, algorithm, f"the loss should be {losses[0]} up to rounding, not {losses[1]}")
    for name, tensor in looped.model.items():
        is_close = torch.allclose(other.server.model[name], tensor, rtol=1e-3, atol=1e-5)
        expect(is_close, algorithm, f"{name} should be the same up to rounding when clients are trained as a stack")


def run_settled(simulation: Simulation, rounds: int | None = None) -> list[dict[str, Any]]:
    """Run to the end, or so many rounds, and check what is left."""
    records = tiny.run_rounds(simulation, rounds)
    expect_settled(simulation.algorithm, records, simulation.server.model)
    return records


def expect_settled(algorithm: AnyAlgorithm, records: list[dict[str, Any]], model: Weights) -> None:
    """Check that no client was lost, no round rolled back, and that the model is finite."""
    for record in records:
        expect_equal(record["lost"], {}, algorithm, f"no client should be lost in round {record['round']}")
        expect(not record["rolled_back"], algorithm, f"round {record['round']} should not be rolled back")
    expect_finite(algorithm, model)


def expect_finite(algorithm: AnyAlgorithm, model: Weights) -> None:
    """Check that all numbers of a model are finite."""
    expect(tiny.finite(model), algorithm, "all numbers of the model should be finite")


def expect_data_error(simulation: Simulation) -> None:
    """Check that a run is refused since nobody holds an example of a class."""
    algorithm, words = simulation.algorithm, "no client holds an example of"
    try:
        tiny.run_rounds(simulation)
    except DataError as error:
        expect(words in str(error), algorithm, f"the error should say that {words} a class, not {error}")
    else:
        expect(False, algorithm, f"a run should be refused with a DataError that says {words} a class")


def expect_same_files(algorithm: AnyAlgorithm, folder: Path, whole: Path, why: str) -> None:
    """Check that two trials left the same bytes."""
    for name in ("rounds.jsonl", "model.safetensors", "result.json"):
        same = (folder / name).read_bytes() == (whole / name).read_bytes()
        expect(same, algorithm, f"{name} should hold the same bytes {why}; all that is kept belongs into a state")


class Stopped(BaseException):
    """Stands for whatever stops a process."""


def stop_after(number: int) -> Callback:
    """Return a callback that stops the trial after a round."""

    def stop(state: Any, result: Any) -> None:
        if result.record["round"] == number:
            raise Stopped

    return OnRoundEnd(stop)


class WrappedSteps(Executor):
    """Carries out other steps than it is given.

    ``wrap``: Returns what is called in the place of a request's step.
    """

    def __init__(self, inner: Executor, wrap: Callable[[StepRequest], Step]) -> None:
        self.inner = inner
        self.wrap = wrap
        self.prefetch = inner.prefetch

    def begin_round(self, round: int, cohort: Sequence[str]) -> None:
        self.inner.begin_round(round, cohort)

    def submit(self, *requests: StepRequest) -> list[Future]:
        return self.inner.submit(*(replace(request, step=self.wrap(request)) for request in requests))

    def wait(self, future: Future) -> StepResult | Fault:
        return self.inner.wait(future)

    def cancel_all(self) -> None:
        self.inner.cancel_all()

    def stop(self) -> None:
        self.inner.stop()


class BackwardExecutor(Executor):
    """Carries out all that it was given, the latest first, as soon as one result is waited for."""

    prefetch = 64

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.pending: list[tuple[int, Future]] = []
        self.results: dict[int, StepResult | Fault] = {}
        self.submitted = 0

    def submit(self, *requests: StepRequest) -> list[Future]:
        futures = self.inner.submit(*requests)
        numbers = list(range(self.submitted, self.submitted + len(futures)))
        self.submitted += len(futures)
        self.pending += zip(numbers, futures, strict=True)
        return numbers

    def wait(self, future: Future) -> StepResult | Fault:
        while self.pending:
            number, inner = self.pending.pop()
            self.results[number] = self.inner.wait(inner)
        return self.results.pop(future)

    def cancel_all(self) -> None:
        self.pending.clear()
        self.results.clear()
        self.inner.cancel_all()

    def stop(self) -> None:
        self.cancel_all()
        self.inner.stop()


def wrap_steps(simulation: SimulationState, wrap: Callable[[StepRequest], Step]) -> None:
    """Let a simulation carry out other steps than the method's own (see `WrappedSteps`)."""
    simulation.executor = WrappedSteps(simulation.executor, wrap)


def watch_clients(simulation: SimulationState, watch: Callable[[LocalParty], None]) -> None:
    """Call a function with every client before its step."""

    def wrap(request: StepRequest) -> Step:
        @functools.wraps(request.step)
        def wrapped(client: LocalClient, *args: Any, **kwargs: Any) -> Any:
            watch(client)
            return request.step(client, *args, **kwargs)

        return wrapped

    wrap_steps(simulation, wrap)


@dataclass
class RecordedBatches:
    """What clients saw.

    ``labels``: Of each client's examples.
    ``orders``: The rows of each pass over a data set, in their order, by round and client.
    """

    labels: dict[str, list[int]]
    orders: dict[tuple[int, str], list[list[int]]]


def record_batches(simulation: Simulation) -> RecordedBatches:
    """Return what will hold what clients see, once the simulation has run."""
    seen = RecordedBatches({}, defaultdict(list))

    def watch(client: LocalParty) -> None:
        seen.labels[client.name] = client.data["label"].tolist()
        make = client.train_job

        def train_job(*args: Any, **kwargs: Any) -> Any:
            job = make(*args, **kwargs)
            orders = seen.orders[client.round, client.name]
            return replace(job, streams=[_RecordedStream(**vars(stream), orders=orders) for stream in job.streams])

        client.train_job = train_job  # type: ignore[method-assign]

    watch_clients(simulation, watch)
    return seen


@dataclass(frozen=True, eq=False)
class _RecordedStream(BatchStream):
    """A data set that writes down in which order its rows are drawn."""

    orders: list[list[int]] | None = None

    def batches(self, size: int, merge_last: bool) -> Iterator[Batch]:
        drawn = list(super().batches(size, merge_last))
        if self.orders is not None:
            self.orders.append([row for batch in drawn for row in batch.index.tolist()])
        return iter(drawn)
