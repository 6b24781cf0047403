"""Models that are added up where they are trained: of a group of clients one mean goes to the server.

The mean of a cohort is the mean of its groups' means, and the groups follow from the cohort alone. So its bits do not
depend on which worker trained whom, nor on whether the server saw the models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from fedkeep.aggregation.mean import PartialMean
from fedkeep.data import Federation
from fedkeep.interface import Fit
from fedkeep.interface.cohort import Aggregation
from fedkeep.interface.pytree import num_bytes
from fedkeep.models import Weights
from fedkeep.rounds.messages import Fault, FaultKind, StepRequest, StepResult
from fedkeep.rounds.reply_step import Reply, ReplyStep
from fedkeep.rounds.state import SimulationState

MAX_GROUPS = 16
"""Most groups of a cohort without stacks. Up to so many clients, each is a group, and means are as without groups."""


def groups_of(clients: Sequence[str], federation: Federation, stack: int) -> list[list[str]]:
    """Return the groups of a cohort, each in the cohort's order: its stacks, or up to `MAX_GROUPS` of equal size.

    Stacks are of about the same size, the largest clients together. They depend only on the cohort, not on the workers,
    since stacking changes rounding.
    """
    if stack == 1:
        return _split(clients, min(len(clients), MAX_GROUPS))
    place = {client: number for number, client in enumerate(clients)}
    ordered = in_stack_order(clients, federation)
    return [sorted(group, key=place.__getitem__) for group in _split(ordered, ceil(len(clients) / stack))]


def in_stack_order(clients: Sequence[str], federation: Federation) -> list[str]:
    """Return clients as they are stacked: the largest come first."""
    return sorted(clients, key=federation.num_examples, reverse=True)


def _split(clients: Sequence[str], count: int) -> list[list[str]]:
    size = len(clients)
    return [list(clients[size * number // count : size * (number + 1) // count]) for number in range(count)]


def mean_of_groups(groups: Sequence[Sequence[str]], replies: Mapping[str, Fit], how: Aggregation) -> Weights:
    """Return the mean of replies that are here, group by group: bit for bit that of `PartialAggregator` and server."""
    total = PartialMean(how)
    for group in groups:
        of_group = PartialMean(how)
        for client in group:
            if client in replies:
                (total if len(group) == 1 else of_group).add(replies[client])
        if of_group.count:
            total.add_group(of_group.value(), of_group.weight, of_group.count)
    return total.value()


@dataclass(frozen=True, eq=False)
class PartialAggregate:
    """What came of a group of clients.

    ``mean``: The mean of their models; empty if all are lost.
    ``weight``, ``count``: As of `PartialMean`.
    ``replies``: The clients' replies, without models, in order.
    """

    mean: Weights
    weight: float
    count: int
    replies: list[Reply]


@dataclass(frozen=True, eq=False)
class PartialAggregator:
    """Carries out the requests of a group in this process, checks the models and adds them up.

    ``steps``: Reply steps, of which `ReplyStep.check` looks at each model.
    ``stacked``: Whether a group is trained as one stacked model.
    """

    state: SimulationState
    steps: Sequence[ReplyStep]
    how: Aggregation
    stacked: bool

    def __call__(self, requests: Sequence[StepRequest]) -> PartialAggregate:
        mean, replies, results = PartialMean(self.how), [], self._results(requests)
        for request in requests:
            reply = self._checked(request, results.pop(request.client) if results else self._result(request))
            replies.append(reply)
            if reply.fault is not None:
                continue
            fit: Fit = reply.value
            reply.value = Fit({}, fit.num_examples, fit.num_steps, fit.loss)
            if len(requests) == 1:  # without a copy
                return PartialAggregate(fit.model, mean.weight_of(fit), 1, replies)
            mean.add(fit)
            del fit
        return PartialAggregate(mean.value() if mean.count else {}, mean.weight, mean.count, replies)

    def _result(self, request: StepRequest) -> StepResult:
        serial = self.state.serial
        return serial.wait(serial.submit(request)[0])

    def _results(self, requests: Sequence[StepRequest]) -> dict[str, StepResult]:
        """Return the results of a stack; without stacks none, since one model at a time is in memory."""
        if not self.stacked:
            return {}
        by_client, serial = {request.client: request for request in requests}, self.state.serial
        stacked = in_stack_order(list(by_client), self.state.federation)
        futures = serial.submit(*(by_client[client] for client in stacked))
        return {client: serial.wait(future) for client, future in zip(stacked, futures, strict=True)}

    def _checked(self, request: StepRequest, result: StepResult) -> Reply:
        reply = Reply(request, result.reply, result.state, result.uses)
        try:
            for step in self.steps:
                step.check(self.state, reply)
        except Fault as fault:  # without its traceback, which holds the model
            return Reply(request, uses=reply.uses, fault=Fault(fault.text, fault.kind))
        reply.size = num_bytes(reply.value)
        return reply


# As a worker sends it


def encode_aggregate(found: PartialAggregate, steps: Sequence[ReplyStep]) -> Any:
    """Return a group's sum as a value of `aggregate_type`."""
    noting = [step.name for step in steps if step.note_type is not None]
    replies = [
        (
            reply.value if reply.fault is None else None,
            reply.state,
            reply.uses,
            reply.size,
            tuple(reply.notes.get(name) for name in noting),
            None if reply.fault is None else (reply.fault.text, str(reply.fault.kind)),
        )
        for reply in found.replies
    ]
    return found.mean, found.weight, found.count, replies


def decode_aggregate(value: Any, requests: Sequence[StepRequest], steps: Sequence[ReplyStep]) -> PartialAggregate:
    """Return the group's sum that `encode_aggregate` has encoded."""
    noting = [step.name for step in steps if step.note_type is not None]
    mean, weight, count, found = value
    replies = [
        Reply(
            request,
            fit,
            state,
            uses,
            None if fault is None else Fault(fault[0], FaultKind(fault[1])),
            size,
            {name: note for name, note in zip(noting, notes, strict=True) if note is not None},
        )
        for request, (fit, state, uses, size, notes, fault) in zip(requests, found, strict=True)
    ]
    return PartialAggregate(mean, weight, count, replies)


def aggregate_type(steps: Sequence[ReplyStep], client_state_type: type[Any]) -> Any:
    """Return the type of `encode_aggregate`, against which a worker's answer is checked."""
    notes = tuple.__class_getitem__(tuple(step.note_type | None for step in steps if step.note_type is not None))
    fault = tuple[str, str] | None
    one = tuple.__class_getitem__((Fit | None, client_state_type | None, dict[str, int], int, notes, fault))
    return tuple.__class_getitem__((Weights, float, int, list.__class_getitem__(one)))
