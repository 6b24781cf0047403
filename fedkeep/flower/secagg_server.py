"""The server's part in SecAgg: it carries keys and encrypted shares between sites, and unmasks the sum alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.secaggplus_constants import Stage
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key, public_key_to_bytes
from torch import Tensor

from fedkeep.flower.secagg import SHORTEST_SHARE, mask, pairwise_seed, threshold
from fedkeep.flower.transport import Envelope
from fedkeep.rounds.messages import Fault, UpdateSum

Ask = Callable[[str, Mapping[str, Any]], Iterator[tuple[str, Envelope | Fault]]]
"""Asks sites their questions in a stage, and yields each site with its answer, or why there is none, as they arrive."""


class TooFewSites(Exception):
    """Fewer sites answered in a stage than are needed to unmask a sum."""


class SecureAggregation:
    """One aggregation, in four stages, each with the sites that answered in the one before.

    ``length``: How many numbers an update has.
    ``least``: With fewer sites in the sum the round is rolled back. Then nothing is unmasked: if the round is repeated,
        another sum of the same updates would differ from this one by the updates of those who were lost.
    ``lost``: Sites that are not in the sum, and why.
    """

    def __init__(self, ask: Ask, examples: Mapping[str, int], length: int, least: int = 0) -> None:
        self.ask = ask
        self.examples = examples
        self.length = length
        self.least = least
        self.lost: dict[str, str] = {}
        self.owners: dict[bytes, str] = {}  # by public key, the site that sent it
        self.total = torch.zeros(length, dtype=torch.int64)
        self.threshold = threshold(len(examples))

    def run(self) -> UpdateSum:
        """Carry out the four stages.

        Returns: The sum; without numbers, and with all sites lost, if too few answered.
        """
        try:
            return UpdateSum(self._unmasked_sum(), self.lost)
        except TooFewSites as error:
            return UpdateSum(torch.zeros(0, dtype=torch.int64), dict.fromkeys(self.examples, str(error)) | self.lost)

    def _unmasked_sum(self) -> Tensor:
        keys = self._stage(Stage.SETUP, dict.fromkeys(self.examples), self._read_keys)
        self.threshold = threshold(len(keys))
        sharing = self._stage(
            Stage.SHARE_KEYS, dict.fromkeys(keys, keys), lambda site, reply: _read_texts(reply, keys.keys() - {site})
        )
        forwarded = {to: {site: sharing[site][to] for site in sharing if site != to} for to in sharing}
        active = list(self._stage(Stage.COLLECT_MASKED_VECTORS, forwarded, self._add))
        dead = [site for site in sharing if site not in active]
        if sum(self.examples[site] > 0 for site in active) < 2:
            raise TooFewSites("fewer than two sites with examples are left, and their sum would show a model")
        if len(active) < self.least:
            raise TooFewSites(f"{len(active)} sites are left for a sum, and the round needs {self.least}")
        question = {"active": active, "dead": dead}
        known = {*active, *dead}
        before = dict(self.lost)
        shares = self._stage(
            Stage.UNMASK, dict.fromkeys(active, question), lambda site, reply: _read_shares(reply, known)
        )
        self.lost = before  # whoever fell silent now is in the sum all the same
        for site in active:
            self._take_off(site, self._own_masks(site, shares))
        for site in dead:
            self._take_off(site, self._pairwise_masks(site, shares, {other: keys[other][0] for other in active}))
        return self.total

    def _own_masks(self, site: str, shares: Mapping[str, Mapping[str, bytes]]) -> Iterator[Tensor]:
        """Yield the mask that only a site in the sum has added."""
        yield mask(self._combine(site, shares), self.length)

    def _pairwise_masks(
        self, site: str, shares: Mapping[str, Mapping[str, bytes]], active: Mapping[str, str]
    ) -> Iterator[Tensor]:
        """Yield what others, given with their first public keys, have added to cancel masks of a site that was lost."""
        own_key: Any = bytes_to_private_key(self._combine(site, shares))
        if not isinstance(own_key, ec.EllipticCurvePrivateKey):
            raise ValueError("a key of another kind")
        for other, public_key in active.items():
            shared = mask(pairwise_seed(own_key, bytes_to_public_key(public_key.encode())), self.length)
            yield shared if other > site else -shared

    def _take_off(self, site: str, masks: Iterator[Tensor]) -> None:
        try:
            for each in masks:
                self.total -= each
        except (ValueError, TypeError, IndexError, AttributeError, UnsupportedAlgorithm):
            # It is not known who gave a wrong share.
            raise TooFewSites(f"secure aggregation was given shares of a secret of {site} that do not fit") from None

    def _stage(self, stage: str, questions: Mapping[str, Any], read: Callable[[str, Envelope], Any]) -> dict[str, Any]:
        """Ask in a stage, and return what was read of each answer, in the order of the questions."""
        answers: dict[str, Any] = {}
        for site, reply in self.ask(stage, questions):
            if isinstance(reply, Fault):
                self.lost[site] = f"{reply.text} (secure aggregation, stage {stage})"
                continue
            try:
                answers[site] = read(site, reply)
            except (ValueError, TypeError, KeyError, AttributeError, UnsupportedAlgorithm) as error:
                self.lost[site] = f"answered in stage {stage} of secure aggregation with {error}"
        if len(answers) < self.threshold:
            raise TooFewSites(
                f"{len(answers)} of {len(self.examples)} sites answered in stage {stage} of secure aggregation, and "
                f"{self.threshold} are needed to unmask a sum"
            )
        return {site: answers[site] for site in questions if site in answers}

    def _read_keys(self, site: str, reply: Envelope) -> list[str]:
        """Return a site's two public keys, as text. No key is there twice: sites refuse an aggregation then."""
        first, second = reply.head["answer"]
        keys = [bytes_to_public_key(key.encode()) for key in (first, second)]
        if not all(isinstance(key.curve, ec.SECP384R1) for key in keys):  # the curve of Flower's keys
            raise ValueError("keys of another kind")
        one, two = map(public_key_to_bytes, keys)
        if one == two:
            raise ValueError("one key twice")
        if other := self.owners.get(one) or self.owners.get(two):
            raise ValueError(f"a key that {other} has sent")
        self.owners |= {one: site, two: site}
        return [first, second]

    def _add(self, site: str, reply: Envelope) -> None:
        """Add a masked vector to the total, so that not all are in memory."""
        vector = reply.tensors.get("vector")
        if vector is None or vector.dtype != torch.int64 or vector.shape != (self.length,):
            raise ValueError("another vector than its update has")
        self.total += vector.cpu()

    def _combine(self, site: str, shares: Mapping[str, Mapping[str, bytes]]) -> bytes:
        """Return the secret of a site of which enough others gave shares."""
        return combine_shares([told[site] for told in list(shares.values())[: self.threshold]])


def _read_texts(reply: Envelope, names: Any) -> dict[str, str]:
    answer = reply.head["answer"]
    if answer.keys() != set(names) or not all(isinstance(text, str) for text in answer.values()):
        raise ValueError("shares for others than the members")
    return dict(answer)


def _read_shares(reply: Envelope, names: Any) -> dict[str, bytes]:
    shares = {name: bytes.fromhex(text) for name, text in _read_texts(reply, names).items()}
    if any(len(share) < SHORTEST_SHARE for share in shares.values()):
        raise ValueError("shares that are too short")
    return shares
