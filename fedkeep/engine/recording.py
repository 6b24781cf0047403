"""Record what a GPU is told to do, and tell it again with one call: CUDA graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from fedkeep.errors import ConfigError

Replay = Callable[[], None]


def checked_graphs(device: torch.device) -> None:
    """Raise `ConfigError` if a device cannot replay graphs."""
    if device.type != "cuda":
        raise ConfigError(f"CUDA graphs need a GPU, and the device is {device}. Add --device cuda, or omit --graphs.")


class Recorder(ABC):
    """Records what a device is told to do, without its doing it."""

    @abstractmethod
    def record(self, step: Callable[[], None]) -> Replay:
        """Return what does all that a step would have done, with whatever is then in the tensors that it used."""

    @abstractmethod
    def apart(self) -> AbstractContextManager[None]:
        """Return a context for a step that is not recorded, but will be."""


class CudaRecorder(Recorder):
    """Records CUDA graphs. All share their memory: they run one after another, and leave nothing that another needs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The memory goes when no graph uses it any more, and its name would then be of nothing: this one stays.
        self.first = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream), torch.cuda.graph(self.first, stream=self.stream):
            torch.zeros(1, device=device)

    def record(self, step: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        # The outer context also leads back to the stream before if recording fails.
        with torch.cuda.stream(self.stream), torch.cuda.graph(graph, pool=self.first.pool(), stream=self.stream):
            step()
        replay: Replay = graph.replay
        return replay

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Enter the stream on which is recorded later: autograd remembers on which one it saw a weight first."""
        usual = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(usual)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            usual.wait_stream(self.stream)
