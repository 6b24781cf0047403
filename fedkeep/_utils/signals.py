"""The signals with which schedulers, service managers and closed terminals end a process: they let a run save."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

ENDING_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""What Slurm, systemd and `kill` send, and what a terminal sends as it is closed."""


class Terminated(SystemExit):
    """One of these signals has arrived. If nothing catches it, the process ends with its exit code.

    ``code``: The exit code: 128 plus the signal's number.
    ``signal``: The signal's name.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number).name


@contextmanager
def raising_terminated() -> Iterator[None]:
    """Raise `Terminated` where one of these signals arrives in the block; the next ones are ignored while it saves.

    A signal that is ignored (as by nohup) or that the program handles itself is left alone, and so are all of them
    outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = [number for number in ENDING_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]

    def stop(number: int, _: object) -> None:
        for other in caught:
            signal.signal(other, signal.SIG_IGN)
        raise Terminated(number)

    for number in caught:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def signals_blocked_in_children() -> Iterator[None]:
    """Let processes that are started in the block never receive these signals; their parent decides what to do.

    One that arrives in the block is delivered to this process after it.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
