"""The process of a host, which is no child of this process."""

from __future__ import annotations

import os
import select
import signal
import weakref
from contextlib import suppress

_EXITING = 0x4  # a flag of a thread (PF_EXITING)


class Process:
    """A process. Another process that gets its number later is not mistaken for it. A process that is not visible
    from here counts as ended."""

    def __init__(self, pid: int) -> None:
        self._pid, self._fd = pid, -1
        with suppress(OSError):  # the process has ended, is in another namespace, or the kernel has no such descriptors
            self._fd = os.pidfd_open(pid)
            weakref.finalize(self, os.close, self._fd)

    def ended(self, seconds: float = 0) -> bool:
        """Returns whether the process has ended, or ends within the given seconds."""
        if self._fd < 0:
            return True
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(1e3 * seconds))

    def kill(self) -> None:
        with suppress(OSError):  # it has ended, or is another user's
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def await_end(self, seconds: float) -> None:
        """Waits for the end of a process that has begun to end, at most the given seconds, and not for a process
        that goes on. Its connections are closed before the last work on its GPU has ended."""
        if not self.ended() and self._ends():
            self.ended(seconds)

    def _ends(self) -> bool:
        try:
            with open(f"/proc/{self._pid}/stat", "rb") as f:
                state, *fields = f.read().rpartition(b")")[2].split()
            return state in (b"Z", b"X") or bool(int(fields[5]) & _EXITING)
        except (OSError, ValueError, IndexError):
            return False
