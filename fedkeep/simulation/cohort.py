"""The clients of a round in flight as a method sees them: names that can be asked."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from fedkeep.errors import ConfigError
from fedkeep.interface import Cohort, Remote
from fedkeep.interface.algorithm import is_client_step
from fedkeep.interface.values import Each
from fedkeep.simulation.rounds import LOST, Call, RoundState, Step


class LocalRemote(Remote):
    """One client of a round in flight."""

    def __init__(self, flight: RoundState, client: str) -> None:
        self.flight = flight
        self.id = client

    def ask(self, step: Step, *args: Any, **kwargs: Any) -> Any:
        calls = _calls(step, self.flight, [self.id], args, kwargs)
        reply = self.flight.ask(self.id, calls[self.id]) if self.id in calls else LOST
        return None if reply is LOST else reply


class LocalCohort(Cohort):
    """The clients of a round in flight."""

    def __init__(self, flight: RoundState, clients: Sequence[str]) -> None:
        self.flight = flight
        self.clients = clients

    def __iter__(self) -> Iterator[Remote]:
        return (LocalRemote(self.flight, client) for client in self.clients)

    def __len__(self) -> int:
        return len(self.clients)

    def ask(self, step: Step, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        calls = _calls(step, self.flight, self.clients, args, kwargs)
        replies = self.flight.ask_all(calls)
        return {client: reply for client, reply in replies.items() if reply is not LOST}

    def start(self, step: Step, *args: Any, **kwargs: Any) -> None:
        for client, call in _calls(step, self.flight, self.clients, args, kwargs).items():
            self.flight.start(client, call)

    def without(self, known: Container[str]) -> Cohort:
        return LocalCohort(self.flight, [client for client in self.clients if client not in known])


def _calls(
    step: Step, flight: RoundState, clients: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Call]:
    """Return each client's call: `each` arguments unpacked, and only clients that all of them name."""
    if not is_client_step(step):
        name = getattr(step, "__qualname__", repr(step))
        raise ConfigError(f"{name} is no client step: only methods marked with @on_client can be asked of a client.")
    named = [value.values for value in (*args, *kwargs.values()) if isinstance(value, Each)]
    population = flight.engine.federation.clients
    for stranger in (name for values in named for name in values if name not in population):
        raise ConfigError(
            f"each(...) names {stranger!r}, which is no client. Its keys are client ids, such as {population[0]!r}."
        )
    reached = [client for client in clients if all(client in values for values in named)]
    return {
        client: Call(
            step,
            tuple(arg.values[client] if isinstance(arg, Each) else arg for arg in args),
            {name: arg.values[client] if isinstance(arg, Each) else arg for name, arg in kwargs.items()},
        )
        for client in reached
    }
