"""The worker's half: it carries out the stores and loads of the scheduler's half, and reports their results."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from kvhost.background import Background
from kvhost.errors import Code, KvhostError
from kvhost.link import Link
from kvhost.session import NOT_WANTED, LoadChunk, LoadJob, Lookup, Result, Session, StoreChunk, StoreJob
from kvhost.vllm.adapters import LoadedAdapters
from kvhost.vllm.layers import Gate, StepLayers
from kvhost.vllm.orders import ChunkOrder, LoadOrder, LoadTime, StepOrders, StoreOrder, WorkerReport
from kvhost.pulse import PAUSE, Pulse
from kvhost.vllm.settings import Settings

log = logging.getLogger("vllm.kvhost")

#: Failures that say nothing about the stored bytes: another request may be promised the same key.
_NOT_THE_BYTES = {Code.LEASE_OVER, Code.CANCELLED, Code.CLOSING, Code.UNKNOWN, Code.BUSY, Code.LIMIT, Code.INVALID}

_NO_SESSION = "no session with the host"
_NO_ANSWER = "the host does not answer"
_OTHER_ADAPTER = "the engine has loaded other files of the LoRA adapter"

#: Seconds from the cancellation of a load until its request restarts without it.
_CANCEL_SECONDS = 5.0
_CANCEL_SECONDS_IN_STEP = 1.0  # the same for a load inside a step, which all requests of the step wait for
_LOOK_SECONDS = 0.02  # seconds between two checks that a host still answers while a step waits for it


@dataclass
class _Store:
    """A store order from the step that computed its blocks until every chunk has its result."""

    order: StoreOrder
    ready: Callable[[], None]  # waits for the step's writes
    began: float
    dropped: bool = False
    cause: str = ""  # the reason for which it was dropped; "" if it was not, or another rank stores the same bytes
    late: bool = False  # the host was asked to cancel it
    started: bool = False
    jobs: list[tuple[StoreJob, list[bytes]]] = field(default_factory=list)
    reported: bool = False

    def drop(self, cause: str) -> None:
        self.dropped, self.cause = True, cause

    @property
    def read(self) -> bool:
        return self.dropped or (self.started and all(j.was_read for j, _ in self.jobs))

    @property
    def over(self) -> bool:
        return self.dropped or (self.started and all(j.over for j, _ in self.jobs))

    @property
    def chunks(self) -> int:
        return max(len(chunks) for _, chunks in self.order.chunks)


@dataclass
class _Load:
    order: LoadOrder
    began: float
    jobs: list[tuple[int, LoadJob]] = field(default_factory=list)  # (position in the order's groups, job)
    cause: str = ""  # the reason for which it was not begun; "" if it was
    cancelled: float | None = None  # time of the cancellation; None: not cancelled
    abandoned: bool = False  # the request goes on without the load, and the host keeps its blocks
    gates: list[tuple[Gate, LoadJob]] = field(default_factory=list)  # gates of a load inside a step

    @property
    def over(self) -> bool:
        return all(j.over for _, j in self.jobs)

    def time(self, now: float) -> LoadTime:
        over = max((j.over_at for _, j in self.jobs), default=self.began)
        return LoadTime(self.order.id, self.order.tokens, now - self.began, over)

    def close(self) -> None:
        for gate, job in self.gates:
            gate.close(job)


@dataclass
class Finished:
    received: set[str]  # requests with a finished or abandoned load
    failed: set[str]  # requests among them that lack a block
    abandoned: set[str]  # requests among them with a load that may still write its blocks


class Worker:
    """The jobs of one rank.

    Sending a store waits for the GPU, so it has a thread of its own. Everything else runs on the engine's thread.
    ``_lock`` guards a store that starts while it is dropped."""

    def __init__(
        self, settings: Settings, link: Link, rank: tuple[int, int], stores: bool, adapters: LoadedAdapters | None = None,
        layers: StepLayers | None = None,
    ) -> None:
        """``rank`` is (pipeline stage, rank in the stage). ``stores`` is false if another rank has the same bytes.
        ``layers`` are the layers that a step can wait for; None if no load runs inside a step."""
        self._settings, self._link, self._rank = settings, link, rank
        self._pulse = Pulse(settings.lookup_timeout, lambda: time.monotonic())
        self._stores_here = stores
        self._adapters = adapters  # None: no request with a LoRA adapter is stored or loaded
        self._lock = threading.Lock()
        self._stores: dict[int, _Store] = {}
        self._loads: dict[int, _Load] = {}
        self._layers = layers
        self._in_step: list[_Load] = []  # loads that the running step waits for
        self._shed: set[str] = set()  # requests that lost a chunk, so that later chunks have no parent
        self._bad_blocks: set[int] = set()
        self._report = WorkerReport()
        self._said_epoch = -2
        self._work = Background("kvhost-send", log)

    # ---- a step, in the order of the engine's calls ------------------------------------------------------------------

    def begin(self, orders: StepOrders, layered: bool = False) -> None:
        """Begins the step's loads, and cancels loads that are not wanted any more. ``layered``: the model calls
        :meth:`wait_for_layer` before each layer's attention."""
        self._link.follow(orders.epoch)
        for id in orders.cancels:
            if (load := self._loads.get(id)) is not None:
                self._cancel(load)
        for order in orders.loads:
            load = self._begin(order)
            if order.in_step:
                self._in_step.append(load)
            else:
                self._loads[order.id] = load
        if self._layers is not None and not layered:
            self._layers.wait_for_all(self._stopped)

    def wait_for_layer(self, name: str) -> None:
        if self._layers is not None:
            self._layers.wait(name, self._stopped)

    def _stopped(self) -> bool:
        return self._pulse.stopped(next(iter(self._link.sessions()), None))

    def store(self, orders: StepOrders, ready: Callable[[], None]) -> None:
        """Begins the step's stores, once; ``ready`` returns when the step's writes to the cache are done."""
        stores, orders.stores = orders.stores, []
        for order in stores:
            self._accept(order, ready)

    def finished(self, orders: StepOrders, written: Callable[[], Callable[[], None]]) -> Finished:
        """Returns the report since the last step. ``written`` makes the ``ready`` argument of :meth:`store`."""
        if not orders.forward:
            if orders.stores:  # stores of requests that have ended: vLLM 0.26 saves only in steps that compute
                self.store(orders, written())
            self._wait_for_a_job(0.001)  # an idle engine polls: let the receiving thread run
        self._settle_stores()
        for request, number in orders.ended:
            self._shed.discard(request)
            self._work.put(partial(self._end_request, number))
        return self._settle_loads()

    def bad_blocks(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def report(self) -> WorkerReport | None:
        epoch = self._link.epoch
        if epoch != self._said_epoch:
            self._said_epoch = epoch
            self._report.epochs[self._rank] = epoch
        if self._adapters is not None and (loaded := self._adapters.changed()) is not None:
            self._report.adapters[self._rank] = loaded
        if not self._report:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    # ---- stores ------------------------------------------------------------------------------------------------------

    def _accept(self, order: StoreOrder, ready: Callable[[], None]) -> None:
        store = _Store(order, ready, time.monotonic())
        self._stores[order.id] = store
        if not self._stores_here:
            store.dropped = True
        elif order.adapter is not None and (self._adapters is None or not self._adapters.may_store(order.adapter)):
            store.drop(_OTHER_ADAPTER)
        elif order.request_id in self._shed or self._link.epoch < 0:
            store.drop(_NO_SESSION)
        elif self._stopped():
            store.drop(_NO_ANSWER)
        else:
            self._work.put(partial(self._send, store))

    def _send(self, store: _Store) -> None:
        """Sends a store once its pages are written. Runs on the sending thread."""
        try:
            store.ready()
        except Exception as e:
            store.drop(f"the step that computed them failed: {e}")
            raise
        with self._lock:
            if store.dropped:
                return
            sessions = self._link.sessions()
            try:
                if not sessions:
                    store.drop(_NO_SESSION)
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

    @staticmethod
    def _cancel_store(store: _Store) -> None:
        """Withdraws a store that the host has not read. An older host uses the blocks until it has cancelled the
        store."""
        for job, _ in store.jobs:
            if not job.was_read:
                if not job.over:
                    job.cancel(wait=False)
                job.withdraw()

    def _settle_stores(self) -> None:
        now = time.monotonic()
        unread = [s for s in list(self._stores.values()) if s.started and not s.read]
        if unread and now - min(s.began for s in unread) > PAUSE and self._stopped():
            self._take_back(unread, _NO_ANSWER)
        why = f"the host had not read them within {self._settings.read_timeout} s"
        self._take_back([s for s in unread if now - s.began > self._settings.read_timeout], why)
        for id, s in list(self._stores.items()):
            if s.read and not s.reported:
                s.reported = True
                self._report.free[id] += 1
                if s.cause:
                    self._shed.add(s.order.request_id)
                    self._report.dropped[s.cause] += s.chunks
            if s.over:
                del self._stores[id]
                for job, keys in s.jobs:
                    self._settle_store(job, keys)

    def _take_back(self, stores: Sequence[_Store], why: str) -> None:
        for s in stores:
            if not s.late:
                s.late = True
                self._report.dropped[why] += s.chunks
                self._cancel_store(s)

    def _settle_store(self, job: StoreJob, keys: list[bytes]) -> None:
        try:
            result = job.published(0)
        except (KvhostError, TimeoutError) as e:
            log.debug("kvhost: store of %d chunks: %s", len(keys), e)
            return
        for key, chunk in zip(keys, result.chunks, strict=True):
            if chunk.result == Result.STORED:
                self._report.stored.append(key)
            elif chunk.result == Result.FAILED and not job.withdrawn:
                log.warning("kvhost: chunk %s was not stored: %s", key.hex()[:16], chunk.error)

    def _end_request(self, number: int) -> None:
        for s in self._link.sessions():
            s.end_request(number, wait=False)

    # ---- loads -------------------------------------------------------------------------------------------------------

    def _begin(self, order: LoadOrder) -> _Load:
        load = _Load(order, time.monotonic())
        if self._outdated(order):
            load.cause = _OTHER_ADAPTER
            return load
        if any(x.abandoned for x in self._loads.values()) or self._stopped():
            load.cause = _NO_ANSWER  # a new load would also hold its blocks until the host answers
            return load
        sessions = self._link.sessions(order.epoch)
        if not sessions:
            load.cause = "no session with the host"
            return load
        try:
            for at, g in enumerate(order.groups):
                leased = sessions[0].leased(g.leases[self._rank[0]])
                chunks = [LoadChunk(c.index, c.blocks) for c in g.chunks]
                job = self._load_layers(sessions[0], leased, chunks, load) if order.in_step else sessions[0].load(leased, chunks)
                load.jobs.append((at, job))
        except KvhostError as e:
            load.cause = str(e)
        return load

    def _load_layers(self, session: Session, leased: Lookup, chunks: Sequence[LoadChunk], load: _Load) -> LoadJob:
        assert self._layers is not None
        gate = self._layers.gate()
        if gate is None:
            raise KvhostError("too many loads inside steps have not been answered")
        job = session.load(leased, chunks, on_layer=gate.on_layer, timeline=gate.timeline)
        job.when_over(gate.over)
        load.gates.append((gate, job))
        self._layers.add(gate)
        return job

    def _settle_step(self) -> None:
        """Waits for the loads of a queued or finished step, so that the step's output can say which of their blocks
        are bad."""
        loads, self._in_step = self._in_step, []
        if not loads or self._layers is None:
            return
        waited = self._layers.end()
        self._await_in_step(loads)
        for load in loads:
            if not waited:
                load.cause = "the model did not wait for its layers"
            if not load.over:
                log.error("kvhost: the host did not end the load of request %s inside a step within %.1f s; its blocks stay "
                          "unused until it does or ends", load.order.request_id, time.monotonic() - load.began)
                load.abandoned, load.cause = True, "the host hangs"
                self._report.abandoned[load.order.id] = load.order.request_id
                self._loads[load.order.id] = load
                for gate, _ in load.gates:
                    gate.give_up()
            else:
                self._report.free[load.order.id] += 1
                load.close()
            before, self._bad_blocks = self._bad_blocks, set()
            waited_for_it = waited and not any(gate.missed for gate, _ in load.gates)
            if not (waited_for_it or load.cause):
                load.cause = f"its layers had not come within {self._settings.step_timeout} s"
            if self._settle_load(load.order.request_id, load, waited_for_it):
                self._report.loads.append(load.time(time.monotonic()))
            self._report.broken |= self._bad_blocks
            self._bad_blocks |= before

    def _await_in_step(self, loads: Sequence[_Load]) -> None:
        """Waits for the loads inside a step until they are over or the time is up, since all requests of the step
        wait."""
        waited, most = time.monotonic() - min(load.began for load in loads), self._settings.step_timeout
        cancelled = False
        while running := [load for load in loads if not load.over]:
            stopped = waited > PAUSE and self._stopped()
            if stopped or waited >= most:
                for load in running:
                    self._cancel(load)
                if stopped or cancelled:
                    return
                cancelled, most = True, waited + _CANCEL_SECONDS_IN_STEP
            seconds = min(_LOOK_SECONDS, most - waited)
            for _, job in running[0].jobs:
                if not job.over:
                    _wait(job, seconds)
                    waited += seconds
                    break

    def _outdated(self, order: LoadOrder) -> bool:
        """Whether the engine computes with another version of the request's LoRA adapter."""
        return order.adapter is not None and (self._adapters is None or not self._adapters.may_load(order.adapter))

    def _cancel(self, load: _Load) -> None:
        """Asks the host to cancel a load. The host has the blocks until it has ended the load."""
        if load.cancelled is not None:
            return
        load.cancelled = time.monotonic()
        for _, job in load.jobs:
            if not job.over:
                job.cancel(wait=False)

    def _wait_for_a_job(self, seconds: float) -> None:
        """Waits for the oldest load or unread store. It does not wait if one of them is over."""
        loads = [job for load in self._loads.values() for _, job in load.jobs]
        if any(job.over for job in loads):
            return
        reads = (job for s in list(self._stores.values()) if s.started and not s.read for job, _ in s.jobs)
        for job in (*loads[:1], *islice(reads, 1)):
            _wait(job, seconds)
            return

    def _settle_loads(self) -> Finished:
        self._settle_step()
        done = Finished(set(), set(), set())
        now = time.monotonic()
        for id, load in list(self._loads.items()):
            if load.over:
                del self._loads[id]
                self._report.free[id] += 1
                load.close()
                if load.abandoned:
                    continue
            elif not self._gives_up(load, now):
                continue
            request = load.order.request_id
            done.received.add(request)
            self._report.loaded[request] += 1
            if self._settle_load(request, load):
                self._report.loads.append(load.time(now))
            else:
                done.failed.add(request)
            if load.abandoned:
                done.abandoned.add(request)
        return done

    def _gives_up(self, load: _Load, now: float) -> bool:
        """Whether the request must go on without a load that is not over."""
        if load.abandoned:
            return False
        if now - load.began > PAUSE and self._stopped():
            self._cancel(load)  # takes effect when the host goes on
        elif load.cancelled is None:
            if now - load.began > self._settings.load_timeout:
                log.error("kvhost: load of request %s cancelled after %.0f s", load.order.request_id, now - load.began)
                self._cancel(load)
            return False
        elif now - load.cancelled <= _CANCEL_SECONDS:
            return False
        log.error("kvhost: the host does not answer, or has not ended the load of request %s within %.0f s of being asked to; its "
                  "blocks stay unused until it does or ends", load.order.request_id, _CANCEL_SECONDS)
        load.abandoned = True
        load.cause = "the host hangs"
        self._report.abandoned[load.order.id] = load.order.request_id
        return True

    def _settle_load(self, request: str, load: _Load, waited: bool = True) -> bool:
        """Records the failed blocks and chunks, and returns whether there are none. Without ``waited`` all have
        failed, since the model computed before they arrived."""
        failed: dict[int, bytes] = {}
        if load.abandoned:
            self._report.failed[request] = {c.index: b"" for g in load.order.groups for c in g.chunks}
            if load.order.in_step:
                for g in load.order.groups:
                    self._fail_group(g.chunks)
            return False
        begun = {at for at, _ in load.jobs}
        outdated = self._outdated(load.order)
        if outdated:
            load.cause = _OTHER_ADAPTER
        for at, g in enumerate(load.order.groups):
            if at not in begun or outdated or not waited:
                failed = self._fail_group(g.chunks) | failed
        for at, job in load.jobs:
            chunks = load.order.groups[at].chunks
            try:
                result = job.wait(0)
            except (KvhostError, TimeoutError) as e:
                load.cause = str(e)
                failed = self._fail_group(chunks) | failed
                continue
            for f in result.failed:
                self._bad_blocks.add(f.block)
                chunk = chunks[f.chunk]
                failed[chunk.index] = failed.get(chunk.index) or (b"" if f.error.code in _NOT_THE_BYTES else chunk.key)
                load.cause = str(f.error)
        if failed:
            self._report.failed[request] = failed
            if load.cancelled is None:
                log.warning("kvhost: %d chunks of request %s were not loaded: %s", len(failed), request, load.cause)
        return not failed

    def _fail_group(self, chunks: Sequence[ChunkOrder]) -> dict[int, bytes]:
        for c in chunks:
            self._bad_blocks.update(b for b in c.blocks if b != NOT_WANTED)
        return {c.index: b"" for c in chunks}

    # ---- the end -----------------------------------------------------------------------------------------------------

    def drain(self) -> bool:
        """Drops and cancels all jobs before the memory is unregistered, which waits for them. Returns whether the
        host answers."""
        with self._lock:
            for s in self._stores.values():
                if not (s.started or s.dropped):
                    s.drop("the engine went to sleep")
        for s in self._stores.values():
            self._cancel_store(s)
        for load in self._loads.values():
            self._cancel(load)
        try:
            return all(s.start_ping().wait(self._settings.lookup_timeout) for s in self._link.sessions())
        except KvhostError:
            return False

    def close(self) -> None:
        """Waits a limited time for the host to write all stores."""
        due = time.monotonic() + self._settings.shutdown_wait
        self._work.close(self._settings.shutdown_wait)
        late = sum(
            s.chunks for s in list(self._stores.values())
            if not (all(_ends_by(due, job.published) for job, _ in s.jobs) and s.over)
        )
        if late:
            log.warning("kvhost: %d chunks may not be stored: the engine ended, and the host had not written them within "
                        "%.1f s (shutdown_wait)", late, self._settings.shutdown_wait)
        self._link.close()


def _wait(job: StoreJob | LoadJob, seconds: float) -> None:
    """Waits for the end of a load, or until a store's blocks are read."""
    try:
        job.read(seconds) if isinstance(job, StoreJob) else job.wait(seconds)
    except (KvhostError, TimeoutError):
        pass


def _ends_by(due: float, wait: Callable[[float], object]) -> bool:
    """Returns whether a job ends in time. ``wait`` waits for it for a number of seconds."""
    try:
        wait(max(0.0, due - time.monotonic()))
    except TimeoutError:
        return False
    except KvhostError:
        pass  # it ended
    return True


def open_session(open: Callable[[], Session], register: Callable[[Session], None]) -> list[Session]:
    """Opens a session and registers its groups. After an exception no session is left."""
    session = open()
    try:
        register(session)
    except BaseException:
        session.close()
        raise
    return [session]
