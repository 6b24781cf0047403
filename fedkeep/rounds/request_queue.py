"""The requests of a round on their way to the executor: which wait, and which are under way."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from fedkeep._utils import progress
from fedkeep.rounds.executor import Future
from fedkeep.rounds.messages import Fault, StepRequest, StepResult
from fedkeep.rounds.partial_aggregation import PartialAggregate, PartialAggregator, groups_of, in_stack_order
from fedkeep.rounds.state import SimulationState


class RequestQueue:
    """Requests of one round: each is submitted when its client's last one is done.

    ``waiting``: Requests that have not been submitted yet, by client.
    ``under_way``: Requests that have been submitted, by client.
    ``step_seconds``: Seconds of waiting for each client step, by name.
    ``deferred``: Carries out what a cohort was asked, if nobody has looked at its replies yet.
    """

    def __init__(self, state: SimulationState, ready: Callable[[StepRequest], StepRequest | Fault]) -> None:
        self.state = state
        self.ready = ready
        self.waiting: dict[str, list[StepRequest]] = {}
        self.under_way: dict[str, tuple[StepRequest, Future | Fault]] = {}
        self.step_seconds: dict[str, float] = {}
        self.deferred: Callable[[], object] | None = None
        self._began = 0.0
        self._replies: dict[str, int] = {}  # how often each step was waited for, by name

    def add(self, request: StepRequest) -> None:
        """Let a request wait."""
        self.waiting.setdefault(request.client, []).append(request)

    def carry_out_deferred(self) -> None:
        """Carry out what a cohort was asked before, if nobody has looked at its replies."""
        if self.deferred is not None:
            self.deferred()

    def is_busy(self, client: str) -> bool:
        """Tell whether a client has requests that are not done."""
        return client in self.under_way or bool(self.waiting.get(client))

    def prefetch(self) -> None:
        """Submit requests that nobody waits for yet to idle workers, in the order in which they were asked for."""
        if self.state.settings.stack > 1:  # otherwise the groups would depend on which workers are idle
            return
        free = self.state.executor.prefetch - len(self.under_way)
        if free > 0:
            idle = [client for client in self.waiting if self.waiting[client] and client not in self.under_way]
            for client in idle[:free]:
                self._launch(client)

    def launch_together(self, clients: Sequence[str]) -> None:
        """Submit the next request of some clients, alone or in stacks; the largest clients come first."""
        ready = [client for client in clients if self.waiting.get(client) and client not in self.under_way]
        federation, stack = self.state.federation, self.state.settings.stack
        if stack > 1:
            groups = [in_stack_order(group, federation) for group in groups_of(ready, federation, stack)]
        else:
            groups = [[client] for client in (in_stack_order(ready, federation) if len(ready) > 1 else ready)]
        for group in groups:
            self._launch(*group)

    def take_next(self, clients: Sequence[str]) -> dict[str, StepRequest] | None:
        """Take the requests of clients out of the queue, in order; None if some have none, or another before it."""
        if any(len(self.waiting.get(client, ())) != 1 or client in self.under_way for client in clients):
            return None
        return {client: self.waiting.pop(client)[0] for client in clients}

    def _launch(self, *clients: str) -> None:
        """Submit the next request of some clients as one group."""
        requests: list[StepRequest] = []
        for client in clients:
            request = self.waiting[client].pop(0)
            ready = self.ready(request)
            if isinstance(ready, Fault):
                self.under_way[client] = request, ready
            else:
                requests.append(ready)
        if requests:
            for request, future in zip(requests, self.state.executor.submit(*requests), strict=True):
                self.under_way[request.client] = request, future

    def arriving(self, clients: Sequence[str], expected: int | None) -> Iterator[tuple[StepRequest, Future | Fault]]:
        """Yield the requests of clients, which are under way, each when its result arrives; failures come first.

        Progress is shown for the first ``expected`` replies to a step: how often it is asked, only the method knows.
        """
        steps = [self.under_way[client][0].step.__name__ for client in clients]
        failed = [client for client in clients if isinstance(self.under_way[client][1], Fault)]
        others = [client for client in clients if not isinstance(self.under_way[client][1], Fault)]
        completed = self.state.executor.as_completed([self.under_way[client][1] for client in others])
        arriving = chain(failed, (others[position] for position in completed))
        for step in steps:
            done = self._replies.get(step, 0)
            self._replies[step] = done + 1
            progress.report(step, done, expected if expected is not None and done < expected else None)
            self._began = time.perf_counter()
            yield self.under_way.pop(next(arriving))

    def aggregating(
        self, groups: Sequence[Sequence[StepRequest]], aggregator: PartialAggregator, expected: int
    ) -> Iterator[tuple[int, PartialAggregate]]:
        """Yield the sum of each group of requests when it arrives; progress is reported as in `arriving`."""
        done, self._began = 0, time.perf_counter()
        for number, found in self.state.executor.aggregate_groups(groups, aggregator):
            step = groups[number][0].step.__name__
            done += len(groups[number])
            progress.report(step, done, expected if done <= expected else None)
            self.count_seconds(groups[number][0])
            yield number, found
            del found
            self._began = time.perf_counter()

    def count_seconds(self, request: StepRequest) -> None:
        """Count the seconds of waiting for a request, or for a group with it, when its result is there."""
        step = request.step.__name__
        self.step_seconds[step] = self.step_seconds.get(step, 0.0) + time.perf_counter() - self._began

    def take(self, client: str) -> tuple[StepRequest, StepResult | Fault]:
        """Wait for the result of a client's request."""
        request, future = self.under_way.pop(client)
        return request, future if isinstance(future, Fault) else self.state.executor.wait(future)

    def clear(self) -> None:
        """Drop all requests."""
        self.waiting.clear()
        self.under_way.clear()
        self.state.executor.cancel_all()
