"""Withdrawals of stores from a host that does not answer."""

from __future__ import annotations

import mmap
import threading

from kvhost.arena import Arena

_ALL = (1 << 64) - 1


class Withdrawals:
    """The word of one session in memory of this process. The host reads it after a store's pages, and before it
    publishes them."""

    def __init__(self) -> None:
        self.arena = Arena(mmap.PAGESIZE)
        self._word = self.arena.view.cast("Q")
        self._lock = threading.Lock()
        self._closed = False

    def withdraw(self, job: int = _ALL) -> None:
        """Takes back the store with a number and all earlier ones. Their blocks may be used again when this returns."""
        with self._lock:
            if not self._closed and self._word[0] < job:
                self._word[0] = job
        with self._lock:  # the lock is a memory barrier: on every processor, later writes follow the write of the word
            pass

    def close(self) -> None:
        """Closes the memory here. The host keeps its mapping as long as it has the session."""
        self.withdraw()
        with self._lock:
            if not self._closed:
                self._closed = True
                self._word.release()
                self.arena.close()
