"""HAM10000 as the Hub has it, made into train and test splits that share no lesion."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from fedkeep.data.splits import Features, Split
from fedkeep.errors import DataError

DIAGNOSES = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")

_LONG = {
    "actinic_keratoses": "akiec",
    "basal_cell_carcinoma": "bcc",
    "benign_keratosis-like_lesions": "bkl",
    "dermatofibroma": "df",
    "melanoma": "mel",
    "melanocytic_nevi": "nv",
    "vascular_lesions": "vasc",
}


def by_lesion(splits: Mapping[str, Split]) -> dict[str, Split]:
    """Pool all splits, keep each image once, and split again by lesion.

    The splits on the Hub repeat images: most of its test images are training images too. A lesion goes to test where
    the first byte of the SHA-256 of its id is below 51, a fifth of the lesions and the same ones wherever it is done.

    Returns
    -------
    The splits ``"train"`` and ``"test"`` with the columns ``"image"`` and ``"label"``.

    Raises
    ------
    DataError
        For a diagnosis that is none of the seven.
    """
    pooled = list(splits.values())
    images = list(chain.from_iterable(split.values("image_id") for split in pooled))
    lesions = list(chain.from_iterable(split.values("lesion_id") for split in pooled))
    labels = [_label(dx) for split in pooled for dx in split.values("dx")]
    seen: set[str] = set()
    part: list[str] = []  # of each pooled row; empty for a repeated image
    for image, lesion in zip(images, lesions, strict=True):
        test = hashlib.sha256(lesion.encode()).digest()[0] < 51
        part.append("" if image in seen else "test" if test else "train")
        seen.add(image)
    return {name: _part(name, part, pooled, labels) for name in ("train", "test")}


def _part(name: str, part: Sequence[str], pooled: Sequence[Split], labels: Sequence[int]) -> Split:
    def read(column: str) -> Iterator[Sequence[Any]]:
        if column == "label":
            yield [label for label, its in zip(labels, part, strict=True) if its == name]
            return
        row = 0
        for chunk in chain.from_iterable(split.read(column) for split in pooled):
            yield [value for value, its in zip(chunk, part[row : row + len(chunk)], strict=True) if its == name]
            row += len(chunk)

    features: Features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": list(DIAGNOSES)}}
    return Split(f"{pooled[0].where}, all splits, the {name} lesions", list(part).count(name), features, read)


def _label(diagnosis: str) -> int:
    short = _LONG.get(diagnosis.lower(), diagnosis.lower())
    if short not in DIAGNOSES:
        raise DataError(f"HAM10000: {diagnosis!r} is none of the diagnoses {', '.join(DIAGNOSES)}.")
    return DIAGNOSES.index(short)
