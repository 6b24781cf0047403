"""What tools/equality.py compares: the SHA-256 of values, bit for bit, and of no name in the code.

- A model is digested as its tensors in order, each with type, shape and bytes; the tensors' names by themselves.
- Of records, states and messages only tensors, numbers and None count. The items of a list count in their order. What
  stands under names, in a dict or a dataclass, is sorted by content, and what is nested there counts as if it stood
  outside. So a field may be renamed or moved into another dataclass, but no number may change, come or go.
- Texts do not count, except decimal numbers: names of clients, and keys of dicts such as labels. A value under such a
  key counts together with it.
- Two fields of a record that swapped their values would go unseen, so those of FIELDS are digested by themselves too.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

FIELDS = {  # what is digested by itself of a record, and what it is called there
    **{"cohort": "cohort", "lost clients": "lost", "round undone": "rolled_back", "training loss": "loss"},
    **{"examples": "examples", "bytes sent to clients": "down", "bytes sent by clients": "up"},
    **{"correct counts": "correct", "test loss": "test_loss"},
}
Digests = dict[str, str]


def digest(value: Any) -> str:
    return sha256(content(value)).hexdigest()


def content(value: Any) -> bytes:
    """Return the canonical bytes of a value, as the docstring above says."""
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {tuple(value.shape)} ".encode() + data
    if isinstance(value, list | tuple):
        return "[{}]".format(" ".join(map(digest, value))).encode()
    if isinstance(value, Mapping) or is_dataclass(value):
        return "{{{}}}".format(" ".join(sorted(named(value)))).encode()
    if value is None or isinstance(value, str | bool | int | float):
        return f"{type(value).__name__} {'' if is_word(value) else value!r}".encode()
    raise TypeError(f"cannot digest a {type(value).__name__}")


def named(value: Any) -> Iterator[str]:
    """Yield a digest of each thing that stands under a name."""
    items = value if isinstance(value, Mapping) else {f.name: getattr(value, f.name) for f in fields(value)}
    for key, item in items.items():
        nested = isinstance(item, Mapping) or is_dataclass(item)
        if str(key).isdecimal():
            if not nested or any(named(item)):  # nothing that is kept, such as for a client, is as good as no key
                yield digest([str(key), item])
        elif nested:
            yield from named(item)
        elif not is_word(item):
            yield digest(item)


def is_word(value: Any) -> bool:
    return isinstance(value, str) and not value.isdecimal()


def of_model(model: Mapping[str, Tensor], what: str = "weights") -> Digests:
    return {what: digest(list(model.values())), f"names of {what}": sha256(" ".join(model).encode()).hexdigest()}


def of_records(records: Sequence[Mapping[str, Any]]) -> Digests:
    for name in FIELDS.values():
        if not any(name in record for record in records):
            raise KeyError(f"no record has {name!r}. If that is called otherwise now, change FIELDS.")
    alone = {what: digest([record.get(name) for record in records]) for what, name in FIELDS.items()}
    return alone | {"records": digest(records)}


def read_records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def of_run(run: Any) -> Digests:
    """Digest all trials of a run, and the numbers in its table and its CSV file but for those that measure time."""
    table = [line.split("|")[2:-1] for line in (run.path / "table.md").read_text().split("\n\n")[0].splitlines()]
    lines = [line[3:] for line in csv.reader((run.path / "results.csv").read_text().splitlines())]  # without texts
    found = {}
    for what, (head, *rows) in {"table": table, "results.csv": lines}.items():
        timed = [number for number, title in enumerate(head) if "train s" in title or "seconds" in title]
        filled = [number for number in range(len(head)) if any(row[number] for row in rows)]  # new ones may be empty
        kept = [number for number in filled if number not in timed]
        numbers = [[re.findall(r"-?\d[\d.]*(?:e-?\d+)?", row[number]) for number in kept] for row in rows]
        found[what] = sha256(json.dumps(numbers).encode()).hexdigest()
    for number, trial in enumerate(run.trials):
        each = of_model(load_file(trial.path / "model.safetensors")) | of_records(trial.rounds)
        each["partition"] = digest(trial.partition)
        found |= {f"{what} of cell {number}": value for what, value in each.items()}
    return found
