"""Which objects this server knows to be in the host."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable
from typing import Generic, TypeVar

from kvhost.lmcache.keys import ObjectKey

_K = TypeVar("_K", bound=ObjectKey)


class Residents(Generic[_K]):
    """Objects that were stored or found by this server, until it deletes them or a lookup misses them. It is what
    LMCache's accounting and listing see. The host cannot list them: it knows hashes of LMCache's keys only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: dict[_K, int] = {}

    def add(self, keys: Iterable[_K], size: int) -> list[_K]:
        """Notes objects, and returns those that were not known."""
        with self._lock:
            new = [key for key in keys if key not in self._sizes]
            self._sizes.update((key, size) for key in new)
            return new

    def remove(self, keys: Iterable[_K], size: int) -> list[_K]:
        """Notes that objects of a size are gone, and returns those that were known."""
        with self._lock:
            gone = [key for key in keys if self._sizes.get(key) == size]
            for key in gone:
                del self._sizes[key]
            return gone

    def page(self, model: str | None, most: int, after: str | None) -> tuple[list[tuple[_K, int]], str | None]:
        """The next objects in the order of their names, and where the page after this one starts."""
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
    """A key as text. No part of it holds an @."""
    return f"{key.model_name}@{key.kv_rank:08x}@{key.object_group_id:08x}@{key.chunk_hash.hex()}@{key.cache_salt}"
