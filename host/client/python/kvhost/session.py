"""Sessions, lookups and jobs."""

from __future__ import annotations

import asyncio
import enum
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration

from kvhost.adopted import AdoptedMemory
from kvhost.arena import Arena, SharedMemory
from kvhost.errors import OTHER_VERSION, Code, HostError, HostStoppedError, KvhostError, VersionError
from kvhost.events import EventStream, Position
from kvhost.forks import Origin
from kvhost.pulse import patiently
from kvhost.semaphores import ArenaSemaphores, Timeline
from kvhost.shape import Namespace, Region
from kvhost.v1 import kvhost_pb2 as pb
from kvhost.wire import Stream, checked, send_descriptor
from kvhost.withdrawals import Withdrawals

PROTOCOL = 1

_R = TypeVar("_R")

#: In a load's blocks: do not load this block of the chunk.
NOT_WANTED = 0xFFFFFFFF


class Result(enum.IntEnum):
    """The result of one chunk of a store; the numbers of the protocol."""

    UNSPECIFIED = 0
    STORED = 1
    RESIDENT = 2
    REFUSED = 3
    SHED = 4
    FAILED = 5


class DiscardResult(enum.IntEnum):
    """The result of one key of a discard; the numbers of the protocol."""

    UNSPECIFIED = 0
    REMOVED = 1
    ABSENT = 2
    IN_USE = 3  # a lease has the chunk, or a piece of it is being loaded or stored
    OTHER_TENANT = 4  # another tenant stored the chunk
    UNAVAILABLE = 5  # the chunk is or may be in a root that cannot be written to or is still being scanned


class EndReason(enum.IntEnum):
    """The reason for a request's end; the numbers of the protocol."""

    UNSPECIFIED = 0
    STOP = 1
    LENGTH = 2
    TOOL_CALL = 3
    ABORT = 4


@dataclass(frozen=True)
class Hints:
    """The engine's information about a request at its end, for policies. The defaults mean unknown."""

    reason: EndReason = EndReason.UNSPECIFIED
    tokens_in: int = 0
    tokens_out: int = 0
    priority: int = 0  # the engine's priority: lower is first
    return_seconds: float = 0  # expected seconds until the next use of the prefix


@dataclass(frozen=True)
class Limits:
    """The host's limits for one session."""

    keys_per_lookup: int
    chunks_per_job: int
    message_bytes: int
    jobs: int  # most at a time
    leases: int  # most at a time
    requests: int  # requests between their first message and ``end_request``
    arena_bytes: int  # bytes of registered memory


@dataclass(frozen=True)
class StoreChunk:
    key: bytes
    blocks: Sequence[int]
    parent: bytes | None = None  # key of the chunk before it; None or empty for a prefix's first chunk
    depth: int = 0


@dataclass(frozen=True)
class ChunkResult:
    result: Result
    error: HostError | None = None


@dataclass(frozen=True)
class StoreResult:
    chunks: list[ChunkResult]
    bytes: int
    cancelled: bool


@dataclass(frozen=True)
class LoadChunk:
    index: int  # index of the key in the lookup
    blocks: Sequence[int]


@dataclass(frozen=True)
class BlockFailure:
    block: int
    chunk: int  # index of the chunk in the load
    error: HostError


@dataclass(frozen=True)
class LoadResult:
    bytes: int
    failed: list[BlockFailure]  # all other blocks were delivered and verified
    cancelled: bool


@dataclass(frozen=True)
class LevelHits:
    """The hits whose nearest copy is in one level."""

    level: int  # 0 is the nearest
    chunks: int
    bytes: int  # bytes of the pages of one reader's load of these hits
    load_seconds: float | None  # estimate for loads of these hits alone, as :attr:`Lookup.load_seconds`


def _seconds(m: Any, field: str) -> float | None:
    """Returns a duration of a message in seconds; None if it is absent."""
    if not m.HasField(field):
        return None
    d = getattr(m, field)
    return float(d.seconds + d.nanos / 1e9)


class Lookup:
    """The hits of a lookup, and the lease that keeps them for a while."""

    def __init__(self, session: Session, first: int, reply: pb.LookupReply) -> None:
        self._session = session
        self._first = first
        self.hits: int = reply.hits
        self.lease: int = reply.lease  # number of the lease; 0 without hits
        self.bits: bytes = reply.bits  # hits of a membership group: bit i%8 of byte i/8 is key i
        #: Bytes of the pages of one reader's load of all hits.
        self.bytes: int = reply.bytes
        #: The host's estimate in seconds of the readers' loads of all hits if they start now, by its measured bandwidth
        #: and its queue. None before it has measured.
        self.load_seconds: float | None = _seconds(reply, "load_time")
        #: If roots of different speed hold the hits: the same estimate for leading parts, as (keys, seconds).
        self.load_parts: list[tuple[int, float]] = [(p.keys, _seconds(p, "load_time") or 0.0) for p in reply.load_parts]
        #: The levels of the hits, nearest first.
        self.levels: list[LevelHits] = [
            LevelHits(at.level, at.chunks, at.bytes, _seconds(at, "load_time")) for at in reply.levels
        ]

    def __repr__(self) -> str:
        return f"<Lookup: {self.hits} hits, {self.bytes} bytes, lease {self.lease}>"

    def has(self, i: int) -> bool:
        """Whether key ``i`` of the lookup was hit."""
        if self.bits:
            return i // 8 < len(self.bits) and bool(self.bits[i // 8] >> (i % 8) & 1)
        return self._first <= i < self._first + self.hits

    def release(self, *, wait: bool = True) -> None:
        """Ends the lease. After a load or the expiry it has no effect, and without ``wait`` none after the session's
        end."""
        if self.lease:
            self._session._tell(wait, release=pb.Release(lease=self.lease))


class PendingLookup:
    """A lookup whose answer may not have come yet."""

    def __init__(self, session: Session, first: int) -> None:
        self._session = session
        self._first = first
        self._origin = Origin()
        self._over = threading.Event()
        self._answer: Any = None

    def __repr__(self) -> str:
        return f"<PendingLookup, {'answered' if self.done() else 'waiting'}>"

    def _call(self, m: Any) -> bool:
        if not isinstance(m, Exception) and m.WhichOneof("body") == "lookup" and m.lookup.pending:
            return False  # the final answer follows
        self._answer = m
        self._over.set()
        return True

    def done(self, timeout: float = 0) -> bool:
        """Returns whether the answer has come, or comes within ``timeout`` seconds."""
        self._origin.check()
        return self._over.wait(timeout)

    def result(self, timeout: float | None = None) -> Lookup:
        self._origin.check()
        if not self._over.wait(timeout):
            raise TimeoutError(f"no answer to lookup within {timeout} s")
        return Lookup(self._session, self._first, checked(self._answer).lookup)


class _Job:
    def __init__(self, session: Session, timeline: Timeline | None = None) -> None:
        self._session = session
        self._origin = Origin()
        self.timeline = timeline
        self.id = 0
        self._over = threading.Event()
        self.over_at = 0.0  # time of the end, by time.monotonic
        self._answer: Any = None
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []

    def _end(self, m: Any) -> None:
        if self.timeline is not None and (isinstance(m, Exception) or m.WhichOneof("body") == "error"):
            self.timeline.abandon()  # the host does not
        with self._lock:
            self._answer, self.over_at = m, time.monotonic()
            self._over.set()
            wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()

    async def _awaited(self, result: Callable[[float | None], _R]) -> _R:
        """Waits on the running event loop. Cancelling the task ends only the waiting, as a TimeoutError does."""
        self._origin.check()
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(over.set)
            except RuntimeError:
                pass  # the loop was closed: no task waits

        self.when_over(wake)
        await over.wait()
        return result(0)

    def when_over(self, wake: Callable[[], None]) -> None:
        """Calls ``wake`` when the job is over, on the receiving thread, or at once. ``wake`` must be quick."""
        with self._lock:
            if not (done := self._over.is_set()):
                self._wakers.append(wake)
        if done:
            wake()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}, {'over' if self.over else 'running'}>"

    @property
    def over(self) -> bool:
        """Whether the job has completed or failed."""
        return self._over.is_set()

    @property
    def answered(self) -> bool:
        """Whether the host has ended the job, and touches neither its blocks nor its semaphores any more."""
        return self._over.is_set() and not isinstance(self._answer, Exception)

    def cancel(self, *, wait: bool = True) -> None:
        """Cancels the job. Returns when no copy can touch the blocks any more, or at once without ``wait``, also if
        the session has ended. The job still completes."""
        self._session._tell(wait, cancel=pb.Cancel(job=self.id))

    def _wait(self, timeout: float | None) -> Any:
        self._origin.check()
        if not self._over.wait(timeout):
            raise TimeoutError(f"job {self.id} is not over after {timeout} s: its blocks are still the host's")
        return checked(self._answer)


class StoreJob(_Job):
    """A running store."""

    def __init__(self, session: Session, timeline: Timeline | None = None) -> None:
        super().__init__(session, timeline)
        self._read = threading.Event()
        self._withdrawals = session._withdrawals  # None: the session did not share a word
        self.withdrawn = False

    def _call(self, m: Any) -> bool:
        if not isinstance(m, Exception) and m.WhichOneof("body") == "store_read":
            self._read.set()
            return False
        self._end(m)
        self._read.set()
        return True

    @property
    def was_read(self) -> bool:
        """Whether the blocks may be used again."""
        return self._read.is_set()

    def read(self, timeout: float | None = None) -> None:
        """Waits until the blocks may be used again."""
        self._origin.check()
        if not self._read.wait(timeout):
            raise TimeoutError(f"job {self.id} has not read its blocks after {timeout} s")
        if self._over.is_set():
            checked(self._answer)

    def withdraw(self) -> bool:
        """Withdraws the store and all earlier stores of the session. It does not wait for the host, which may be
        stopped. The blocks may be used again when this returns. The host does not publish a store that it had not
        read by then; the job still completes. Returns False, without effect, if :meth:`Session.share_withdrawals`
        was not called before or the host does not know it."""
        self._origin.check()
        if self._withdrawals is None:
            return False
        self._withdrawals.withdraw(self.id)
        self.withdrawn = True
        self._read.set()
        return True

    def __await__(self) -> Generator[Any, None, StoreResult]:
        return self._awaited(self.published).__await__()

    def published(self, timeout: float | None = None) -> StoreResult:
        """Waits for the result of every chunk, and returns the results."""
        m = self._wait(timeout).store_published
        errors = {f.chunk: HostError(f.code, "", f.message) for f in m.failures}
        chunks = [ChunkResult(Result(r), errors.get(i)) for i, r in enumerate(m.results)]
        return StoreResult(chunks, m.bytes, m.cancelled)


class LoadJob(_Job):
    """A running load."""

    def __init__(
        self, session: Session, on_layer: Callable[[int, list[int]], None] | None, timeline: Timeline | None = None
    ) -> None:
        super().__init__(session, timeline)
        self._on_layer = on_layer

    def _call(self, m: Any) -> bool:
        if not isinstance(m, Exception) and m.WhichOneof("body") == "load_layer":
            if self._on_layer is not None:
                self._on_layer(m.load_layer.layer, list(m.load_layer.failed))
            return False
        self._end(m)
        return True

    def __await__(self) -> Generator[Any, None, LoadResult]:
        return self._awaited(self.wait).__await__()

    def wait(self, timeout: float | None = None) -> LoadResult:
        """Waits until every block was delivered or has failed. After :class:`HostGoneError` or :class:`HostError` no
        block of the load may be used."""
        m = self._wait(timeout).load_done
        failed = [
            BlockFailure(block, f.chunk, HostError(f.code, "", f.message)) for f in m.failures for block in f.blocks
        ]
        return LoadResult(m.bytes, failed, m.cancelled)


class Session:
    """A session with the host on a Unix socket. Any thread may use it."""

    def __init__(
        self,
        socket: str,
        engine: str,
        namespace: Namespace,
        *,
        role: str = "worker",
        rank: int = 0,
        local_ranks: int = 1,
        tenant: int = 0,
        device_uuid: str | None = None,
        unsealed_memory: bool = False,
        timeout: float = 30.0,
    ) -> None:
        """``device_uuid`` is the GPU of the registered memory, None for host memory. ``unsealed_memory`` allows
        :class:`kvhost.SharedMemory`, which is not sealed against shrinking: a job that finds missing pages fails."""
        self._socket = socket
        self._timeout = timeout
        self._namespace = namespace
        self.chunk_bytes = namespace.chunk_bytes
        self._units = namespace.rank_units
        self._tags = iter(range(1, 1 << 62))
        self._stream = Stream(socket)
        try:
            hello = self._ask(
                hello=pb.Hello(
                    protocol=PROTOCOL, engine=engine, role=role, rank=rank, local_ranks=local_ranks,
                    device_uuid=device_uuid or "", namespace=namespace.message(), tenant=tenant,
                    unsealed_memory=unsealed_memory,
                )
            ).hello
            if hello.units != namespace.units:
                raise VersionError(f"{socket}: {OTHER_VERSION}: it knows no units, which engines of several sizes share")
        except BaseException as e:
            self._stream.close(0.0 if isinstance(e, HostStoppedError) else 5.0)
            raise
        self._withdrawals: Withdrawals | None = None
        self._nonce: bytes = hello.nonce
        self.namespace_digest: bytes = hello.namespace_digest  # name of the namespace in events and on disk
        self.version: str = hello.version
        self.lease_seconds: float = _seconds(hello, "lease_time") or 0.0
        l = hello.limits
        self.limits = Limits(
            l.keys_per_lookup, l.chunks_per_job, l.message_bytes, l.jobs, l.leases, l.requests, l.arena_bytes
        )
        self.levels: int = hello.levels or 1  # levels of the host's roots
        self.pin_bytes: int = hello.pin_bytes  # most bytes of ``pin`` leases of all engines

    def _ask(self, **body: Any) -> Any:
        return patiently(self, self._stream.asked(**body), self._timeout)

    def _tell(self, wait: bool, **body: Any) -> None:
        """Sends a message that ends something. Without ``wait`` it is no error that the session has ended, since all
        ends with it."""
        if wait:
            self._ask(**body)
            return
        self._stream.origin.check()
        with suppress(KvhostError):
            self._stream.start(lambda m: True, **body)

    def __repr__(self) -> str:
        return f"<Session with {self._socket}, kvhost {self.version}{', ended' if self.ended.is_set() else ''}>"

    @property
    def ended(self) -> threading.Event:
        """An event that is set when either side has ended the session. Its jobs have failed by then."""
        return self._stream.ended

    def when_ended(self, wake: Callable[[], None]) -> None:
        """Calls ``wake`` when the session is over, on the receiving thread, or at once. ``wake`` must be quick."""
        self._stream.when_ended(wake)

    def kill_host(self) -> None:
        """Ends the host's process, also one that is stopped, so that it writes to no memory that it has mapped."""
        self._stream.host.kill()

    def register(
        self, group: int, memory: Arena | AdoptedMemory | SharedMemory | Sequence[bytes], regions: Sequence[Region]
    ) -> None:
        """Registers a group's pages: one region per plane of the group, in its order. If the rank has several units
        (:attr:`Namespace.units`), the regions of the first unit come before those of the next. ``memory`` is
        shared host memory or, for memory of the session's GPU, the handle of each plane's allocation
        (:func:`kvhost.cuda.export_ipc`); a region's offset counts from the allocation's start."""
        handles: list[dict[str, Any]]
        if isinstance(memory, (Arena, AdoptedMemory, SharedMemory)):
            if memory.fd < 0:
                raise ValueError("the memory is closed")
            handles = [{"memfd": self._send(memory.fd)}] * len(regions)
        elif isinstance(memory, Sequence) and not isinstance(memory, (bytes, bytearray, str)):
            handles = [{"cuda_ipc": handle} for handle in memory]
        else:
            raise TypeError(f"{type(memory).__name__} is no memory that can be shared: see Arena and SharedMemory")
        planes = max(1, len(regions) // self._units)
        self._ask(
            register=pb.Register(
                group=group,
                regions=[
                    pb.Region(
                        unit=i // planes, plane=i % planes, offset=r.offset, stride=r.stride, blocks=r.blocks, pages=r.pages,
                        page_stride=r.page_stride, **handle,
                    )
                    for i, (handle, r) in enumerate(zip(handles, regions, strict=True))
                ],
            )
        )

    def _send(self, fd: int) -> int:
        """Sends a descriptor to the host, and returns its tag for messages."""
        self._stream.origin.check()
        tag = next(self._tags)
        send_descriptor(self._socket + ".fd", self._nonce, tag, fd, self._timeout)
        return tag

    def unregister(self, group: int) -> None:
        """Unregisters a group. Returns when the host cannot touch its pages any more."""
        self._ask(unregister=pb.Unregister(group=group))

    def lookup(
        self,
        keys: Sequence[bytes],
        *,
        group: int = 0,
        request: int = 0,
        first: int = 0,
        readers: int = 0,
        prefetch: bool = False,
        traceparent: str = "",
    ) -> Lookup:
        """Looks keys up, and leases the hits for a while. ``prefetch`` says that the load comes later: hits of farther
        levels are copied to the nearest one while the lease lasts. No load waits for that.

        ``traceparent`` (W3C) names the caller's span: the host's spans of the lookup, and of loads under it, become its
        children."""
        pending = self.start_lookup(
            keys, group=group, request=request, first=first, readers=readers, prefetch=prefetch, traceparent=traceparent
        )
        return patiently(self, pending.result, self._timeout)

    def start_lookup(
        self,
        keys: Sequence[bytes],
        *,
        group: int = 0,
        request: int = 0,
        first: int = 0,
        readers: int = 0,
        prefetch: bool = False,
        pin: bool = False,
        traceparent: str = "",
    ) -> PendingLookup:
        """Starts a lookup without waiting for the answer. With ``pin`` no load follows: the lease only keeps the
        hits, in at most half of a root."""
        packed = self._packed(keys)
        pending = PendingLookup(self, first)
        self._stream.start(
            pending._call,
            traceparent=traceparent,
            lookup=pb.Lookup(
                request=request, group=group, keys=packed, first=first, readers=readers, prefetch=prefetch, pin=pin
            ),
        )
        return pending

    def _packed(self, keys: Sequence[bytes]) -> bytes:
        n = self._namespace.key_bytes
        if [*map(len, keys)].count(n) != len(keys):  # half the time of a generator, which counts with thousands of keys
            raise ValueError(f"keys have {n} bytes each")
        return b"".join(keys)

    def leased(self, lease: int) -> Lookup:
        """Returns a lease of another session of the engine, for loads under it by this session."""
        return Lookup(self, 0, pb.LookupReply(lease=lease))

    def share_semaphores(self, arena: Arena, offset: int, count: int) -> ArenaSemaphores:
        """Shares 64-bit semaphores in an arena for the timelines of jobs. It can be called once in a session."""
        self._ask(semaphores=pb.Semaphores(memfd=self._send(arena.fd), offset=offset, count=count))
        return ArenaSemaphores(arena, offset, count)

    def share_semaphores_ipc(self, handle: bytes, offset: int, count: int) -> None:
        """Shares semaphores in memory of the session's GPU (:class:`kvhost.cuda.DeviceSemaphores`)."""
        self._ask(semaphores=pb.Semaphores(cuda_ipc=handle, offset=offset, count=count))

    def share_withdrawals(self) -> bool:
        """Shares a word by which stores that start from now on can be withdrawn. It can be called once in a session.
        Returns False if the host is too old for it."""
        word = Withdrawals()
        try:
            self._ask(withdrawals=pb.Withdrawals(memfd=self._send(word.arena.fd)))
        except BaseException as e:
            word.close()
            if isinstance(e, HostError) and e.code == Code.INVALID and e.field == "body":
                return False
            raise
        self._withdrawals = word
        return True

    def store(
        self,
        chunks: Sequence[StoreChunk],
        *,
        group: int = 0,
        request: int = 0,
        timeline: Timeline | None = None,
        traceparent: str = "",
    ) -> StoreJob:
        """Begins to store chunks, and returns the job. The blocks must not change until the job has read them."""
        job = StoreJob(self, timeline)
        job.id = self._stream.start(
            job._call,
            traceparent=traceparent,
            store=pb.Store(
                request=request,
                group=group,
                timeline=timeline.message() if timeline else None,
                chunks=[pb.StoreChunk(key=c.key, parent=c.parent or b"", depth=c.depth, blocks=c.blocks) for c in chunks],
            ),
        )
        return job

    def load(
        self,
        lookup: Lookup,
        chunks: Sequence[LoadChunk],
        *,
        on_layer: Callable[[int, list[int]], None] | None = None,
        timeline: Timeline | None = None,
        traceparent: str = "",
    ) -> LoadJob:
        """Begins to fill blocks from leased chunks, and uses up the lease.

        With ``on_layer`` the load is layer-wise: the first layer of all chunks is read before the second of any, as the
        group's planes name them. ``on_layer(layer, failed)`` is called for each layer, in order, when
        its pages hold their bytes in every chunk that is not in ``failed`` (indices into ``chunks``). It runs on the
        receiving thread: it must be quick and must not call the session. A load with a ``timeline`` of several layers is
        layer-wise without ``on_layer``: then the semaphores alone say which layers have landed, and the host sends no
        message."""
        job = LoadJob(self, on_layer, timeline)
        job.id = self._stream.start(
            job._call,
            traceparent=traceparent,
            load=pb.Load(
                lease=lookup.lease,
                layers=on_layer is not None or (timeline is not None and timeline.layers > 0),
                silent=on_layer is None,
                timeline=timeline.message() if timeline else None,
                chunks=[pb.LoadChunk(index=c.index, blocks=c.blocks) for c in chunks],
            ),
        )
        return job

    def discard(self, keys: Sequence[bytes], *, group: int = 0, traceparent: str = "") -> list[DiscardResult]:
        """Removes chunks, with the pieces of every rank. Chunks in use and chunks of another tenant stay."""
        reply = self._ask(traceparent=traceparent, discard=pb.Discard(group=group, keys=self._packed(keys)))
        return [DiscardResult(r) for r in reply.discard.results]

    def end_request(self, request: int, hints: Hints | None = None, *, wait: bool = True) -> None:
        """Ends a request and releases its leases. ``hints`` are for policies. Without ``wait`` it has no effect after
        the session's end."""
        h = hints or Hints()
        self._tell(
            wait,
            end_request=pb.EndRequest(
                request=request, reason="END_REASON_" + h.reason.name, tokens_in=h.tokens_in, tokens_out=h.tokens_out,
                priority=h.priority, return_after=Duration(seconds=int(h.return_seconds), nanos=int(h.return_seconds % 1 * 1e9)),
            ),
        )

    def await_copies(self, jobs: Sequence[StoreJob | LoadJob] = ()) -> None:
        """Waits until no copy of the jobs, or of all jobs sent so far, can touch their blocks any more."""
        self._ask(await_copies=pb.AwaitCopies(jobs=[j.id for j in jobs]))

    def events(self, after: Position | None = None, *, all_namespaces: bool = False) -> EventStream:
        """Streams stored and removed chunks of the session's namespace or of all namespaces. It resumes after a
        position if the host still has the events after it; otherwise it starts with a snapshot."""
        digest, key_bytes = (b"", 32) if all_namespaces else (self.namespace_digest, self._namespace.key_bytes)
        return self._stream.events(digest, key_bytes, after)

    def ping(self) -> None:
        """Waits for the host's answer, by which it has handled all earlier messages."""
        self._ask(ping=pb.Ping())

    def start_ping(self) -> threading.Event:
        """Sends a ping without waiting. The event is set when the answer has come or the session has ended."""
        answered = threading.Event()

        def call(_: Any) -> bool:
            answered.set()
            return True

        self._stream.start(call, ping=pb.Ping())
        return answered

    def status(self) -> pb.StatusResponse:
        """Returns the host's status."""
        return self._stream.status(self._timeout)

    def end(self) -> None:
        """Asks the host to end the session, without waiting. ``ended`` is set when it has ended."""
        self._stream.end()

    def close(self, wait: float | None = 5.0) -> None:
        """Ends the session: the host cancels its jobs and unmaps its memory. If the host does not end it within
        ``wait`` seconds, the stream is broken, and a hanging host may still touch the memory when it goes on. In
        a forked child it does nothing: the session belongs to the parent, and goes on."""
        if self._withdrawals is not None and self._stream.origin.here:
            self._withdrawals.close()  # the host publishes no pages that it reads afterwards
        self._stream.close(wait)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
