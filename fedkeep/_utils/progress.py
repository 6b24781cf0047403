"""Progress of long work: reported where it is done, shown where somebody subscribed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str], None]

EVERY = 2.0
"""Seconds from one report that reaches a listener to the next, at least."""

_listener: ContextVar[Listener | None] = ContextVar("_listener", default=None)


def report(what: str, done: int, total: int | None = None) -> None:
    """Report how much of something is done, such as ``("images drawn", 512, 6000)``, to whoever subscribed."""
    listener = _listener.get()
    if listener is not None:
        listener(f"{what} {done:,}" + ("" if total is None else f"/{total:,}"))


@contextmanager
def subscribe(listener: Listener) -> Iterator[None]:
    """Give a listener what is reported in the block, at most once in `EVERY` seconds."""
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
