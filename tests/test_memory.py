"""Memory that is given back to the system."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedkeep._utils import memory


def test_memory_is_given_back_each_time_that_enough_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(memory, "_malloc_trim", lambda: calls.append)
    trimmer = memory.MemoryTrimmer()
    for size in (0, memory.ENOUGH - 1, 1, 1, 3 * memory.ENOUGH):
        trimmer.dropped(size)
    assert calls == [0, 0]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells how much memory a process has")
def test_freed_pages_between_tensors_are_given_back() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    tensors = [torch.ones(2**14) for _ in range(2_000)]  # 64 KiB each, too small for memory of their own
    before = resident()
    kept = tensors[::50]
    del tensors
    memory.MemoryTrimmer().dropped(memory.ENOUGH)
    assert len(kept) == 40
    assert before - resident() > 50 * 2**20
