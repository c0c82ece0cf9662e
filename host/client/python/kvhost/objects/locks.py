"""The leases of objects that an engine has found and not loaded yet."""

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
    keys: set[bytes]  # keys that are still locked
    until: float  # time after which the host's lease has certainly ended
    used: bool = False  # a load has taken the lease


class Locks:
    """A lookup locks the keys that it finds. An engine unlocks the keys that it will not load, loads the others
    together, and unlocks them. The host leases the hits of one lookup, and one load uses up the lease. Several
    lookups may have locked a key."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mutex = threading.Lock()
        self._locks: list[_Lock] = []

    def hold(self, kind: Kind, hit: Hit) -> None:
        """Records the hits of a lookup."""
        if not hit.index:
            return
        now = self._clock()
        with self._mutex:
            self._locks = [k for k in self._locks if k.until > now]
            self._locks.append(_Lock(kind, hit, set(hit.index), now + 2 * hit.session.lease_seconds))

    def take(self, kind: Kind, keys: Sequence[bytes]) -> Hit | None:
        """Returns a lease with all the keys, for one load. None if there is none, and the load needs a lookup of its
        own."""
        wanted = set(keys)
        with self._mutex:
            found = [k for k in self._locks if k.kind == kind and not k.used and wanted <= k.keys]
            if not found:
                return None
            best = min(found, key=lambda k: len(k.keys))
            best.used = True
            return best.hit

    def drop(self, keys: Sequence[bytes]) -> list[Hit]:
        """Unlocks keys, each once. Returns the hits with no locked key left, to release their leases."""
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
    """Ranks a lease for a load. 0: the load has all its keys. 1: the load has a part of its keys. 2: it is most
    likely another request's, and used only without a better one, which costs that request a lookup."""
    if k.used:
        return 0 if k.keys == keys else 2
    return 1 if keys <= k.keys else 2
