"""Client steps at sites: tasks go out over the transport, and what comes back is checked."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedkeep.errors import ValueRefused
from fedkeep.flower.reply_log import ReplyLog
from fedkeep.flower.site_registry import POLL_SECONDS, SiteRegistry
from fedkeep.flower.state_store import StateRef, state_ref
from fedkeep.flower.transport import Envelope, Transport, content_namer
from fedkeep.flower.views import ServerView
from fedkeep.interface import Fit
from fedkeep.interface.codec import from_structure
from fedkeep.interface.pytree import iter_instances
from fedkeep.simulation.executor import Executor, Future
from fedkeep.simulation.messages import ClientFailure, ClientTask, TaskResult, encode_task, results_type
from fedkeep.simulation.state import SimulationState


@dataclass(eq=False)
class _Asked:
    """A call: its name, until when it may be answered, and what came of it."""

    task: ClientTask
    call: str
    until: float = 0.0
    found: TaskResult | ClientFailure | None = None


class FlowerExecutor(Executor):
    """Carries steps out at sites, one call at a time at each, since a SuperNode does one thing after another.

    A round asks the next call of a client only when the last has come to an end.

    Parameters
    ----------
    state : SimulationState
        Whose steps are carried out. Its client states are references (see `fedkeep.flower.state_store.StateRef`).
    transport : Transport
        Leads to the sites.
    sites : SiteRegistry
        The sites that take part.
    reply_log : ReplyLog
        Keeps the replies of the round under way.
    introduction : Envelope
        What each site is told of the run with every call, so that it depends on no earlier one.
    run : str
        The run's name, under which sites keep states.
    deadline : float
        Seconds that a call may take.
    """

    def __init__(
        self,
        state: SimulationState,
        transport: Transport,
        sites: SiteRegistry,
        reply_log: ReplyLog,
        introduction: Envelope,
        run: str,
        deadline: float,
    ) -> None:
        self.state = state
        self.transport = transport
        self.sites = sites
        self.reply_log = reply_log
        self.introduction = introduction
        self.run = run
        self.deadline = deadline
        self.ahead = len(state.federation.clients)
        self.pending: dict[str, _Asked] = {}  # by what the answer will be known by
        self.names: dict[int, tuple[str, Tensor]] = {}
        self.round = 0  # over all tasks

    def begin_round(self, round: int, cohort: Sequence[str]) -> None:
        self.round = round
        self.reply_log.begin(round)
        self.names.clear()
        self.sites.gather(cohort, min(self.state.schedule.min_clients, len(cohort)))

    def submit(self, *tasks: ClientTask) -> list[Future]:
        return [self._submit(task) for task in tasks]

    def _submit(self, task: ClientTask) -> _Asked:
        envelope = self._pack(task)
        asked = _Asked(task, envelope.head["call"])
        known = self.reply_log.recall(asked.call, self._hint(task))
        if known is not None:
            asked.found = self._accept(asked, known)
            return asked
        sent = self._send(task, envelope)
        if isinstance(sent, ClientFailure):
            self._settle(asked, sent)
        else:
            asked.until = time.monotonic() + self.deadline
            self.pending[sent] = asked
        return asked

    def wait(self, future: Future) -> TaskResult | ClientFailure:
        asked: _Asked = future
        while asked.found is None:
            self._receive()
            if asked.found is None:
                time.sleep(POLL_SECONDS)
        return asked.found

    def drain(self) -> None:
        """Forget what was asked. A site that is still at it finishes, and keeps an answer that nobody will ask for."""
        self.pending.clear()

    def stop(self) -> None:
        self.pending.clear()

    def _send(self, task: ClientTask, envelope: Envelope) -> str | ClientFailure:
        if self.sites.node(task.client) is None:
            self.sites.look()  # it may have come back since the round began
        node = self.sites.node(task.client)
        if node is None:
            return ClientFailure("is not connected")
        return self.transport.send(node, "perform", envelope, self.round, self.deadline)

    def _receive(self) -> None:
        for sent, reply in self.transport.receive(self.pending).items():
            asked = self.pending.pop(sent)
            self._settle(asked, self._read(asked, reply))
        for sent, asked in list(self.pending.items()):
            if time.monotonic() > asked.until:
                del self.pending[sent]
                self._settle(asked, ClientFailure(f"did not answer within {self.deadline:g} s"))

    def _settle(self, asked: _Asked, found: Any) -> None:
        try:
            self.reply_log.keep(asked.call, found)
        except (KeyError, TypeError, ValueError) as error:  # of a kind of tensor that no file can hold
            found = ClientFailure(f"answered with what cannot be kept: {error}")
            self.reply_log.keep(asked.call, found)
        asked.found = self._accept(asked, found)

    def _accept(self, asked: _Asked, found: Any) -> TaskResult | ClientFailure:
        if isinstance(found, ClientFailure):
            return found
        ((reply, _, uses),), train, teachers = found
        self.state.context.timer.add(train, teachers)
        return TaskResult(reply, state_ref(asked.call, self.state.client_state), uses)

    def _read(self, asked: _Asked, reply: Envelope | ClientFailure) -> Any:
        """Return an answer of the step's own type, or why it is none."""
        if isinstance(reply, ClientFailure):
            return reply
        if "error" in reply.head:
            return ClientFailure(f"its site says: {reply.head['error']}")
        tensors = {name: tensor.to(self.state.device) for name, tensor in reply.tensors.items()}
        try:
            found = from_structure(reply.head.get("answer"), tensors, self._hint(asked.task))
            fault = implausible(found, self._examples(asked.task.client))
            return ClientFailure(f"answered with {fault}") if fault else found
        except ValueRefused as error:
            return ClientFailure(f"answered with what {asked.task.step.__name__} does not give: {error}")

    def _hint(self, task: ClientTask) -> Any:
        return results_type([task.step], self.state.client_state)

    def _examples(self, client: str) -> int:
        federation = self.state.federation
        assert isinstance(federation, ServerView)
        return federation.total_size(client)

    def _pack(self, task: ClientTask) -> Envelope:
        """Return a task as a envelope, named by its round and by all that is asked."""
        tensors: dict[str, Tensor] = {}
        settled = self.state.client_states.get(task.client)
        head = {
            **self.introduction.head,
            "run": self.run,
            "settled": settled.call if isinstance(settled, StateRef) else "",
            "request": encode_task(task, content_namer(tensors, self.names)),
        }
        digest = hashlib.blake2b(json.dumps(head).encode(), digest_size=16).hexdigest()
        return Envelope({**head, "call": f"{self.round:06d}-{digest}"}, tensors)


MOST_STEPS = 10**9  # of a local training


def implausible(answer: Any, examples: int) -> str | None:
    """Return what a site with so many examples cannot have answered, or None: it would outweigh all others."""
    _, train, teachers = answer
    if not (0 <= train < math.inf and 0 <= teachers < math.inf):
        return f"a training of {train} s and teachers of {teachers} s"
    for fit in iter_instances(answer, Fit):
        if not 0 <= fit.num_examples <= examples:
            return f"a model trained on {fit.num_examples} examples, and it has {examples}"
        if not 0 <= fit.num_steps <= MOST_STEPS:
            return f"a model trained in {fit.num_steps} steps"
    return None
