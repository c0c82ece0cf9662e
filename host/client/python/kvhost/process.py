"""A host's process, which is no child of this one."""

from __future__ import annotations

import os
import select
import weakref
from contextlib import suppress

_EXITING = 0x4  # of the flags of a thread (PF_EXITING)


class Process:
    """A process as long as it lasts, whatever has its number afterwards. One that cannot be seen from here counts as ended."""

    def __init__(self, pid: int) -> None:
        self._pid, self._fd = pid, -1
        with suppress(OSError):  # it has ended, is in another namespace, or the kernel has no such descriptors
            self._fd = os.pidfd_open(pid)
            weakref.finalize(self, os.close, self._fd)

    def ended(self, seconds: float = 0) -> bool:
        """Whether it has ended, or does within so many seconds."""
        if self._fd < 0:
            return True
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(1e3 * seconds))

    def await_end(self, seconds: float) -> None:
        """Waits so long for the end of a process that has begun to end, and not for one that goes on. Its connections are closed before
        the last of its GPU's work is taken back."""
        if not self.ended() and self._ends():
            self.ended(seconds)

    def _ends(self) -> bool:
        try:
            with open(f"/proc/{self._pid}/stat", "rb") as f:
                state, *fields = f.read().rpartition(b")")[2].split()
            return state in (b"Z", b"X") or bool(int(fields[5]) & _EXITING)
        except (OSError, ValueError, IndexError):
            return False
