"""Client steps in workers, each with its own network and the same data: processes of this machine, or others.

Messages are values, as they would be sent to a client, and never pickled. A tensor is sent to a worker once per round,
however many clients receive it, and forgotten there when it is forgotten here. Requests go to whichever worker is idle,
so a round's result must not depend on who did what: the random generators of a step are derived from the client's
name, and replies are put in the cohort's order.
"""

import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from fedkeep.errors import RunError, ValueRefused
from fedkeep.executors.workers import DONE, REFUSED, Handler, Message, Worker, kill_workers, wait_for_any
from fedkeep.interface.codec import from_structure, to_structure
from fedkeep.interface.pytree import tree_tensors
from fedkeep.rounds.executor import Executor, Future
from fedkeep.rounds.messages import StepRequest, StepResult, decode_request, encode_request, results_type
from fedkeep.rounds.partial_aggregation import (
    PartialAggregate,
    PartialAggregator,
    aggregate_type,
    decode_aggregate,
    encode_aggregate,
)
from fedkeep.rounds.state import SimulationState

STEPS = "steps"
"""The kind of a request for client steps that are carried out together."""


@dataclass(eq=False)
class RequestGroup:
    """Requests that one worker carries out together, and their results, or their aggregate with an ``aggregator``."""

    requests: Sequence[StepRequest]
    aggregator: PartialAggregator | None = None
    aggregate: PartialAggregate | None = None
    results: list[StepResult] = field(default_factory=list)
    error: BaseException | None = None

    def __str__(self) -> str:
        """Say which steps these are, for error messages."""
        if len(self.requests) == 1:
            return str(self.requests[0])
        clients = ", ".join(request.client for request in self.requests)
        return f"{self.requests[0]} It was trained together with clients {clients}."


class StepWorker(Protocol):
    """A worker as the executor sees it: `fedkeep.executors.workers.Worker`, or one on another machine."""

    def send(self, kind: str, content: Any, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send a request."""

    def receive(self) -> tuple[str, Any, dict[str, Tensor]]:
        """Wait for the result: its status, its content, and its tensors by name."""


W = TypeVar("W", bound=StepWorker)


class WorkerExecutor(Executor, Generic[W]):
    """Carries out steps in workers, wherever they are.

    ``workers``: The workers. Each answers requests with `StepHandler` for a simulation with the same settings.
    """

    def __init__(self, workers: Sequence[W], state: SimulationState) -> None:
        self.workers = list(workers)
        self.state = state
        self.prefetch = 2 * len(self.workers)
        self.under_way: dict[W, RequestGroup] = {}
        # Names of the tensors that each worker has.
        self.known: dict[W, set[str]] = {worker: set() for worker in self.workers}
        self._backlog: deque[RequestGroup] = deque()
        self._round = 0, 0  # task and round
        self._names: dict[int, str] = {}  # by id of a tensor, until nobody here has it any more or the round is over
        self._count = 0  # number of names so far

    def submit(self, *requests: StepRequest) -> list[Future]:
        return self._submit(RequestGroup(requests))

    def _submit(self, group: RequestGroup) -> list[Future]:
        round = group.requests[0].task, group.requests[0].round
        if round != self._round:
            self._round, self._names = round, {}
        self._backlog.append(group)
        self._dispatch()
        return [(group, number) for number in range(len(group.requests))]

    def as_completed(self, futures: Sequence[Future]) -> Iterator[int]:
        positions: dict[RequestGroup, list[int]] = {}
        for position in range(len(futures)):
            positions.setdefault(futures[position][0], []).append(position)
        del futures  # they hold the results, which need not stay in memory
        self._put_first(positions)
        while positions:
            finished = [group for group in positions if group.results or group.aggregate or group.error is not None]
            while finished:
                yield from positions.pop(finished.pop(0))
            if positions:
                self._dispatch()
                self._receive()

    def aggregate_groups(
        self, groups: Sequence[Sequence[StepRequest]], aggregator: PartialAggregator
    ) -> Iterator[tuple[int, PartialAggregate]]:
        futures: list[Future] = []
        for requests in groups:
            (future, *_) = self._submit(RequestGroup(requests, aggregator))
            futures.append(future)
        for position in self.as_completed(futures):
            group: RequestGroup = futures[position][0]
            if group.error is not None:
                raise group.error
            assert group.aggregate is not None
            found, group.aggregate = group.aggregate, None
            yield position, found
            del found

    def wait(self, future: Future) -> StepResult:
        group: RequestGroup = future[0]
        if group in self._backlog:
            self._put_first([group])
        while not group.results and group.error is None:
            self._dispatch()
            self._receive()
        if group.error is not None:
            raise group.error
        result: StepResult = group.results[future[1]]
        return result

    def _put_first(self, groups: Collection[RequestGroup]) -> None:
        """Let groups that are waited for go before those that nobody waits for yet."""
        self._backlog = deque(sorted(self._backlog, key=lambda group: group not in groups))

    def cancel_all(self) -> None:
        self._backlog.clear()
        while self.under_way:
            self._receive()

    def stop(self) -> None:
        """End all workers, also in the middle of a step; later rounds are carried out in this process."""
        self._backlog.clear()
        self.under_way.clear()
        self.state.executor = self.state.serial
        self._kill_workers()

    @abstractmethod
    def _kill_workers(self) -> None:
        """End all workers at once."""

    @abstractmethod
    def _messages(self) -> Iterator[tuple[RequestGroup, str, Any, dict[str, Tensor]]]:
        """Wait until a busy worker has sent a message, for a second at most, and take what has arrived.

        Yields: The group, which is under way no more, and the status, content and tensors of its result.
        """

    def _dispatch(self) -> None:
        for worker in self.workers:
            if worker not in self.under_way and self._backlog:
                encoded, fresh = self._encode(self._backlog[0].requests, self.known[worker])
                group = self.under_way[worker] = self._backlog.popleft()
                # A state is its client's alone; what else is sent may be sent again, to another client.
                states = {
                    self._names.get(id(tensor))
                    for request in group.requests
                    for tensor, _ in tree_tensors(request.state)
                }
                known = self.known[worker].intersection(self._names.values())
                self.known[worker] = known | (fresh.keys() - states)
                try:
                    summed = [group.aggregator.how, group.aggregator.stacked] if group.aggregator else None
                    worker.send(STEPS, [encoded, sorted(self.known[worker]), summed], fresh)
                except RunError as death:
                    raise type(death)(f"{death} {group}") from None

    def _receive(self) -> None:
        """Take the messages that have arrived, and read them."""
        messages = list(self._messages())
        self._dispatch()  # no worker is idle while results are read
        for group, kind, content, tensors in messages:
            self._accept(group, kind, content, tensors)

    def _accept(self, group: RequestGroup, kind: str, content: Any, tensors: Mapping[str, Tensor]) -> None:
        """Read the result of a group."""
        if kind != DONE:
            group.error = RunError(content if kind == REFUSED else f"{group} The worker's error:\n{content}")
            return
        state_type, aggregator = self.state.client_states.type, group.aggregator
        if aggregator is None:
            hint = results_type([request.step for request in group.requests], state_type)
        else:
            hint = tuple.__class_getitem__((aggregate_type(aggregator.steps, state_type), float, float))
        moved = {name: tensor.to(self.state.settings.device) for name, tensor in tensors.items()}
        try:
            results, train, teachers = from_structure(content, moved, hint)
        except ValueRefused as error:
            group.error = RunError(f"a worker's reply is not what its step says that it returns: {error} {group}")
            return
        self.state.context.timer.add(train, teachers)
        if aggregator is None:
            group.results = [StepResult(*result) for result in results]
        else:
            group.aggregate = decode_aggregate(results, group.requests, aggregator.steps)

    def _encode(self, requests: Sequence[StepRequest], known: set[str]) -> tuple[list[Any], dict[str, Tensor]]:
        """Return encoded requests, and those of their tensors that a worker does not have yet."""
        fresh: dict[str, Tensor] = {}

        def name(tensor: Tensor) -> str:
            if id(tensor) not in self._names:
                self._names[id(tensor)] = str(self._count)
                self._count += 1
                weakref.finalize(tensor, self._names.pop, id(tensor), None).atexit = False
            found = self._names[id(tensor)]
            if found not in known and found not in fresh:
                fresh[found] = tensor
            return found

        return [encode_request(request, name) for request in requests], fresh


class ProcessExecutor(WorkerExecutor[Worker]):
    """Carries out steps in worker processes of this machine.

    ``all_steps``: Whether the workers have all reply steps of the run. A step that the user gave as an object is here
        alone: then models are not added up in the workers, and all replies come here.
    """

    def __init__(self, workers: Sequence[Worker], state: SimulationState, *, all_steps: bool = True) -> None:
        super().__init__(workers, state)
        self.partial_aggregation = all_steps

    def _kill_workers(self) -> None:
        kill_workers(self.workers)

    def _messages(self) -> Iterator[tuple[RequestGroup, str, Any, dict[str, Tensor]]]:
        try:
            for worker in wait_for_any(self.under_way):
                kind, content, tensors = worker.receive()
                yield self.under_way.pop(worker), kind, content, tensors
        except RunError as death:
            where = " ".join(map(str, self.under_way.values()))
            raise type(death)(f"{death} {where}") from None


class StepHandler:
    """The worker's side: carries out client steps and returns their results.

    ``state``: A simulation with the same settings as the parent's.
    """

    def __init__(self, state: SimulationState) -> None:
        self.state = state
        self.steps = [step for step in state.steps if step.applies(state)]
        self._known: dict[str, Tensor] = {}  # tensors that may be meant again

    def __call__(self, content: Any, tensors: dict[str, Tensor]) -> Message:
        state, (encoded, known, summed) = self.state, content
        state.set_task(encoded[0]["task"])
        received = self._known | {name: tensor.to(state.settings.device) for name, tensor in tensors.items()}
        self._known = {name: received[name] for name in known}
        builtin = state.builtin_steps
        requests = [
            decode_request(state.algorithm, one, received, state.client_states.type, builtin=builtin) for one in encoded
        ]
        del received
        timer = state.context.timer
        timer.reset()
        if summed is not None:
            found = encode_aggregate(PartialAggregator(state, self.steps, *summed)(requests), self.steps)
            return to_structure((found, timer.train, timer.teachers))
        results = [state.serial.wait(future) for future in state.serial.submit(*requests)]
        contents = tuple((result.reply, result.state, result.uses) for result in results)
        return to_structure((contents, timer.train, timer.teachers))


def step_handlers(state: SimulationState) -> dict[str, Handler]:
    """Return the handlers of a worker that only carries out client steps."""
    return {STEPS: StepHandler(state)}
