"""Lookups of one request in every group and on every pipeline stage."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvhost.errors import KvhostError
from kvhost.session import Lookup, PendingLookup, Session
from kvhost.vllm.groups import GroupPlan, longest_hit


class RequestLookup:
    """The lookups of one request's chunks, in all groups at once, with asynchronous answers."""

    def __init__(
        self,
        sessions: Sequence[Session],
        groups: Sequence[GroupPlan],
        keys: Sequence[bytes],
        request: int,
        readers: int,
        prefetch: bool = False,
        traceparent: str = "",
        pin: bool = False,
        epoch: int = -1,
    ) -> None:
        """``sessions`` has one session for each pipeline stage, and ``readers`` one bit for each rank of a stage.
        ``epoch`` is that of the sessions, since another host's leases have the same numbers.
        With ``prefetch`` the host copies hits to its nearest level while the request waits. With ``pin`` the
        lookup only keeps its hits."""
        self._groups, self._count = groups, len(keys)
        self._lease_seconds = min(s.lease_seconds for s in sessions)
        self.epoch = epoch
        self.waited = False  # the scheduler has waited for the answers once
        self.began = time.monotonic()
        self.answered = 0.0
        self.failed = False
        self._pending: list[list[PendingLookup]] = []  # by group, then stage
        self._found: list[list[Lookup]] = []
        for g in groups:
            self._pending.append(
                [
                    s.start_lookup(
                        keys, group=g.id, request=request, readers=readers, prefetch=prefetch and s.levels > 1, pin=pin,
                        traceparent=traceparent,
                    )
                    for s in sessions
                ]
            )

    def done(self, timeout: float = 0) -> bool:
        """Returns whether every answer came within ``timeout`` seconds. An error counts as a miss."""
        if self._found:
            return True
        due = time.monotonic() + timeout
        if not all(p.done(max(0.0, due - time.monotonic())) for stages in self._pending for p in stages):
            return False
        self.answered = time.monotonic()
        found: list[list[Lookup]] = []
        for stages in self._pending:
            found.append([])
            for p in stages:
                try:
                    found[-1].append(p.result(0))
                except KvhostError:
                    self.failed = True
        self._found = found
        if self.failed:
            self.release()
            self._count = 0
        return True

    @property
    def fresh(self) -> bool:
        """Whether the leases last long enough for a load to be sent."""
        return time.monotonic() - self.answered < self._lease_seconds / 2

    def hit(self, limit: int) -> int:
        """Returns the number of leading chunks, at most ``limit``, that the engine can load."""
        return longest_hit(
            self._groups, min(limit, self._count), lambda g, i: all(found.has(i) for found in self._found[g])
        )

    @property
    def is_far(self) -> bool:
        """Whether any hit is not in the host's nearest level."""
        return any(at.level > 0 for stages in self._found for found in stages for at in found.levels)

    def parts(self, first: int, hit: int) -> list[tuple[int, float]]:
        """Returns leading parts of a hit: (number of chunks, the host's estimate in seconds for a load of the chunks
        at or after ``first``; 0: unknown). The last part is the whole hit."""
        ends = {hit}
        for g, stages in zip(self._groups, self._found, strict=True):
            if not g.window:
                ends |= {keys for found in stages for keys, _ in found.load_parts if first < keys < hit}
        return [(n, self._seconds(first, n)) for n in sorted(ends)]

    def _seconds(self, first: int, end: int) -> float:
        total = 0.0
        for g, stages in zip(self._groups, self._found, strict=True):
            longest = 0.0
            for found in stages:
                if not found.hits or not found.load_seconds:
                    continue
                if g.window:
                    seconds = found.load_seconds / found.hits * len(g.needed(end, first))
                else:
                    seconds = _until(found, end) - _until(found, first)
                longest = max(longest, seconds)
            total += longest
        return total

    def leases(self, group: int) -> list[int]:
        return [f.lease for f in self._found[group]]

    def release(self) -> None:
        """Gives the leases back. Leases of answers that have not come end with their request."""
        for stages in self._found:
            for found in stages:
                found.release(wait=False)


def _until(found: Lookup, chunks: int) -> float:
    """Returns the expected seconds of a load of the given leading chunks."""
    before, seconds = 0, 0.0
    for keys, until in [*found.load_parts, (found.hits, found.load_seconds or 0.0)]:
        if chunks <= keys:
            return seconds + (until - seconds) * (chunks - before) / max(1, keys - before)
        before, seconds = keys, until
    return seconds
