"""Texts as inputs: a word's token id is a hash, and lists of ids are cut or filled to one length."""

import re
import unicodedata
import zlib
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep.data.readers import Problems, Where, at
from fedkeep.errors import DataError

_WORD = re.compile(r"\w+|[^\w\s]")


def hash_words(text: str, vocabulary: int, most: int | None = None) -> list[int]:
    """Return a token id for each word and punctuation mark of a text.

    The id is a hash (CRC-32) of the word in lower case, 1 to vocabulary - 1. So all clients number words alike, and
    none has to tell which words it has. Different words may share an id.

    most : how many are returned; None for all.

    Weinberger et al., "Feature hashing for large scale multitask learning", ICML 2009.
    """
    words = (found[0] for found in _WORD.finditer(unicodedata.normalize("NFC", text.lower())))
    return [1 + zlib.crc32(word.encode("utf-8", "replace")) % (vocabulary - 1) for word in islice(words, most)]


def tokenise(texts: Iterable[Any], where: Where | str, length: int, vocabulary: int, problems: Problems) -> Tensor:
    """Return the token ids of texts, int64 ``[n, length]``; raises `DataError` if one is missing or not text."""
    texts = list(texts)
    empty = [row for row, text in enumerate(texts) if not isinstance(text, str)]
    if empty:
        raise DataError(f"{where}: {at(where, empty)} has no text, but {texts[empty[0]]!r}. Fill or remove it.")
    return pad([hash_words(text, vocabulary, length + 1) for text in texts], where, length, problems)


def pad(rows: Sequence[Any], where: Where | str, length: int, problems: Problems) -> Tensor:
    """Return lists of token ids as int64 ``[n, length]``: longer ones are cut, which is noted, others filled with 0.

    Raises `DataError` if a row is no list of integers from 0 on.
    """
    result: np.ndarray[Any, np.dtype[np.int64]] = np.zeros((len(rows), length), np.int64)
    for row, ids in enumerate(rows):
        if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < 2**31 for one in ids[:length]):
            raise DataError(f"{where}: {at(where, [row])} must be a list of token ids, integers from 0 to {2**31 - 1}.")
        result[row, : len(ids)] = ids[:length]
    if cut := sum(len(ids) > length for ids in rows):
        problems.notes.append(
            f"{where}: {cut} of {len(rows)} rows have more than {length} token ids and were cut; data.length "
            "keeps more."
        )
    return torch.from_numpy(result)
