"""Whether the host's process runs, so that nothing waits for one that is stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from kvhost.errors import HostStoppedError, KvhostError

if TYPE_CHECKING:
    from kvhost.session import Session

_R = TypeVar("_R")

#: Seconds between pings while an answer is awaited, and so how late at most the first ping is that a host does not answer.
PAUSE = 0.25
#: What is said of a host that answers no ping.
SILENT = "the host does not answer: its process is stopped, or gets no processor"
#: Seconds for which this process must have run since it found an answer to be late. If it was stopped itself, the answer has
#: come by then.
_LOOK_AGAIN = 0.05


class Pulse:
    """Asks with pings: a host that is slow answers at once, and one whose process is stopped does not."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``seconds`` that the answer to a ping may take."""
        self._seconds, self._clock = seconds, clock
        self._session: Session | None = None
        self._answered = threading.Event()
        self._asked = 0.0
        self._late: float | None = None  # when the answer was found to be late

    def stopped(self, session: Session | None) -> bool:
        """Asks the host, unless it was asked just now; whether it has not answered for too long. None has ended, and its
        jobs with it."""
        if session is None:
            return False
        now = self._clock()
        if session is self._session and not self._answered.is_set():
            if now - self._asked <= self._seconds:
                return False
            self._late = now if self._late is None else self._late
            return now - self._late >= _LOOK_AGAIN
        if session is not self._session or now - self._asked >= PAUSE:
            try:
                self._answered = session.start_ping()
            except KvhostError:
                return False
            self._session, self._asked, self._late = session, now, None
        return False


def patiently(session: Session, wait: Callable[[float], _R], timeout: float, stopped: float = 2.0) -> _R:
    """What ``wait`` returns, which raises a TimeoutError after so many seconds without it. Waits ``timeout`` seconds for a host
    that is slow, and raises :class:`HostStoppedError` once a ping has had no answer for ``stopped`` seconds."""
    pulse, due = Pulse(min(stopped, timeout)), time.monotonic() + timeout
    while True:
        left = due - time.monotonic()
        try:
            return wait(min(PAUSE, max(0.0, left)))
        except TimeoutError:
            if pulse.stopped(session):
                raise HostStoppedError(SILENT) from None
            if left <= PAUSE:
                raise
