"""Executors carry out client steps: in this process, in worker processes, or at sites (`fedkeep.flower`)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from greenlet import getcurrent, greenlet
from torch import Tensor

from fedkeep.data import Federation
from fedkeep.errors import ConfigError
from fedkeep.interface import Fit
from fedkeep.interface.algorithm import unwrap_step
from fedkeep.interface.pytree import changed_in_place, copy_containers, tensor_versions
from fedkeep.models import Weights
from fedkeep.rounds.messages import UPDATE, Fault, StepRequest, StepResult, UpdateSum, check_arguments, check_reply
from fedkeep.training.client_test import client_test
from fedkeep.training.context import ClientContext
from fedkeep.training.local_training import TrainJob
from fedkeep.training.party import LocalClient
from fedkeep.training.vmap_training import VmapTrainer

Future: TypeAlias = Any
"""Stands for the result of a request that may not be finished; each executor has its own type."""


class Executor(ABC):
    """Takes requests for client steps and returns their results.

    ``prefetch``: Number of requests that the executor can work on before anyone waits for them.
    ``partial_aggregation``: Whether it can add models up where they are trained.
    """

    prefetch: int = 0
    partial_aggregation: bool = False

    def begin_round(self, round: int, cohort: Sequence[str]) -> None:  # noqa: B027 — most have nothing to prepare
        """Prepare for a round, before any client is asked.

        ``round``: The round, counted over the whole run.
        """

    @abstractmethod
    def submit(self, *requests: StepRequest) -> list[Future]:
        """Take requests, which may be trained as one stacked model (see `fedkeep.training.vmap_training`)."""

    @abstractmethod
    def wait(self, future: Future) -> StepResult | Fault:
        """Wait for the result of a request.

        In processes of this machine an exception in a step is a bug: it is raised, with a note that says where it
        happened.

        Returns: The result, or the reason why there is none.
        """

    def as_completed(self, futures: Sequence[Future]) -> Iterator[int]:
        """Yield the positions of futures, each when `wait` returns its result at once.

        So no result has to be kept while another one is waited for. An executor that does not know which is finished
        yields them in order, and `wait` waits.

        ``futures``: From `submit`, in the order in which they were submitted.
        """
        return iter(range(len(futures)))

    def sum_updates(self, updates: Mapping[str, Weights], examples: Mapping[str, int], least: int = 0) -> UpdateSum:
        """Add up updates of which the method sees the sum alone (see `fedkeep.privacy.secure_sum`).

        In processes of one machine there is nobody to hide them from, so that they need no masks.

        ``updates``: By client, its last reply's `UPDATE`, int64; at least two. Sites keep theirs: these are empty.
        ``examples``: By client, its number of examples. A client without any has an update of zeros, which hides
            nobody.
        ``least``: With fewer updates there is no sum, since the round is rolled back.
        """
        first, *others = updates
        total = updates[first][UPDATE].clone()
        for client in others:
            total += updates[client][UPDATE]
        return UpdateSum(total, {})

    def cancel_all(self) -> None:  # noqa: B027 — most have nothing running between calls
        """Discard all requests, and return when none is running any more."""

    def aggregate_groups(self, groups: Sequence[Sequence[StepRequest]], aggregator: Any) -> Iterator[tuple[int, Any]]:
        """Add up the models of groups of clients where they are trained; asked only with `partial_aggregation`.

        ``aggregator``: A `fedkeep.rounds.partial_aggregation.PartialAggregator`, which does so in this process.
        Yields: The position of a group and its `PartialAggregate`, in any order.
        """
        raise NotImplementedError

    def stop(self) -> None:  # noqa: B027 — as above
        """Discard all requests at once, after an error; an executor that cannot go on puts another in its place."""


@dataclass(eq=False, repr=False)
class _Group:
    """Requests that were submitted together; ``train`` carries out their local training, by default job by job."""

    requests: Sequence[StepRequest]
    train: Callable[[TrainJob], Fit] | None = None
    results: list[StepResult] = field(default_factory=list)


@dataclass(eq=False, repr=False)
class SerialExecutor(Executor):
    """Carries out steps in this process when their result is waited for.

    Requests that were submitted together run side by side: each runs in its own greenlet until it calls `Client.fit`.
    Then all of these local trainings are carried out together, and each greenlet continues with its result. So a step
    needs no knowledge of the others.

    ``new_state``: Makes the state of a client that has none yet.
    ``own_contexts``: Contexts of the clients whose architecture differs from the server's, by client id.
    """

    context: ClientContext
    federation: Federation
    new_state: Callable[[], Any]
    own_contexts: Mapping[str, ClientContext]
    partial_aggregation = True

    def __post_init__(self) -> None:
        self.vmap_trainer = VmapTrainer(self.context.runner, self.context.training)

    def submit(self, *requests: StepRequest) -> list[Future]:
        group = _Group(requests)
        return [(group, number) for number in range(len(requests))]

    def wait(self, future: Future) -> StepResult:
        group: _Group = future[0]
        if not group.results and len(group.requests) > 1:
            group.results = self._run_together(group.requests)
        elif not group.results:
            (request,) = group.requests
            client = self._client(request, group.train)
            try:
                state_type, before = type(client.state), _versions((request.args, request.kwargs, client.state))
                try:
                    reply = request.step(client, *request.args, **request.kwargs)
                except Exception:
                    check_arguments(request)
                    raise
                check_reply(request, reply, client.state, state_type)
                _check_versions(request, before)
            except Exception as error:
                error.add_note(str(request))
                raise
            group.results = [StepResult(reply, client.state, request.uses)]
        result: StepResult = group.results[future[1]]
        return result

    def aggregate_groups(self, groups: Sequence[Sequence[StepRequest]], aggregator: Any) -> Iterator[tuple[int, Any]]:
        for number, requests in enumerate(groups):
            yield number, aggregator(requests)

    def _client(self, request: StepRequest, train: Callable[[TrainJob], Fit] | None) -> LocalClient:
        own_context, is_test = self.own_contexts.get(request.client), unwrap_step(request.step) is client_test
        client = LocalClient(
            own_context or self.context,
            request.client,
            self.federation.test_data(request.client) if is_test else self.federation.data(request.client),
            self.new_state() if request.state is None else copy_containers(request.state),
            task=request.task,
            round=request.round,
            uses=request.uses,
        )
        client.train = None if own_context else train  # a client with another architecture is trained alone
        return client

    def _run_together(self, requests: Sequence[StepRequest]) -> list[StepResult]:
        steps = [greenlet(self.wait) for _ in requests]
        try:
            # What each step returned last: a job that is to be trained, or its result.
            returned = [
                step.switch((_Group((request,), _switch_to_trainer), 0))
                for step, request in zip(steps, requests, strict=True)
            ]
            while training := [number for number, step in enumerate(steps) if not step.dead]:
                with self.context.training_time():
                    fits = self.vmap_trainer.fit([returned[number] for number in training])
                for number, fit in zip(training, fits, strict=True):
                    step = steps[number]
                    returned[number] = step.throw(fit) if isinstance(fit, Exception) else step.switch(fit)
            return returned
        finally:
            for step in steps:
                if not step.dead:
                    step.throw()  # after an error the other steps are ended too


def _versions(shared: tuple[Any, ...]) -> list[tuple[str, Tensor, int]]:
    """Return the tensors of a step's arguments and state, each with PyTorch's count of its changes."""
    return tensor_versions(zip(("argument", "argument", "client.state"), shared, strict=True))


def _check_versions(request: StepRequest, before: Sequence[tuple[str, Tensor, int]]) -> None:
    """Raise `ConfigError` if a step changed what it was given; other clients, or the server, have the same tensors."""
    if (changed := changed_in_place(before)) is not None:
        raise ConfigError(
            f"step {request.step.__name__!r} changed {changed} in place. The server and other clients may have the "
            "same tensor: make a new one, such as h - g in the place of h -= g, and assign it."
        )


def _switch_to_trainer(job: TrainJob) -> Fit:
    """Pass a job to the greenlet that runs the steps, and continue when it returns the result."""
    fit: Fit = getcurrent().parent.switch(job)
    return fit
