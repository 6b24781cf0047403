"""Perform client steps: here, when their result is waited for, or in worker processes (`fedkeep.simulation.process_executor`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from greenlet import getcurrent, greenlet

from fedkeep.data import Federation
from fedkeep.interface import Fit
from fedkeep.interface.values import copied
from fedkeep.simulation.messages import ClientFailure, ClientTask, TaskResult, describe_task
from fedkeep.training.context import ClientContext
from fedkeep.training.local_training import TrainJob
from fedkeep.training.party import LocalClient
from fedkeep.training.vmap_training import VmapTrainer

Future = Any
"""Stands for a request until its outcome is there."""


class Executor(ABC):
    """Takes requests and gives outcomes. ``ahead`` is how many requests nobody waits for yet it should be given."""

    ahead: int = 0

    def begin(self, round: int, cohort: Sequence[str]) -> None:  # noqa: B027 — most have nothing to prepare
        """Prepare for a round; called before anybody is asked."""

    @abstractmethod
    def submit(self, *requests: ClientTask) -> list[Future]:
        """Take requests, at least one; those given together may be trained as one (see `fedkeep.training.vmap_training`)."""

    @abstractmethod
    def wait(self, ticket: Future) -> TaskResult | ClientFailure:
        """Return the outcome of a request, or why there is none.

        In processes of this machine an exception in a step is a bug: it is raised, with a note that says where.
        """

    @abstractmethod
    def drain(self) -> None:
        """Forget all requests, and return once none is being worked at."""

    @abstractmethod
    def stop(self) -> None:
        """Forget all requests at once, after an error; nothing can be submitted any more."""


@dataclass(eq=False)
class _Group:
    requests: tuple[ClientTask, ...]
    outcomes: list[TaskResult] = field(default_factory=list)


class Here(Executor):
    """Performs steps in this process, when an outcome is waited for: one by one, or those of a group side by side.

    A step knows nothing of the others. Each runs in a greenlet of its own until it asks for a training, which is then
    carried out for all that do, and handed back to each.
    """

    def __init__(
        self,
        place: ClientContext,
        federation: Federation,
        new_state: Callable[[], Any],
        own: Mapping[str, ClientContext] = MappingProxyType({}),
    ) -> None:
        self.place = place
        self.own = own  # of clients whose network is another
        self.federation = federation
        self.new_state = new_state
        self.stacks = VmapTrainer(context.runner, place.training)

    def submit(self, *requests: ClientTask) -> list[Future]:
        group = _Group(requests)
        return [(group, number) for number in range(len(requests))]

    def wait(self, ticket: Future) -> TaskResult:
        group: _Group = ticket[0]
        if not group.outcomes:
            alone = len(group.requests) == 1
            group.outcomes = [self.perform(group.requests[0])] if alone else self._together(group.requests)
        outcome: TaskResult = group.outcomes[ticket[1]]
        return outcome

    def perform(self, request: ClientTask, train: Callable[[TrainJob], Fit] | None = None) -> TaskResult:
        """Perform a request now; ``train`` carries out its trainings, by default one step after another."""
        own = self.own.get(request.client)
        party = LocalClient(
            own or self.place,
            request.client,
            self.federation.data(request.client),
            self.new_state() if request.state is None else copied(request.state),
            task=request.task,
            round=request.round,
            uses=request.uses,
        )
        if train and not own:  # a network of its own is trained alone
            party.train = train
        try:
            reply = request.step(party, *request.args, **request.kwargs)
        except Exception as error:
            error.add_note(describe_task(request))
            raise
        return TaskResult(reply, party.state, request.uses)

    def _together(self, requests: Sequence[ClientTask]) -> list[TaskResult]:
        steps = [greenlet(self.perform) for _ in requests]
        try:
            # What a step has said last: what it wants to be trained, or its outcome.
            said = [step.switch(request, _pause) for step, request in zip(steps, requests, strict=True)]
            while asking := [number for number, step in enumerate(steps) if not step.dead]:
                with self.context.training_time():
                    found = self.stacks.fit([said[number] for number in asking])
                for number, fit in zip(asking, found, strict=True):
                    step = steps[number]
                    said[number] = step.throw(fit) if isinstance(fit, Exception) else step.switch(fit)
            return said
        finally:
            for step in steps:
                if not step.dead:
                    step.throw()  # after an error the others end too, where they stand

    def drain(self) -> None:
        """Nothing was begun."""

    def stop(self) -> None:
        """Nothing was begun, and this process can always go on."""


def _pause(assignment: TrainJob) -> Fit:
    """Hand an assignment to whoever runs the steps, and go on with the training that comes back."""
    fit: Fit = getcurrent().parent.switch(assignment)
    return fit
