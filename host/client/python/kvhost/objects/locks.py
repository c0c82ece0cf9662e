"""Which leases stand for what an engine has found and not loaded yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvhost.objects.kind import Kind
from kvhost.objects.store import Hit


@dataclass
class _Lock:
    kind: Kind
    hit: Hit
    keys: set[bytes]  # not unlocked
    until: float  # then the host's lease is long over
    used: bool = False  # a load has taken the lease


class Locks:
    """A lookup locks the keys that it finds. An engine unlocks those that it will not load, loads the others at
    once, and unlocks them. The host leases what one lookup found, and one load uses the lease up. Any number of
    lookups may have locked a key."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mutex = threading.Lock()
        self._locks: list[_Lock] = []

    def hold(self, kind: Kind, hit: Hit) -> None:
        """Notes what a lookup found."""
        if not hit.index:
            return
        now = self._clock()
        with self._mutex:
            self._locks = [k for k in self._locks if k.until > now]
            self._locks.append(_Lock(kind, hit, set(hit.index), now + 2 * hit.session.lease_seconds))

    def take(self, kind: Kind, keys: Sequence[bytes]) -> Hit | None:
        """A lease that has all the keys, for one load. None when there is none: the load needs a lookup of its own."""
        wanted = set(keys)
        with self._mutex:
            found = [k for k in self._locks if k.kind == kind and not k.used and wanted <= k.keys]
            if not found:
                return None
            best = min(found, key=lambda k: len(k.keys))
            best.used = True
            return best.hit

    def drop(self, keys: Sequence[bytes]) -> list[Hit]:
        """Unlocks keys once each. Returns the hits with a lease to be released: nothing of theirs is locked any
        more."""
        rest = set(keys)
        released: list[Hit] = []
        with self._mutex:
            for k in sorted(self._locks, key=lambda k: (_strangeness(k, rest), len(k.keys))):
                mine = rest & k.keys
                k.keys -= mine
                rest -= mine
                if not k.keys and not k.used:
                    released.append(k.hit)
            self._locks = [k for k in self._locks if k.keys]
        return released

    def count(self) -> int:
        with self._mutex:
            return len(self._locks)


def _strangeness(k: _Lock, keys: set[bytes]) -> int:
    """0: all of a load's own. 1: part of what a lookup locked. 2: most likely another request's, taken only for
    want of a better one. It costs that request a lookup, no more."""
    if k.used:
        return 0 if k.keys == keys else 2
    return 1 if keys <= k.keys else 2
