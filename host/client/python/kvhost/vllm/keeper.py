"""What clients ask of the cache for the time after their requests: chunks that stay, come nearer, or go."""

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

MOST = 256  # requests at a time
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # they double: a request's last chunks are published a little after its end
_DISCARDS = 6  # at most: a chunk that is in use, or not stored yet, is discarded later
_ANSWER_SECONDS = 1.0
_AT_ONCE = 64  # discards in one message: lookups wait behind it while files are removed


def common(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    """How many leading chunks two requests have in common: a key stands for all that is before it, too."""
    return bisect.bisect_left(range(min(len(a), len(b))), True, key=lambda i: a[i] != b[i])


class Sessions(Protocol):
    """Where the sessions are (see link.py)."""

    def sessions(self) -> list[Session]: ...


@dataclass
class _Kept:
    keys: Sequence[bytes]
    pins: int  # how many leading chunks are kept
    alone: int  # how many of them no request had pinned before
    until: float  # their leases are renewed
    near: float  # when its chunks are to come to the nearest level; inf: not
    own: int  # the first chunk that no other request has had
    drop: float  # when its own are to be discarded; inf: not
    due: float
    pause: float = _FIRST_PAUSE
    prefetches: bool = False
    lookup: RequestLookup | None = None
    discards: int = 0
    gone: set[bytes] = field(default_factory=set)

    @property
    def left(self) -> list[bytes]:
        """What is still to be discarded."""
        return [k for k in self.keys[self.own :] if k not in self.gone]


class Keeper:
    """Renews leases, as the host's are short, and sends prefetches and discards when they are due. An idle engine makes no
    steps, so a thread of its own does it, from the first wish on."""

    def __init__(
        self, link: Sessions, groups: Sequence[GroupPlan], readers: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._link, self._groups, self._readers, self._clock = link, groups, readers, clock
        self._wake = threading.Condition()
        self._kept: dict[bytes, _Kept] = {}  # by the last key
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def levels(self) -> int:
        """Of the host's roots; 0 while no host is there."""
        return min((s.levels for s in self._link.sessions()), default=0)

    @property
    def full(self) -> bool:
        return len(self._kept) >= MOST

    @property
    def drops(self) -> bool:
        """Whether there is anything to drop."""
        if not self._kept:
            return False
        with self._wake:
            return any(k.drop < math.inf for k in self._kept.values())

    def _room(self, keys: Sequence[bytes], now: float) -> tuple[int, int]:
        """How many leading chunks may be pinned, and how many of them are."""
        sessions = self._link.sessions()
        if not sessions:
            return 0, 0
        pinned = [k for k in self._kept.values() if k.until > now]
        shared = max((min(k.pins, common(k.keys, keys)) for k in pinned), default=0)
        room = min(s.pin_bytes for s in sessions) // sum(s.chunk_bytes for s in sessions) - sum(k.alone for k in pinned)
        return min(shared + max(0, room), *(s.limits.keys_per_lookup or len(keys) for s in sessions), len(keys)), shared

    def keep(self, keys: Sequence[bytes], own: int, pin: float, near: float, drop: float) -> int:
        """For so many seconds, or after them; ``near`` and ``drop`` are inf where that is not wished. Chunks before ``own`` are
        not dropped. Returns how many leading chunks are pinned: with all others they may have a share of the host."""
        now = self._clock()
        if own >= len(keys):
            drop = math.inf
        with self._wake:
            pins, shared = self._room(keys, now) if pin else (0, 0)
            due = now if pins else now + min(near, drop)
            if due == math.inf:
                return 0
            kept = _Kept(keys, pins, max(0, pins - shared), now + (pin if pins else 0), now + near, own, now + drop, due)
            if (before := self._kept.get(keys[-1])) is not None:  # perhaps another client's: its pin and its prefetch stand
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
        """A request with these chunks has come: nothing of what it continues is dropped."""
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
        """Does what is due."""
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
            if found.done(_ANSWER_SECONDS) and not found.failed:  # else what is held lasts on, and it is asked again
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
            if k.own != own:  # a request has come meanwhile that continues some of it
                return

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify_all()
