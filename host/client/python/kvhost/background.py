"""A thread that runs functions in order."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable


class Background:
    """Runs functions in the order of :meth:`put`. It logs the exception of a function and goes on."""

    def __init__(self, name: str, log: logging.Logger) -> None:
        self._log = log
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, do: Callable[[], object]) -> None:
        self._work.put(do)

    def flush(self) -> None:
        """Waits until all functions that were put before are done."""
        done = threading.Event()
        self.put(done.set)
        done.wait()

    def close(self, seconds: float | None = None) -> None:
        """Ends the thread after the functions that were put before. Waits at most ``seconds`` for the end."""
        self._work.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (do := self._work.get()) is not None:
            try:
                do()
            except Exception:
                self._log.exception("kvhost: the work of thread %s failed", self._thread.name)
