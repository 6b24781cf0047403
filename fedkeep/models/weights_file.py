"""Models in a temporary file, from which each tensor is read when it is needed: for more models than memory holds."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from fedkeep._utils.memory import MemoryTrimmer
from fedkeep.errors import RunError

ADVICE = "Set TMPDIR to a folder with more room, or take smaller cohorts (run.cohort_size)."


class WeightsFile:
    """A temporary file without a name, in the system's folder for such files (``TMPDIR``).

    The system removes it when the process ends, however it ends. The space of a model that nothing refers to any more
    is used again, and the file is emptied when it holds none. One thread may use it.

    ``largest``: The largest size of the file so far, in bytes.
    ``trimmer``: Gives the memory back of models that were put into the file, and of tensors that were read.
    """

    def __init__(self) -> None:
        self.trimmer = MemoryTrimmer()
        self._file: Any = None
        self._end = self.largest = 0
        self._used = 0  # number of models in the file
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # positions by length, in bytes

    def check_room(self, needed: int) -> None:
        """Check that the disk has room for models that are not there yet.

        ``needed``: Their size in bytes; 0 or less if none will come.
        """
        unused = sum(length * len(positions) for length, positions in self._free.items())
        if needed > unused and (free := shutil.disk_usage(tempfile.gettempdir()).free + unused) < needed:
            raise RunError(
                f"the models of a round's clients do not fit into memory, and take {needed / 1e9:.1f} GB in "
                f"{tempfile.gettempdir()}, which has {free / 1e9:.1f} GB free. {ADVICE}"
            )

    def put(self, weights: Mapping[str, Tensor]) -> StoredWeights:
        """Write a model to the file.

        Returns: The same model. Its tensors are read from the file each time that they are asked for.
        """
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        length = sum(tensor.nbytes for tensor in plain.values())
        position = self._free[length].pop() if self._free[length] else self._end
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="fedkeep-")  # noqa: SIM115 — open for as long as this object
                weakref.finalize(self, self._file.close)
            self._file.seek(position)
            for tensor in plain.values():
                if tensor.numel():
                    self._file.write(_bytes_of(tensor))
            self._file.flush()
        except OSError as error:
            raise RunError(
                f"the models of this round's clients do not fit into memory, and {length / 1e6:.1f} MB for one more "
                f"cannot be written to {tempfile.gettempdir()}: {error.strerror}. {ADVICE}"
            ) from error
        self._end = max(self._end, position + length)
        self.largest = max(self.largest, self._end)
        self._used += 1
        places: dict[str, tuple[Tensor, int, torch.device]] = {}
        for name, tensor in plain.items():
            places[name] = tensor.to("meta"), position, weights[name].device
            position += tensor.nbytes
        stored = StoredWeights(self, places)
        weakref.finalize(stored, self._release, position - length, length).atexit = False
        return stored

    def read(self, position: int, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Read a tensor.

        ``position``: Where it begins, in bytes.
        """
        tensor = torch.empty(shape, dtype=dtype)
        self.trimmer.dropped(tensor.nbytes)  # as many were read before, and most of them are gone
        if tensor.numel():
            self._file.seek(position)
            if self._file.readinto(_bytes_of(tensor)) != tensor.nbytes:
                raise RunError(f"a temporary file in {tempfile.gettempdir()} was cut short by another program.")
        return tensor

    def _release(self, position: int, length: int) -> None:
        self._free[length].append(position)
        self._used -= 1
        if not self._used:
            self._free.clear()
            self._end = 0
            os.ftruncate(self._file.fileno(), 0)


class StoredWeights(Mapping[str, Tensor]):
    """A model in a `WeightsFile`.

    ``places``: For each tensor one of its form on the device ``meta``, its position in the file, and its device.
    """

    def __init__(self, file: WeightsFile, places: Mapping[str, tuple[Tensor, int, torch.device]]) -> None:
        self._file = file
        self._places = places

    def __getitem__(self, name: str) -> Tensor:
        form, position, device = self._places[name]
        return self._file.read(position, form.shape, form.dtype).to(device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @cached_property
    def form(self) -> Mapping[str, Tensor]:
        """The shapes and types of the tensors, as tensors without content, by name."""
        return {name: form for name, (form, _, _) in self._places.items()}

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """Read some elements of a tensor.

        ``start``, ``stop``: The elements from ``start`` up to ``stop``, as the flattened tensor has them.
        Returns: [stop - start].
        """
        form, position, device = self._places[name]
        size = prod(form.shape)
        start, stop = min(start, size), min(stop, size)
        return self._file.read(position + start * form.itemsize, (stop - start,), form.dtype).to(device)


def form_of(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors that have the shapes and types of a model's, without reading them from a file."""
    return weights.form if isinstance(weights, StoredWeights) else weights


def part_of(weights: Mapping[str, Tensor], name: str, start: int, stop: int) -> Tensor:
    """Return some elements of a model's tensor; of a stored one no others are read.

    ``start``, ``stop``: The elements from ``start`` up to ``stop``, as the flattened tensor has them.
    Returns: [stop - start].
    """
    if isinstance(weights, StoredWeights):
        return weights.part(name, start, stop)
    return weights[name].reshape(-1)[start:stop]


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.flatten().view(torch.uint8).numpy().data
