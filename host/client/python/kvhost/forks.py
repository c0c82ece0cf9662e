"""Detection of forks, which a child's sessions do not survive, since their threads are not inherited."""

from __future__ import annotations

import os

from kvhost.errors import HostGoneError


class Origin:
    """The process that made an object. In a child the object has no threads, and its locks may be held for ever."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def here(self) -> bool:
        """Whether this is the process that made the object."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises in any other process."""
        if not self.here:
            raise HostGoneError(
                f"the session is of process {self._pid}, and process {os.getpid()} was forked from it: sessions do not pass a "
                "fork, open one here"
            )
