"""A reply step: one thing that happens to clients' replies on their way to the method.

A check, a defence, an attack, an account, noise or a sum is one class in a file of its own. `ReplyStep` says when its
methods are called; `fedkeep.trials.reply_steps` says in which order the steps take their turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import isfunction
from typing import Any, Protocol

from fedkeep.errors import FedKeepError
from fedkeep.interface import Fit
from fedkeep.models import Weights
from fedkeep.models.weights import form_of
from fedkeep.rounds.messages import Fault, StepRequest, sent_model
from fedkeep.rounds.state import SimulationState


@dataclass(eq=False)
class Reply:
    """A client's reply on its way to the method.

    ``request``: What the client was asked.
    ``value``: What it answered; steps may put something else in its place.
    ``state``: The client's state after the step.
    ``uses``: Its uses of randomness in this round, by purpose.
    ``fault``: Why the reply is lost, or refused.
    ``size``: Bytes that came from the client.
    ``notes``: What steps keep of the reply alone, by their name.
    ``state_before``: The client's state before the step; None if it was that of the round before.
    """

    request: StepRequest
    value: Any = None
    state: Any = None
    uses: dict[str, int] = field(default_factory=dict)
    fault: Fault | None = None
    size: int = 0
    notes: dict[str, Any] = field(default_factory=dict)
    state_before: Any = None

    @property
    def client(self) -> str:
        """The client's id."""
        return self.request.client

    def with_value(self, value: Any) -> Reply:
        """Return the reply with another value; what the client was sent stays the same."""
        return replace(self, value=value)

    @cached_property
    def sent(self) -> Weights | None:
        """The model that the client was sent, if it returned one of that form."""
        return sent_model(self.request, form_of(self.value.model)) if isinstance(self.value, Fit) else None


@dataclass
class Costs:
    """What a round cost.

    ``down``, ``up``: Bytes sent to clients, and bytes of their replies.
    ``waiting_seconds``: Seconds in which the server waited for clients.
    ``client_seconds``: Seconds of training and teachers within these.
    ``evaluation_seconds``: Seconds of evaluations of clients' models.
    """

    down: int = 0
    up: int = 0
    waiting_seconds: float = 0.0
    client_seconds: float = 0.0
    evaluation_seconds: float = 0.0


@dataclass
class Attendance:
    """Who answered in a round, and who was lost.

    ``lost``: Lost clients, and why.
    ``refused``: Those of whom a reply was refused.
    ``lost_between_rounds``: Clients that were lost at the beginning or the end of the task only.
    ``answered``: Clients of whom a reply was accepted.
    ``asks_all``: Whether a task begins or ends, when all clients are asked, and the round is never rolled back.
    """

    lost: dict[str, Fault] = field(default_factory=dict)
    refused: dict[str, Fault] = field(default_factory=dict)
    lost_between_rounds: dict[str, Fault] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)
    asks_all: bool = False


class Round(Protocol):
    """What a reply step sees of a round in progress.

    ``state``: The simulation: its method, options, server and clients.
    ``number``: The round, counted over the whole run.
    ``cohort``: Ids of the round's clients, in order.
    ``attendance``: Who answered, and who was lost.
    ``client_states``: New states of the round's clients.
    ``uses``: Number of uses of randomness in this round, by client and purpose.
    ``fits``: Results of local training by client, in the order of arrival, without models.
    ``costs``: Its bytes and seconds.
    """

    state: SimulationState
    number: int
    cohort: list[str]
    attendance: Attendance
    client_states: dict[str, Any]
    uses: dict[str, dict[str, int]]
    fits: list[tuple[str, Fit]]
    costs: Costs

    @property
    def task(self) -> int:
        """The current task, counted from 1."""
        return self.state.settings.run.position(self.number)[0]

    @property
    def round(self) -> int:
        """The round of this task, counted from 1."""
        return self.state.settings.run.position(self.number)[1]

    @property
    def lost(self) -> Mapping[str, Fault]:
        """Lost clients, and why."""
        return self.attendance.lost

    @property
    def refused(self) -> Mapping[str, Fault]:
        """Those of whom a reply was refused in this round, and why."""
        return self.attendance.refused

    @property
    def answered(self) -> set[str]:
        """Clients of whom a reply was accepted."""
        return self.attendance.answered

    @property
    def fewest(self) -> int:
        """With fewer clients the round is rolled back."""
        return 0 if self.attendance.asks_all else min(self.state.settings.run.min_clients, len(self.cohort))

    def uncounted(self) -> AbstractContextManager[Mapping[str, Fault]]:
        """Ask clients within this block for what the round does not count; yield who is lost in it."""

    def ask_builtin(self, step: Callable[..., Any], clients: Sequence[str], *args: Any) -> dict[str, Any]:
        """Ask clients for a step that every method has, and return the replies of those that are not lost."""

    def restore(self, reply: Reply) -> None:
        """Give a client the state back that it had before a step."""

    def lose_in_sum(self, replies: Mapping[str, Reply], faults: Mapping[str, Fault]) -> None:
        """Lose clients whose models were to be summed up."""

    def unused_replies(self) -> Iterable[Reply]:
        """Yield the replies that have arrived, or will, after the round was rolled back."""

    def timed(self) -> AbstractContextManager[None]:
        """Count the seconds of a block as waiting for clients, not as the server's work."""


class ReplyStep:
    """Base class of reply steps; override the methods that are needed.

    ``kept`` is a dataclass with defaults, of tensors, numbers and text in lists and dicts. It lasts from round to
    round; checkpoints save it, and a round that fails leaves it as it was. Everything else that a step notes is for one
    round, and set anew in `begin_round`. A step that needs nothing kept leaves it None.
    """

    kept: Any = None
    note_type: Any = None
    """Type of what `check` leaves in `Reply.notes`; None if it leaves nothing."""

    @property
    def name(self) -> str:
        """The step's name in checkpoints, in `Reply.notes` and in errors."""
        return type(self).__name__

    def applies(self, state: SimulationState) -> bool:
        """Tell whether the step takes part in the rounds of a run."""
        return True

    def reason_against(self, state: SimulationState) -> str:
        """Say why the run cannot be carried out with this step; empty if it can. Asked before the first round."""
        return ""

    def set_aside(self, state: SimulationState) -> Mapping[str, str]:
        """Return clients that are not to be asked, and why, as a text that follows the client's name."""
        return {}

    def begin_round(self, state: SimulationState, number: int) -> None:
        """Prepare for a round, before its cohort is drawn."""

    def allows_partial_aggregation(self, state: SimulationState) -> bool:
        """Tell whether the step looks at models in `check` alone, so that workers may aggregate them partially.

        Then `check` runs in workers, which have new steps: it must not depend on `kept` or `begin_round`.
        """
        return False

    def check(self, state: SimulationState, reply: Reply) -> None:
        """Check one reply alone, where it is made or where it arrives. To lose its client, raise `Fault`."""

    def receive(self, round: Round, reply: Reply) -> None:
        """Check or change one reply alone, in the order of arrival. To lose its client, raise `Fault`."""
        self.check(round.state, reply)

    def arrived(self, round: Round, reply: Reply) -> None:
        """Note a reply, in the order of the clients; ``reply.fault`` says what `receive` found."""

    def screen(self, round: Round, replies: Sequence[Reply]) -> Iterable[tuple[Reply, Fault]]:
        """Compare models that were asked for together. Each pair is refused before the next one is asked for."""
        return ()

    def accepted(self, round: Round, reply: Reply) -> None:
        """Note a model that all steps have accepted."""

    def combine(self, round: Round, replies: dict[str, Reply]) -> dict[str, Reply]:
        """Change replies that were asked for together, before the method aggregates them."""
        return replies

    def abandon(self, round: Round) -> None:
        """Note that the round is rolled back, before what is under way is dropped."""

    def record(self, round: Round) -> dict[str, Any]:
        """Return what the round's record says of the step."""
        return {}

    def releases(self, round: Round, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the trial's ledger, which no resume cuts back, says of what left with noise."""
        return {}

    def end_round(self, round: Round, record: Mapping[str, Any]) -> None:
        """Keep what a round showed; the record holds its evaluation."""

    def reason_to_stop(self, state: SimulationState) -> str:
        """Say why more rounds would be wasted; empty if the run goes on."""
        return ""


def named(step: ReplyStep) -> ReplyStep:
    """Return a step of the user's, with a note of its name on every exception that its methods raise."""
    for method in [name for name, value in vars(ReplyStep).items() if isfunction(value)]:
        setattr(step, method, _noting(step, method))
    return step


def _noting(step: ReplyStep, method: str) -> Callable[..., Any]:
    def noting(*args: Any) -> Any:
        try:
            return getattr(type(step), method)(step, *args)
        except (Fault, FedKeepError):
            raise
        except Exception as error:
            error.add_note(f"It was raised by the reply step {step.name}.")
            raise

    return noting


def set_aside(steps: Iterable[ReplyStep], state: SimulationState) -> dict[str, str]:
    """Return the clients that steps set aside, and why."""
    return {client: reason for step in steps for client, reason in step.set_aside(state).items()}


def begins_task(state: SimulationState, number: int) -> bool:
    """Tell whether a task other than the first begins with a round."""
    return number > 1 and state.settings.run.position(number)[1] == 1
