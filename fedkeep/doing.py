"""What a long round is at, for whoever watches: said where the work is done, heard where it is shown."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str], None]

EVERY = 2.0
"""Seconds from one word that is heard to the next, at least."""

_listener: ContextVar[Listener | None] = ContextVar("_listener", default=None)


def say(what: str, done: int, total: int | None = None) -> None:
    """Say how much of something is done, such as ``("images drawn", 512, 6000)``. Nobody need listen."""
    listener = _listener.get()
    if listener is not None:
        listener(f"{what} {done:,}" + ("" if total is None else f"/{total:,}"))


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Let a listener hear now and then what is said in the block."""
    heard = time.monotonic()

    def seldom(what: str) -> None:
        nonlocal heard
        if time.monotonic() - heard >= EVERY:
            heard = time.monotonic()
            listener(what)

    before = _listener.set(seldom)
    try:
        yield
    finally:
        _listener.reset(before)
