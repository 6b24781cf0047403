"""A round in progress: which clients are asked, which are lost, and the way of their replies to the method.

Client states take effect only when the round is over, so that it can be rolled back.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from types import MethodType
from typing import Any

import torch

from fedkeep._utils import seeds
from fedkeep._utils.type_hints import annotations_of
from fedkeep.aggregation.mean import PartialMean
from fedkeep.errors import in_one_line
from fedkeep.interface import Algorithm, Fit
from fedkeep.interface.algorithm import server_arguments, unwrap_step
from fedkeep.interface.codec import decode, encode
from fedkeep.interface.cohort import Aggregation
from fedkeep.interface.pytree import copy_containers, num_bytes
from fedkeep.models import Weights
from fedkeep.models.weights import RunningMean
from fedkeep.rounds.messages import Fault, StepRequest, StepResult, check_arguments, no_reply
from fedkeep.rounds.partial_aggregation import PartialAggregate, PartialAggregator, in_stack_order
from fedkeep.rounds.reply_step import Attendance, Costs, Reply, ReplyStep, Round, set_aside
from fedkeep.rounds.reply_store import ReplyStore, fit_into_memory
from fedkeep.rounds.request_queue import RequestQueue
from fedkeep.rounds.state import SimulationState

Step = Callable[..., Any]


class TooFewClients(BaseException):  # not an Exception: a method that catches those must not swallow it
    """Fewer clients replied than ``run.min_clients``; the round is rolled back."""


class RoundState(Round):
    """Asks the clients of one round, takes their replies through the reply steps, and keeps the round's records.

    ``state``: What the round starts from. Its client states are replaced only when the round is over.
    ``steps``: The reply steps that take part, in order.
    ``queue``: The requests that are not done.
    ``mean``: Of the models that clients returned, if it is evaluated.
    """

    def __init__(self, state: SimulationState, number: int, cohort: list[str], steps: Sequence[ReplyStep]) -> None:
        self.state = state
        self.number = number
        self.cohort = cohort
        self.steps = [step for step in steps if step.applies(state)]
        self.queue = RequestQueue(state, self._ready)
        self.attendance = Attendance()
        self.client_states, self.uses, self.fits = {}, {}, []
        self.mean = RunningMean()
        self.costs = Costs()
        self._arrived: dict[str, Reply] = {}  # not accepted yet, since those of earlier clients have not arrived

    def start(self, requests: Sequence[StepRequest]) -> None:
        """Queue requests without waiting: each is carried out before its client's next one, whenever that is."""
        self.queue_up(requests)
        with self.timed():
            self.queue.prefetch()

    def queue_up(self, requests: Sequence[StepRequest]) -> list[str]:
        """Queue requests for which `collect` is called next, and return their clients."""
        self.queue.carry_out_deferred()
        with self.timed():
            self._queue(requests)
        return [request.client for request in requests]

    def ask_builtin(self, step: Step, clients: Sequence[str], *args: Any) -> dict[str, Any]:
        """Ask clients for a step that every method has, and return the replies of those that are not lost."""
        bound = MethodType(step, self.state.algorithm)
        requests = [StepRequest(client, bound, args, {}, self.task, self.round) for client in clients]
        return {client: reply.value for client, reply in self.collect(self.queue_up(requests)).items()}

    def combine(self, replies: dict[str, Reply]) -> dict[str, Any]:
        """Return the values of replies that were asked for together, as the method sees them."""
        for step in self.steps:
            replies = step.combine(self, replies)
        return {client: reply.value for client, reply in replies.items()}

    def finish(self) -> None:
        """Carry out all waiting requests, so that every step that was asked for is done by the end of the round."""
        self.queue.carry_out_deferred()
        self.collect(list(self.queue.waiting), one_by_one=True)

    def abandon(self) -> None:
        """Drop all requests that are waiting or running."""
        with self.timed():
            self.queue.waiting.clear()
            self.queue.deferred = None
            for step in self.steps:
                step.abandon(self)
            self.queue.clear()

    def unused_replies(self) -> Iterator[Reply]:
        """Yield the replies that have arrived, or will, after the round was rolled back."""
        yield from self._arrived.values()
        for client in list(self.queue.under_way):
            request, result = self.queue.take(client)
            yield _reply(request, result)

    def refuse(self, reply: Reply, fault: Fault) -> None:
        """Refuse a reply that had arrived: the client's state is as it was before the step."""
        self.restore(reply)
        self._lose(reply.client, fault)

    def restore(self, reply: Reply) -> None:
        """Give a client the state back that it had before a step."""
        if reply.state_before is None:
            self.client_states.pop(reply.client, None)
        else:
            self.client_states[reply.client] = reply.state_before

    def lose_in_sum(self, replies: Mapping[str, Reply], faults: Mapping[str, Fault]) -> None:
        """Lose clients whose models were to be summed up."""
        for client, fault in faults.items():
            self.fits = [one for one in self.fits if one[0] != client]
            self.answered.discard(client)
            self.restore(replies[client])
            self._note_lost(client, fault)
        self._require_clients()

    @contextmanager
    def between_rounds(self) -> Iterator[None]:
        """Ask clients at the beginning or the end of a task within this block; no client counts as lost at first."""
        attendance = self.attendance
        lost, attendance.lost, attendance.asks_all = attendance.lost, {}, True
        yield
        attendance.lost_between_rounds |= attendance.lost
        attendance.lost, attendance.asks_all = lost, False

    @contextmanager
    def uncounted(self) -> Iterator[Mapping[str, Fault]]:
        """Ask clients within this block for what the round does not count; yield who is lost in it."""
        before = self.attendance, replace(self.costs), dict(self.client_states), dict(self.uses)
        self.attendance = Attendance(asks_all=True)
        yield self.attendance.lost
        self.attendance, self.costs, states, uses = before
        if self.state.federation.holds_client_data:  # a site counts its calls, and names its state by the last
            self.client_states, self.uses = states, uses

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the seconds of a block as waiting for clients, not as the server's work."""
        timer = self.state.context.timer
        began, before = time.perf_counter(), timer.total
        try:
            yield
        finally:
            self.costs.waiting_seconds += time.perf_counter() - began
            self.costs.client_seconds += timer.total - before

    def record(self) -> dict[str, Any]:
        """Return the round's record; the loss is None if nobody told it, or it is not finite."""
        order = {client: number for number, client in enumerate(self.cohort)}  # sums must not depend on timing
        fits = [fit for _, fit in sorted(self.fits, key=lambda one: order.get(one[0], len(order)))]
        examples, privacy = sum(fit.num_examples for fit in fits), self.state.settings.privacy
        is_hidden = privacy.secure_aggregation or privacy.noise_multiplier or privacy.client_noise_multiplier
        has_loss = examples and not is_hidden
        loss = sum(fit.loss * fit.num_examples for fit in fits) / examples if has_loss else None
        lost = self.attendance.lost_between_rounds | self.attendance.lost
        record: dict[str, Any] = {
            "task": self.task,
            "round": self.number,
            "cohort": self.cohort,
            "lost": {client: fault.text for client, fault in lost.items()},
            "loss": loss if loss is not None and isfinite(loss) else None,
            "examples": examples,
            "down": self.costs.down,
            "up": self.costs.up,
        }
        for step in self.steps:
            record |= step.record(self)
        return record

    def _queue(self, requests: Sequence[StepRequest]) -> None:
        aside = set_aside(self.steps, self.state)
        for request in requests:
            if request.client in aside and request.client not in self.lost:
                self._lose(request.client, no_reply(aside[request.client]))
            if request.client not in self.lost:
                try:
                    self.costs.down += num_bytes([request.args, request.kwargs])
                except TypeError:
                    check_arguments(request)
                    raise
                self.queue.add(self._delivered(request))

    def collect(self, clients: Sequence[str], *, one_by_one: bool = False) -> dict[str, Reply]:
        """Carry out all waiting requests of some clients, and return the last reply of each that is not lost.

        Clients are finished side by side if there are workers or stacks, and nobody wants them ``one_by_one``.
        """
        state, queue, models = self.state, self.queue, list[Reply]()
        replies: dict[str, Reply] = {}
        expected = 0 if state.own_contexts else len(clients)  # other networks, other sizes
        store = ReplyStore(state.weights_file, expected) if len(clients) > 1 else None
        in_round = None if self.attendance.asks_all else len(self.cohort)
        together = not one_by_one and (state.executor.prefetch or state.settings.stack > 1)
        with self.timed():
            for group in [clients] if together else [[client] for client in clients]:
                while unfinished := [name for name in group if name not in self.lost and queue.is_busy(name)]:
                    queue.launch_together(unfinished)
                    if len(group) == 1:  # a cohort that is asked at once keeps all workers busy anyway
                        queue.prefetch()
                    # Checked as they arrive, so that few results wait in memory; accepted in the clients' order, on
                    # which the record depends.
                    asked, self._arrived = set(unfinished), {}
                    arrived = self._arrived
                    order = deque(client for client in unfinished if client in queue.under_way)
                    under_way = [client for client in queue.under_way if client in asked]
                    for request, future in queue.arriving(under_way, in_round):
                        result = future if isinstance(future, Fault) else state.executor.wait(future)
                        queue.count_seconds(request)
                        arrived[request.client] = self._receive(request, result, store)
                        del future, result  # which may be stored by now, while the next one is made
                        if store is not None:
                            store.trim()
                        while order and order[0] in arrived:
                            reply = arrived.pop(order.popleft())
                            if self._accept(reply):
                                replies[reply.client] = reply
                                models += [reply] if isinstance(reply.value, Fit) else []
                            del reply
        self._screen(models)
        for client in clients:
            queue.waiting.pop(client, None)
        return {client: replies[client] for client in clients if client in replies and client not in self.lost}

    def _receive(self, request: StepRequest, result: StepResult | Fault, store: ReplyStore | None) -> Reply:
        """Take one reply through the steps alone; nothing of the round changes."""
        reply, state = _reply(request, result), self.state
        if reply.fault is not None:
            return reply
        try:
            for step in self.steps:
                step.receive(self, reply)
        except Fault as fault:  # without its traceback, which holds the model
            return Reply(request, uses=reply.uses, fault=Fault(fault.text, fault.kind, fault.uses))
        reply.size = num_bytes(reply.value)
        if state.settings.through_codec:
            reply.state = decode(encode(reply.state), state.client_states.type, state.settings.device)
            hint = annotations_of(unwrap_step(request.step))["return"]
            reply.value = decode(encode(reply.value), hint, state.settings.device)
        else:
            reply.value = copy_containers(reply.value)
        if store is not None:
            reply.value, reply.notes = store.keep((reply.value, reply.notes))
        return reply

    def _accept(self, reply: Reply) -> bool:
        """Keep the client's new state, and tell whether the reply goes on."""
        for step in self.steps:
            step.arrived(self, reply)
        client = reply.client
        if reply.fault is not None:
            self._lose(client, reply.fault)
            return False
        reply.state_before = self.client_states.get(client)
        self.client_states[client], self.uses[client] = reply.state, reply.uses
        self.costs.up += reply.size
        self.answered.add(client)
        return True

    def may_sum(self, step: Step, clients: Sequence[str]) -> bool:
        """Tell whether models are added up where they are trained: in workers, or here if memory cannot hold all."""
        state, method = self.state, self.state.algorithm
        return (
            state.executor.partial_aggregation
            and bool(state.executor.prefetch or not fit_into_memory(len(clients), state.server.model))
            and len(clients) > 1
            and method.only_averages
            and annotations_of(unwrap_step(step)).get("return") is Fit
            and type(method).validate_reply is Algorithm.validate_reply  # which may need the server
            and not (state.averages_local_models or state.own_contexts or state.settings.through_codec)
            and all(each.allows_partial_aggregation(state) for each in self.steps)
        )

    def aggregate_groups(
        self, clients: Sequence[str], groups: Sequence[Sequence[str]], how: Aggregation
    ) -> tuple[Weights, list[tuple[str, Fit]], list[list[StepRequest]]] | None:
        """Carry out the waiting requests of clients, and add their models up where they are trained.

        Returns: The mean, each client's `Fit` without its model, and what was carried out; None if the replies
            themselves are needed, as where a step that compares them refuses one: then all requests wait again.
        """
        state, found, arrived = self.state, dict[str, Reply](), dict[int, PartialAggregate]()
        requests = self.queue.take_next([client for group in groups for client in group])
        if requests is None:
            return None
        ready = [[self._ready(requests[client]) for client in group] for group in groups]
        for client, one in zip(requests, (one for group in ready for one in group), strict=True):
            if isinstance(one, Fault):
                found[client] = Reply(requests[client], fault=one)
        sent = [left for group in ready if (left := [one for one in group if not isinstance(one, Fault)])]
        again = [[replace(one, uses=dict(one.uses)) for one in group] for group in sent]  # a step counts its uses in it
        mean, merged = PartialMean(how), 0
        aggregator = PartialAggregator(state, self.steps, how, stacked=state.settings.stack > 1)
        with self.timed():
            for number, aggregate in self.queue.aggregating(sent, aggregator, len(self.cohort)):
                arrived[number] = aggregate
                del aggregate
                while merged in arrived:
                    done = arrived.pop(merged)
                    merged += 1
                    found |= {reply.client: reply for reply in done.replies}
                    if done.count:
                        mean.add_group(done.mean, done.weight, done.count)
                    del done
        replies = [found[client] for client in clients if client in found]
        models = [reply for reply in replies if reply.fault is None]
        if any(True for step in self.steps for _ in step.screen(self, models)):
            for request in requests.values():
                self.queue.add(request)
            return None
        for reply in replies:
            self._accept(reply)
        self._take(models)
        return mean.value(), [(reply.client, reply.value) for reply in models], again

    def train_again(self, sent: Sequence[Sequence[StepRequest]]) -> dict[str, Weights]:
        """Return the models of trainings that `aggregate_groups` carried out; nothing of the round changes."""
        state, store, futures = self.state, ReplyStore(self.state.weights_file), list[tuple[str, Any]]()
        with self.timed():
            groups = sent if state.settings.stack > 1 else [[request] for group in sent for request in group]
            for group in groups:
                by_client = {request.client: request for request in group}
                ordered = in_stack_order(list(by_client), state.federation)
                futures += zip(ordered, state.executor.submit(*map(by_client.__getitem__, ordered)), strict=True)
            results = ((client, state.executor.wait(future)) for client, future in futures)
            return {c: store.keep(found.reply.model) for c, found in results if not isinstance(found, Fault)}

    def _screen(self, models: Sequence[Reply]) -> None:
        """Let steps compare models that were asked for together, and keep those that all of them accept."""
        for step in self.steps:
            for reply, fault in step.screen(self, [one for one in models if one.client not in self.lost]):
                if reply.client not in self.lost:
                    self.refuse(reply, fault)
        self._take([reply for reply in models if reply.client not in self.lost])

    def _take(self, models: Sequence[Reply]) -> None:
        """Keep what the round needs of models that all steps accept."""
        for reply in models:
            for step in self.steps:
                step.accepted(self, reply)
            self._add_fit(reply.client, reply.value)

    def _add_fit(self, client: str, fit: Fit) -> None:
        """Keep what the record and the mean of the round need of a training."""
        if self.state.averages_local_models and fit.num_steps:
            self.mean.add(fit.model)
        if self.state.algorithm.sequential:  # the model takes the place of the one before
            self.state.weights_file.trimmer.dropped(num_bytes(fit.model))
        self.fits.append((client, Fit({}, fit.num_examples, fit.num_steps, fit.loss)))

    def _lose(self, client: str, fault: Fault) -> None:
        self._note_lost(client, fault)
        self._require_clients()

    def _note_lost(self, client: str, fault: Fault) -> None:
        fault = Fault(in_one_line(fault.text), fault.kind)  # it may contain text from the client
        self.attendance.lost[client] = fault
        if fault.refused:
            self.attendance.refused[client] = fault
        self.queue.waiting.pop(client, None)

    def _require_clients(self) -> None:
        """End the round if too few of its clients are left."""
        if sum(name not in self.lost for name in self.cohort) < self.fewest:
            raise TooFewClients

    def _ready(self, request: StepRequest) -> StepRequest | Fault:
        """Return a request with its client's state as it is now, or why it fails on demand."""
        client, state = request.client, self.state
        settings = state.settings
        if dropout := settings.run.client_dropout:
            number = torch.rand((), generator=seeds.rng(settings.seed, "dropout", round=self.number, client=client))
            if number < dropout:
                return no_reply("dropped out")
        reason = settings.fault_injector and settings.fault_injector(self.number, client, request.step.__name__)
        if reason is not None:
            return no_reply(reason)
        now = self.client_states.get(client, state.client_states.get(client))
        return replace(request, state=now, uses=dict(self.uses.get(client, {})))

    def _delivered(self, request: StepRequest) -> StepRequest:
        """Return a request as its client receives it."""
        if not self.state.settings.through_codec:
            return replace(request, args=copy_containers(request.args), kwargs=copy_containers(request.kwargs))
        hints, device = annotations_of(unwrap_step(request.step)), self.state.settings.device
        names = server_arguments(request.step)
        args = tuple(decode(encode(arg), hints[name], device) for name, arg in zip(names, request.args, strict=False))
        kwargs = {name: decode(encode(arg), hints[name], device) for name, arg in request.kwargs.items()}
        return replace(request, args=args, kwargs=kwargs)


def _reply(request: StepRequest, result: StepResult | Fault) -> Reply:
    if isinstance(result, Fault):
        return Reply(request, uses=result.uses, fault=result)
    return Reply(request, result.reply, result.state, result.uses)
