"""The data as they were read: inputs, examples of each split, class and client, and what was left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

NOT_KNOWN = "?"
"""Stands for a number that was not recorded."""
_INPUTS = {"uint8": "images of {}", "int64": "{} token ids", "float32": "numbers of {}"}


@dataclass(frozen=True)
class DataRead:
    """Numbers of examples, as a trial's description and its partition have them.

    ``classes``: Of each class its name, its examples at clients (None: not recorded) and its test examples.
    ``clients``: Of each client its name and its examples; empty if they are not recorded.
    """

    inputs: str
    classes: Sequence[tuple[str, int | None, int]]
    clients: Sequence[tuple[str, int]]
    num_clients: int
    note: str

    def facts(self, shown: int = 200) -> list[tuple[str, str]]:
        """Return it in a few words each; of long lists the first entries."""
        sizes = [size for _, size in self.clients]
        held = f"{sum(sizes):,} at " if sizes else ""
        each = f" ({min(sizes):,} to {max(sizes):,} each)" if sizes else ""
        of_classes = (f"{name} {NOT_KNOWN if train is None else train} + {test}" for name, train, test in self.classes)
        total = sum(test for _, _, test in self.classes)
        return [
            ("inputs", self.inputs),
            ("examples", f"{held}{self.num_clients} clients{each} for training, {total:,} for testing"),
            ("classes, training + testing", _listed(of_classes, shown)),
            ("clients", _listed((f"{name}: {size}" for name, size in self.clients), shown)),
            ("noted", self.note),
        ]


def data_read(info: Mapping[str, Any], partition: Mapping[str, Any]) -> DataRead:
    """Return what was read for a trial; earlier versions recorded less."""
    test = list(map(int, info.get("test_total") or []))
    names = list(map(str, info.get("label_names") or []))
    names = names if len(names) == len(test) else list(map(str, range(len(test))))
    counts = np.asarray(partition.get("counts") or np.zeros((0, len(test))), dtype=np.int64)
    train: list[int | None] = [*map(int, counts.sum(0))] if len(counts) else [None] * len(test)
    clients = partition.get("client_names") or range(len(counts))
    about = info.get("input") or {}
    features, shape = about.get("features") or [], " x ".join(map(str, about.get("shape") or []))
    inputs = _INPUTS.get(str(about.get("type")), "{}").format(shape) if shape else ""
    return DataRead(
        f"{len(features)} features: {_listed(features, 30)}" if features else inputs,
        list(zip(names, train, test, strict=True)),
        [(str(name), int(size)) for name, size in zip(clients, counts.sum(1), strict=False)],
        int(info.get("num_clients") or len(counts)),
        str(info.get("dataset_note") or ""),
    )


def _listed(words: Iterable[object], shown: int) -> str:
    every = list(map(str, words))
    return ", ".join(every[:shown]) + (f" and {len(every) - shown:,} more" if len(every) > shown else "")
