"""Clients' wishes for the time after their requests: chunks to keep, to prefetch or to discard."""

from __future__ import annotations

import bisect
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvhost.errors import KvhostError
from kvhost.session import DiscardResult, Session
from kvhost.vllm.groups import GroupPlan
from kvhost.vllm.lookups import RequestLookup

MOST = 256  # most requests at a time
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # they double: a request's last chunks are published a little after its end
_DISCARDS = 6  # most attempts, since a chunk that is in use or not stored yet is discarded later
_ANSWER_SECONDS = 1.0
_AT_ONCE = 64  # discards in one message, since lookups wait for it while files are removed


def common(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    """Returns the number of leading chunks that two requests share. A key covers all chunks before it."""
    return bisect.bisect_left(range(min(len(a), len(b))), True, key=lambda i: a[i] != b[i])


class Sessions(Protocol):
    """The source of sessions (see link.py)."""

    def sessions(self) -> list[Session]: ...


@dataclass
class _Kept:
    keys: Sequence[bytes]
    pins: int  # number of leading chunks that are pinned
    alone: int  # number of those that no earlier request had pinned
    until: float  # time until which their leases are renewed
    near: float  # time of the prefetch to the nearest level; inf: none
    own: int  # index of the first chunk that no other request has had
    drop: float  # time of the discard of its own chunks; inf: none
    due: float
    pause: float = _FIRST_PAUSE
    prefetches: bool = False
    lookup: RequestLookup | None = None
    discards: int = 0
    gone: set[bytes] = field(default_factory=set)

    @property
    def left(self) -> list[bytes]:
        """Returns the chunks that are still to be discarded."""
        return [k for k in self.keys[self.own :] if k not in self.gone]


class Keeper:
    """Renews leases, since the host's are short, and sends prefetches and discards when they are due. It has a
    thread of its own from the first wish on, since an idle engine makes no steps."""

    def __init__(
        self, link: Sessions, groups: Sequence[GroupPlan], readers: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._link, self._groups, self._readers, self._clock = link, groups, readers, clock
        self._wake = threading.Condition()
        self._kept: dict[bytes, _Kept] = {}  # by the last key of the request
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def levels(self) -> int:
        """Returns the number of levels of the host's roots; 0 without a host."""
        return min((s.levels for s in self._link.sessions()), default=0)

    @property
    def full(self) -> bool:
        return len(self._kept) >= MOST

    @property
    def drops(self) -> bool:
        """Whether there are chunks to discard."""
        if not self._kept:
            return False
        with self._wake:
            return any(k.drop < math.inf for k in self._kept.values())

    def _room(self, keys: Sequence[bytes], now: float) -> tuple[int, int]:
        """Returns the number of leading chunks that may be pinned, and the number of those that are."""
        sessions = self._link.sessions()
        if not sessions:
            return 0, 0
        pinned = [k for k in self._kept.values() if k.until > now]
        shared = max((min(k.pins, common(k.keys, keys)) for k in pinned), default=0)
        room = min(s.pin_bytes for s in sessions) // sum(s.chunk_bytes for s in sessions) - sum(k.alone for k in pinned)
        return min(shared + max(0, room), *(s.limits.keys_per_lookup or len(keys) for s in sessions), len(keys)), shared

    def keep(self, keys: Sequence[bytes], own: int, pin: float, near: float, drop: float) -> int:
        """Carries out the wishes for a request. Its chunks are pinned for ``pin`` seconds, prefetched after ``near``
        seconds and discarded after ``drop`` seconds; inf means never. Chunks before ``own`` are not discarded.
        Returns the number of leading chunks that are pinned, since all pins together may have only a share of the
        host."""
        now = self._clock()
        if own >= len(keys):
            drop = math.inf
        with self._wake:
            pins, shared = self._room(keys, now) if pin else (0, 0)
            due = now if pins else now + min(near, drop)
            if due == math.inf:
                return 0
            kept = _Kept(keys, pins, max(0, pins - shared), now + (pin if pins else 0), now + near, own, now + drop, due)
            if (before := self._kept.get(keys[-1])) is not None:  # perhaps another client's, whose pin and prefetch remain
                kept.until, kept.near = max(kept.until, before.until), min(kept.near, before.near)
                kept.drop, kept.due = max(kept.drop, before.until), min(kept.due, before.due)
                kept.pins, kept.alone = max(kept.pins, before.pins), kept.alone + before.alone
                kept.lookup, kept.prefetches = before.lookup, before.prefetches
            self._kept[keys[-1]] = kept
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvhost-keeper", daemon=True)
                self._thread.start()
            self._wake.notify_all()
        return pins

    def continued(self, keys: Sequence[bytes]) -> None:
        """Records a request with these chunks: chunks that it continues are not discarded."""
        if self._kept:
            with self._wake:
                for kept in self._kept.values():
                    kept.own = max(kept.own, common(kept.keys, keys))
                    if kept.own == len(kept.keys) and kept.drop < math.inf:
                        kept.drop, kept.due = math.inf, self._clock()
                self._wake.notify_all()

    def _run(self) -> None:
        while not self._closed:
            self.act()
            with self._wake:
                due = min((k.due for k in self._kept.values()), default=math.inf)
                if not self._closed and due > self._clock():
                    self._wake.wait(due - self._clock() if due < math.inf else None)

    def act(self) -> None:
        """Carries out the wishes that are due."""
        now = self._clock()
        with self._wake:
            due = [(key, k) for key, k in self._kept.items() if k.due <= now]
        for key, kept in due:
            kept.due = now + kept.pause
            kept.pause = min(2 * kept.pause, _LONGEST_PAUSE)
            try:
                self._act(kept, now)
            except (KvhostError, TimeoutError):
                pass  # no host answers: later
            with self._wake:
                if kept.due == math.inf and self._kept.get(key) is kept:
                    del self._kept[key]

    def _act(self, k: _Kept, now: float) -> None:
        sessions = self._link.sessions()
        if now >= k.drop:
            self._release(k)
            if sessions:
                if not k.discards:
                    k.pause, k.due = _FIRST_PAUSE, now + _FIRST_PAUSE
                k.discards += 1
                if k.left:
                    self._discard(k, sessions)
            if not k.left or k.discards == _DISCARDS:
                k.due = math.inf
            return
        lease = min((s.lease_seconds for s in sessions), default=_LONGEST_PAUSE)
        if now >= k.near:
            k.prefetches, k.near, k.until = True, math.inf, max(k.until, now + lease)
        if now >= k.until:
            self._release(k)
            k.due = min(k.near, k.drop)
            return
        k.pause = min(k.pause, lease / 2)
        k.due = min(k.due, k.until, k.near, k.drop)
        if sessions:
            limit = min(s.limits.keys_per_lookup or len(k.keys) for s in sessions) if k.prefetches else k.pins
            found = RequestLookup(sessions, self._groups, k.keys[:limit], 0, self._readers, prefetch=k.prefetches, pin=True)
            if found.done(_ANSWER_SECONDS) and not found.failed:  # otherwise the old leases last, and the next attempt follows
                self._release(k)
                k.lookup = found

    def _release(self, k: _Kept) -> None:
        if k.lookup is not None:
            k.lookup.release()
            k.lookup = None

    def _discard(self, k: _Kept, sessions: Sequence[Session]) -> None:
        left, own = k.left, k.own
        at_once = min(_AT_ONCE, *(s.limits.keys_per_lookup or _AT_ONCE for s in sessions))
        for at in range(0, len(left), at_once):
            part = left[at : at + at_once]
            over = set(part)
            for s in sessions:
                for g in self._groups:
                    for key, result in zip(part, s.discard(part, group=g.id), strict=True):
                        if result not in (DiscardResult.REMOVED, DiscardResult.OTHER_TENANT):
                            over.discard(key)
            k.gone |= over
            if k.own != own:  # another request continues some of these chunks
                return

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify_all()
