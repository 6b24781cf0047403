"""Puts this folder on the import path, so that all tests share `tiny`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before torch is imported: on a busy machine two threads of a small model can be eight times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Readline, which pytest imports, tells all child processes a width; what they print to pipes is not broken into lines.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
    os.unsetenv(name)

pytest.register_assert_rewrite("byhand", "local_transport", "permuting", "toy")


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what tests decode and generate out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDKEEP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Thousands of files are written that need not outlive a power cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield
