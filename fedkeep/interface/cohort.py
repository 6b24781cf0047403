"""Whom a method can ask, and how: the verbs of every schedule, parallel or sequential."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from fedkeep.interface.party import Client

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Step = Callable[Concatenate[Client[Any], P], R]
"""A bound client step of a method, such as ``self.train``: takes the client, then what the server sends."""


@dataclass(frozen=True)
class Each:
    """An argument that differs from client to client (see `each`)."""

    values: Mapping[str, Any]


def each(values: Mapping[str, T]) -> T:
    """Give each client its own argument: ``cohort.ask(step, each({"3": a, "7": b}))`` reaches clients 3 and 7 only.

    To the type checker the result is one client's value, so that the call is checked against the step.
    """
    return cast(T, Each(values))


class RemoteClient(ABC):
    """One client, as `round` sees it: a name that can be asked."""

    id: str

    @abstractmethod
    def ask(self, step: Step[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Let the client do a step and return its reply; None if it was lost, now or earlier in the round."""


class Cohort(ABC):
    """The clients of a round, in the order of the schedule. Iterating yields `RemoteClient`s."""

    @abstractmethod
    def __iter__(self) -> Iterator[RemoteClient]: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def ask(self, step: Step[P, R], *args: P.args, **kwargs: P.kwargs) -> Mapping[str, R]:
        """Let all clients do a step at once; return the replies by client id, in cohort order, lost clients left
        out."""

    @abstractmethod
    def start(self, step: Step[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Ask all clients without waiting. A client does its steps in the order asked, and this one by the round's
        end."""

    @abstractmethod
    def without(self, known: Container[str]) -> Cohort:
        """Return the cohort of those clients whose id ``known`` does not contain."""
