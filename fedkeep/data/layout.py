"""Which columns and splits of a data set play which part, given or guessed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedkeep.data.splits import Features, Split
from fedkeep.errors import DataError, did_you_mean

TEST_NAMES = ("test", "validation", "valid", "val")
"""What a test split may be called, the first that is there."""

_IMAGES = ("image", "img")
_LABELS = ("label", "labels", "fine_label", "character", "target", "class")


@dataclass(frozen=True)
class Layout:
    """Say where images, labels and further integer columns are.

    Parameters
    ----------
    image, label : column names.
    train, test : split names; an empty test makes one from train (see `share`).
    columns : pairs of a source's column and its name in a `DataSet`; its values are numbered in sorted order.
    group : a name in `columns` within which a missing test split is held out; empty for within each class.
    share : of each group that is held out when there is no test split; 0 makes a missing test split an error.
    channels : 1 or 3 converts all images; None takes them as they are.
    side : the side that images are brought to, from their middle square; None leaves them.
    """

    image: str = "image"
    label: str = "label"
    train: str = "train"
    test: str = "test"
    columns: tuple[tuple[str, str], ...] = ()
    group: str = ""
    share: float = 0.0
    channels: int | None = None
    side: int | None = None

    def check(self, split: Split) -> None:
        """Raise `DataError` for a column that is missing, with the nearest that is there."""
        for column in (self.image, self.label, *(source for source, _ in self.columns)):
            if column not in split.features:
                raise DataError(
                    f"{split.where}: the column {column!r} is missing.{did_you_mean(column, split.features)} "
                    "Rename the columns, or write the file again with Hugging Face `datasets`."
                )


def guess(splits: Mapping[str, Split], where: str) -> Layout:
    """Return the layout of a data set that nobody described.

    Raises
    ------
    DataError
        Without a split ``"train"``, or where the image or the label column cannot be told.
    """
    if "train" not in splits:
        raise DataError(
            f"{where}: there is no split 'train'.{did_you_mean('train', splits)} A data set needs 'train' and should "
            f"have one of {', '.join(map(repr, TEST_NAMES))}."
        )
    features = splits["train"].features
    test = next((name for name in TEST_NAMES if name in splits), "")
    return Layout(image=_only(features, "Image", _IMAGES, where), label=_label(features, where), test=test, share=0.2)


def _only(features: Features, kind: str, usual: tuple[str, ...], where: str) -> str:
    names = [name for name, feature in features.items() if feature.get("_type") == kind]
    if len(names) == 1:
        return names[0]
    for name in usual:
        if name in names:
            return name
    found = f"several ({', '.join(names)})" if names else f"none among {', '.join(features) or 'no columns'}"
    raise DataError(f"{where}: one {kind} column is needed but there is {found}. Name the one to use {usual[0]!r}.")


def _label(features: Features, where: str) -> str:
    if any(feature.get("_type") == "ClassLabel" for feature in features.values()):
        return _only(features, "ClassLabel", _LABELS, where)
    for name in _LABELS:
        if name in features:
            return name
    raise DataError(
        f"{where}: no column says which class an image has (columns: {', '.join(features)}). Name it 'label', or write "
        "the file with Hugging Face `datasets` and a ClassLabel feature."
    )
