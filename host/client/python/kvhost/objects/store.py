"""Stores and loads of batches of objects."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from kvhost.errors import Code, HostError, HostGoneError
from kvhost.objects.connection import Connection, Connector, TakenBack, offsets, stride
from kvhost.objects.inplace import NotShared, Place
from kvhost.objects.kind import Kind
from kvhost.pulse import patiently
from kvhost.session import DiscardResult, LoadChunk, LoadJob, Lookup, Result, Session, StoreChunk, StoreJob

_T = TypeVar("_T")


#: The addresses of an object's pages in this process, one for each page of its kind. The caller keeps the memory alive.
Addresses = Sequence[int]


@dataclass(frozen=True)
class StoreObject:
    key: bytes
    pages: Addresses
    parent: bytes = b""  # key of the object with the preceding tokens, if the engine names it
    depth: int = 0


class Hit:
    """The hits of a lookup. A lease keeps them until they are loaded, released or too old."""

    def __init__(self, keys: Sequence[bytes], lookup: Lookup, session: Session) -> None:
        self.lookup, self.session = lookup, session
        self.found = [lookup.has(i) for i in range(len(keys))]
        self.index = {key: i for i, key in enumerate(keys) if self.found[i]}

    def release(self) -> None:
        """Ends the lease, without waiting."""
        self.lookup.release(wait=False)


class ObjectStore:
    """Objects in the host. Any thread may use it. Calls block; without a host they raise :class:`HostGoneError`."""

    def __init__(self, connector: Connector) -> None:
        self._host = connector

    def lookup(self, kind: Kind, keys: Sequence[bytes]) -> Hit:
        """Looks up keys, each on its own, and leases the hits."""

        def look(place: Place | None, blocks: Sequence[int]) -> Hit:
            with self._host.session(kind, place) as (_, session):
                prefetch = self._host.prefetch and session.levels > 1  # prefetch, since the load comes later
                return Hit(keys, session.lookup(keys, prefetch=prefetch), session)

        return self._either(kind, (), look)

    def touch(self, kind: Kind, keys: Sequence[bytes]) -> None:
        """Tells the host's policies that objects were used from another cache."""

        def touch(place: Place | None, blocks: Sequence[int]) -> None:
            with self._host.session(kind, place) as (_, session):
                most = session.limits.keys_per_lookup or len(keys)
                for first in range(0, len(keys), most):
                    session.lookup(keys[first : first + most]).release(wait=False)

        self._either(kind, (), touch)

    def store(self, kind: Kind, objects: Sequence[StoreObject]) -> list[Result]:
        """Stores objects by one job, or by several if the arena has no room for all. Returns the result of each."""

        def store(place: Place | None, blocks: Sequence[int]) -> list[Result]:
            results: list[Result] = []
            with self._host.session(kind, place, copies=True) as (connection, session):
                while (n := len(results)) < len(objects):
                    batch = _Batch(kind, connection, session, self._host.timeout, blocks[n:] if place else None)
                    results += batch.store(objects[n:])
            return results

        return self._either(kind, [o.pages for o in objects], store)

    def load(self, kind: Kind, keys: Sequence[bytes], pages: Sequence[Addresses], hit: Hit | None = None) -> list[bool]:
        """Fills memory with objects, under the lease of a hit with all the keys or under a new one. Returns which
        were delivered. The bytes of the others are undefined."""

        def load(place: Place | None, blocks: Sequence[int]) -> list[bool]:
            with self._host.session(kind, place, copies=True) as (connection, session):
                return self._load(_Load(kind, connection, session, keys, pages, blocks if place else None), hit)

        return self._either(kind, pages, load)

    def _load(self, load: _Load, hit: Hit | None) -> list[bool]:
        loaded = [False] * len(load.keys)
        todo = list(range(len(load.keys)))
        fresh = hit is None or hit.session is not load.session
        while todo:
            if hit is None or fresh:
                wanted = [load.keys[i] for i in todo]
                hit = Hit(wanted, load.session.lookup(wanted), load.session)
            todo = [i for i in todo if load.keys[i] in hit.index]
            if todo:
                batch = load.batch(todo, self._host.timeout)
                delivered = batch.load(hit, [load.keys[i] for i in todo], [load.pages[i] for i in todo])
                for i, ok in zip(todo, delivered):
                    loaded[i] = ok
                over = [] if fresh else [todo[n] for n in batch.lease_over]
                todo = over + todo[len(delivered) :]
            fresh = True
        return loaded

    def discard(self, kind: Kind, keys: Sequence[bytes]) -> list[DiscardResult]:
        """Removes objects. Returns the result of each."""

        def discard(place: Place | None, blocks: Sequence[int]) -> list[DiscardResult]:
            results: list[DiscardResult] = []
            with self._host.session(kind, place) as (_, session):
                most = session.limits.keys_per_lookup
                for first in range(0, len(keys), most):
                    results += session.discard(keys[first : first + most])
            return results

        return self._either(kind, (), discard)

    def _either(self, kind: Kind, pages: Sequence[Addresses], do: Callable[[Place | None, Sequence[int]], _T]) -> _T:
        """Runs a job on objects in place if possible, otherwise through the arena."""
        place, blocks = self._host.place(kind, pages)
        try:
            return do(place, blocks)
        except NotShared as e:
            self._host.displace(kind, e)
            return do(None, [])

    def status(self) -> dict[str, object]:
        return {
            "socket": self._host.socket,
            "connected": self._host.connected,
            "gone": self._host.gone,
            "sessions": self._host.sessions(),
            "losses": self._host.losses,
        }

    def close(self) -> None:
        self._host.close()


@dataclass
class _Load:
    """The source and the destination of a load."""

    kind: Kind
    connection: Connection
    session: Session
    keys: Sequence[bytes]
    pages: Sequence[Addresses]
    blocks: Sequence[int] | None  # blocks of objects in place; None: through the arena

    def batch(self, todo: Sequence[int], timeout: float) -> _Batch:
        blocks = None if self.blocks is None else [self.blocks[i] for i in todo]
        return _Batch(self.kind, self.connection, self.session, timeout, blocks)


@dataclass
class _Batch:
    """One job, with as many objects as the arena has room for."""

    kind: Kind
    connection: Connection
    session: Session
    timeout: float
    blocks: Sequence[int] | None = None  # blocks of objects in place; None: through the arena
    lease_over: list[int] = field(default_factory=list)  # objects of a load that failed because the lease had ended

    def store(self, objects: Sequence[StoreObject]) -> list[Result]:
        with self._blocks(len(objects)) as (blocks, addresses):
            for address, o in zip(addresses, objects):
                for offset, page, size in zip(offsets(self.kind), o.pages, self.kind.pages, strict=True):
                    ctypes.memmove(address + offset, page, size)
            job = self.session.store([StoreChunk(o.key, [b], o.parent, o.depth) for b, o in zip(blocks, objects)])
            self._settle(job, job.read)
        return [c.result for c in self._settle(job, job.published).chunks]

    def load(self, hit: Hit, keys: Sequence[bytes], pages: Sequence[Addresses]) -> list[bool]:
        with self._blocks(len(keys)) as (blocks, addresses):
            chunks = [LoadChunk(hit.index[key], [b]) for b, key in zip(blocks, keys)]
            job = self.session.load(hit.lookup, chunks)
            failures = {f.chunk: f.error.code for f in self._settle(job, job.wait).failed}
            for n, address in enumerate(addresses):
                if n not in failures:
                    for offset, page, size in zip(offsets(self.kind), pages[n], self.kind.pages, strict=True):
                        ctypes.memmove(page, address + offset, size)
        self.lease_over = [n for n, code in failures.items() if code == Code.LEASE_OVER]
        return [n not in failures for n in range(len(blocks))]

    @contextmanager
    def _blocks(self, most: int) -> Iterator[tuple[list[int], list[int]]]:
        """A context with blocks of the arena and their addresses, for copies. After the loss of a session they are
        not given back, since the host may still copy, and the arena ends with the connection. Objects in place
        have blocks, and need no copy."""
        if self.blocks is not None:
            yield list(self.blocks[: self.session.limits.chunks_per_job]), []
            return
        step, space = stride(self.kind), self.connection.space
        blocks = space.take(step, min(most, self.session.limits.chunks_per_job), self.timeout)
        try:
            yield blocks, [self.connection.base + b * step for b in blocks]
        except HostError:
            space.give(step, blocks)
            raise
        space.give(step, blocks)

    def _settle(self, job: StoreJob | LoadJob, wait: Callable[[float | None], _T]) -> _T:
        """Waits for a job. A job that takes too long is cancelled, so that its blocks become free. A store is taken
        back if the host is stopped or another thread has abandoned the session; then only blocks of loads stay in
        the host's use."""
        try:
            return patiently(self.session, wait, self.timeout)
        except HostGoneError as e:
            if isinstance(job, StoreJob) and job.withdraw():
                raise TakenBack(str(e)) from e
            raise
        except TimeoutError:
            job.cancel()
            return wait(self.timeout)

