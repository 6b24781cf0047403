"""What a process does about signals and memory.

The signals are those with which schedulers, service managers and closed terminals end a process: they let a run save.
Memory of tensors that are gone is kept for the next ones, or given back to the system.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache

ENDING_SIGNALS = signal.SIGTERM, signal.SIGHUP
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
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


ENOUGH = 32 * 2**20
"""Bytes of dropped tensors from which it is worth the milliseconds that giving memory back takes."""


# Parameters of mallopt, and what they are set to. The GNU C library accepts no larger threshold for mappings.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MAX_FREE, _LARGEST_BLOCK = 2**30, 32 * 2**20


def keep_freed_memory() -> None:
    """Let this process use the memory of freed tensors again, instead of asking the system for it at every step.

    As it starts, the GNU C library gives large blocks and the free end of its heap back at once. Training frees its
    activations after every step, and would get new pages, all cleared, for the next: with CNN-4 that is a fifth of the
    time of two processes. Call it in processes of one's own only; elsewhere than on Linux with glibc nothing is done.
    """
    mallopt = _library_function("mallopt")
    mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK)
    mallopt(_TRIM_THRESHOLD, _MAX_FREE)


class MemoryTrimmer:
    """Gives freed memory back to the system each time that a process has grown while tensors were dropped.

    Up to glibc 2.37 PyTorch's aligned tensors cannot take the place of freed ones of the same size
    (`glibc bug 14581`_), so that a process which makes one model after another may grow by each. Free pages between
    tensors can still be given back. Elsewhere than on Linux with glibc nothing is done.

    .. _glibc bug 14581: https://sourceware.org/bugzilla/show_bug.cgi?id=14581
    """

    def __init__(self) -> None:
        self._dropped = 0
        self._needed = 0  # the most bytes that the process held at the next look after memory was given back
        self._trimmed = False

    def dropped(self, size: int) -> None:
        """Count tensors that nothing refers to any more, and give memory back if there are enough.

        ``size``: Their size in bytes.
        """
        self._dropped += size
        if self._dropped < ENOUGH:
            return
        self._dropped, held = 0, _resident_bytes()
        if self._trimmed:
            self._needed = max(self._needed, held)
        # The next step would get new, cleared pages in place of those that it needs each time: a quarter of its time.
        self._trimmed = held > self._needed + ENOUGH
        if self._trimmed:
            _library_function("malloc_trim")(0)


def _resident_bytes() -> int:
    """Return how much memory this process has; 0 where the system does not say."""
    with suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


@cache
def _library_function(name: str) -> Callable[..., object]:
    """Return a function of the C library, or one that does nothing where it is missing."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return getattr(library, name, lambda *arguments: None)
