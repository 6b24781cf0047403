"""The clients of a round as a method sees them: what the method asks becomes requests of the round."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from fedkeep.errors import ConfigError
from fedkeep.interface import Cohort, Fit, RemoteClient
from fedkeep.interface.algorithm import is_client_step
from fedkeep.interface.cohort import Each
from fedkeep.rounds.messages import StepRequest
from fedkeep.rounds.round import RoundState, Step


class RoundClient(RemoteClient):
    """One client of a round, as a method sees it."""

    def __init__(self, round: RoundState, client: str) -> None:
        self.round = round
        self.id = client

    def ask(self, step: Step, *args: Any, **kwargs: Any) -> Any:
        replies = self.round.collect(self.round.queue_up(_step_requests(step, self.round, [self.id], args, kwargs)))
        reply = replies[self.id].value if self.id in replies else None
        privacy = self.round.state.settings.privacy
        if isinstance(reply, Fit) and (privacy.secure_aggregation or privacy.client_noise_multiplier):
            option = "secure_aggregation" if privacy.secure_aggregation else "client_noise_multiplier"
            raise ConfigError(
                f"privacy.{option}: {self.round.state.algorithm.name()} asks one client alone for a model, which "
                "a sum or a mean hides only among several: let it ask the cohort."
            )
        return reply


class RoundCohort(Cohort):
    """Clients of a round, as a method sees them.

    ``clients``: Their ids, in order.
    """

    def __init__(self, round: RoundState, clients: Sequence[str]) -> None:
        self.round = round
        self.clients = clients

    def __iter__(self) -> Iterator[RemoteClient]:
        return (RoundClient(self.round, client) for client in self.clients)

    def __len__(self) -> int:
        return len(self.clients)

    def ask(self, step: Step, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        clients = self.round.queue_up(_step_requests(step, self.round, self.clients, args, kwargs))
        return self.round.combine(self.round.collect(clients))

    def start(self, step: Step, *args: Any, **kwargs: Any) -> None:
        self.round.start(_step_requests(step, self.round, self.clients, args, kwargs))

    def without(self, known: Container[str]) -> Cohort:
        return RoundCohort(self.round, [client for client in self.clients if client not in known])


def _step_requests(
    step: Step, round: RoundState, clients: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[StepRequest]:
    """Return a request for each client that all `each` arguments name, with its own values of these arguments."""
    if not is_client_step(step):
        name = getattr(step, "__qualname__", repr(step))
        raise ConfigError(
            f"{name} is not a client step: clients can be asked only for methods that are marked with @on_client."
        )
    by_client = [value.values for value in (*args, *kwargs.values()) if isinstance(value, Each)]
    population = round.state.federation.clients
    for unknown in (name for values in by_client for name in values if name not in population):
        raise ConfigError(
            f"each(...) names {unknown!r}, which is not a client. Its keys are client ids, such as {population[0]!r}."
        )
    return [
        StepRequest(
            client,
            step,
            tuple(arg.values[client] if isinstance(arg, Each) else arg for arg in args),
            {name: arg.values[client] if isinstance(arg, Each) else arg for name, arg in kwargs.items()},
            round.task,
            round.round,
        )
        for client in clients
        if all(client in values for values in by_client)
    ]
