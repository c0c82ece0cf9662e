"""Doubles for the vLLM connector's two halves: a host's sessions, and the engine's requests and steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace as Record
from typing import Any

from google.protobuf.duration_pb2 import Duration

from kvhost import Hints, HostGoneError, Lookup
from kvhost.semaphores import Timeline
from kvhost.session import NOT_WANTED, DiscardResult, LoadJob, PendingLookup, Result, StoreJob
from kvhost.v1 import kvhost_pb2 as pb


class Clock:
    """What stands for the module ``time``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Pending(PendingLookup):
    def __init__(self, session: DoubleSession, keys: Sequence[bytes], group: int) -> None:
        super().__init__(session, 0)  # type: ignore[arg-type]
        self.keys, self.group = list(keys), group
        self.asked: DoubleSession = session
        if session.answers:
            self.reply()

    def reply(self) -> None:
        self.asked.last_lease += 1
        there = [k in self.asked.resident for k in self.keys]
        hits = there.index(False) if False in there else len(there)
        bits = sum(1 << i for i, t in enumerate(there) if t).to_bytes(len(there) // 8 + 1, "little")
        if self.group in self.asked.membership:
            self._call(pb.SessionResponse(lookup=pb.LookupReply(
                hits=sum(there), bits=bits, lease=self.asked.last_lease, load_time=Duration(nanos=1000 * self.asked.membership_micros),
            )))
        else:
            each = self.asked.micros_per_chunk
            slow = max(0, hits - self.asked.fast_chunks) if self.asked.fast_chunks else 0
            reply = pb.LookupReply(hits=hits, lease=self.asked.last_lease, load_time=Duration(nanos=1000 * (hits + 9 * slow) * each))
            if slow:
                reply.load_parts.add(keys=hits - slow, load_time=Duration(nanos=1000 * (hits - slow) * each))
                reply.levels.add(level=1, chunks=slow)
            self._call(pb.SessionResponse(lookup=reply))


class Store(StoreJob):
    def __init__(self, session: DoubleSession, chunks: Sequence[Any]) -> None:
        super().__init__(session)  # type: ignore[arg-type]
        self.id = len(session.stores) + 1
        self.chunks, self.cancelled = list(chunks), False

    def finish_reading(self) -> None:
        self._call(pb.SessionResponse(store_read=pb.StoreRead()))

    def publish(self, *results: Result) -> None:
        """One result for all chunks, or one for each; all are stored without."""
        each = results if len(results) > 1 else [*results, Result.STORED][:1] * len(self.chunks)
        self._call(pb.SessionResponse(store_published=pb.StorePublished(results=[f"CHUNK_RESULT_{r.name}" for r in each])))

    def cancel(self, *, wait: bool = True) -> None:
        self.cancelled = True
        if not self._session.frozen():
            self.publish(Result.FAILED)


class Load(LoadJob):
    def __init__(self, session: DoubleSession, lease: int, chunks: Sequence[Any]) -> None:
        super().__init__(session, None)  # type: ignore[arg-type]
        self.lease, self.chunks, self.cancelled = lease, list(chunks), False

    def finish(self, failures: Sequence[tuple[int, int]] = ()) -> None:
        """``failures`` are (chunk of the load, code)."""
        failed = [
            pb.ChunkFailure(chunk=c, code=pb.Code.Name(code), blocks=[b for b in self.chunks[c].blocks if b != NOT_WANTED])
            for c, code in failures
        ]
        self._call(pb.SessionResponse(load_done=pb.LoadDone(failures=failed)))

    def cancel(self, *, wait: bool = True) -> None:
        self.cancelled = True
        if not self._session.frozen():
            self.finish([(i, 9) for i in range(len(self.chunks))])


class DoubleSession:
    """What a session with a host would do, at the test's word."""

    lease_seconds = 60.0
    limits = Record(keys_per_lookup=1000, chunks_per_job=1000, jobs=1000)
    version = "double"
    namespace_digest = bytes(16)

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._wakers: list[Callable[[], None]] = []
        self.resident: set[bytes] = set()
        self.membership: set[int] = set()
        self.membership_micros = 0
        self.in_step: Callable[[Load], None] = lambda load: load.finish()  # the engine waits inside the step
        self.answers = True
        self.frozen = lambda: False  # whether the host's process is stopped: it acknowledges nothing
        self.micros_per_chunk = 0
        self.fast_chunks = 0  # so many leading chunks load ten times as fast as the others; 0: all are alike
        self.last_lease = 0
        self.lookups: list[Pending] = []
        self.prefetches: list[bool] = []  # by lookup
        self.pins: list[bool] = []  # likewise
        self.traces: list[str] = []  # by lookup and store
        self.levels = 1
        self.pin_bytes, self.chunk_bytes = 1 << 40, 1 << 20
        self.stores: list[Store] = []
        self.loads: list[Load] = []
        self.released: list[int] = []
        self.withdrawn: list[int] = []
        self._withdrawals: Any = Record(withdraw=self.withdrawn.append)  # None: an older host
        self.pings: list[threading.Event] = []
        self.ended_requests: list[int] = []
        self.hints: list[Hints | None] = []
        self.discarded: list[list[bytes]] = []
        self.in_use: set[bytes] = set()

    def start_lookup(
        self, keys: Sequence[bytes], *, group: int, request: int, readers: int = 0, prefetch: bool = False, pin: bool = False,
        traceparent: str = "",
    ) -> Pending:
        self._alive()
        self.traces.append(traceparent)
        self.prefetches.append(prefetch)
        self.pins.append(pin)
        self.lookups.append(Pending(self, keys, group))
        return self.lookups[-1]

    def _alive(self) -> None:
        if self.ended.is_set():
            raise HostGoneError("gone")

    def _tell(self, wait: bool, **body: Any) -> None:
        if not self.ended.is_set():
            self.released.append(body["release"].lease)

    def leased(self, lease: int) -> Lookup:
        return Lookup(self, 0, pb.LookupReply(lease=lease))  # type: ignore[arg-type]

    def store(self, chunks: Sequence[Any], *, group: int, request: int, traceparent: str = "") -> Store:
        self._alive()
        self.traces.append(traceparent)
        self.stores.append(Store(self, chunks))
        return self.stores[-1]

    def load(
        self, lookup: Lookup, chunks: Sequence[Any], *, on_layer: Callable[[int, list[int]], None] | None = None,
        timeline: Timeline | None = None,
    ) -> Load:
        self._alive()
        load = Load(self, lookup.lease, chunks)
        self.loads.append(load)
        if on_layer is not None:
            self.in_step(load)
        return load

    def discard(self, keys: Sequence[bytes], *, group: int) -> list[DiscardResult]:
        self._alive()
        self.discarded.append(list(keys))
        results = []
        for key in keys:
            results.append(
                DiscardResult.IN_USE if key in self.in_use else
                DiscardResult.REMOVED if key in self.resident else DiscardResult.ABSENT
            )
            if results[-1] == DiscardResult.REMOVED:
                self.resident.discard(key)
        return results

    def start_ping(self) -> threading.Event:
        self._alive()
        self.pings.append(threading.Event())
        if not self.frozen():
            self.pings[-1].set()
        return self.pings[-1]

    def go_on(self) -> None:
        """The host's process was stopped, and is not any more."""
        self.frozen = lambda: False
        for ping in self.pings:
            ping.set()

    def end_request(self, request: int, hints: Hints | None = None, *, wait: bool) -> None:
        if not self.ended.is_set():
            self.ended_requests.append(request)
            self.hints.append(hints)

    def die(self) -> None:
        self.ended.set()
        jobs: list[Store | Load] = [*self.stores, *self.loads]
        for call in [*(j for j in jobs if not j.over), *(p for p in self.lookups if not p.done())]:
            call._call(HostGoneError("the host is gone"))
        for wake in self._wakers:
            wake()

    def when_ended(self, wake: Callable[[], None]) -> None:
        self._wakers.append(wake)

    def end(self) -> None:
        if not self.frozen():
            self.die()

    def close(self, wait: float | None = 5.0) -> None:
        self.die()


class DoubleLink:
    """A link whose session is there at once."""

    starting = False

    def __init__(self, *sessions: DoubleSession) -> None:
        self.up = list(sessions)
        self.epoch = 0
        self.wanted = 0
        self.followed: list[int] = []

    def sessions(self, epoch: int | None = None) -> list[DoubleSession]:
        return self.up if self.epoch >= 0 and epoch in (None, self.epoch) else []

    def follow(self, epoch: int) -> None:
        self.followed.append(epoch)

    def close(self) -> None:
        pass


class DoublePool:
    """The engine's block pool, as far as holds know it."""

    def __init__(self, blocks: int = 1000) -> None:
        self.num_gpu_blocks = blocks
        self.blocks = [Record(block_id=i, ref_cnt=0) for i in range(blocks)]

    def touch(self, blocks: Sequence[Any]) -> None:
        for b in blocks:
            b.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Any]) -> None:
        for b in blocks:
            b.ref_cnt -= 1
            assert b.ref_cnt >= 0, f"block {b.block_id} is freed once too often"

    def get_num_free_blocks(self) -> int:
        return sum(1 for b in self.blocks[1:] if not b.ref_cnt)

    @property
    def held(self) -> set[int]:
        return {b.block_id for b in self.blocks if b.ref_cnt}


def request(id: str, tokens: Sequence[int], prompt: int | None = None) -> Any:
    return Record(
        request_id=id, all_token_ids=list(tokens), num_tokens=len(tokens), num_prompt_tokens=prompt or len(tokens),
        num_computed_tokens=0, lora_request=None, cache_salt=None, mm_features=[], prompt_embeds=None,
        status="RUNNING", kv_transfer_params=None, priority=0,
    )


def step(scheduled: dict[str, int], new_blocks: dict[str, Any] | None = None, resumed: Sequence[str] = ()) -> Any:
    """A scheduler output; ``new_blocks`` are those of running requests."""
    ids = list(new_blocks or {})
    return Record(
        num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_cached_reqs=Record(
            req_ids=ids, new_block_ids=[(new_blocks or {})[i] for i in ids], resumed_req_ids=set(resumed)
        ),
    )

