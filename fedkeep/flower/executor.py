"""An executor that runs client steps at sites: it sends requests over a transport and checks the replies.

Replies of the current round lie on the server's disk: a restarted server does not ask for the same step twice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedkeep._utils.digests import DamagedFile
from fedkeep._utils.identity import ForeignFile, Identity, seal, unseal
from fedkeep.aggregation.fixed_point import vector_length
from fedkeep.errors import ValueRefused
from fedkeep.flower.site_registry import POLL_SECONDS, SiteRegistry
from fedkeep.flower.state_store import StateRef, state_ref
from fedkeep.flower.transport import Envelope, MessageKind, Transport, content_namer
from fedkeep.interface import Fit
from fedkeep.interface.codec import decode, encode, from_structure
from fedkeep.models import Weights
from fedkeep.rounds.executor import Executor, Future
from fedkeep.rounds.messages import (
    Fault,
    FaultKind,
    StepRequest,
    StepResult,
    UpdateSum,
    encode_request,
    no_reply,
    results_type,
)
from fedkeep.rounds.state import SimulationState

REPLIES_AT_ONCE = 4
"""The most replies that are taken from the transport at once, and so are in memory before they lie on disk."""


log = logging.getLogger(__name__)


class ReplyLog:
    """A folder with one file for each finished call of the current round.

    A round depends only on the server's state and on the replies. A server that restarts from the last checkpoint makes
    the same calls again, and their identifiers are hashes of their content. It therefore finds the replies here, and
    the failures too.

    ``folder``: Where the replies are stored; created with the first of them.
    """

    def __init__(self, folder: Path, owner: Identity) -> None:
        self.folder = folder
        self.owner = owner

    def begin_round(self, round: int) -> None:
        """Delete the replies of other rounds, which the checkpoint covers, and partly written files.

        ``round``: The round that begins, counted over all tasks.
        """
        for file in list(self.folder.iterdir()) if self.folder.exists() else []:
            if not file.name.startswith(f"{round:06d}-"):
                file.unlink()

    def store(self, call_id: str, reply: Any) -> None:
        """Store the reply to a call, or the reason why there was none.

        ``reply``: A value that the codec can encode, or a `Fault`.
        """
        if isinstance(reply, Fault):
            kind, content = "refused" if reply.refused else "lost", reply.text.encode()
        else:
            kind, content = "reply", encode(reply)
        seal(self.folder / f"{call_id}.{kind}", content, replace(self.owner, call=call_id))

    def has(self, call_id: str) -> bool:
        """Return whether a reply or a failure is stored; `load` tells whether it is whole."""
        return bool(self._files(call_id))

    def load(self, call_id: str, hint: Any, device: torch.device | None = None) -> Any:
        """Return the stored reply to a call.

        ``device``: Where to put the tensors; by default they stay on the CPU.
        Returns: The reply, a `Fault`, or None if nothing is stored or it is damaged: the site is then asked again.
        """
        for file in self._files(call_id):
            try:
                content = unseal(file, replace(self.owner, call=call_id))
            except (DamagedFile, ForeignFile) as error:
                log.warning("%s The site is asked again.", error)
                file.unlink()
                continue
            if file.suffix == ".reply":
                return decode(content, hint, device)
            kind = FaultKind.REFUSED if file.suffix == ".refused" else FaultKind.NO_REPLY
            return Fault(content.decode(), kind)
        return None

    def _files(self, call_id: str) -> list[Path]:
        """Return the files that are stored of a call, usually one."""
        files = [self.folder / f"{call_id}.{kind}" for kind in ("reply", "lost", "refused")]
        return [file for file in files if file.exists()]

    def clear(self) -> None:
        """Delete all replies: after the run, or after an error that one of them may have caused."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(eq=False)
class _Call:
    """One request that was sent to a site: its identifier, its deadline (monotonic seconds), and what came of it.

    The reply itself lies in the reply log until somebody waits for it, so that memory holds no more replies than the
    simulation keeps (see `fedkeep.rounds.reply_store`).
    """

    request: StepRequest
    call_id: str
    deadline: float = 0.0
    is_logged: bool = False
    is_repeated: bool = False


class FlowerExecutor(Executor):
    """Runs client steps at sites, one call at a time per site, since a SuperNode handles one message after another.

    The simulation submits a client's next request only when its last one has finished.

    ``state``: The simulation whose steps are run. Its client states are references (see
        `fedkeep.flower.state_store.StateRef`).
    ``reply_log``: Stores the replies of the current round.
    ``introduction``: The description of the run. It is sent with every call, so that no call depends on an earlier one.
    ``run``: The run's identifier, under which sites store states.
    ``deadline``: Seconds that a call may take.
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
        self.prefetch = len(state.federation.clients)
        self.pending: dict[str, _Call] = {}  # by the transport's message identifier
        self.names: dict[int, str] = {}
        self.trained: dict[str, str] = {}  # by site, the last call that left a model there
        self.round = 0  # counted over all tasks

    def begin_round(self, round: int, cohort: Sequence[str]) -> None:
        self.round = round
        self.reply_log.begin_round(round)
        self.names.clear()
        self.trained.clear()
        self.sites.wait_for(cohort, min(self.state.settings.run.min_clients, len(cohort)))

    def submit(self, *requests: StepRequest) -> list[Future]:
        return [self._submit(request) for request in requests]

    def _submit(self, request: StepRequest) -> _Call:
        envelope = self._pack(request)
        call = _Call(request, envelope.head["call"])
        call.is_logged = self.reply_log.has(call.call_id)
        if not call.is_logged:
            self._ask(call, envelope)
        return call

    def _ask(self, call: _Call, envelope: Envelope) -> None:
        message_id = self._send(call.request.client, "perform", envelope)
        if isinstance(message_id, Fault):
            self._log(call, message_id)
        else:
            call.deadline = time.monotonic() + self.deadline
            self.pending[message_id] = call

    def wait(self, future: Future) -> StepResult | Fault:
        call: _Call = future
        while True:
            while not call.is_logged:
                self._receive()
                if not call.is_logged:
                    time.sleep(POLL_SECONDS)
            reply = self.reply_log.load(call.call_id, self._reply_type(call.request), self.state.settings.device)
            if reply is not None:
                return self._to_result(call, reply)
            if call.is_repeated:
                return no_reply("answered twice, and the server's disk has damaged both replies")
            call.is_logged, call.is_repeated = False, True
            self._ask(call, self._pack(call.request))

    def sum_updates(self, updates: Mapping[str, Weights], examples: Mapping[str, int], least: int = 0) -> UpdateSum:
        """Let the sites mask the updates that they hold, and unmask the sum (see `fedkeep.flower.secagg`).

        The sum is logged like a reply: a restarted server does not ask for it again. If the server was stopped before,
        it asks again, with new keys. Then sites mask the same updates, and give the same sum or none.
        """
        from fedkeep.flower.secagg import SecureAggregation  # which needs Flower; nothing else here does

        calls = {client: self.trained[client] for client in updates}
        digest = hashlib.blake2b(json.dumps(calls).encode(), digest_size=16).hexdigest()
        name = f"{self.round:06d}-{digest}"
        found = self.reply_log.load(name, UpdateSum)  # on the CPU, where it is added up
        if found is None:
            aggregation = f"{self.round:06d}-{secrets.token_hex(16)}"

            def ask(stage: str, questions: Mapping[str, Any]) -> Iterator[tuple[str, Envelope | Fault]]:
                head = {"run": self.run, "aggregation": aggregation, "stage": stage}
                return self._ask_all(
                    {
                        site: Envelope({**head, "client": site, "call": calls[site], "question": question})
                        for site, question in questions.items()
                    }
                )

            length = vector_length(self.state.context.runner.initial)
            found = SecureAggregation(ask, examples, length, least).run()
            self.reply_log.store(name, found)
        result: UpdateSum = found
        return result

    def _ask_all(self, envelopes: Mapping[str, Envelope]) -> Iterator[tuple[str, Envelope | Fault]]:
        """Send each site an envelope of an aggregation, and yield the replies as they arrive."""
        pending: dict[str, str] = {}
        for site, envelope in envelopes.items():
            message_id = self._send(site, "aggregate", envelope)
            if isinstance(message_id, Fault):
                yield site, message_id
            else:
                pending[message_id] = site
        deadline = time.monotonic() + self.deadline
        while pending:
            waiting = list(pending)
            for start in range(0, len(waiting), REPLIES_AT_ONCE):
                replies = self.transport.receive(waiting[start : start + REPLIES_AT_ONCE])
                for message_id, reply in replies.items():
                    if not isinstance(reply, Fault) and "error" in reply.head:
                        reply = no_reply(f"its site says: {reply.head['error']}")
                    yield pending.pop(message_id), reply
            if pending and time.monotonic() > deadline:
                for site in pending.values():
                    yield site, no_reply(f"did not answer within {self.deadline:g} s")
                return
            if len(pending) == len(waiting):
                time.sleep(POLL_SECONDS)

    def cancel_all(self) -> None:
        """Stop waiting for pending calls. A site that runs one finishes it, and its reply is never fetched."""
        self.pending.clear()

    def stop(self) -> None:
        self.pending.clear()

    def _send(self, site: str, kind: MessageKind, envelope: Envelope) -> str | Fault:
        if self.sites.node(site) is None:
            self.sites.refresh()  # the site may have connected again since the round began
        node = self.sites.node(site)
        if node is None:
            return no_reply("is not connected")
        return self.transport.send(node, kind, envelope, self.round, self.deadline)

    def _receive(self) -> None:
        """Take the replies that have arrived, and give up calls whose deadline has passed."""
        message_ids = list(self.pending)
        for start in range(0, len(message_ids), REPLIES_AT_ONCE):
            replies = self.transport.receive(message_ids[start : start + REPLIES_AT_ONCE])
            while replies:
                message_id, reply = replies.popitem()
                call = self.pending.pop(message_id)
                self._log(call, self._read(call, reply))
        for message_id, call in list(self.pending.items()):
            if time.monotonic() > call.deadline:
                del self.pending[message_id]
                self._log(call, no_reply(f"did not answer within {self.deadline:g} s"))

    def _log(self, call: _Call, reply: Any) -> None:
        """Write a reply or a failure into the reply log."""
        try:
            self.reply_log.store(call.call_id, reply)
        except (KeyError, TypeError, ValueError) as error:  # a tensor of a type that safetensors does not have
            reply = Fault(f"answered with what cannot be stored: {error}")
            self.reply_log.store(call.call_id, reply)
        call.is_logged = True

    def _to_result(self, call: _Call, reply: Any) -> StepResult | Fault:
        if isinstance(reply, Fault):
            return reply
        ((value, _, uses),), train, teachers = reply
        self.state.context.timer.add(train, teachers)
        if isinstance(value, Fit):
            self.trained[call.request.client] = call.call_id
        return StepResult(value, state_ref(call.call_id, self.state.client_states.type), uses)

    def _read(self, call: _Call, reply: Envelope | Fault) -> Any:
        """Return a reply as a value of the step's return type, or the reason why it is not one."""
        if isinstance(reply, Fault):
            return reply
        if "error" in reply.head:
            return no_reply(f"its site says: {reply.head['error']}")
        try:  # on the CPU: from here a reply goes to the reply log, and later from there to the server's device
            value = from_structure(reply.head.get("answer"), reply.tensors, self._reply_type(call.request))
        except ValueRefused as error:
            reason = f"answered with what {call.request.step.__name__} does not give: {error}"
            return Fault(reason)
        if reply.head.get("call") != call.call_id:
            return Fault("answered another call, perhaps with an old reply")
        _, train, teachers = value
        if not (0 <= train < math.inf and 0 <= teachers < math.inf):
            reason = f"answered with a training of {train} s and teachers of {teachers} s"
            return Fault(reason)
        return value

    def _reply_type(self, request: StepRequest) -> Any:
        return results_type([request.step], self.state.client_states.type)

    def _pack(self, request: StepRequest) -> Envelope:
        """Return a request as an envelope, with an identifier made of its round and a hash of its content."""
        tensors: dict[str, Tensor] = {}
        checkpointed = self.state.client_states.get(request.client)
        head = {
            **self.introduction.head,
            "run": self.run,
            "checkpointed": checkpointed.call if isinstance(checkpointed, StateRef) else "",
            "request": encode_request(request, content_namer(tensors, self.names)),
        }
        digest = hashlib.blake2b(json.dumps(head).encode(), digest_size=16).hexdigest()
        return Envelope({**head, "call": f"{self.round:06d}-{digest}"}, tensors)
