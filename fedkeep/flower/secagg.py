"""SecAgg (Bonawitz et al., 2017) from Flower's primitives: the server learns a sum of masked updates, and nothing else.

SecAgg is SecAgg+ (Bell et al., 2020) where every two sites are neighbours. Flower gives keys, key agreement, encryption
and secret shares. Its generator of masks, `pseudo_rand_gen`, is not used: it folds a key of 256 bits into 32, of which
at most 28 vary, so that a server could try all masks. SecAgg asks for AES in counter mode, which is used here.

The server carries keys and encrypted shares between sites, and unmasks the sum alone. The four stages are messages of
their own, which any process of a site can answer: the secrets of an aggregation wait in a file. A stage is answered
once. The same question again gets the same answer, and another question none, since two answers about one secret would
give it away.
"""

import base64
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep._utils.digests import Identity
from fedkeep._utils.files import atomic_write
from fedkeep.errors import ConfigError, MissingExtra, RunError, ValueRefused
from fedkeep.flower.config import NodeConfig
from fedkeep.flower.state_store import StateStore
from fedkeep.flower.transport import Envelope
from fedkeep.rounds.messages import Fault, UpdateSum

try:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.fernet import InvalidToken
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
    from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt, generate_shared_key
    from flwr.common.secure_aggregation.secaggplus_constants import Stage
    from flwr.common.secure_aggregation.secaggplus_utils import (
        share_keys_plaintext_concat,
        share_keys_plaintext_separate,
    )
    from flwr.supercore.primitives import asymmetric
except ImportError as error:
    raise MissingExtra("Secure aggregation", "flower") from error

SEED_BYTES = 32
"""Length of the seed of a mask, the key of AES-256."""
SHORTEST_SHARE = 4 + SEED_BYTES
"""No share of a seed or of a key is shorter: four bytes say which share it is."""
LONGEST_SHARE = 4096
"""No share of a key, which has some 300 bytes, is longer: shares of any length would take the server any time."""


def threshold(members: int) -> int:
    """Return how many sites must answer in every stage, and how many shares make a secret.

    More than half: then a server that tells two stories about who was lost cannot get from honest sites, each of which
    gives one share of a site, both secrets of that site.

    ``members``: How many sites sent public keys.
    Returns: At least 2, since the sum of one is no secret.
    """
    return max(members // 2 + 1, 2)


def mask(seed: bytes, length: int) -> Tensor:
    """Return the numbers that a seed stands for, uniform modulo 2^64: the key stream of AES-256 in counter mode.

    A seed is used once, for one round, so that the counter can begin at 0.

    ``seed``: 32 bytes.
    Returns: int64 [length].
    """
    stream = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor().update(bytes(8 * length))
    return torch.from_numpy(np.frombuffer(stream, "<i8").astype(np.int64))


def pairwise_seed(private_key: ec.EllipticCurvePrivateKey, public_key: ec.EllipticCurvePublicKey) -> bytes:
    """Return the seed of the mask that two sites share, which one of them adds and the other one subtracts.

    Returns: 32 bytes.
    """
    return base64.urlsafe_b64decode(generate_shared_key(private_key, public_key))


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
        own_key: Any = asymmetric.bytes_to_private_key(self._combine(site, shares))
        if not isinstance(own_key, ec.EllipticCurvePrivateKey):
            raise ValueError("a key of another kind")
        for other, public_key in active.items():
            shared = mask(pairwise_seed(own_key, asymmetric.bytes_to_public_key(public_key.encode())), self.length)
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
        keys = [asymmetric.bytes_to_public_key(key.encode()) for key in (first, second)]
        if not all(isinstance(key.curve, ec.SECP384R1) for key in keys):  # the curve of Flower's keys
            raise ValueError("keys of another kind")
        one, two = map(asymmetric.public_key_to_bytes, keys)
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
    if not all(_is_share(share) for share in shares.values()):
        raise ValueError("shares of a length that none has")
    return shares


def _is_share(share: bytes) -> bool:
    return SHORTEST_SHARE <= len(share) <= LONGEST_SHARE


Secrets = dict[str, Any]
"""What the site keeps of one aggregation, as JSON: keys, shares of the others' secrets, and what it was asked."""


def answer_stage(envelope: Envelope, config: NodeConfig) -> Envelope:
    """Return a site's answer in one stage of an aggregation.

    ``envelope``: The stage and its question; the aggregation, the site, and the call of the client step whose update is
        summed.
    """
    head = envelope.head
    if head["client"] != config.site:
        raise ConfigError(f"this is site {config.site}, and the server asks {head['client']}.")
    if head["stage"] not in Stage.all():
        raise ValueRefused(f"{head['stage']!r} is no stage of an aggregation.")
    store = StateStore(Path(config.state_dir), Identity(run=str(head["run"]), site=config.site), torch.device("cpu"))
    with store.lock():
        return _answer(store, config.site, head)


def _answer(store: StateStore, site: str, head: Mapping[str, Any]) -> Envelope:
    call, stage, question = str(head["call"]), str(head["stage"]), head["question"]
    file = store.file(str(head["aggregation"]), "secagg")
    secrets: Secrets = json.loads(file.read_text()) if file.exists() else {"call": call, "questions": {}, "answers": {}}
    digest = hashlib.sha256(json.dumps([call, question], sort_keys=True).encode()).hexdigest()
    before = secrets["questions"].get(stage)
    if before not in (None, digest) or secrets["call"] != call:
        raise ValueRefused(f"stage {stage} was answered before, to another question.")
    tensors: dict[str, Tensor] = {}
    if before is None:
        missing = [name for name in Stage.all()[: Stage.all().index(stage)] if name not in secrets["questions"]]
        if missing:
            raise ValueRefused(f"stage {stage} comes before {missing[0]}.")
        if stage == Stage.SETUP:
            store.forget_secrets(str(head["aggregation"]))
        answer = _STAGES[stage](store, site, secrets, question)
        secrets["questions"][stage], secrets["answers"][stage] = digest, answer
        if stage == Stage.UNMASK:  # nothing needs the secrets any more
            secrets = {name: secrets[name] for name in ("call", "questions", "answers")}
        atomic_write(file, json.dumps(secrets), secret=True)
    if stage == Stage.COLLECT_MASKED_VECTORS:
        if "seed" not in secrets:
            raise ValueRefused("the vector was unmasked already.")
        tensors["vector"] = _masked(store, site, secrets)
    return Envelope({"answer": secrets["answers"][stage], "call": call}, tensors)


def _setup(store: StateStore, site: str, secrets: Secrets, question: Any) -> Any:
    """Make two pairs of keys: the first for masks, the second to encrypt shares."""
    for name in ("key1", "key2"):
        private, public = asymmetric.generate_key_pairs()
        secrets[name] = [
            asymmetric.private_key_to_bytes(private).decode(),
            asymmetric.public_key_to_bytes(public).decode(),
        ]
    return [secrets["key1"][1], secrets["key2"][1]]


def _share_keys(store: StateStore, site: str, secrets: Secrets, question: Any) -> Any:
    """Share the seed of the own mask and the first private key among all members, encrypted for each."""
    keys: dict[str, list[str]] = dict(question)
    if keys.get(site) != [secrets["key1"][1], secrets["key2"][1]]:
        raise ValueRefused("the server gives out other public keys in this site's name.")
    if len(keys) < 2 or len({key for pair in keys.values() for key in pair}) < 2 * len(keys):
        raise ValueRefused("an aggregation needs two sites at least, and each has keys of its own.")
    members = sorted(keys)
    seed, own_key = os.urandom(SEED_BYTES), secrets["key1"][0].encode()
    seed_shares, key_shares = (create_shares(each, threshold(len(members)), len(members)) for each in (seed, own_key))
    secrets |= {"members": keys, "seed": seed.hex(), "shares": {}}
    ciphertexts = {}
    for number, member in enumerate(members):
        if member == site:
            secrets["shares"][site] = [seed_shares[number].hex(), key_shares[number].hex()]
            continue
        plaintext = share_keys_plaintext_concat(members.index(site), number, seed_shares[number], key_shares[number])
        ciphertexts[member] = encrypt(_channel(secrets, member), plaintext).decode()
    return ciphertexts


def _collect(store: StateStore, site: str, secrets: Secrets, question: Any) -> Any:
    """Keep the shares of those who shared theirs: with each of them the vector has a mask in common."""
    members = sorted(secrets["members"])
    for source, ciphertext in dict(question).items():
        if source == site or source not in members:
            raise ValueRefused(f"{source!r} is no other member of this aggregation.")
        try:
            plaintext = decrypt(_channel(secrets, source), ciphertext.encode())
        except InvalidToken:
            raise ValueRefused(f"what {source} sent for this site cannot be decrypted.") from None
        sender, receiver, *shares = share_keys_plaintext_separate(plaintext)
        if (sender, receiver) != (members.index(source), members.index(site)):
            raise ValueRefused(f"the shares of {source} are not what it sent to this site.")
        if not all(map(_is_share, shares)):
            raise ValueRefused(f"the shares of {source} have a length that none has.")
        secrets["shares"][source] = [share.hex() for share in shares]
    if len(secrets["shares"]) < threshold(len(members)):
        raise ValueRefused(f"{len(secrets['shares'])} sites share their keys, {threshold(len(members))} are needed.")
    store.update(secrets["call"])  # if it is missing, nothing is masked
    return None


def _masked(store: StateStore, site: str, secrets: Secrets) -> Tensor:
    """Return the update with the own mask, and with those that others take off again."""
    vector = store.update(secrets["call"])
    masked = vector + mask(bytes.fromhex(secrets["seed"]), len(vector))
    own_key = asymmetric.bytes_to_private_key(secrets["key1"][0].encode())
    for other in sorted(secrets["shares"]):
        if other != site:
            shared = mask(pairwise_seed(own_key, _public(secrets["members"][other][0])), len(vector))
            masked += shared if site > other else -shared
    return masked


def _unmask(store: StateStore, site: str, secrets: Secrets, question: Any) -> Any:
    """Give shares of the masks of those who are in the sum, and of the keys of those who were lost before.

    A site tells them for one sum of each update: the difference of two sums would be the update of a single site.
    """
    active, dead = sorted(question["active"]), sorted(question["dead"])
    if sorted([*active, *dead]) != sorted(secrets["shares"]) or site not in active:
        raise ValueRefused("who is in the sum and who was lost are not those who shared their keys.")
    members = len(secrets["members"])
    if len(active) < threshold(members):
        raise ValueRefused(f"a sum of {len(active)} sites, where at least {threshold(members)} are unmasked.")
    told = store.file(secrets["call"], "told")
    if told.exists() and json.loads(told.read_text()) != active:
        raise RunError("this update is in another sum already; the difference of the two would tell it.")
    atomic_write(told, json.dumps(active), secret=True)
    shares = secrets["shares"]
    return {name: shares[name][0] for name in active} | {name: shares[name][1] for name in dead}


_STAGES: dict[str, Callable[[StateStore, str, Secrets, Any], Any]] = {
    Stage.SETUP: _setup,
    Stage.SHARE_KEYS: _share_keys,
    Stage.COLLECT_MASKED_VECTORS: _collect,
    Stage.UNMASK: _unmask,
}


def _channel(secrets: Secrets, other: str) -> bytes:
    """Return the key of what this site and another one send each other through the server."""
    own = asymmetric.bytes_to_private_key(secrets["key2"][0].encode())
    return generate_shared_key(own, _public(secrets["members"][other][1]))


def _public(key: str) -> Any:
    return asymmetric.bytes_to_public_key(key.encode())
