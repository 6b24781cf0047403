"""Carry out client steps: in this process, or elsewhere (`fedkeep.simulation.process_executor`, `fedkeep.flower`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

from greenlet import getcurrent, greenlet

from fedkeep.data import Federation
from fedkeep.interface import Fit
from fedkeep.interface.pytree import copy_containers
from fedkeep.simulation.messages import ClientFailure, ClientTask, TaskResult
from fedkeep.training.context import ClientContext
from fedkeep.training.local_training import TrainJob
from fedkeep.training.party import LocalClient
from fedkeep.training.vmap_training import VmapTrainer

Future: TypeAlias = Any
"""Stands for a task until its result is there; each executor has its own kind."""


class Executor(ABC):
    """Takes client tasks and gives their results.

    Attributes
    ----------
    ahead : int
        How many tasks that nobody waits for yet the executor should be given.
    """

    ahead: int = 0

    def begin_round(self, round: int, cohort: Sequence[str]) -> None:  # noqa: B027 — most have nothing to prepare
        """Prepare for a round; called before any client is asked."""

    @abstractmethod
    def submit(self, *tasks: ClientTask) -> list[Future]:
        """Take tasks, at least one; those given together may train as one (see `fedkeep.training.vmap_training`)."""

    @abstractmethod
    def wait(self, future: Future) -> TaskResult | ClientFailure:
        """Return the result of a task, or why there is none.

        In processes of this machine an exception in a step is a bug: it is raised, with a note that says where.
        """

    @abstractmethod
    def drain(self) -> None:
        """Forget all tasks, and return once none is under way."""

    @abstractmethod
    def stop(self) -> None:
        """Forget all tasks at once, after an error; nothing can be submitted any more."""


@dataclass(eq=False)
class _Group:
    """Tasks that were submitted together; ``train`` carries out their local training, by default one job at once."""

    tasks: Sequence[ClientTask]
    train: Callable[[TrainJob], Fit] | None = None
    results: list[TaskResult] = field(default_factory=list)


class SerialExecutor(Executor):
    """Carries steps out in this process, when a result is waited for: one by one, or those of a group side by side.

    A step knows nothing of the others. Each of a group runs in a greenlet of its own until it asks for local training,
    which is then carried out for all that do, and handed back to each.

    Parameters
    ----------
    context : ClientContext
        Of the server's network.
    federation : Federation
        Gives clients their data.
    new_state : Callable[[], object]
        Makes the state of a client that never kept anything.
    own_contexts : Mapping[str, ClientContext]
        Of clients whose network is another.
    """

    def __init__(
        self,
        context: ClientContext,
        federation: Federation,
        new_state: Callable[[], Any],
        own_contexts: Mapping[str, ClientContext] = MappingProxyType({}),
    ) -> None:
        self.context = context
        self.own_contexts = own_contexts
        self.federation = federation
        self.new_state = new_state
        self.vmap_trainer = VmapTrainer(context.runner, context.training)

    def submit(self, *tasks: ClientTask) -> list[Future]:
        group = _Group(tasks)
        return [(group, number) for number in range(len(tasks))]

    def wait(self, future: Future) -> TaskResult:
        group: _Group = future[0]
        if not group.results and len(group.tasks) > 1:
            group.results = self._run_together(group.tasks)
        elif not group.results:
            (task,) = group.tasks
            client = self._client(task, group.train)
            try:
                reply = task.step(client, *task.args, **task.kwargs)
            except Exception as error:
                error.add_note(str(task))
                raise
            group.results = [TaskResult(reply, client.state, task.uses)]
        result: TaskResult = group.results[future[1]]
        return result

    def _client(self, task: ClientTask, train: Callable[[TrainJob], Fit] | None) -> LocalClient:
        own = self.own_contexts.get(task.client)
        return LocalClient(
            own or self.context,
            task.client,
            self.federation.data(task.client),
            self.new_state() if task.state is None else copy_containers(task.state),
            task=task.task,
            round=task.round,
            uses=task.uses,
            train=None if own else train,  # a client's own network is trained alone
        )

    def _run_together(self, tasks: Sequence[ClientTask]) -> list[TaskResult]:
        steps = [greenlet(self.wait) for _ in tasks]
        try:
            # What a step has returned last: a job that it wants to be carried out, or its result.
            returned = [
                step.switch((_Group((task,), _switch_to_trainer), 0)) for step, task in zip(steps, tasks, strict=True)
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
                    step.throw()  # after an error the others end too, where they stand

    def drain(self) -> None:
        """Nothing was begun."""

    def stop(self) -> None:
        """Nothing was begun, and this process can always go on."""


def _switch_to_trainer(job: TrainJob) -> Fit:
    """Hand a job to whoever runs the steps, and go on with the training that comes back."""
    fit: Fit = getcurrent().parent.switch(job)
    return fit
