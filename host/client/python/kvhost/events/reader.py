"""A host's events in a bounded queue, across lost connections and restarts of the host."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvhost.errors import KvhostError
from kvhost.events.stream import Event, EventStream, Position
from kvhost.forks import Origin

log = logging.getLogger("kvhost.events")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


class Changed(enum.Enum):
    STORED = 1
    EVICTED = 2
    RESET = 3  # a snapshot begins: only chunks STORED after it are resident
    COMPLETE = 4  # the snapshot ends


@dataclass(frozen=True)
class Change:
    kind: Changed
    event: Event | None = None  # set for STORED and EVICTED
    when: float = 0.0  # for RESET: a time before the snapshot's begin, by time.monotonic()


class EventReader:
    """Reads a host's events in a thread of its own until it is closed.

    It resumes after the last batch that it queued. If the host no longer has the following events, or has restarted, it
    sends a snapshot. When the queue is full, the reader stops reading. If the host's log overflows meanwhile, the host
    sends a snapshot, too. So neither side holds more than its bound, and every loss is noticed."""

    def __init__(
        self,
        open: Callable[[Position | None], EventStream | None],
        *,
        limit: int,
        wanted: Callable[[Event], bool] = lambda e: True,
        name: str = "",
    ) -> None:
        """``open`` starts a stream after a position. It returns None, or raises, without a host. ``limit`` is the
        most queued changes. ``wanted`` runs on the reader's thread and selects keys: changes of other keys are
        dropped."""
        self._open, self._limit, self._wanted = open, limit, wanted
        self._origin = Origin()
        self._wake = threading.Condition()
        self._queue: deque[Change] = deque()
        self._stream: EventStream | None = None
        self._after: Position | None = None
        self._life = 0  # counts restarts
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"kvhost-events{name}", daemon=True)
        self._thread.start()

    def take(self, most: int) -> list[Change]:
        """Returns at most the given number of changes, in order, without waiting."""
        if not self._queue:
            return []
        with self._wake:
            taken = [self._queue.popleft() for _ in range(min(most, len(self._queue)))]
            self._wake.notify_all()
        return taken

    def wait(self, seconds: float) -> bool:
        """Waits for a queued change, for a limited time, and returns whether there is one."""
        with self._wake:
            return self._wake.wait_for(lambda: self._queue or self._closed, seconds) and bool(self._queue)

    def restart(self) -> None:
        """Forgets all changes: the next one is the RESET of a new snapshot."""
        with self._wake:
            self._life += 1
            self._after = None
            self._queue.clear()
            stream = self._stream
            self._wake.notify_all()
        if stream is not None:
            stream.close()

    def close(self) -> None:
        if not self._origin.here:
            return
        with self._wake:
            self._closed = True
            stream = self._stream
            self._wake.notify_all()
        if stream is not None:
            stream.close()
        self._thread.join()

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        while not self._closed:
            began = time.monotonic()
            with self._wake:
                life, after = self._life, self._after
            try:
                stream = self._open(after)
                if stream is not None:
                    self._read(stream, life, began)
            except (KvhostError, OSError) as e:
                log.debug("kvhost: events: %s", e)
            if time.monotonic() - began > 1:
                pause = _FIRST_PAUSE
            with self._wake:
                self._wake.wait_for(lambda: self._closed, pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _read(self, stream: EventStream, life: int, opened: float) -> None:
        """Queues a stream's batches until it ends, or the reader is restarted."""
        first = True
        with self._wake:
            if self._closed or self._life != life:
                stream.close()
                return
            self._stream = stream
        snapshot = False
        try:
            for batch in stream:
                changes: list[Change] = []
                if batch.snapshot and not snapshot:
                    changes.append(Change(Changed.RESET, when=opened if first else time.monotonic()))
                first = False
                changes += [
                    Change(Changed.STORED if e.stored else Changed.EVICTED, e) for e in batch.events if self._wanted(e)
                ]
                if batch.snapshot_end:
                    changes.append(Change(Changed.COMPLETE))
                snapshot = batch.snapshot and not batch.snapshot_end
                if not self._put(changes, batch.after, life):
                    break
        except KvhostError as e:
            log.debug("kvhost: events: %s", e)
        finally:
            with self._wake:
                self._stream = None
            stream.close()

    def _put(self, changes: list[Change], after: Position | None, life: int) -> bool:
        """Queues changes when there is room for them. Returns False if the reader was closed or restarted. ``after``
        is the position to resume at afterwards; None within a snapshot, which is read again from its start."""

        def over() -> bool:
            return self._closed or self._life != life

        with self._wake:
            for change in changes:
                if len(self._queue) >= self._limit:
                    self._wake.notify_all()  # otherwise no change is taken while the rest of the batch waits
                    self._wake.wait_for(lambda: len(self._queue) < self._limit or over())
                if over():
                    return False
                self._queue.append(change)
            if over():
                return False
            self._after = after
            self._wake.notify_all()
        return True
