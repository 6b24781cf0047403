"""The clients of a round as a method sees them: what the method asks becomes requests of the round."""

import logging
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fedkeep._utils.type_hints import annotations_of
from fedkeep.errors import ConfigError
from fedkeep.interface import Cohort, Fit, RemoteClient
from fedkeep.interface.algorithm import is_client_step, unwrap_step
from fedkeep.interface.cohort import Aggregation, Each, Replies
from fedkeep.models import Weights
from fedkeep.rounds.messages import StepRequest
from fedkeep.rounds.partial_aggregation import groups_of, mean_of_groups
from fedkeep.rounds.round import RoundState, Step

log = logging.getLogger(__name__)


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


class RoundReplies(Replies[Any]):
    """Replies of a cohort: the clients train when somebody first looks inside, or asks for the mean.

    ``clients``: Ids of those that were asked, in order.
    ``values_by_client``: The replies; None before they are carried out.
    """

    def __init__(self, round: RoundState, clients: Sequence[str]) -> None:
        self._round = round
        self._clients = clients
        queued = [client for client in clients if client not in round.lost]
        self._groups = groups_of(queued, round.state.federation, round.state.settings.stack)
        self.values_by_client: dict[str, Any] | None = None
        self._means: dict[Aggregation, Weights] = {}
        self._trained: Sequence[Sequence[StepRequest]] = ()  # what was trained for a mean
        self._models: dict[str, Weights] | None = None

    def computed(self) -> dict[str, Any]:
        """Return the replies; they are carried out if they were not yet."""
        if self.values_by_client is None:
            self._round.queue.deferred = None
            self.values_by_client = self._round.combine(self._round.collect(self._clients))
        return self.values_by_client

    def mean(self, how: Aggregation) -> Weights:
        if self.values_by_client is None:
            self._round.queue.deferred = None
            found = self._round.aggregate_groups(self._clients, self._groups, how)
            if found is not None:
                self._means[how], fits, self._trained = found
                self.values_by_client = {client: replace(fit, model=_SummedModel(self, client)) for client, fit in fits}
        if how not in self._means:
            self._means[how] = mean_of_groups(self._groups, self.computed(), how)
        return self._means[how]

    def train_again(self) -> dict[str, Weights]:
        """Train those again whose models were added up and not kept; return the models, with the same bits."""
        if self._models is None:
            log.warning(
                "Clients train twice: %s looks at single models after it took their mean. Look before, or let "
                "only_averages say False.",
                self._round.state.algorithm.name(),
            )
            self._models = self._round.train_again(self._trained)
        return self._models

    def __getitem__(self, client: str) -> Any:
        return self.computed()[client]

    def __iter__(self) -> Iterator[str]:
        return iter(self.computed())

    def __len__(self) -> int:
        return len(self.computed())


class _SummedModel(Mapping[str, Tensor]):
    """A client's model that was added to the others' where it was trained; it is trained again if somebody looks."""

    def __init__(self, replies: RoundReplies, client: str) -> None:
        self._replies = replies
        self._client = client

    def __getitem__(self, name: str) -> Tensor:
        return self._replies.train_again()[self._client][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._replies.train_again()[self._client])

    def __len__(self) -> int:
        return len(self._replies.train_again()[self._client])


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
        replies = RoundReplies(self.round, clients)
        if self.round.may_sum(step, clients):
            self.round.queue.deferred = replies.computed
        else:
            replies.values_by_client = self.round.combine(self.round.collect(clients))
        return replies

    def start(self, step: Step, *args: Any, **kwargs: Any) -> None:
        if annotations_of(unwrap_step(step)).get("return") not in (None, type(None)):
            raise ConfigError(
                f"cohort.start({step.__name__}) would throw away what {step.__name__} returns: use cohort.ask, or let "
                "it return None."
            )
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
