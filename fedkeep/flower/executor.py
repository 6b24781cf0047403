"""An executor that runs client steps at sites: it sends requests over a transport and checks the replies.

A server that restarts from its last checkpoint asks the same again, and sites send what they answered before (see
`fedkeep.flower.state_store`): no step is run twice.
"""

import hashlib
import json
import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedkeep.errors import ValueRefused
from fedkeep.flower.state_store import StateRef, state_ref
from fedkeep.flower.transport import POLL_SECONDS, Envelope, MessageKind, SiteRegistry, Transport, content_namer
from fedkeep.interface import Fit
from fedkeep.interface.codec import from_structure
from fedkeep.models import Weights
from fedkeep.privacy.secure_sum import vector_length
from fedkeep.rounds import messages
from fedkeep.rounds.executor import Executor, Future
from fedkeep.rounds.messages import Fault, StepRequest, StepResult, UpdateSum
from fedkeep.rounds.state import SimulationState


@dataclass(frozen=True, eq=False)
class _Call:
    """One request that was sent to a site.

    ``message``: Under which the transport has its reply; or the reason why it was not sent.
    ``deadline``: Until when the reply is waited for (monotonic seconds).
    """

    request: StepRequest
    call_id: str
    message: str | Fault
    deadline: float


@dataclass(eq=False, repr=False)
class FlowerExecutor(Executor):
    """Runs client steps at sites, one call at a time per site, since a SuperNode handles one message after another.

    The simulation submits a client's next request only when its last one has finished. Nothing is cancelled: a site
    that runs a step finishes it, and its reply is never fetched.

    ``state``: The simulation whose steps are run. Its client states are references (see
        `fedkeep.flower.state_store.StateRef`).
    ``introduction``: The description of the run. It is sent with every call, so that no call depends on an earlier one.
    ``run``: The run's identifier, under which sites store states.
    ``deadline``: Seconds that a call may take.
    ``trained``: By site, the last call of this round that left a model there.
    ``round``: The round, counted over all tasks.
    """

    state: SimulationState
    transport: Transport
    sites: SiteRegistry
    introduction: Envelope
    run: str
    deadline: float
    names: dict[int, str] = field(init=False, default_factory=dict)
    trained: dict[str, str] = field(init=False, default_factory=dict)
    round: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.prefetch = len(self.state.federation.clients)

    def begin_round(self, round: int, cohort: Sequence[str]) -> None:
        self.round = round
        self.names.clear()
        self.trained.clear()
        self.sites.wait_for(cohort, min(self.state.settings.run.min_clients, len(cohort)))

    def submit(self, *requests: StepRequest) -> list[Future]:
        return [self._submit(request) for request in requests]

    def _submit(self, request: StepRequest) -> _Call:
        envelope = self._pack(request)
        message = self._send(request.client, "perform", envelope)
        return _Call(request, envelope.head["call"], message, time.monotonic() + self.deadline)

    def wait(self, future: Future) -> StepResult | Fault:
        """Take one reply from the transport, which has those that nobody waits for yet: memory holds one at a time."""
        call: _Call = future
        if isinstance(call.message, Fault):
            return call.message
        return self._to_result(call, next(self._replies({call.message: call.request.client}, call.deadline))[1])

    def sum_updates(self, updates: Mapping[str, Weights], examples: Mapping[str, int], least: int = 0) -> UpdateSum:
        """Let the sites mask the updates that they hold, and unmask the sum (see `fedkeep.flower.secagg`).

        A restarted server asks for the sum again, with new keys. Then sites mask the same updates, and give the same
        sum or none.
        """
        from fedkeep.flower.secagg import SecureAggregation  # which needs Flower; nothing else here does

        calls = {client: self.trained[client] for client in updates}
        head = {"run": self.run, "aggregation": f"{self.round:06d}-{secrets.token_hex(16)}"}

        def ask(stage: str, questions: Mapping[str, Any]) -> Iterator[tuple[str, Envelope | Fault]]:
            """Send each site its question, and yield the replies as they arrive."""
            pending: dict[str, str] = {}
            for site, question in questions.items():
                content = {**head, "stage": stage, "client": site, "call": calls[site], "question": question}
                message_id = self._send(site, "aggregate", Envelope(content))
                if isinstance(message_id, Fault):
                    yield site, message_id
                else:
                    pending[message_id] = site
            yield from self._replies(pending, time.monotonic() + self.deadline)

        return SecureAggregation(ask, examples, vector_length(self.state.context.runner.initial), least).run()

    def _replies(self, pending: dict[str, str], deadline: float) -> Iterator[tuple[str, Envelope | Fault]]:
        """Yield the site and its reply for each message, as they arrive; a site's error is a fault too."""
        while pending:
            if not (replies := self.transport.receive(list(pending))):
                if time.monotonic() > deadline:
                    break
                time.sleep(POLL_SECONDS)
            for message_id, reply in replies.items():
                if not isinstance(reply, Fault) and "error" in reply.head:
                    reply = messages.no_reply(f"its site says: {reply.head['error']}", _uses(reply.head))
                yield pending.pop(message_id), reply
        for site in pending.values():
            yield site, messages.no_reply(f"did not answer within {self.deadline:g} s")

    def _send(self, site: str, kind: MessageKind, envelope: Envelope) -> str | Fault:
        if self.sites.node(site) is None:
            self.sites.refresh()  # the site may have connected again since the round began
        node = self.sites.node(site)
        if node is None:
            return messages.no_reply("is not connected")
        # A reply may lie at the transport while those before it are waited for.
        return self.transport.send(node, kind, envelope, self.round, 2 * self.deadline)

    def _to_result(self, call: _Call, reply: Envelope | Fault) -> StepResult | Fault:
        """Return what a site answered, or the reason why it is not what the step returns."""
        if isinstance(reply, Fault):
            return reply
        tensors = {name: tensor.to(self.state.settings.device) for name, tensor in reply.tensors.items()}
        try:
            returned = messages.results_type([call.request.step], self.state.client_states.type)
            found = from_structure(reply.head.get("answer"), tensors, returned)
        except ValueRefused as error:
            return Fault(f"answered with what {call.request.step.__name__} does not give: {error}")
        if reply.head.get("call") != call.call_id:
            return Fault("answered another call, perhaps with an old reply")
        ((value, _, uses),), train, teachers = found
        if not (0 <= train < math.inf and 0 <= teachers < math.inf):
            return Fault(f"answered with a training of {train} s and teachers of {teachers} s")
        self.state.context.timer.add(train, teachers)
        if isinstance(value, Fit):
            self.trained[call.request.client] = call.call_id
        return StepResult(value, state_ref(call.call_id, self.state.client_states.type), uses)

    def _pack(self, request: StepRequest) -> Envelope:
        """Return a request as an envelope, with an identifier made of its round and a hash of its content."""
        tensors: dict[str, Tensor] = {}
        checkpointed = self.state.client_states.get(request.client)
        head = {
            **self.introduction.head,
            "run": self.run,
            "checkpointed": checkpointed.call if isinstance(checkpointed, StateRef) else "",
            "request": messages.encode_request(request, content_namer(tensors, self.names)),
        }
        digest = hashlib.blake2b(json.dumps(head).encode(), digest_size=16).hexdigest()
        return Envelope({**head, "call": f"{self.round:06d}-{digest}"}, tensors)


def _uses(head: Mapping[str, Any]) -> dict[str, int]:
    """Return what a site says that it has used of randomness for an answer that it does not give."""
    told = head.get("uses")
    return told if isinstance(told, dict) and all(type(count) is int for count in told.values()) else {}
