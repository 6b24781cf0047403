"""HAM10000 as the Hub has it, split again so that training and test images share no lesion."""

from __future__ import annotations

import hashlib
from typing import Any

from fedkeep.data.readers import RawSplits, datasets_library, read_column
from fedkeep.errors import DataError

DIAGNOSES = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")

_SHORT_NAMES = {
    "actinic_keratoses": "akiec",
    "basal_cell_carcinoma": "bcc",
    "benign_keratosis-like_lesions": "bkl",
    "dermatofibroma": "df",
    "melanoma": "mel",
    "melanocytic_nevi": "nv",
    "vascular_lesions": "vasc",
}


def split_by_lesion(splits: RawSplits) -> dict[str, Any]:
    """Pool all splits, keep each image once, and split again by lesion.

    The splits on the Hub repeat images: most of its test images are training images too. A lesion goes to test if the
    first byte of the SHA-256 of its id is below 51: a fifth of the lesions, the same ones on every machine.

    Returns: The splits ``"train"`` and ``"test"`` with the columns ``"image"`` and ``"label"``.
    """
    library = datasets_library("Loading HAM10000")
    pooled = library.concatenate_datasets(list(splits.values()))
    image_ids, lesions, diagnoses = (read_column(pooled, name, "HAM10000") for name in ("image_id", "lesion_id", "dx"))
    features = library.Features({"label": library.ClassLabel(names=list(DIAGNOSES))})
    labels = library.Dataset.from_dict({"label": [_label(dx) for dx in diagnoses]}, features=features)
    table = library.concatenate_datasets([pooled.select_columns(["image"]), labels], axis=1)
    rows: dict[str, list[int]] = {"train": [], "test": []}
    seen: set[str] = set()
    for row, (image_id, lesion) in enumerate(zip(image_ids, lesions, strict=True)):
        if image_id not in seen:
            is_test = hashlib.sha256(lesion.encode()).digest()[0] < 51
            rows["test" if is_test else "train"].append(row)
            seen.add(image_id)
    return {name: table.select(chosen) for name, chosen in rows.items()}


def _label(diagnosis: str) -> int:
    short = _SHORT_NAMES.get(diagnosis.lower(), diagnosis.lower())
    if short not in DIAGNOSES:
        raise DataError(f"HAM10000: {diagnosis!r} is none of the diagnoses {', '.join(DIAGNOSES)}.")
    return DIAGNOSES.index(short)
