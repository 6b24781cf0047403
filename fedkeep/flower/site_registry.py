"""Who is there: which of the nodes that are connected is which site of the run."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from typing import Any

from fedkeep.errors import ConfigError, RunError, in_one_line
from fedkeep.flower.transport import Envelope, Transport
from fedkeep.simulation.messages import ClientFailure

log = logging.getLogger(__name__)
POLL_SECONDS = 0.05  # seconds between looks for an answer
RETRY_SECONDS = 30.0  # seconds after which a node that was turned away is asked again: its operator may have mended it
REMINDER_SECONDS = 15.0  # seconds between reminders that the run waits


class SiteRegistry:
    """The sites of one run.

    A node is asked who it is when it is first seen. A name belongs to the node that has it for as long as that is
    connected; if Flower knows the node under a registered name, it has to be that one.

    Parameters
    ----------
    introduction : what a node is told of the run before it says who it is.
    patience : seconds to wait where too few are connected.
    tasks : how many the run has; a site tells its examples of each.
    nodes : the sites that take part, each with the node that it had; None before the first round, when it is found out.
    """

    def __init__(
        self,
        line: Transport,
        introduction: Envelope,
        patience: float,
        tasks: int = 1,
        nodes: Mapping[str, int] | None = None,
    ) -> None:
        self.line = line
        self.introduction = introduction
        self.patience = patience
        self.tasks = tasks
        self.members: Collection[str] | None = None if nodes is None else nodes.keys()
        self.sizes: dict[str, list[int]] = {}
        self.connected: Mapping[int, str] = {}
        self.names = {node: site for site, node in (nodes or {}).items()}
        self.asked: dict[str, int] = {}  # nodes that have not said yet who they are, by what was sent
        self.rejected: dict[int, float] = {}  # nodes, and when

    def wait_for_all(self, count: int) -> dict[str, list[int]]:
        """Wait until all sites of a new run are there, and return how many examples each holds in each task."""
        self._await(None, count, count, self.patience)
        here = sorted(site for node, site in self.names.items() if node in self.connected)
        if len(here) > count:
            raise ConfigError(f"{len(here)} sites are connected, and the run is for {count}: {', '.join(here)}.")
        self.members = here
        return {site: self.sizes[site] for site in here}

    def nodes(self) -> dict[str, int]:
        """Return the node of each site, for a server that starts again."""
        return {site: node for node, site in self.names.items()}

    def gather(self, sites: Collection[str], least: int, grace: float = 0.0) -> None:
        """Wait until ``least`` of these sites are connected; in the first ``grace`` seconds, for all of them."""
        self._await(sites, len(sites), least, grace)

    def node(self, site: str) -> int | None:
        """Return the node of a site, or None if it is not connected."""
        return next((node for node, name in self.names.items() if name == site and node in self.connected), None)

    def look(self) -> None:
        """See who is connected, ask newcomers who they are, and hear what they say; does not wait."""
        self.connected = self.line.nodes()
        now = time.monotonic()
        for node in self.connected:
            away = self.rejected.get(node)
            if node in self.names or node in self.asked.values() or (away is not None and now - away < RETRY_SECONDS):
                continue
            sent = self.line.send(node, "introduce", self.introduction, 0, max(self.patience, RETRY_SECONDS))
            if isinstance(sent, ClientFailure):
                self._heard(node, sent)
            else:
                self.asked[sent] = node
        for sent, reply in self.line.receive(self.asked).items():
            self._heard(self.asked.pop(sent), reply)

    def _heard(self, node: int, reply: Envelope | ClientFailure) -> None:
        site: Any = None
        examples: Any = None
        if isinstance(reply, ClientFailure):
            reason = in_one_line(reply.reason)
        elif "error" in reply.head:
            reason = in_one_line(reply.head["error"])
            if self.members is None:  # before the first round nothing is lost by stopping, and much time by waiting
                raise ConfigError(f"a site does not fit the run. {reason}")
        else:
            site, examples = reply.head.get("site"), reply.head.get("examples")
            reason = self._objection(node, site, examples)
        if reason:
            self.rejected[node] = time.monotonic()
            log.warning("node %d is turned away: %s", node, reason)
            return
        self.rejected.pop(node, None)
        self.names[node], self.sizes[site] = site, examples
        log.info("site %s is there, with %s examples", site, " + ".join(map(str, examples)))

    def _objection(self, node: int, site: Any, examples: Any) -> str:
        """Return why a node is not taken for the site that it says it is; empty if it is."""
        registered = self.connected.get(node, "")
        if not isinstance(site, str) or not 0 < len(site) <= 100 or not site.isprintable():
            return "it did not say properly who it is"
        if not isinstance(examples, list) or len(examples) != self.tasks:
            return "it did not say how many examples it has in each task"
        if any(type(number) is not int or number < 0 for number in examples):
            return "it did not say properly how many examples it has"
        if registered and registered != site:
            return f"it calls itself {site!r} and is registered as {registered!r}"
        if self.members is not None and site not in self.members:
            return f"{site!r} is no site of this run, which began without it"
        other = self.node(site)
        return "" if other in (None, node) else f"node {other}, which is connected, is {site!r} already"

    def _await(self, sites: Collection[str] | None, wanted: int, least: int, grace: float) -> None:
        began = time.monotonic()
        said: float | None = None
        while True:
            self.look()
            here = [name for node, name in self.names.items() if node in self.connected]
            here = here if sites is None else [name for name in here if name in sites]
            waited = time.monotonic() - began
            if len(here) >= wanted or (waited >= grace and len(here) >= least):
                return
            missing = "" if sites is None else f" Missing: {', '.join(sorted(set(sites) - set(here)))}."
            text = f"{len(here)} of {wanted} sites are connected.{missing}"
            if waited >= self.patience:
                raise RunError(
                    f"too few sites: after {waited:.0f} s {text} What was learned is kept. Start the missing ones and "
                    "run again with the same out."
                )
            if waited > 2 * POLL_SECONDS and (said is None or time.monotonic() - said > REMINDER_SECONDS):
                said = time.monotonic()
                log.warning(
                    "waiting: %s At most %.0f s more.", text, (grace if len(here) >= least else self.patience) - waited
                )
            time.sleep(POLL_SECONDS)
