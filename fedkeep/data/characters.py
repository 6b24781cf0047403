"""What else papers may mean by FEMNIST than its 62 classes: its digits, or its letters."""

from __future__ import annotations

import string
from dataclasses import replace

from fedkeep.data.combine import choose
from fedkeep.data.dataset import Data, DataSet


def only_digits(femnist: DataSet) -> DataSet:
    """Return FEMNIST's digits: 10 classes."""
    return replace(choose(femnist, string.digits), name="femnist-digits")


def alphabet(femnist: DataSet) -> DataSet:
    """Return FEMNIST's letters in 26 classes, a capital and its small letter in one, as in EMNIST's Letters."""
    cased = choose(femnist, string.ascii_uppercase + string.ascii_lowercase)

    def uncased(half: Data) -> Data:
        return {**half, "label": half["label"] % len(string.ascii_uppercase)}

    train, test = uncased(cased.train), uncased(cased.test)
    names = tuple(string.ascii_uppercase)
    return replace(cased, name="femnist-alphabet", train=train, test=test, label_names=names)
