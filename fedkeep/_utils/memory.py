"""Memory of tensors that are gone, given back to the system."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

ENOUGH = 32 * 2**20
"""Bytes of dropped tensors from which it is worth the milliseconds that giving memory back takes."""


class MemoryTrimmer:
    """Gives freed memory back to the system each time that many bytes of tensors have been dropped.

    Up to glibc 2.37 PyTorch's aligned tensors cannot take the place of freed ones of the same size
    (`glibc bug 14581`_), so that a process which makes one model after another may grow by each. Free pages between
    tensors can still be given back. Elsewhere than on Linux with glibc nothing is done.

    .. _glibc bug 14581: https://sourceware.org/bugzilla/show_bug.cgi?id=14581
    """

    def __init__(self) -> None:
        self._dropped = 0

    def dropped(self, size: int) -> None:
        """Count tensors that nothing refers to any more, and give memory back if there are enough.

        Parameters
        ----------
        size : int
            Their size in bytes.
        """
        self._dropped += size
        if self._dropped >= ENOUGH:
            self._dropped = 0
            _malloc_trim()(0)


@cache
def _malloc_trim() -> Callable[[int], object]:
    """Return the function of the C library that gives free pages back, or one that does nothing."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return getattr(library, "malloc_trim", lambda pad: None)
