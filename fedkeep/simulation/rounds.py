"""A round in flight: who was asked, who was lost, what travelled, and the states that stand only if the round does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, Final

import torch

from fedkeep import doing, seeds
from fedkeep.annotations import annotations_of
from fedkeep.errors import in_one_line
from fedkeep.interface import Copy, Fit
from fedkeep.interface.algorithm import function_of, sent
from fedkeep.interface.codec import decode, encode
from fedkeep.interface.steps import label_counts, not_counts
from fedkeep.interface.values import copied, found_in, not_finite, payload
from fedkeep.models import Weights
from fedkeep.models.weights import same_form
from fedkeep.simulation.executor import Future
from fedkeep.simulation.messages import ClientFailure, ClientTask
from fedkeep.training.model_runner import ModelRunner

if TYPE_CHECKING:
    from fedkeep.simulation.simulation import Simulation

Step = Callable[..., Any]
LOST: Final = object()


class TooFewClients(BaseException):  # not an Exception: a method that catches those must not swallow it
    """Fewer clients answered than the recipe's minimum; the engine undoes the round."""


@dataclass
class Call:
    """One call that waits for its turn."""

    step: Step
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class RoundState:
    """Performs the calls of one round and keeps its books."""

    def __init__(self, engine: Simulation, number: int, cohort: list[str]) -> None:
        self.engine = engine
        self.number = number  # over the whole run
        self.task, self.round = engine.schedule.place(number)
        self.cohort = cohort
        self.lost: dict[str, str] = {}
        self.missed: dict[str, str] = {}  # lost at a task's beginning or end, but not for the round
        self.counting = True
        self.states: dict[str, Any] = {}
        self.uses: dict[str, dict[str, int]] = {}
        self.waiting: dict[str, list[Call]] = {}
        self.under_way: dict[str, tuple[Call, str | None, Future]] = {}
        self.down = self.up = 0
        self.fits: list[tuple[str, Fit]] = []
        self.visits: list[dict[str, Any]] = []
        self.evaluating = 0.0
        self.asking = 0.0  # seconds in which the method's server half waited for clients
        self.clients_worked = 0.0  # seconds of training and teachers in these
        self.steps: dict[str, float] = {}  # seconds spent waiting for each step, by its name
        self.taken: dict[str, int] = {}  # how often each was waited for

    def start(self, client: str, call: Call) -> None:
        """Queue a call; it is performed before the client's next one, which gives the same result as at once."""
        with self._waiting():
            self._queue(client, call)
            self._look_ahead()

    def ask(self, client: str, call: Call) -> Any:
        """Perform a call after those that wait before it; return the reply, or LOST."""
        self.start(client, call)
        with self._waiting():
            return self._finish(client)

    def ask_all(self, calls: Mapping[str, Call]) -> dict[str, Any]:
        """Perform a call of each client, side by side where there are workers; return the replies, or LOST."""
        with self._waiting():
            for client, call in calls.items():
                self._queue(client, call)
            replies: dict[str, Any] = {}
            if self.engine.executor.ahead or self.engine.stack > 1:
                while unfinished := [client for client in calls if self._is_unfinished(client)]:
                    self._launch_together(unfinished)
                    for client in unfinished:
                        replies[client] = self._take(client) if client in self.under_way else LOST
            else:
                replies = {client: self._finish(client) for client in calls}
            return {client: LOST if client in self.lost else replies[client] for client in calls}

    def settle(self) -> None:
        """Perform what still waits: every step that was asked is done by the end of the round."""
        with self._waiting():
            for client in list(self.waiting):
                self._finish(client)

    def abandon(self) -> None:
        """Drop all that waits or is under way."""
        with self._waiting():
            self.waiting.clear()
            self.under_way.clear()
            self.engine.executor.drain()

    def in_order(self) -> list[tuple[str, Fit]]:
        """Return the fits in the cohort's order, so that no sum depends on who was quicker."""
        place = {client: number for number, client in enumerate(self.cohort)}
        return sorted(self.fits, key=lambda item: place.get(item[0], len(place)))

    def record(self) -> dict[str, Any]:
        """Return the round's record, without what only the engine knows."""
        fits = [fit for _, fit in self.in_order()]
        examples = sum(fit.examples for fit in fits)
        loss = sum(fit.loss * fit.examples for fit in fits) / examples if examples else None
        books: dict[str, Any] = {
            "task": self.task,
            "round": self.number,
            "cohort": self.cohort,
            "lost": self.missed | self.lost,
            "loss": loss,
            "examples": examples,
            "down": self.down,
            "up": self.up,
        }
        return books | ({"visits": self.visits} if self._watched else {})

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        clock = self.engine.context.clock
        began, worked = time.perf_counter(), clock.worked
        try:
            yield
        finally:
            self.asking += time.perf_counter() - began
            self.clients_worked += clock.worked - worked

    def _queue(self, client: str, call: Call) -> None:
        if client not in self.lost:
            self.down += payload([call.args, call.kwargs])
            self.waiting.setdefault(client, []).append(self._received(call))

    def _finish(self, client: str) -> Any:
        """Perform all calls of a client that wait; return the last reply, or LOST."""
        reply: Any = LOST
        while self._is_unfinished(client):
            self._launch(client)
            self._look_ahead()
            reply = self._take(client)
        self.waiting.pop(client, None)
        return LOST if client in self.lost else reply

    def _is_unfinished(self, client: str) -> bool:
        return client not in self.lost and (client in self.under_way or bool(self.waiting.get(client)))

    def _look_ahead(self) -> None:
        """Let idle workers begin with calls that nobody waits for yet, in the order in which they were asked."""
        if self.engine.stack > 1:  # else who is trained with whom would depend on who was idle
            return
        free = self.engine.executor.ahead - len(self.under_way)
        if free > 0:
            idle = [client for client in self.waiting if self.waiting[client] and client not in self.under_way]
            for client in idle[:free]:
                self._launch(client)

    def _launch_together(self, clients: Sequence[str]) -> None:
        """Begin the next call of many clients: those with most to do first, in groups of about the same size.

        Who is trained with whom follows from the cohort alone, not from the workers, since it may change rounding.
        """
        asked = [client for client in clients if self.waiting.get(client)]
        asked.sort(key=self.engine.federation.size, reverse=True)
        groups = ceil(len(asked) / self.engine.stack)
        for number in range(groups):
            self._launch(*asked[len(asked) * number // groups : len(asked) * (number + 1) // groups])

    def _launch(self, *clients: str) -> None:
        """Begin the next call of clients, unless one is under way, as one group."""
        requests: dict[str, ClientTask] = {}
        for client in clients:
            if client in self.under_way:
                continue
            call = self.waiting[client].pop(0)
            reason = self._fails(client, call.step.__name__)
            self.under_way[client] = call, reason, None
            if reason is None:
                state = self.states.get(client, self.engine.states.get(client))
                uses = dict(self.uses.get(client, {}))
                requests[client] = ClientTask(
                    client, call.step, call.args, call.kwargs, state, self.task, self.round, uses
                )
        if not requests:
            return
        for client, ticket in zip(requests, self.engine.executor.submit(*requests.values()), strict=True):
            call, reason, _ = self.under_way[client]
            self.under_way[client] = call, reason, ticket

    def _take(self, client: str) -> Any:
        """Wait for the call of a client that is under way; return its reply, or LOST."""
        engine = self.engine
        call, reason, ticket = self.under_way[client]
        began, step = time.perf_counter(), call.step.__name__
        self._say(step)
        try:
            outcome = engine.executor.wait(ticket) if reason is None else ClientFailure(reason)
        finally:
            del self.under_way[client]
            self.steps[step] = self.steps.get(step, 0.0) + time.perf_counter() - began
        if not isinstance(outcome, ClientFailure):
            reason = self._refused(client, call.step, outcome.reply)
            outcome = outcome if reason is None else ClientFailure(reason)
        if isinstance(outcome, ClientFailure):
            self._lose(client, outcome.reason)
            return LOST
        self.states[client], self.uses[client] = outcome.state, outcome.uses
        self.up += payload(outcome.reply)
        if engine.through_codec:
            self.states[client] = decode(encode(outcome.state), engine.client_state, engine.device)
            reply = decode(encode(outcome.reply), annotations_of(function_of(call.step))["return"], engine.device)
        else:
            reply = copied(outcome.reply)
        if isinstance(reply, Fit):
            self._came_back(client, reply)
        return reply

    def _say(self, step: str) -> None:
        """Say how many replies to a step there were before the next one is waited for.

        Of how many, only the method knows that asks everybody, or the same clients again.
        """
        done = self.taken.get(step, 0)
        self.taken[step] = done + 1
        doing.say(step, done, len(self.cohort) if self.counting and done < len(self.cohort) else None)

    def _fails(self, client: str, step: str) -> str | None:
        plan, seed = self.engine.schedule, self.engine.seed
        if plan.dropout:
            luck = torch.rand((), generator=seeds.generator(seed, "dropout", round=self.number, client=client))
            if luck < plan.dropout:
                return "dropped out"
        return self.engine.lose(self.number, client, step) if self.engine.lose else None

    def _refused(self, client: str, step: Step, reply: Any) -> str | None:
        """Return why the border does not let a reply through, or None."""
        where = not_finite(reply)
        if where is not None:
            return f"answered with a {where} that is not finite"
        if function_of(step) is label_counts:
            fault = not_counts(reply, self.engine.context.classes, self.engine.federation.size(client))
            return fault and f"answered with {fault}"
        networks = self.engine.context_of(client).networks
        mismatches = [same_form(reply.model, networks.initial)] if isinstance(reply, Fit | Copy) else []
        mismatches += (_mismatch(weights, networks) for weights in found_in(reply, Mapping))
        if mismatch := next(filter(None, mismatches), None):
            return f"answered with another model: {mismatch}"
        try:
            fault = self.engine.algorithm.fault(self.engine.server, reply, self.engine.federation.size(client))
        except Exception as error:  # a reply that cannot even be looked at must not stop everybody
            fault = f"what cannot be checked ({type(error).__name__}: {error})"
        return fault and f"answered with {fault}"

    def _lose(self, client: str, reason: str) -> None:
        self.lost[client] = in_one_line(reason)  # it may hold names and words that came from the client
        self.waiting.pop(client, None)
        if self.counting and self._answering() < min(self.engine.schedule.min_clients, len(self.cohort)):
            raise TooFewClients

    def _answering(self) -> int:
        return sum(name not in self.lost for name in self.cohort)

    @contextmanager
    def with_everyone(self) -> Iterator[None]:
        """Ask clients outside the round, at a task's beginning or end: none is out yet, and none's loss undoes a
        round."""
        lost, self.lost, self.counting = self.lost, {}, False
        yield
        self.missed |= self.lost
        self.lost, self.counting = lost, True

    def _came_back(self, client: str, fit: Fit) -> None:
        if self._watched:
            self._visit(client, fit.model, self.fits[-1][0] if self.fits else None)
        self.fits.append((client, fit))

    def look_at_own_models(self) -> None:
        """Evaluate the models that the round's clients keep for themselves, if they should be."""
        for client in self.cohort if self._watched else ():
            if client in self.states and (model := self.engine.algorithm.own_model(self.states[client])):
                self._visit(client, model, None)

    @property
    def _watched(self) -> bool:
        return self.engine.schedule.evaluate_local_models and self.engine.schedule.is_due(self.round)

    def _visit(self, client: str, model: Weights, before: str | None) -> None:
        """Evaluate a client's model; ``before`` is who was visited before it, on whose examples it is tried too."""
        began = time.perf_counter()
        self.visits.append(
            {
                "client": client,
                "correct": self.engine.evaluate(model, client).correct,
                "own": self.engine.evaluate_on(client, model, client),
                "previous": None if before is None else self.engine.evaluate_on(before, model, client),
            }
        )
        self.evaluating += time.perf_counter() - began

    def _received(self, call: Call) -> Call:
        """Return the call as it arrives at the client."""
        if not self.engine.through_codec:
            return Call(call.step, copied(call.args), copied(call.kwargs))
        hints = annotations_of(function_of(call.step))
        names = sent(call.step)
        args = tuple(
            decode(encode(arg), hints[name], self.engine.device) for name, arg in zip(names, call.args, strict=False)
        )
        kwargs = {name: decode(encode(arg), hints[name], self.engine.device) for name, arg in call.kwargs.items()}
        return Call(call.step, args, kwargs)


def _mismatch(weights: Mapping[Any, Any], networks: ModelRunner) -> str | None:
    """Return why what stands under a model's names is not of the model's form; parameters alone are enough."""
    if weights.keys().isdisjoint(networks.initial):
        return None
    whole = weights.keys() != set(networks.parameters)
    expected = networks.initial if whole else {name: networks.initial[name] for name in networks.parameters}
    return same_form(weights, expected)
