"""Anchors of classes: a vector for each class name, such as a language model's embedding of a sentence with it."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from fedkeep.errors import ConfigError, nearest

FORMATS = (
    "a .csv file with a line for each class, its name and then the numbers; or a .safetensors file with a vector "
    "under each class's name"
)


def read_anchors(path: str, names: Sequence[str]) -> Tensor:
    """Return the vectors of some classes, float32 [classes, width], in their order.

    ``path``: A file with a vector for each class, and perhaps for others: see `FORMATS`.
    """
    file = Path(path).expanduser()
    reader = _READERS.get(file.suffix)
    if reader is None:
        raise ConfigError(f"cannot read anchors from {path!r}: expected {FORMATS}.")
    try:
        found = reader(file)
    except Exception as error:  # each library has its own
        raise ConfigError(f"cannot read anchors from {path!r}: {error}. Expected {FORMATS}.") from error
    missing = [name for name in names if name not in found]
    if missing:
        others = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(
            f"{path!r} has no anchor for class {missing[0]!r}{others}.{nearest(missing[0], found)} Name them as the "
            "data set does."
        )
    vectors = [found[name].flatten().float() for name in names]
    widths = sorted({len(vector) for vector in vectors})
    if len(widths) > 1:
        raise ConfigError(
            f"anchors must be of one length, and {path!r} has some of {widths[0]} and {widths[-1]} numbers."
        )
    anchors = torch.stack(vectors)
    if not bool(anchors.isfinite().all()):
        raise ConfigError(f"some numbers in {path!r} are not finite. Anchors must be.")
    return anchors


def _from_csv(file: Path) -> Mapping[str, Tensor]:
    with file.open(encoding="utf-8", newline="") as lines:
        return {row[0]: torch.tensor([float(number) for number in row[1:]]) for row in csv.reader(lines) if row}


_READERS: Mapping[str, Callable[[Path], Mapping[str, Tensor]]] = {
    ".csv": _from_csv,
    ".safetensors": load_file,
}
