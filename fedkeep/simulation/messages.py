"""What a client is asked to do, and what comes of it, as values and as they are written down to travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedkeep.annotations import annotations_of
from fedkeep.errors import ValueRefused
from fedkeep.interface import Algorithm
from fedkeep.interface.algorithm import function_of, is_client_step, sent
from fedkeep.interface.codec import flatten, restore


@dataclass(frozen=True, eq=False)
class ClientTask:
    """A client step that shall be done.

    Attributes
    ----------
    client : its name. step : a bound step of the method. args, kwargs : what the server sends.
    state : what the client keeps; None for a client that never kept anything.
    task, round : where the run is: the task, and its round.
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
class TaskResult:
    """What a step left: its reply, and the client's state and uses of randomness after it."""

    reply: Any
    state: Any
    uses: dict[str, int]


@dataclass(frozen=True)
class ClientFailure:
    """Why a request has no outcome; its client is out for the round, and its state as before."""

    reason: str


def encode_task(request: ClientTask, name: Callable[[Tensor], str]) -> dict[str, Any]:
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


def decode_task(
    algorithm: Algorithm[Any, Any], written: Mapping[str, Any], tensors: Mapping[str, Tensor], client_state: type[Any]
) -> ClientTask:
    """Return the request that `encode_task` wrote, checked against the annotations of its step.

    Raises
    ------
    ValueRefused
        If what is asked is no client step, or is not asked as its annotations say.
    """
    step: Any = getattr(algorithm, str(written["step"]), None)
    if not is_client_step(step):
        raise ValueRefused(f"{written['step']!r} is no client step of {algorithm.name()}.")
    hints, names = annotations_of(function_of(step)), sent(step)
    args = written["args"]
    return ClientTask(
        written["client"],
        step,
        tuple(restore(arg, tensors, hints[name]) for name, arg in zip(names[: len(args)], args, strict=True)),
        {name: restore(value, tensors, hints[name]) for name, value in written["kwargs"].items()},
        None if written["state"] is None else restore(written["state"], tensors, client_state),
        written["task"],
        written["round"],
        written["uses"],
    )


def results_type(steps: Sequence[Callable[..., Any]], client_state: type[Any]) -> Any:
    """Return the type of what performed steps leave: (reply, state, uses) of each, seconds of training and teachers."""
    replies = (annotations_of(function_of(step))["return"] for step in steps)
    outcomes = tuple(tuple.__class_getitem__((reply, client_state, dict[str, int])) for reply in replies)
    return tuple.__class_getitem__((tuple.__class_getitem__(outcomes), float, float))


def describe_task(request: ClientTask) -> str:
    """Say which step this is, for errors."""
    where = f"task {request.task}, round {request.round}" if request.task > 1 else f"round {request.round}"
    return f"This happened in step {request.step.__name__!r} of client {request.client}, {where}."
