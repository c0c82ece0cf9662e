"""Lookups of one request in every group and on every pipeline stage."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvhost.errors import KvhostError
from kvhost.session import Lookup, PendingLookup, Session
from kvhost.vllm.groups import GroupPlan, longest_hit


class RequestLookup:
    """What the host has of one request's chunks: asked for in all groups at once, answered asynchronously."""

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
    ) -> None:
        """``sessions`` has one for each pipeline stage. ``readers`` has a bit for each rank of a stage. With ``prefetch``
        what is found comes nearer while the request waits, where the host has levels. ``pin``: only to keep what is found."""
        self._groups, self._count = groups, len(keys)
        self._lease_seconds = min(s.lease_seconds for s in sessions)
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
        """Whether every answer came within ``timeout`` seconds. An answer that is an error counts as a miss."""
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
        """How many leading chunks, at most ``limit``, the engine can be given."""
        return longest_hit(
            self._groups, min(limit, self._count), lambda g, i: all(found.has(i) for found in self._found[g])
        )

    @property
    def is_far(self) -> bool:
        """Whether any of what was found is not in the host's nearest level."""
        return any(at.level > 0 for stages in self._found for found in stages for at in found.levels)

    def parts(self, first: int, hit: int) -> list[tuple[int, float]]:
        """Leading parts of a hit: (chunks, how long the host expects the load of those at or after ``first`` to take).
        The last part is the whole hit. 0 seconds if the host does not know."""
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
        """Gives the leases back. The answers that have not come are given back when their request ends."""
        for stages in self._found:
            for found in stages:
                try:
                    found.release(wait=False)
                except KvhostError:
                    pass


def _until(found: Lookup, chunks: int) -> float:
    """How long the load of so many leading chunks takes."""
    before, seconds = 0, 0.0
    for keys, until in [*found.load_parts, (found.hits, found.load_seconds or 0.0)]:
        if chunks <= keys:
            return seconds + (until - seconds) * (chunks - before) / max(1, keys - before)
        before, seconds = keys, until
    return seconds
