"""Events for routers about the tier's chunks: stored in the host, and removed from it."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvhost.events import Changed, Event, EventReader, EventStream, Position

_Chunk = tuple[int, bytes]  # group, and the host's key


class TierEvents:
    """Follows the host's events about the chunks that this engine has stored. Its methods run on the scheduler's
    thread and do not block."""

    MOST_TAKEN = 1024  # most changes of the host in a step
    GONE_SECONDS = 30.0  # seconds without a host after which all announced chunks are announced as removed

    def __init__(
        self,
        open: Callable[[Position | None], EventStream | None],
        alive: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._alive, self._clock, self._seen = alive, clock, clock()
        self._known: dict[_Chunk, bytes] = {}  # vLLM's keys of the chunks that were offered to the host
        self._said: dict[_Chunk, float] = {}  # announced chunks, with the time
        self._gone: set[_Chunk] = set()  # evicted before the answer to its store was seen
        self._there: tuple[float, set[_Chunk]] | None = None  # a snapshot of the host: time of its begin, and its chunks so far
        self._changes: list[tuple[bytes, bool]] = []  # vLLM's key, and whether it was removed
        self._reader = EventReader(open, limit=1 << 14, wanted=self._wanted, name="-tier")

    def _wanted(self, e: Event) -> bool:
        """Whether an event is of use. Runs on the reader's thread."""
        return (e.group, e.key) in self._known

    def offered(self, group: int, host_key: bytes, key: bytes) -> None:
        """Records a chunk that is about to be stored."""
        self._known[group, host_key] = key

    def answered(self, group: int, host_key: bytes, there: bool) -> None:
        """Records the end of a chunk's store, and whether the host has the chunk."""
        chunk = group, host_key
        if chunk in self._said or chunk not in self._known:
            return
        if there and chunk not in self._gone:
            self._say(chunk)
        else:
            self._gone.discard(chunk)
            del self._known[chunk]

    def take(self) -> list[tuple[bytes, bool]]:
        """Returns the changes since the last call: vLLM's keys, and whether they were removed."""
        for change in self._reader.take(self.MOST_TAKEN):
            if change.kind == Changed.RESET:
                self._there = change.when, set()
            elif change.kind == Changed.COMPLETE:
                since, there = self._there or (0.0, set())
                self._there = None
                self._remove([c for c, when in self._said.items() if when < since and c not in there])
            elif change.event is not None:
                self._apply((change.event.group, change.event.key), change.event.stored)
        if self._alive():
            self._seen = self._clock()
        elif self._clock() - self._seen > self.GONE_SECONDS:
            self._remove([*self._said])
        changes, self._changes = self._changes, []
        return changes

    def _apply(self, chunk: _Chunk, stored: bool) -> None:
        if chunk not in self._known:
            return  # the chunk was forgotten after the reader had queued the change
        if stored:
            self._gone.discard(chunk)
            self._say(chunk)
            if self._there is not None:
                self._there[1].add(chunk)
        elif chunk in self._said:
            self._remove([chunk])
        else:
            self._gone.add(chunk)

    def _say(self, chunk: _Chunk) -> None:
        if chunk not in self._said:
            self._said[chunk] = self._clock()
            self._changes.append((self._known[chunk], False))

    def _remove(self, chunks: list[_Chunk]) -> None:
        for chunk in chunks:
            del self._said[chunk]
            self._changes.append((self._known.pop(chunk), True))

    def forget(self) -> None:
        """Forgets all chunks, when the engine's cache was emptied for other weights. Routers learn that from the
        engine itself."""
        self._known, self._said, self._gone, self._changes = {}, {}, set(), []

    def close(self) -> None:
        self._reader.close()
