"""The objects that this server knows to be in the host."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable
from typing import Generic, TypeVar

from kvhost.lmcache.keys import ObjectKey

_K = TypeVar("_K", bound=ObjectKey)


class Residents(Generic[_K]):
    """Objects that this server has stored or found, until it deletes them or a lookup misses them. LMCache's
    accounting and listing use them, since the host knows only hashes of LMCache's keys."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: dict[_K, int] = {}

    def add(self, keys: Iterable[_K], size: int) -> list[_K]:
        """Adds objects, and returns the new ones."""
        with self._lock:
            new = [key for key in keys if key not in self._sizes]
            self._sizes.update((key, size) for key in new)
            return new

    def remove(self, keys: Iterable[_K], size: int) -> list[_K]:
        """Removes objects of a size, and returns those that were known."""
        with self._lock:
            gone = [key for key in keys if self._sizes.get(key) == size]
            for key in gone:
                del self._sizes[key]
            return gone

    def page(self, model: str | None, most: int, after: str | None) -> tuple[list[tuple[_K, int]], str | None]:
        """Returns the next objects in the order of their names, and the start of the following page."""
        if most <= 0:
            raise ValueError(f"page_size {most}, want a number above 0")
        if after is not None and after.count("@") != 4:
            raise ValueError(f"cursor {after!r} is none that a page ended with")
        with self._lock:
            known = [
                (name_of(key), key, size)
                for key, size in self._sizes.items()
                if model is None or key.model_name == model
            ]
        found = [f for f in known if after is None or f[0] > after]
        page = heapq.nsmallest(most, found, key=lambda f: f[0])
        return [(key, size) for _, key, size in page], page[-1][0] if len(found) > len(page) else None

    def __len__(self) -> int:
        with self._lock:
            return len(self._sizes)


def name_of(key: ObjectKey) -> str:
    """Returns a key as text. None of its parts contains an @."""
    return f"{key.model_name}@{key.kv_rank:08x}@{key.object_group_id:08x}@{key.chunk_hash.hex()}@{key.cache_salt}"
