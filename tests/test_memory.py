"""Memory that is given back to the system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedkeep._utils import process


def test_memory_is_given_back_when_enough_is_dropped_and_the_process_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    much, held, given_back = process.ENOUGH, [0], list[int]()
    monkeypatch.setattr(process, "_library_function", lambda name: lambda _: given_back.append(held[-1]))
    monkeypatch.setattr(process, "_resident_bytes", lambda: held[-1])
    trimmer = process.MemoryTrimmer()
    for now, size in (
        (20 * much, much - 1),  # not enough is dropped
        (20 * much, 1),
        (15 * much, much),  # what a step needs
        (16 * much, 3 * much),
        (17 * much, much),  # more by more than `ENOUGH`
        (14 * much, much),
        (16 * much + 1, much),
        (18 * much, much),  # such a step needs more, as is seen after memory was given back
        (19 * much, much),
    ):
        held.append(now)
        trimmer.dropped(size)
    assert given_back == [20 * much, 17 * much, 16 * much + 1]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells how much memory a process has")
def test_freed_pages_between_tensors_are_given_back() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    tensors = [torch.ones(2**14) for _ in range(2_000)]  # 64 KiB each, too small for memory of their own
    before = resident()
    kept = tensors[::50]
    del tensors
    process.MemoryTrimmer().dropped(process.ENOUGH)
    assert len(kept) == 40
    assert before - resident() > 50 * 2**20


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems' allocators have other rules")
def test_a_process_that_keeps_freed_memory_asks_for_it_once() -> None:
    """After some steps of training the next ones take few new pages; by default each gets thousands of its own."""
    code = """
import resource
import sys
import torch
from fedkeep._utils.process import keep_freed_memory

if sys.argv[1:]:
    keep_freed_memory()
weight = torch.ones((), requires_grad=True)
for step in range(32):
    if step == 8:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    values = torch.ones(64, 64, 32, 32)
    for _ in range(2):
        values = (weight * values).relu()
    values.sum().backward()
    del values
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    command = [sys.executable, "-c", code]
    default, kept = (
        int(subprocess.run([*command, *more], check=True, capture_output=True, text=True).stdout)
        for more in ([], ["keep"])
    )
    assert default > 10_000
    assert kept < default / 2  # the heap may still grow by a block or two of 4,096 pages at odd times
