"""The worker's half: it stores and loads what the scheduler's half orders, and reports what became of it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvhost.errors import Code, KvhostError
from kvhost.session import NOT_WANTED, LoadChunk, LoadJob, Result, Session, StoreChunk, StoreJob
from kvhost.vllm.link import Link
from kvhost.vllm.orders import ChunkOrder, LoadOrder, StepOrders, StoreOrder, WorkerReport
from kvhost.vllm.settings import Settings

log = logging.getLogger("vllm.kvhost")

#: Failures that say nothing about the stored bytes: another request may be promised the same key.
_NOT_THE_BYTES = {Code.LEASE_OVER, Code.CANCELLED, Code.CLOSING, Code.UNKNOWN, Code.BUSY, Code.LIMIT, Code.INVALID}


@dataclass
class _Store:
    """A store order from the step that computed its blocks until every chunk has its result."""

    order: StoreOrder
    ready: Callable[[], None]  # returns when the step's writes are done
    blocks: set[int]
    dropped: bool = False
    started: bool = False
    jobs: list[tuple[StoreJob, list[bytes]]] = field(default_factory=list)
    reported: bool = False

    @property
    def read(self) -> bool:
        return self.dropped or (self.started and all(j.was_read for j, _ in self.jobs))

    @property
    def over(self) -> bool:
        return self.dropped or (self.started and all(j.over for j, _ in self.jobs))


@dataclass
class _Load:
    order: LoadOrder
    began: float
    jobs: list[tuple[int, LoadJob]] = field(default_factory=list)  # (position in the order's groups, job)
    cause: str = ""  # why it was not begun
    cancelling: bool = False

    @property
    def over(self) -> bool:
        return all(j.over for _, j in self.jobs)


@dataclass
class Finished:
    sent: set[str]
    received: set[str]
    failed: set[str]


class Worker:
    """The jobs of one rank.

    Sending a store waits for the GPU, and cancelling a job waits for the host, so a sending thread does both.
    Everything else runs on the engine's thread. ``_lock`` guards the start of a store against its being dropped."""

    def __init__(self, settings: Settings, link: Link, rank: tuple[int, int], blocks: int, stores: bool) -> None:
        """``rank`` is (pipeline stage, rank in the stage); ``stores`` is false when another rank has the same bytes."""
        self._settings, self._link, self._rank = settings, link, rank
        self._unread_limit = int(settings.unread_blocks * blocks)
        self._stores_here = stores
        self._lock = threading.Lock()
        self._stores: dict[int, _Store] = {}
        self._unread: Counter[int] = Counter()  # blocks of stores that are not read yet
        self._loads: dict[str, _Load] = {}
        self._held: dict[str, None] = {}
        self._shed: set[str] = set()  # requests that lost a chunk: what follows has no parent
        self._bad_blocks: set[int] = set()
        self._report = WorkerReport()
        self._said_epoch = -2
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvhost-send", daemon=True)
        self._thread.start()

    # ---- a step, in the order of the engine's calls ------------------------------------------------------------------

    def before_step(self, orders: StepOrders) -> None:
        """Returns when no store reads a block that this step may overwrite."""
        self._link.follow(orders.epoch)
        self._settle_stores()
        if not self._unread:
            return
        reused = self._unread.keys() & set(orders.reused)
        if reused:
            self._fence(reused)

    def begin_loads(self, orders: StepOrders) -> None:
        for request in orders.cancels:
            if (load := self._loads.get(request)) is not None:
                self._cancel(load)
        for order in orders.loads:
            self._loads[order.request_id] = self._begin(order)

    def store(self, orders: StepOrders, ready: Callable[[], None]) -> None:
        """Begins the step's stores; ``ready`` returns when the step's writes to the cache are done."""
        for order in orders.stores:
            self._accept(order, ready)

    def finished(self, orders: StepOrders) -> Finished:
        self._settle_stores()
        if not orders.forward and self._loads and not any(load.over for load in self._loads.values()):
            self._wait_for_a_load(0.001)  # an idle engine polls: leave the interpreter to the receiving thread
        for request, number in orders.ended:
            self._shed.discard(request)
            self._work.put(lambda number=number: self._end_request(number))  # type: ignore[misc]
        received, failed = self._settle_loads()
        self._held |= dict.fromkeys(orders.held)
        busy = {s.order.request_id for s in self._stores.values() if not s.read}
        sent = {r for r in self._held if r not in busy}
        for r in sent:
            del self._held[r]
        return Finished(sent, received, failed)

    def bad_blocks(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def report(self) -> WorkerReport | None:
        epoch = self._link.epoch
        if epoch != self._said_epoch:
            self._said_epoch = epoch
            self._report.epochs[self._rank] = epoch
        if not self._report:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    # ---- stores ------------------------------------------------------------------------------------------------------

    def _accept(self, order: StoreOrder, ready: Callable[[], None]) -> None:
        blocks = {b for _, chunks in order.chunks for c in chunks for b in c.blocks}
        full = len(self._unread) + len(blocks) > self._unread_limit
        if full:
            self._shed.add(order.request_id)
        if not self._stores_here or order.request_id in self._shed or self._link.epoch < 0:
            self._report.read[order.id] += 1
            return
        store = _Store(order, ready, blocks)
        self._stores[order.id] = store
        self._unread.update(blocks)
        self._work.put(lambda: self._send(store))

    def _send(self, store: _Store) -> None:
        """On the sending thread."""
        try:
            store.ready()
        except Exception:
            store.dropped = True
            raise
        with self._lock:
            if store.dropped:
                return
            sessions = self._link.sessions()
            try:
                if not sessions:
                    store.dropped = True
                    return
                for group, chunks in store.order.chunks:
                    job = sessions[0].store(
                        [StoreChunk(c.key, c.blocks, parent=c.parent, depth=c.index) for c in chunks],
                        group=group, request=store.order.request, traceparent=store.order.traceparent,
                    )
                    store.jobs.append((job, [c.key for c in chunks]))
            except KvhostError:
                pass  # the jobs begun so far end with the session
            store.started = True

    def _settle_stores(self) -> None:
        for id, s in list(self._stores.items()):
            if s.read and not s.reported:
                s.reported = True
                self._unread.subtract(s.blocks)
                for b in s.blocks:
                    if self._unread[b] <= 0:
                        del self._unread[b]
                self._report.read[id] += 1
            if s.over:
                del self._stores[id]
                for job, keys in s.jobs:
                    self._settle_store(job, keys)

    def _settle_store(self, job: StoreJob, keys: list[bytes]) -> None:
        try:
            result = job.published(0)
        except (KvhostError, TimeoutError) as e:
            log.debug("kvhost: store of %d chunks: %s", len(keys), e)
            return
        for key, chunk in zip(keys, result.chunks, strict=True):
            if chunk.result == Result.STORED:
                self._report.stored.append(key)
            elif chunk.result == Result.FAILED:
                log.warning("kvhost: chunk %s was not stored: %s", key.hex()[:16], chunk.error)

    def _fence(self, reused: set[int]) -> None:
        """Returns when no store can read the blocks any more: it was read, dropped before it was sent, or cancelled."""
        due = time.monotonic() + self._settings.fence_timeout
        touched = [s for s in self._stores.values() if not s.read and s.blocks & reused]
        with self._lock:
            for s in touched:
                if not s.started:
                    s.dropped = True
                    self._shed.add(s.order.request_id)
        for s in touched:
            for job, _ in s.jobs:
                try:
                    job.read(max(0.0, due - time.monotonic()))
                except TimeoutError:
                    self._shed.add(s.order.request_id)
                    self._cancel_now(job)
                except KvhostError:
                    pass  # it ended, and reads nothing
        self._settle_stores()

    def _cancel_now(self, job: StoreJob | LoadJob) -> None:
        try:
            job.cancel()
        except TimeoutError:
            log.error("kvhost: the host did not acknowledge a cancelled job; ending the session")
            for s in self._link.sessions():
                s.close()
        except KvhostError:
            pass  # the session is over, and with it the job

    def _end_request(self, number: int) -> None:
        for s in self._link.sessions():
            try:
                s.end_request(number, wait=False)
            except KvhostError:
                pass

    # ---- loads -------------------------------------------------------------------------------------------------------

    def _begin(self, order: LoadOrder) -> _Load:
        load = _Load(order, time.monotonic())
        sessions = self._link.sessions(order.epoch)
        if not sessions:
            load.cause = "no session with the host"
            return load
        try:
            for at, g in enumerate(order.groups):
                leased = sessions[0].leased(g.leases[self._rank[0]])
                job = sessions[0].load(leased, [LoadChunk(c.index, c.blocks) for c in g.chunks])
                load.jobs.append((at, job))
        except KvhostError as e:
            load.cause = str(e)
        return load

    def _cancel(self, load: _Load) -> None:
        if load.cancelling:
            return
        load.cancelling = True
        for _, job in load.jobs:
            if not job.over:
                self._work.put(lambda job=job: self._cancel_now(job))  # type: ignore[misc]

    def _wait_for_a_load(self, seconds: float) -> None:
        load = next(iter(self._loads.values()))
        for _, job in load.jobs:
            if not job.over:
                try:
                    job.wait(seconds)
                except (KvhostError, TimeoutError):
                    pass
                return

    def _settle_loads(self) -> tuple[set[str], set[str]]:
        received, failed = set(), set()
        now = time.monotonic()
        for request, load in list(self._loads.items()):
            if not load.over:
                if now - load.began > self._settings.load_timeout and not load.cancelling:
                    log.error("kvhost: load of request %s cancelled after %.0f s", request, now - load.began)
                    self._cancel(load)
                continue
            del self._loads[request]
            received.add(request)
            self._report.loaded[request] += 1
            if self._settle_load(request, load):
                self._report.loads.append((load.order.tokens, now - load.began))
            else:
                failed.add(request)
        return received, failed

    def _settle_load(self, request: str, load: _Load) -> bool:
        """Notes which blocks and chunks failed; whether none did."""
        failed: dict[int, bool] = {}
        begun = {at for at, _ in load.jobs}
        for at, g in enumerate(load.order.groups):
            if at not in begun:
                failed |= self._fail_group(g.chunks)
        for at, job in load.jobs:
            chunks = load.order.groups[at].chunks
            try:
                result = job.wait(0)
            except (KvhostError, TimeoutError) as e:
                load.cause = str(e)
                failed |= self._fail_group(chunks)
                continue
            for f in result.failed:
                self._bad_blocks.add(f.block)
                bad = f.error.code not in _NOT_THE_BYTES
                index = chunks[f.chunk].index
                failed[index] = failed.get(index, False) or bad
                load.cause = str(f.error)
        if failed:
            self._report.failed[request] = failed
            if not load.cancelling:
                log.warning("kvhost: %d chunks of request %s were not loaded (%s); computing them",
                            len(failed), request, load.cause)
        return not failed

    def _fail_group(self, chunks: Sequence[ChunkOrder]) -> dict[int, bool]:
        for c in chunks:
            self._bad_blocks.update(b for b in c.blocks if b != NOT_WANTED)
        return {c.index: False for c in chunks}

    # ---- the end -----------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Returns when no job touches the cache any more."""
        for s in self._stores.values():
            for job, _ in s.jobs:
                if not job.was_read:
                    self._cancel_now(job)
        for load in self._loads.values():
            for _, loading in load.jobs:
                if not loading.over:
                    self._cancel_now(loading)
        self._settle_stores()

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(5)
        self._link.close()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:
                log.exception("kvhost: the sending thread's work failed")


def open_session(open: Callable[[], Session], register: Callable[[Session], None]) -> list[Session]:
    """A session with its groups registered, or an exception and no session."""
    session = open()
    try:
        register(session)
    except BaseException:
        session.close()
        raise
    return [session]
