"""Progress of long operations: reported by the code that works, shown by the code that subscribed."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str, float], None]
"""Receives a line of text, and which part of the operation is done, from 0 to 1; 0 if that is not known."""
Count = tuple[str, int, int | None]

REPORT_SECONDS = 2.0
"""Smallest number of seconds between two reports that reach a listener, unless it asks for more or fewer."""


class _Subscription:
    """Passes what is due to a listener; what is not due costs a look at the clock."""

    def __init__(self, listener: Listener, every: float | None) -> None:
        self.listener = listener
        self.every = REPORT_SECONDS if every is None else every
        self.last = time.monotonic()
        self.around: Count = ("", 0, None)  # the operation within which another one reports

    def hear(self, count: Count, *, inside: bool) -> None:
        if not inside:
            self.around = count
        if time.monotonic() - self.last < self.every:
            return
        self.last = time.monotonic()
        counts = [self.around, count] if inside and self.around[0] else [count]
        part, size = 0.0, 1.0
        for _, done, total in counts:
            size = size / total if total else 0.0
            part += done * size
        self.listener(", ".join(map(_text, counts)), min(part, 1.0))


def _text(count: Count) -> str:
    what, done, total = count
    return f"{what} {done:,}" + ("" if total is None else f"/{total:,}")


_subscription: ContextVar[_Subscription | None] = ContextVar("_subscription", default=None)


def report(what: str, done: int, total: int | None = None, *, inside: bool = False) -> None:
    """Report how much of an operation is done, to the listener of the current context if there is one.

    ``what``: What is counted, such as ``"images generated"``.
    ``total``: How many there are in all, if that is known.
    ``inside``: Whether it is within one unit of what was last reported: a step of a client's training.
    """
    if (subscription := _subscription.get()) is not None:
        subscription.hear((what, done, total), inside=inside)


@contextmanager
def subscribe(listener: Listener, every: float | None = None) -> Iterator[None]:
    """Pass progress reports that are made in the block to a listener.

    ``every``: Smallest number of seconds between two of them; by default `REPORT_SECONDS`.
    """
    before = _subscription.set(_Subscription(listener, every))
    try:
        yield
    finally:
        _subscription.reset(before)
