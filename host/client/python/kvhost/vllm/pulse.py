"""Whether the host's process runs, so that no request waits for one that is stopped."""

from __future__ import annotations

import threading
import time

from kvhost.errors import KvhostError
from kvhost.session import Session


class Pulse:
    """Asks with pings: a host that is slow answers at once, and one whose process is stopped does not."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._answered = threading.Event()
        self._asked = 0.0

    def stopped(self, session: Session, seconds: float) -> bool:
        """Asks the host; whether it has not answered for so many seconds."""
        now = time.monotonic()
        if session is self._session and not self._answered.is_set():
            return now - self._asked > seconds
        if session is not self._session or now - self._asked > seconds:
            try:
                self._answered = session.start_ping()
            except KvhostError:
                return False  # the session has ended, and its jobs with it
            self._session, self._asked = session, now
        return False
