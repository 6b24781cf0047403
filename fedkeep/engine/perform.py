"""Perform client steps: here, when their result is waited for, or in worker processes (`fedkeep.engine.pool`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedkeep.data import Federation
from fedkeep.engine.toolbox import LocalClient, Workplace
from fedkeep.errors import ValueRefused
from fedkeep.interface import Algorithm
from fedkeep.interface.algorithm import function_of, is_client_step, sent, signature
from fedkeep.interface.codec import flatten, restore
from fedkeep.interface.values import copied


@dataclass(frozen=True, eq=False)
class Request:
    """A client step that shall be done.

    Attributes
    ----------
    client : its name. step : a bound step of the method. args, kwargs : what the server sends.
    state : what the client keeps; None for a client that never kept anything.
    task, round : where the run is.
    uses : how often each purpose has drawn randomness in this round.
    """

    client: str
    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: Any
    task: int
    round: int
    uses: dict[str, int]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a step left: its reply, and the client's state and uses of randomness after it."""

    reply: Any
    state: Any
    uses: dict[str, int]


@dataclass(frozen=True)
class Lost:
    """Why a request has no outcome; its client is out for the round, and its state as before."""

    reason: str


Ticket = Any
"""Stands for a request until its outcome is there."""


class Performer(ABC):
    """Takes requests and gives outcomes. ``ahead`` is how many requests nobody waits for yet it should be given."""

    ahead: int = 0

    def begin(self, round: int, cohort: Sequence[str]) -> None:  # noqa: B027 (most have nothing to prepare)
        """Prepare for a round; called before anybody is asked."""

    @abstractmethod
    def submit(self, request: Request) -> Ticket:
        """Take a request."""

    @abstractmethod
    def wait(self, ticket: Ticket) -> Outcome | Lost:
        """Return the outcome of a request, or why there is none.

        In processes of this machine an exception in a step is a bug: it is raised, with a note that says where.
        """

    @abstractmethod
    def drain(self) -> None:
        """Forget all requests, and return once none is being worked at."""

    @abstractmethod
    def stop(self) -> None:
        """Forget all requests at once, after an error; nothing can be submitted any more."""


@dataclass
class Here(Performer):
    """Performs steps in this process, each when its outcome is waited for."""

    place: Workplace
    federation: Federation
    new_state: Callable[[], Any]

    def submit(self, request: Request) -> Ticket:
        return request

    def wait(self, ticket: Ticket) -> Outcome:
        return self.perform(ticket)

    def perform(self, request: Request) -> Outcome:
        """Perform a request now."""
        party = LocalClient(
            self.place,
            request.client,
            self.federation.data(request.client),
            self.new_state() if request.state is None else copied(request.state),
            task=request.task,
            round=request.round,
            uses=request.uses,
        )
        try:
            reply = request.step(party, *request.args, **request.kwargs)
        except Exception as error:
            error.add_note(place_of(request))
            raise
        return Outcome(reply, party.state, request.uses)

    def drain(self) -> None:
        """Nothing was begun."""

    def stop(self) -> None:
        """Nothing was begun, and this process can always go on."""


def write_request(request: Request, name: Callable[[Tensor], str]) -> dict[str, Any]:
    """Return a request as JSON can hold it, with a name in the place of every tensor."""
    return {
        "client": request.client,
        "step": request.step.__name__,
        "task": request.task,
        "round": request.round,
        "uses": request.uses,
        "state": None if request.state is None else flatten(request.state, name),
        "args": [flatten(arg, name) for arg in request.args],
        "kwargs": {key: flatten(value, name) for key, value in request.kwargs.items()},
    }


def read_request(
    algorithm: Algorithm[Any, Any], written: Mapping[str, Any], tensors: Mapping[str, Tensor], client_state: type[Any]
) -> Request:
    """Return the request that `write_request` wrote, checked against the annotations of its step.

    Raises
    ------
    ValueRefused
        If what is asked is no client step, or is not asked as its annotations say.
    """
    step: Any = getattr(algorithm, str(written["step"]), None)
    if not is_client_step(step):
        raise ValueRefused(f"{written['step']!r} is no client step of {algorithm.name()}.")
    hints, names = signature(function_of(step)), sent(step)
    args = written["args"]
    return Request(
        written["client"],
        step,
        tuple(restore(arg, tensors, hints[name]) for name, arg in zip(names[: len(args)], args, strict=True)),
        {name: restore(value, tensors, hints[name]) for name, value in written["kwargs"].items()},
        None if written["state"] is None else restore(written["state"], tensors, client_state),
        written["task"],
        written["round"],
        written["uses"],
    )


def answer_type(step: Callable[..., Any], client_state: type[Any]) -> Any:
    """Return the type of what a performed step leaves: reply, state, uses, seconds of training and of teachers."""
    reply = signature(function_of(step))["return"]
    return tuple.__class_getitem__((reply, client_state, dict[str, int], float, float))


def place_of(request: Request) -> str:
    """Say which step this is, for errors."""
    return f"This happened in step {request.step.__name__!r} of client {request.client}, round {request.round}."
