"""The clients that a method can ask, and the ways to ask them, for parallel and sequential schedules alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, cast

from fedkeep.interface.party import Client
from fedkeep.models import Weights

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Aggregation = Literal["num_examples", "uniform"]
"""How clients are weighted in a mean: by their numbers of examples, or all alike that have trained."""

Step = Callable[Concatenate[Client[Any], P], R]
"""A bound client step of a method, such as ``self.train``: takes the client, then what the server sends."""


@dataclass(frozen=True)
class Each:
    """An argument that differs between clients; made by `each`.

    ``values``: The argument for each client, by client id.
    """

    values: Mapping[str, Any]


def each(values: Mapping[str, T]) -> T:
    """Give each client its own argument.

    Parameters
    ----------
    values : Mapping[str, T]
        The argument for each client, by client id. Clients that are not in it are not asked.

    Returns
    -------
    T
        A stand-in for the argument, to be given to `Cohort.ask` or `Cohort.start`. Its declared type is that of one
        client's value, so that a type checker compares the call with the step.

    Examples
    --------
    Ask clients 3 and 7 only, each with an argument of its own::

        cohort.ask(self.train, each({"3": model_a, "7": model_b}))
    """
    return cast(T, Each(values))


class Replies(Mapping[str, R]):
    """Replies of a cohort, by client; if only their mean is asked for, models are added up where they are trained."""

    @abstractmethod
    def mean(self, how: Aggregation) -> Weights:
        """Return the mean of the replies' models, added up in groups that follow from the cohort alone."""


class RemoteClient(ABC):
    """One client of a cohort, as `Algorithm.round` sees it.

    Attributes
    ----------
    id : str
        In a simulation the client's number as text, from ``"0"`` on, whatever the data call it; at real sites the
        site's name.
    """

    id: str

    @abstractmethod
    def ask(self, step: Step[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Let this client carry out a step, and wait for its reply.

        Parameters
        ----------
        step : Callable
            A method that is marked with `on_client`, such as ``self.train``.
        *args, **kwargs
            What the step takes after the client.

        Returns
        -------
        R or None
            The reply; None if the client was lost, in this step or earlier in the round.
        """


class Cohort(ABC):
    """The clients of a round, in the order of the schedule; iterate over it to get each `RemoteClient`."""

    @abstractmethod
    def __iter__(self) -> Iterator[RemoteClient]: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def ask(self, step: Step[P, R], *args: P.args, **kwargs: P.kwargs) -> Mapping[str, R]:
        """Let all clients carry out a step at the same time, and wait for their replies.

        Parameters
        ----------
        step : Callable
            A method that is marked with `on_client`, such as ``self.train``.
        *args, **kwargs
            What the step takes after the client; use `each` where clients get different values.

        Returns
        -------
        Mapping[str, R]
            The replies by client id, in the order of the cohort. Lost clients are missing.
        """

    @abstractmethod
    def start(self, step: Step[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Let all clients carry out a step without waiting for it.

        A client carries out its steps in the order in which they were asked for. A started step is finished by the end
        of the round at the latest.

        Parameters
        ----------
        step : Callable
            A method that is marked with `on_client` and returns None.
        *args, **kwargs
            What the step takes after the client; use `each` where clients get different values.
        """

    @abstractmethod
    def without(self, known: Container[str]) -> Cohort:
        """Return the cohort without some of its clients.

        Parameters
        ----------
        known : Container[str]
            The ids of the clients to leave out.

        Returns
        -------
        Cohort
            The other clients, in the same order.
        """
