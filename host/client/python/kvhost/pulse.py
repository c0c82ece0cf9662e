"""The detection of a stopped host, so that no call waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from kvhost.errors import HostStoppedError, KvhostError

if TYPE_CHECKING:
    from kvhost.session import Session

_R = TypeVar("_R")

#: Seconds between pings while an answer is awaited: a stop of the host is followed by a ping after at most this time.
PAUSE = 0.25
#: The message about a host that answers no ping.
SILENT = "the host does not answer: its process is stopped, or gets no processor"
#: Seconds for which this process must have run since it noticed a late answer. If it was stopped itself, the answer has
#: come by then.
_LOOK_AGAIN = 0.05


class Pulse:
    """Checks the host by pings: a slow host answers at once, and a stopped one does not."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``seconds`` is the longest time for the answer to a ping."""
        self._seconds, self._clock = seconds, clock
        self._session: Session | None = None
        self._answered = threading.Event()
        self._asked = 0.0
        self._late: float | None = None  # time at which the answer was noticed to be late; None: it is not late

    def stopped(self, session: Session | None) -> bool:
        """Pings the host, unless a ping was sent just now. Returns whether an answer is overdue. A session of None
        has ended, and is not stopped."""
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
    """Returns the result of ``wait``, which gets a number of seconds and raises a TimeoutError after them. Waits
    ``timeout`` seconds for a slow host, and raises :class:`HostStoppedError` when a ping has had no answer for
    ``stopped`` seconds."""
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
