"""Step between a simulation and its clients: break what they do, or look on, through its public arguments."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, get_origin

import torch
from torch import Tensor

from fedkeep._utils.type_hints import annotations_of
from fedkeep.data import Data
from fedkeep.interface import Algorithm, Fit
from fedkeep.interface.algorithm import client_steps
from fedkeep.interface.pytree import replace_tensors, tree_tensors
from fedkeep.losses import Batch, Loss
from fedkeep.models import Weights
from fedkeep.rounds.executor import Executor, Future
from fedkeep.rounds.messages import Fault, StepRequest, StepResult
from fedkeep.rounds.state import SimulationState
from fedkeep.training.local_training import BatchStream, TrainJob
from fedkeep.training.party import LocalClient, LocalParty
from fedkeep.trials.callbacks import Callback, OnRoundEnd
from fedkeep.trials.simulation import Simulation

Step = Callable[..., Any]

FAULTS = {"nan": "finite", "inf": "finite", "loss": "finite", "shape": "shape", "name": "lacks", "type": "float64"}
"""What may be wrong with a reply, and a word of the reason for which it is refused."""


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


@contextmanager
def raising_in(simulation: Simulation, step: str, number: int, client: str) -> Iterator[None]:
    """Raise ZeroDivisionError in a client's step of a round, for the block."""

    def wrap(request: StepRequest) -> Step:
        @functools.wraps(request.step)
        def wrapped(client: LocalClient, *args: Any, **kwargs: Any) -> Any:
            raise ZeroDivisionError("on purpose")

        at = simulation.finished + 1, request.client, request.step.__name__
        return wrapped if at == (number, client, step) else request.step

    before = simulation.executor
    wrap_steps(simulation, wrap)
    try:
        yield
    finally:
        simulation.executor = before


def break_replies(simulation: Simulation, number: int, faults: Mapping[str, str]) -> None:
    """Let what some clients reply in a round carry a fault each, of `FAULTS`; the clients know nothing of it."""
    carriers = _carriers(simulation.algorithm)

    def wrap(request: StepRequest) -> Step:
        @functools.wraps(request.step)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return _with_fault(request.step(*args, **kwargs), faults[request.client])

        is_broken = simulation.finished + 1 == number and request.client in faults and request.step.__name__ in carriers
        return wrapped if is_broken else request.step

    wrap_steps(simulation, wrap)


def let_diverge(simulation: Simulation, number: int, client: str) -> None:
    """Let a client's training in a round end in weights that are no numbers, before its step computes with them."""

    def diverged(fit: Fit) -> Fit:
        return replace(fit, model={name: torch.full_like(tensor, float("nan")) for name, tensor in fit.model.items()})

    def after(party: LocalParty, fit: Fit) -> Fit:
        return diverged(fit) if (simulation.finished + 1, party.name) == (number, client) else fit

    _watch_clients(simulation, lambda party: _after_fit(party, after))


@dataclass(frozen=True, eq=False)
class RecordedFit:
    """A local training: what was given to it, and what came of it.

    ``task``, ``round``: When it was, both counted from 1.
    ``client``: Who trained; empty for the server.
    ``model``: The weights with which it began.
    ``loss``: The loss as the method gave it.
    ``data``: The data sets that the method gave; none for the client's own examples.
    ``job``: The training with its data and cached teachers.
    ``fit``: The result.
    """

    task: int
    round: int
    client: str
    model: Weights
    loss: Loss
    data: tuple[Data, ...]
    job: TrainJob
    fit: Fit


def record_fits(simulation: SimulationState) -> list[RecordedFit]:
    """Return a list to which every local training is added from now on, the server's too."""
    fits: list[RecordedFit] = []

    def watch(party: LocalParty) -> None:
        make, train = party.train_job, party.fit
        jobs: list[TrainJob] = []

        def train_job(*args: Any, **kwargs: Any) -> TrainJob:
            jobs.append(make(*args, **kwargs))
            return jobs[-1]

        def fit(model: Weights, loss: Loss, *data: Data, **kwargs: Any) -> Fit:
            result = train(model, loss, *data, **kwargs)
            fits.append(RecordedFit(party.task, party.round, party.name, model, loss, data, jobs[-1], result))
            return result

        party.train_job, party.fit = train_job, fit  # type: ignore[method-assign]

    watch(simulation.server)
    _watch_clients(simulation, watch)
    return fits


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

    _watch_clients(simulation, watch)
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


def replies_with(algorithm: Algorithm[Any, Any], kind: type[Any]) -> set[str]:
    """Return the names of a method's steps whose annotated reply is of a kind."""
    replies = {name: annotations_of(step)["return"] for name, step in client_steps(type(algorithm)).items()}
    return {name for name, reply in replies.items() if issubclass(get_origin(reply) or reply, kind)}


def _watch_clients(simulation: SimulationState, watch: Callable[[LocalParty], None]) -> None:
    """Call a function with every client before its step."""

    def wrap(request: StepRequest) -> Step:
        @functools.wraps(request.step)
        def wrapped(client: LocalClient, *args: Any, **kwargs: Any) -> Any:
            watch(client)
            return request.step(client, *args, **kwargs)

        return wrapped

    wrap_steps(simulation, wrap)


def _after_fit(party: LocalParty, after: Callable[[LocalParty, Fit], Fit]) -> None:
    """Let a party's local trainings return what a function makes of them."""
    train = party.fit

    def fit(*args: Any, **kwargs: Any) -> Fit:
        return after(party, train(*args, **kwargs))

    party.fit = fit  # type: ignore[method-assign]


def _carriers(algorithm: Algorithm[Any, Any]) -> set[str]:
    """Return the names of the steps whose replies are broken: fits, else dataclasses, else whatever there is."""
    dataclasses = {
        name for name, step in client_steps(type(algorithm)).items() if is_dataclass(annotations_of(step)["return"])
    }
    return replies_with(algorithm, Fit) or dataclasses or set(client_steps(type(algorithm)))


def _with_fault(reply: Any, fault: str) -> Any:
    """Return a reply whose model carries a fault, or its first tensor if it has no model."""
    if fault == "loss":
        return replace(reply, loss=float("nan"))
    if not hasattr(reply, "model"):
        tensors = [tensor for tensor, _ in tree_tensors(reply)]
        return replace_tensors(reply, [_faulty(tensors[0], fault), *tensors[1:]]) if tensors else reply
    model = dict(reply.model)
    name, tensor = list(model.items())[-1]
    if fault == "name":
        del model[name]
    else:
        model[name] = _faulty(tensor, fault)
    return replace(reply, model=model)


def _faulty(tensor: Tensor, fault: str) -> Tensor:
    faults: dict[str, Callable[[], Tensor]] = {
        "nan": lambda: torch.full_like(tensor, float("nan")),
        "inf": lambda: torch.cat([torch.full_like(tensor[:1], float("inf")), tensor[1:]]),
        "shape": lambda: torch.cat([tensor, tensor]),
        "type": lambda: tensor.double(),
    }
    return faults[fault]()
