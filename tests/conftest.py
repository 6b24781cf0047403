"""Puts this folder on the import path, so that all tests share `tiny`."""

from __future__ import annotations

import gc
import os
import random
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

# Before torch is imported: on a busy machine two threads of a small model can be eight times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Readline, which pytest imports, tells all child processes a width; what they print to pipes is not broken into lines.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
    os.unsetenv(name)

pytest.register_assert_rewrite("byhand", "local_transport", "permuting", "toy")

SEED = os.environ.get("FEDKEEP_TEST_SEED", "0")


def _seed_global_generators(name: str) -> None:
    """Give the generators of torch, NumPy and random a state that depends on a name and on nothing else."""
    import numpy as np  # here, so that pytest starts at once
    import torch

    seed = zlib.crc32(f"{SEED} {name}".encode())
    torch.default_generator.manual_seed(seed)  # torch.manual_seed formats three tracebacks where there is no GPU
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed)  # noqa: NPY002 - the very generator that tests must not depend on
    random.seed(seed)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect no garbage while tests are collected: nothing that is made then goes, and a fifth of the time would."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[None]:
    """Seed each fixture by its own name, since which test is the first to use it depends on the order."""
    _seed_global_generators(f"{fixturedef.baseid} {fixturedef.argname} {getattr(request, 'param_index', 0)}")
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Seed each test by its own name: what it draws is the same on every machine, in every order."""
    _seed_global_generators(item.nodeid)
    return (yield)


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
