"""Steps of one local training on a GPU, each replayed with one call instead of one call for each layer.

A small network's layers take longer to call than to compute. A CUDA graph is recorded from a step on the first full
batch and replayed on the others, which are copied to where the recorded step reads its batch. The arithmetic is the
same. Only steps of this package's losses and networks are recorded: a loss of the user's may do something else in each
step, which a recorded step would not.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol

import torch

from fedkeep.interface.pytree import iter_instances
from fedkeep.losses import Batch, Loss
from fedkeep.models import Network

log = logging.getLogger(__name__)

Step = Callable[[list[Batch]], None]


class Replay(Protocol):
    """A recorded step."""

    def replay(self) -> None:
        """Do again what was recorded, with what now stands in its tensors."""


Record = Callable[[Callable[[], None]], Replay]
"""Records what a function does on the GPU, without doing it."""


def can_record(network: torch.nn.Module, loss: Loss) -> bool:
    """Tell whether a step does the same in every step: whether network and loss are of this package."""
    return isinstance(network, Network) and all(
        type(part).__module__.startswith("fedkeep.") for part in (*iter_instances(loss, Loss),)
    )


class GraphSteps:
    """Takes steps of one local training, from the third of a batch's shape on by replaying the second.

    ``step``: Takes a step.
    ``record``: Records one.
    """

    def __init__(self, step: Step, record: Record) -> None:
        self._step = step
        self._record = record
        self._seen: dict[Hashable, int] = {}
        self._recorded: dict[Hashable, tuple[list[Batch], Replay]] = {}
        self._refused = False

    def __call__(self, batches: list[Batch]) -> None:
        """Take one step."""
        shapes = tuple((name, part.shape) for batch in batches for name, part in _columns(batch))
        if shapes not in self._recorded and not self._may_record(shapes):
            self._step(batches)
            return
        if shapes not in self._recorded:
            places = [Batch({name: part.clone() for name, part in b.data.items()}, b.index.clone()) for b in batches]
            try:
                self._recorded[shapes] = places, self._record(lambda: self._step(places))
            except RuntimeError as error:
                log.info("Steps are not recorded as CUDA graphs: %s", error)
                self._refused = True
                self._step(batches)
                return
        places, recorded = self._recorded[shapes]
        for place, batch in zip(places, batches, strict=True):
            for (_, into), (_, part) in zip(_columns(place), _columns(batch), strict=True):
                into.copy_(part)
        recorded.replay()

    def _may_record(self, shapes: Hashable) -> bool:
        """Count a shape, and tell whether it came often enough: libraries are loaded, and memory found, at first."""
        seen = self._seen[shapes] = self._seen.get(shapes, 0) + 1
        return not self._refused and seen >= 2


def _columns(batch: Batch) -> Iterator[tuple[str, torch.Tensor]]:
    yield from batch.data.items()
    yield "index", batch.index


class CudaRecorder:
    """Records CUDA graphs, all in one pool of memory; only one of them may be replayed at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last: torch.cuda.CUDAGraph | None = None  # keeps the pool

    def __call__(self, function: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        pool = self._last.pool() if self._last is not None else None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), _no_collection():
            graph.capture_begin(pool)
            try:
                function()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._last = graph
        return graph


@cache
def recorder_of(device: torch.device) -> Record | None:
    """Return what records steps on a device; None for a CPU, which calls a layer quickly."""
    return CudaRecorder(device) if device.type == "cuda" else None


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from freeing what belongs to the GPU, which ends a recording."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
