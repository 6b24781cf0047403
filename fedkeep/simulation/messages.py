"""What a client is asked to do, and what comes of it, as values and as they are written down to travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedkeep._utils.type_hints import annotations_of
from fedkeep.errors import ValueRefused
from fedkeep.interface import Algorithm
from fedkeep.interface.algorithm import is_client_step, server_arguments, unwrap_step
from fedkeep.interface.codec import encode_structure, from_structure


@dataclass(frozen=True, eq=False)
class ClientTask:
    """A client step to carry out.

    Attributes
    ----------
    client : str
        Its id.
    step : Callable
        A bound step of the method.
    args, kwargs
        What the server sends.
    task, round : int
        Where the run is: the task of the stream, and its round.
    state : object
        What the client keeps; None for a client that never kept anything.
    uses : dict[str, int]
        How often each purpose has drawn randomness in this round.
    """

    client: str
    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    task: int
    round: int
    state: Any = None
    uses: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """Say which step this is, for errors."""
        where = f"task {self.task}, round {self.round}" if self.task > 1 else f"round {self.round}"
        return f"This happened in step {self.step.__name__!r} of client {self.client}, {where}."


@dataclass(frozen=True, eq=False)
class TaskResult:
    """What a step left: its reply, and the client's state and uses of randomness after it."""

    reply: Any
    state: Any
    uses: dict[str, int]


@dataclass(frozen=True)
class ClientFailure:
    """Why a task has no result; its client is out for the round, and its state is as before."""

    reason: str


def encode_task(task: ClientTask, name: Callable[[Tensor], str]) -> dict[str, Any]:
    """Return a task as JSON can hold it, with a name in the place of every tensor."""
    return {
        "client": task.client,
        "step": task.step.__name__,
        "task": task.task,
        "round": task.round,
        "uses": task.uses,
        "state": None if task.state is None else encode_structure(task.state, name),
        "args": [encode_structure(arg, name) for arg in task.args],
        "kwargs": {key: encode_structure(value, name) for key, value in task.kwargs.items()},
    }


def decode_task(
    algorithm: Algorithm[Any, Any], encoded: Mapping[str, Any], tensors: Mapping[str, Tensor], client_state: type[Any]
) -> ClientTask:
    """Return the task that `encode_task` wrote, checked against the annotations of its step.

    Raises
    ------
    ValueRefused
        If what is asked is no client step, or is not asked as its annotations say.
    """
    step: Any = getattr(algorithm, str(encoded["step"]), None)
    if not is_client_step(step):
        raise ValueRefused(f"{encoded['step']!r} is no client step of {algorithm.name()}.")
    hints, names = annotations_of(unwrap_step(step)), server_arguments(step)
    args = encoded["args"]
    return ClientTask(
        encoded["client"],
        step,
        tuple(from_structure(arg, tensors, hints[name]) for name, arg in zip(names[: len(args)], args, strict=True)),
        {name: from_structure(value, tensors, hints[name]) for name, value in encoded["kwargs"].items()},
        encoded["task"],
        encoded["round"],
        None if encoded["state"] is None else from_structure(encoded["state"], tensors, client_state),
        encoded["uses"],
    )


def results_type(steps: Sequence[Callable[..., Any]], client_state: type[Any]) -> Any:
    """Return the type of what steps leave: (reply, state, uses) of each, seconds of training and of teachers."""
    replies = (annotations_of(unwrap_step(step))["return"] for step in steps)
    results = tuple(tuple.__class_getitem__((reply, client_state, dict[str, int])) for reply in replies)
    return tuple.__class_getitem__((tuple.__class_getitem__(results), float, float))
