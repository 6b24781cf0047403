"""Text to token ids, without a vocabulary that somebody would have to collect."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep.errors import DataError

_WORD = re.compile(r"\w+|[^\w\s]")


def hash_words(text: str, vocabulary: int) -> list[int]:
    """Return a token id for each word and punctuation mark of a text.

    The id is a hash (CRC-32) of the word in lower case, 1 to vocabulary - 1. So all clients number words alike, and
    none has to tell which words it has. Different words may share an id.

    Weinberger et al., "Feature hashing for large scale multitask learning", ICML 2009.

    ``vocabulary``: Number of ids, with 0 for what fills a text up.
    """
    words = _WORD.findall(text.lower())
    return [1 + zlib.crc32(word.encode("utf-8", "replace")) % (vocabulary - 1) for word in words]


def tokenise(texts: Iterable[Any], where: str, length: int, vocabulary: int) -> Tensor:
    """Return the token ids of texts.

    ``where``: What errors call them.
    Returns: int64 ``[n, length]``.
    """
    rows = []
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(f"{where}: row {row} has no text, but {text!r}. Fill or remove the row.")
        rows.append(hash_words(text[: 64 * length], vocabulary))  # a word of 64 letters is none
    return pad(rows, where, length)


def pad(rows: Sequence[Any], where: str, length: int) -> Tensor:
    """Return lists of token ids as one tensor: longer ones are cut, shorter ones filled with 0.

    ``where``: What errors call them.
    Returns: int64 ``[n, length]``.
    """
    result: np.ndarray[Any, np.dtype[np.int64]] = np.zeros((len(rows), length), np.int64)
    for row, ids in enumerate(rows):
        if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < 2**31 for one in ids[:length]):
            raise DataError(f"{where}: row {row} must be a list of token ids, integers from 0 to {2**31 - 1}.")
        result[row, : len(ids)] = ids[:length]
    return torch.from_numpy(result)
