"""The other data sets that papers call FEMNIST besides its 62 classes: its digits, or its letters."""

from __future__ import annotations

import string
from dataclasses import replace

from fedkeep.data.combine import select_classes
from fedkeep.data.dataset import Data, DataSet


def femnist_digits(femnist: DataSet) -> DataSet:
    """Return FEMNIST's digits: 10 classes."""
    return replace(select_classes(femnist, string.digits), name="femnist-digits")


def femnist_alphabet(femnist: DataSet) -> DataSet:
    """Return FEMNIST's letters in 26 classes, a capital and its small letter in one, as in EMNIST's Letters."""
    letters = select_classes(femnist, string.ascii_uppercase + string.ascii_lowercase)

    def merge_cases(data: Data) -> Data:
        return {**data, "label": data["label"] % len(string.ascii_uppercase)}

    train, test = merge_cases(letters.train), merge_cases(letters.test)
    names = tuple(string.ascii_uppercase)
    return replace(letters, name="femnist-alphabet", train=train, test=test, label_names=names)
