"""Loads of one batch of SGLang's, and the layers that have landed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvhost.session import LoadChunk, LoadJob, LoadResult, Lookup, Session
from kvhost.sglang.devicepools import DevicePages


@dataclass(frozen=True)
class Found:
    """The hits of one request in all pools, and their leases."""

    number: int  # the request's number in the protocol
    session: Session
    names: Sequence[bytes]  # names of the pages, in SGLang's order
    pools: dict[str, Lookup]
    until: float  # time until which the leases are valid for a load
    lengths: list[int]


class Part:
    """The load of one request's pages in one pool."""

    def __init__(self, batch: Batch, pool: DevicePages, lookup: Lookup, names: Sequence[bytes], chunks: list[LoadChunk]) -> None:
        self.pool, self.lookup, self.names, self.chunks = pool, lookup, names, chunks
        self.job: LoadJob | None = None
        self.ready = pool.layers[0]  # earlier layers do not wait for this load
        self._batch, self._landed, self._failed = batch, 0, False

    def begin(self, session: Session) -> None:
        self.job = session.load(self.lookup, self.chunks, on_layer=self._layer)

    def _layer(self, _: int, failed: list[int]) -> None:
        """Records that a layer has landed, verified, in all chunks that have not failed. Runs on the receiving
        thread."""
        self._failed = self._failed or bool(failed)
        if not self._failed:
            self._landed += 1
            layers = self.pool.layers
            if self._landed < len(layers):  # the last layer is ready with the job's result
                self.ready = layers[self._landed]
                self._batch.landed()

    def done(self) -> None:
        self.ready = self._batch.layers
        self._batch.landed()


class Batch:
    """The loads that SGLang starts by one call. Its forward waits layer by layer."""

    def __init__(self, counter: Any, rids: Sequence[str], ready: Sequence[Any]) -> None:
        self.rids, self.device_ready = rids, ready
        self.parts: list[Part] = []
        self.layers: int = counter.num_layers
        self.index: int = counter.update_producer()
        self.quiet = threading.Event()  # set when no load of it writes any more, or the host hangs
        self.hangs = False
        self._counter, self._lock, self._announced, self._over = counter, threading.Lock(), 0, False

    def landed(self) -> None:
        """Announces the layers that all loads have delivered."""
        with self._lock:
            if self._over:
                return
            ready = min((p.ready for p in self.parts), default=self.layers)
            for layer in range(self._announced, ready):
                self._counter.complete(self.index, layer)
            self._announced = max(self._announced, ready)

    def fail(self, why: BaseException) -> None:
        with self._lock:
            if not self._over and self._announced < self.layers:
                self._over = True
                self._counter.fail(self.index, why)


def failed_chunks(result: LoadResult) -> list[int]:
    return sorted({f.chunk for f in result.failed})
