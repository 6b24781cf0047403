"""What sites and server share of SecAgg (Bonawitz et al., 2017), from Flower's primitives: stages, threshold, masks.

SecAgg is SecAgg+ (Bell et al., 2020) where every two sites are neighbours. Flower gives keys, key agreement, encryption
and secret shares. Its generator of masks, `pseudo_rand_gen`, is not used: it folds a key of 256 bits into 32, of which
at most 28 vary, so that a server could try all masks. SecAgg asks for AES in counter mode, which is used here.
"""

from __future__ import annotations

import base64

import numpy as np
import torch
from torch import Tensor

from fedkeep.errors import MissingExtra

try:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
except ImportError as error:
    raise MissingExtra("Secure aggregation", "flower") from error

SEED_BYTES = 32
"""Length of the seed of a mask, the key of AES-256."""
SHORTEST_SHARE = 4 + SEED_BYTES
"""No share of a seed or of a key is shorter: four bytes say which share it is."""


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


def pairwise_seed(private_key: EllipticCurvePrivateKey, public_key: EllipticCurvePublicKey) -> bytes:
    """Return the seed of the mask that two sites share, which one of them adds and the other one subtracts.

    Returns: 32 bytes.
    """
    return base64.urlsafe_b64decode(generate_shared_key(private_key, public_key))
