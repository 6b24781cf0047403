"""The transport between the server and the sites: the envelopes that it carries, and which node is which site."""

import logging
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Any, Literal, Protocol

from torch import Tensor

from fedkeep.errors import RunError, in_one_line
from fedkeep.models.weights import tensor_hash
from fedkeep.rounds.messages import Fault

MessageKind = Literal["introduce", "perform", "aggregate"]
"""What the server asks of a site: its name and number of examples, a client step, or a stage of secure aggregation."""


@dataclass(frozen=True, eq=False)
class Envelope:
    """A message in either direction.

    ``head``: The header, which JSON can represent. It refers to tensors by their names.
    ``tensors``: The tensors by name.
    """

    head: dict[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


def content_namer(collected: dict[str, Tensor], known: dict[int, str]) -> Callable[[Tensor], str]:
    """Return a function that names tensors by the hash of their content, so that equal tensors are sent once.

    ``collected``: Receives every tensor that is named.
    ``known``: A cache of names by ``id`` of the tensor. A name is forgotten with its tensor, since the ``id`` is used
        again.
    """

    def name(tensor: Tensor) -> str:
        if id(tensor) not in known:
            known[id(tensor)] = tensor_hash(tensor)
            weakref.finalize(tensor, known.pop, id(tensor), None).atexit = False
        content_name = known[id(tensor)]
        collected[content_name] = tensor
        return content_name

    return name


class Transport(Protocol):
    """Sends envelopes to nodes and receives their replies."""

    def nodes(self) -> dict[int, str]:
        """Return the connected nodes.

        Returns: By node, the name under which Flower registered it; empty for nodes without a registered name.
        """

    def send(self, node: int, kind: MessageKind, envelope: Envelope, round: int, seconds: float) -> str | Fault:
        """Send an envelope to a node, without waiting for the reply.

        ``round``: The current round, counted over all tasks.
        ``seconds``: How long the message and its reply are valid, in seconds.
        Returns: An identifier under which `receive` returns the reply, or the reason why the message was not sent.
        """

    def receive(self, message_ids: Collection[str]) -> dict[str, Envelope | Fault]:
        """Return replies that have arrived, without waiting; others perhaps at the next call.

        ``message_ids``: Identifiers that `send` returned.
        Returns: By identifier, a reply or the reason why there will be none.
        """


log = logging.getLogger(__name__)
POLL_SECONDS = 0.05  # seconds between two looks for replies
ANSWER_SECONDS = 600.0  # in which a site may answer its introduction: one that is slow takes part later
RETRY_SECONDS = 30.0  # seconds until a rejected node is asked again: its operator may have corrected its configuration
SILENT_SHARE = 0.25  # of the patience: then a node that has not answered is asked again, as its app may have died
REMINDER_SECONDS = 15.0  # seconds between two log messages while the run waits


class SiteRegistry:
    """The sites of one run.

    The registry asks a node for its site's name when it sees the node for the first time. A name belongs to its node
    for as long as the node is connected. If Flower has registered the node under a name, the site must use that one.

    ``introduction``: The description of the run, which is sent to every new node.
    ``patience``: Seconds to wait while too few sites are connected.
    ``tasks``: The run's number of tasks; a site reports its number of examples in each.
    ``nodes``: The sites that take part, each with its last known node. None before the first round: `wait_for_all` then
        determines the sites.
    ``max_examples``: The most examples, in all tasks together, that a site may say it has. Clients count by their
        examples.
    ``sizes``: By site, its number of examples in each task when the run began.
    ``members``: The only sites that may take part, if that is known before the first round.
    """

    def __init__(
        self,
        transport: Transport,
        introduction: Envelope,
        patience: float,
        tasks: int = 1,
        nodes: Mapping[str, int] | None = None,
        max_examples: int = 10_000_000,
        sizes: Mapping[str, list[int]] | None = None,
        members: Collection[str] | None = None,
    ) -> None:
        self.transport = transport
        self.introduction = introduction
        self.patience = patience
        self.tasks = tasks
        self.max_examples = max_examples
        known = sizes or {}  # with a run's first round the numbers of examples stand fast
        of_run = nodes if members is None else members
        self.members = None if of_run is None else {site: known.get(site) for site in of_run}
        self.sizes: dict[str, list[int]] = dict(known)
        self.described: dict[str, Any] = {}  # by site, what it told of the form of its data
        self.connected: Mapping[int, str] = {}
        self.names = {node: site for site, node in (nodes or {}).items()}
        self.asked: dict[str, tuple[int, float]] = {}  # by message: its node, which has not replied, and when it went
        self.rejected: dict[int, tuple[float, str]] = {}  # rejected nodes: when they were rejected, and why

    def wait_for_all(
        self, count: int, min_count: int = 1, first: Mapping[str, int] = MappingProxyType({})
    ) -> dict[str, list[int]]:
        """Wait until all sites of a new run are connected, and determine which sites take part.

        No single site can keep a run from beginning: once the patience has ended, the run begins without connected
        sites that were rejected or did not introduce themselves, if enough others are there.

        ``count``: The number of sites. If more are connected, those that came first take part.
        ``min_count``: How many are enough where others were rejected.
        ``first``: Sites that come before others, and their nodes.
        Returns: By site, its number of examples in each task.
        """
        for waited, reminds in self._looks():
            accepted = [*dict.fromkeys(site for node, site in self.names.items() if node in self.connected)]
            accepted.sort(key=lambda site: site not in first)
            others = [node for node in self.connected if node not in self.names]
            expected = [node for node in others if node in first.values() and node not in self.rejected]
            if len(accepted) >= count and (waited >= self.patience or not expected):
                break
            known = bool(first) or len(accepted) + len(others) >= count
            if waited >= self.patience and len(accepted) >= min_count and known:
                log.warning("the run begins with %d of %d sites. %s", len(accepted), count, self._reasons(others))
                break
            hopeless = not accepted and len(others) >= count and all(node in self.rejected for node in others)
            missing = ", ".join(sorted(first.keys() - set(accepted)))
            text = f"{len(accepted)} of {count} sites are connected. {f'Missing: {missing}. ' * bool(missing)}"
            text += self._reasons(others)
            if hopeless or waited >= self.patience:
                raise RunError(
                    f"too few sites: after {waited:.0f} s {text} Start or correct the missing sites, and run "
                    "again with the same out."
                )
            if reminds:
                log.warning("waiting: %s At most %.0f s more.", text, self.patience - waited)
        if len(accepted) > count:
            late = ", ".join(sorted(accepted[count:]))
            log.warning(
                "%d sites are connected, and the run is for %d. These came too late: %s.", len(accepted), count, late
            )
        return self._begin(accepted[:count])

    def _reasons(self, nodes: Collection[int]) -> str:
        """Return why connected nodes do not take part."""
        silent = (0.0, "it has not introduced itself")
        whose = ((node, f"Site {name}" if (name := self.connected.get(node)) else f"Node {node}") for node in nodes)
        reasons = ((who, self.rejected.get(node, silent)[1].rstrip(".")) for node, who in islice(whose, 10))
        return " ".join(f"{who}: {reason}." for who, reason in reasons)

    def nodes(self) -> dict[str, int]:
        """Return the node of each site, which a restarted server needs."""
        return {site: node for node, site in self.names.items()}

    def wait_for(self, sites: Collection[str], min_count: int, grace: float = 0.0) -> None:
        """Wait until enough of some sites are connected.

        ``grace``: Seconds for which the registry waits for all of them, before ``min_count`` are enough.
        """
        for waited, reminds in self._looks():
            connected = {name for node, name in self.names.items() if node in self.connected and name in sites}
            if len(connected) >= len(sites) or (waited >= grace and len(connected) >= min_count):
                return
            missing = ", ".join(sorted(set(sites) - connected))
            others = [node for node in self.connected if node not in self.names]
            text = f"{len(connected)} of {len(sites)} sites are connected. Missing: {missing}. {self._reasons(others)}"
            if waited >= self.patience:
                raise RunError(
                    f"too few sites: after {waited:.0f} s {text.strip()} The finished rounds are saved. Start or "
                    "correct the missing sites and run again with the same out."
                )
            if reminds:
                left = (grace if len(connected) >= min_count else self.patience) - waited
                log.warning("waiting: %s At most %.0f s more.", text, left)

    def wait_for_known(self, sites: Collection[str], min_count: int) -> dict[str, list[int]]:
        """Wait for sites of which it is known that they take part, and return the examples of each in each task.

        Once the patience has ended, ``min_count`` of them are enough.
        """
        self.wait_for(sites, min_count, grace=self.patience)
        there = [site for site in sites if self.node(site) is not None]
        if left_out := ", ".join(sorted({*sites} - {*there})):
            log.warning("this trial begins without %s, and another had all sites", left_out)
        return self._begin(there)

    def _begin(self, sites: Collection[str]) -> dict[str, list[int]]:
        """Let these sites take part, with the examples that they have now."""
        examples = {site: self.sizes[site] for site in sorted(sites)}
        self.members = {**examples}
        return examples

    def _looks(self) -> Iterator[tuple[float, bool]]:
        """Look for nodes again and again; yield the seconds since the first look, and whether to remind of the wait."""
        began, reminded = time.monotonic(), 0.0
        while True:
            self.refresh()
            waited = time.monotonic() - began
            reminds = waited - reminded > REMINDER_SECONDS
            reminded = waited if reminds else reminded
            yield waited, reminds
            time.sleep(POLL_SECONDS)

    def node(self, site: str) -> int | None:
        """Return the node of a site.

        Returns: The node, or None if the site is not connected.
        """
        return next((node for node, name in self.names.items() if name == site and node in self.connected), None)

    def refresh(self) -> None:
        """Update the connected nodes, ask new nodes for their names and take their replies, without waiting."""
        self.connected = self.transport.nodes()
        now = time.monotonic()
        for node in self.connected:
            recently_rejected = node in self.rejected and now - self.rejected[node][0] < RETRY_SECONDS
            silence = max(RETRY_SECONDS, SILENT_SHARE * self.patience)
            recently_asked = any(asked == node and now - when < silence for asked, when in self.asked.values())
            if node in self.names or recently_asked or recently_rejected:
                continue
            message_id = self.transport.send(
                node, "introduce", self.introduction, 0, max(self.patience, ANSWER_SECONDS)
            )
            if isinstance(message_id, Fault):
                self._register(node, message_id)
            else:
                self.asked[message_id] = node, now
        while replies := self.transport.receive(self.asked):
            for message_id, reply in replies.items():
                node, _ = self.asked.pop(message_id)
                if node not in self.names:  # it was asked twice, and its first answer counts
                    self._register(node, reply)

    def _register(self, node: int, reply: Envelope | Fault) -> None:
        """Register a node as the site that it names in its reply, or reject it."""
        site: Any = None
        examples: Any = None
        if isinstance(reply, Fault):
            reason = in_one_line(reply.text)
        elif "error" in reply.head:
            reason = in_one_line(reply.head["error"])
        else:
            site, examples = reply.head.get("site"), reply.head.get("examples")
            reason = self._rejection_reason(node, site, examples)
        if reason:
            self.rejected[node] = time.monotonic(), reason
            log.warning("node %d is rejected: %s", node, reason)
            return
        self.rejected.pop(node, None)
        self.names = {other: name for other, name in self.names.items() if name != site}  # a node that comes back
        self.names[node], self.sizes[site] = site, examples
        self.described[site] = reply.head.get("data") if isinstance(reply, Envelope) else None
        log.info("site %s is connected, with %s examples", site, _sum(examples))

    def _rejection_reason(self, node: int, site: Any, examples: Any) -> str:
        """Return why a node cannot be the site that it claims to be; empty if it can."""
        registered = self.connected.get(node, "")
        if not isinstance(site, str) or not 0 < len(site) <= 100 or not site.isprintable():
            return "it did not give a valid site name"
        if not isinstance(examples, list) or len(examples) != self.tasks:
            return "it did not give its number of examples in each task"
        if any(type(number) is not int or number < 0 for number in examples):
            return "it did not give valid numbers of examples"
        if sum(examples) > self.max_examples:
            return f"it says that it has {sum(examples)} examples, where max-examples={self.max_examples} are believed"
        if registered and registered != site:
            return f"it calls itself {site!r} and is registered as {registered!r}"
        if self.members is not None and site not in self.members:
            return f"{site!r} is no site of this run, which began without it"
        if self.members is not None and (before := self.members[site]) not in (None, examples):
            return (
                f"{site!r} has {_sum(examples)} examples, and had {_sum(before or ())} when the run began: "
                "start it with the data that it had then"
            )
        other = self.node(site)
        return "" if other in (None, node) else f"node {other}, which is connected, is {site!r} already"


def _sum(examples: Collection[int]) -> str:
    return " + ".join(map(str, examples))
