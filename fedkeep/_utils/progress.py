"""Progress of long operations: reported by the code that works, shown by the code that subscribed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str], None]

REPORT_SECONDS = 2.0
"""Smallest number of seconds between two reports that reach a listener, unless it asks for more or fewer."""

_listener: ContextVar[Listener | None] = ContextVar("_listener", default=None)


def report(what: str, done: int, total: int | None = None) -> None:
    """Report how much of an operation is done, to the listener of the current context if there is one.

    ``what``: What is counted, such as ``"images generated"``.
    ``total``: How many there are in all, if that is known.
    """
    listener = _listener.get()
    if listener is not None:
        listener(f"{what} {done:,}" + ("" if total is None else f"/{total:,}"))


@contextmanager
def subscribe(listener: Listener, every: float | None = None) -> Iterator[None]:
    """Pass progress reports that are made in the block to a listener.

    ``listener``: Receives a line of text.
    ``every``: Smallest number of seconds between two lines; by default `REPORT_SECONDS`.
    """
    last = time.monotonic()

    def throttled(what: str) -> None:
        nonlocal last
        if time.monotonic() - last >= (REPORT_SECONDS if every is None else every):
            last = time.monotonic()
            listener(what)

    before = _listener.set(throttled)
    try:
        yield
    finally:
        _listener.reset(before)
