"""A site's part in SecAgg: it masks the update that a client step left, and tells only what unmasks a sum.

The four stages are messages of their own, which any process of the site can answer: the secrets of an aggregation wait
in a file. A stage is answered once. The same question again gets the same answer, and another question none, since two
answers about one secret would give it away.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from cryptography.fernet import InvalidToken
from flwr.common.secure_aggregation.crypto.shamir import create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt, generate_shared_key
from flwr.common.secure_aggregation.secaggplus_constants import Stage
from flwr.common.secure_aggregation.secaggplus_utils import share_keys_plaintext_concat, share_keys_plaintext_separate
from flwr.supercore.primitives.asymmetric import (
    bytes_to_private_key,
    bytes_to_public_key,
    generate_key_pairs,
    private_key_to_bytes,
    public_key_to_bytes,
)
from torch import Tensor

from fedkeep._utils.identity import Identity
from fedkeep.errors import ConfigError, RunError, ValueRefused
from fedkeep.flower.config import NodeConfig
from fedkeep.flower.secagg import SEED_BYTES, SHORTEST_SHARE, mask, pairwise_seed, threshold
from fedkeep.flower.state_store import StateStore
from fedkeep.flower.transport import Envelope

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
        _write(file, secrets)
    if stage == Stage.COLLECT_MASKED_VECTORS:
        if "seed" not in secrets:
            raise ValueRefused("the vector was unmasked already.")
        tensors["vector"] = _masked(store, site, secrets)
    return Envelope({"answer": secrets["answers"][stage], "call": call}, tensors)


def _setup(store: StateStore, site: str, secrets: Secrets, question: Any) -> Any:
    """Make two pairs of keys: the first for masks, the second to encrypt shares."""
    for name in ("key1", "key2"):
        private, public = generate_key_pairs()
        secrets[name] = [private_key_to_bytes(private).decode(), public_key_to_bytes(public).decode()]
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
    seed_shares, key_shares = (
        create_shares(secret, threshold(len(members)), len(members)) for secret in (seed, own_key)
    )
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
        if any(len(share) < SHORTEST_SHARE for share in shares):
            raise ValueRefused(f"the shares of {source} are too short.")
        secrets["shares"][source] = [share.hex() for share in shares]
    if len(secrets["shares"]) < threshold(len(members)):
        raise ValueRefused(
            f"{len(secrets['shares'])} sites share their keys, and {threshold(len(members))} are needed."
        )
    store.update(secrets["call"])  # if it is missing, nothing is masked
    return None


def _masked(store: StateStore, site: str, secrets: Secrets) -> Tensor:
    """Return the update with the own mask, and with those that others take off again."""
    vector = store.update(secrets["call"])
    masked = vector + mask(bytes.fromhex(secrets["seed"]), len(vector))
    own_key = bytes_to_private_key(secrets["key1"][0].encode())
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
    _write(told, active)
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
    own = bytes_to_private_key(secrets["key2"][0].encode())
    return generate_shared_key(own, _public(secrets["members"][other][1]))


def _public(key: str) -> Any:
    return bytes_to_public_key(key.encode())


def _write(file: Path, content: Any) -> None:
    """Write a file for the site's user alone, whole or not at all."""
    new = file.with_name(f"{file.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        json.dump(content, stream)
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(file)
