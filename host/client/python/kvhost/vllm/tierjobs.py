"""The session of the tier in vLLM's offloading: lookups, loads and stores that never wait.

Everything runs on the scheduler's thread, at least once a step. A call sends messages and processes received answers;
the session's own threads do the rest."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from kvhost.errors import KvhostError
from kvhost.session import Hints, LoadChunk, LoadJob, Lookup, PendingLookup, Result, Session, StoreChunk, StoreJob
from kvhost.pulse import Pulse

log = logging.getLogger("vllm.kvhost")

_T = TypeVar("_T")

_MOST_NUMBERS = (1 << 32) - 1
_DRAIN_SECONDS = 5.0  # seconds after which the remaining jobs are cancelled
_DRAIN_PAUSE = 0.01  # seconds between two checks for answers
_CANCEL_AGAIN = 5.0


class Sessions(Protocol):
    """The source of the session (see link.py)."""

    def sessions(self) -> list[Session]: ...


@dataclass(frozen=True)
class Times:
    """Seconds after which the tier goes on without an answer."""

    lookup: float = 1.0
    load: float = 60.0
    store: float = 10.0  # for the host to read the slots


@dataclass(frozen=True)
class Slot:
    """A chunk and its row of the CPU tier. A store reads the row; a load writes it."""

    key: bytes  # vLLM's: block hash and group
    row: int  # -1: unknown
    depth: int = -1  # chunks of its group before it in the prompt; -1: one more than the last stored chunk has
    parent: bytes = b""  # the key of the chunk before it; empty: the last stored chunk


@dataclass(frozen=True)
class Done:
    """The only answer to a job."""

    id: int
    good: list[bytes]  # keys that were loaded, or are resident now
    bad: list[bytes]  # failed keys, without those that a policy refused to store
    seconds: float
    bytes: int


class _Batch:
    """Keys of one request and one group that were looked up together."""

    def __init__(self, session: Session, keys: Sequence[bytes], pending: PendingLookup) -> None:
        self.session, self.pending = session, pending
        self.at = {key: i for i, key in enumerate(keys)}
        self.began = time.monotonic()
        self._answered = 0.0
        self._found: Lookup | None = None
        self._over = False
        self._used = False

    def over(self, seconds: float) -> bool:
        """Whether the lookup was answered, or its time is up. The latter counts as a miss of all keys."""
        if self._over:
            return True
        if self.pending.done():
            self._over, self._answered = True, time.monotonic()
            try:
                self._found = self.pending.result(0)
            except KvhostError:
                pass
        elif time.monotonic() - self.began > seconds:
            self._over = True
        return self._over

    def has(self, key: bytes) -> bool:
        return self._found is not None and self._found.has(self.at[key])

    @property
    def timed_out(self) -> bool:
        return self._over and not self._answered

    @property
    def leased(self) -> bool:
        """Whether the lease of the lookup lasts long enough for a load."""
        usable = self._found is not None and self._found.lease and not self._used and not self.session.ended.is_set()
        return bool(usable) and time.monotonic() - self._answered < self.session.lease_seconds / 2

    def load(self, chunks: Sequence[tuple[bytes, int]]) -> LoadJob:
        assert self._found is not None
        self._used = True
        return self.session.load(self._found, [LoadChunk(self.at[key], [row]) for key, row in chunks])

    def release(self) -> None:
        if self._found is not None and not self._used:
            self._used = True
            self._found.release(wait=False)


@dataclass
class _Request:
    number: int
    wanted: dict[bytes, None] = field(default_factory=dict)  # keys asked for since the last flush
    batches: dict[bytes, _Batch] = field(default_factory=dict)
    missing: set[bytes] = field(default_factory=set)
    last: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # by group: depth and key of the last stored chunk
    session: Session | None = None  # the session that knows the request's number
    unsent: int = 0  # number of unsent parts of jobs
    ended: Hints | None = None


class _Part:
    """Some chunks of a job in one message, which is sent at once or after a lookup has found them."""

    def __init__(self, job: _Job, slots: Sequence[Slot]) -> None:
        self.job, self.slots = job, slots
        self.batch: _Batch | None = None  # the lookup of a load; None for a store
        self.asked = False  # the batch was looked up for this part alone
        self.running: LoadJob | StoreJob | None = None
        self.since = time.monotonic()  # time at which it was sent, or began to wait
        self.cancelled = 0.0

    @property
    def keys(self) -> list[bytes]:
        return [s.key for s in self.slots]


@dataclass
class _Job:
    id: int
    request: _Request
    loads: bool
    began: float
    keys: Sequence[bytes]
    left: int = 0  # number of parts that are not over
    given_up: bool = False  # an abandoned load: no request waits for it
    good: list[bytes] = field(default_factory=list)
    bad: list[bytes] = field(default_factory=list)
    bytes: int = 0


class TierJobs:
    """The tier's traffic. Keys are vLLM's: a block hash, and the number of the group in four bytes."""

    def __init__(
        self, link: Sessions, groups: Collection[int], key_bytes: int, times: Times = Times(),
        set_aside: Callable[[int], bool] = lambda job: False, give_back: Callable[[Collection[int]], None] = lambda rows: None,
    ) -> None:
        """``key_bytes`` is the length of the block hashes. ``set_aside`` lets requests go on without a load, and
        keeps the load's slots unused until it is answered; it returns whether that is possible. :meth:`drain` leaves
        rows to the host; ``give_back`` gets those with which the host is done."""
        self._set_aside, self._give_back, self._pulse = set_aside, give_back, Pulse(times.lookup, lambda: time.monotonic())
        self._stopped = False  # the host's process is stopped, and gets no messages
        self._last: PendingLookup | None = None  # the lookup that was sent last
        self._left: list[_Part] = []  # loads that vLLM has an answer for, and the host has not ended
        self._link, self._groups, self._times = link, frozenset(groups), times
        self._length = key_bytes + 4
        self._numbers = itertools.count()
        self._requests: dict[str, _Request] = {}
        self._asking: list[_Request] = []  # requests with keys to look up
        self._waiting: deque[_Part] = deque()  # parts to send, loads first
        self._running: list[_Part] = []
        self._done: list[Done] = []
        self._unanswered = 0  # number of unanswered jobs
        self._generation = b""
        self._woken = threading.Event()
        self.counts: dict[str, int] = {}

    def _count(self, name: str, n: int = 1) -> None:
        if n:
            self.counts[name] = self.counts.get(name, 0) + n

    @property
    def pending(self) -> bool:
        """Whether there are jobs to wait for. Abandoned loads do not count, since they may last as long as the host
        is stopped."""
        return self._unanswered > 0 or bool(self._done)

    @property
    def left(self) -> set[int]:
        """Returns the rows of answered loads that the host may still write to."""
        return {s.row for part in self._left for s in part.slots}

    def _session(self) -> Session | None:
        sessions = self._link.sessions()
        return sessions[0] if sessions else None

    def _request(self, id: str) -> _Request:
        r = self._requests.get(id)
        if r is None:
            r = self._requests[id] = _Request(next(self._numbers) % _MOST_NUMBERS + 1)
        return r

    def _known(self, key: bytes) -> bool:
        return len(key) == self._length and group_of(key) in self._groups

    def _placed(self, slot: Slot) -> bool:
        return slot.row >= 0 and self._known(slot.key)

    def host_key(self, key: bytes) -> bytes:
        """Returns the host's key of a chunk, which includes the number of the group."""
        hash = key[:-4]
        if not self._generation:
            return hash
        return hashlib.blake2b(hash, digest_size=len(hash), key=self._generation).digest()

    # ---- lookups -----------------------------------------------------------------------------------------------------

    def lookup(self, request: str, key: bytes) -> bool | None:
        """Whether the host has a chunk. None: the answer has not come, or :meth:`flush` will ask."""
        r = self._request(request)
        if key in r.missing:
            return False
        batch = r.batches.get(key)
        if batch is None or batch.session.ended.is_set():
            if self._session() is None or not self._known(key) or self._hangs:
                return False
            r.batches.pop(key, None)
            if not r.wanted:
                self._asking.append(r)
            r.wanted[key] = None
            return None
        if not (batch.over(self._times.lookup) or self._hangs):
            return None
        if batch.has(key) and not self._hangs:
            return True
        del r.batches[key]
        r.missing.add(key)
        if batch.timed_out:
            self._count("lookups_timed_out")
        return False

    def flush(self, scheduled: Iterable[str] = ()) -> None:
        """Sends the step's lookups, a message for each request and group. Call it at the end of a step. Requests
        that were ``scheduled`` look up no more keys."""
        for id in scheduled:
            if (r := self._requests.get(id)) is not None:
                self._release(r)
        asking, self._asking = self._asking, []
        for r in asking:
            wanted, r.wanted = list(r.wanted), {}
            if r.ended is None:
                r.batches |= {key: batch for batch in self._ask(r, wanted) for key in batch.at}
        self._advance()

    def _ask(self, r: _Request, keys: Sequence[bytes]) -> list[_Batch]:
        batches: list[_Batch] = []
        session = self._session()
        if session is None:
            return batches
        for group, found in _by_group(keys, group_of).items():
            for some in _pieces(found, session.limits.keys_per_lookup):
                try:
                    pending = session.start_lookup([self.host_key(k) for k in some], group=group, request=r.number)
                except KvhostError:
                    return batches
                r.session, self._last = session, pending
                batches.append(_Batch(session, some, pending))
                self._count("lookups", len(some))
        return batches

    def _release(self, r: _Request) -> None:
        """Gives leases back that no load has used."""
        for batch in set(r.batches.values()):
            if batch.over(self._times.lookup):
                batch.release()
        r.batches.clear()
        r.missing.clear()

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def load(self, job: int, request: str, slots: Sequence[Slot]) -> None:
        j = self._begin(job, request, slots, loads=True)
        by_batch: dict[_Batch | None, list[Slot]] = {}
        for s in slots:
            batch = j.request.batches.get(s.key)
            by_batch.setdefault(batch if batch is not None and batch.leased else None, []).append(s)
        for batch, some in by_batch.items():
            self._enqueue(j, some, batch)
        self._begun(j)

    def store(self, job: int, request: str, slots: Sequence[Slot]) -> None:
        j = self._begin(job, request, slots, loads=False)
        self._enqueue(j, slots, None)
        self._begun(j)

    def stored_last(self, request: str) -> dict[int, int]:
        """Returns, by group, the depth of the last stored chunk of a request."""
        return {group: depth for group, (depth, _) in self._request(request).last.items()}

    def _begin(self, job: int, request: str, slots: Sequence[Slot], *, loads: bool) -> _Job:
        self._unanswered += 1
        return _Job(job, self._request(request), loads, time.monotonic(), [s.key for s in slots], left=1)

    def _begun(self, j: _Job) -> None:
        self._over(j, [])
        self._advance()

    def _enqueue(self, j: _Job, slots: Sequence[Slot], batch: _Batch | None) -> None:
        session = self._session()
        most = len(slots)
        if session is not None:
            most = min(n or most for n in (most, session.limits.chunks_per_job, session.limits.keys_per_lookup))
        self._lose(j, [s.key for s in slots if not self._placed(s)])
        for same in _by_group([s for s in slots if self._placed(s)], lambda s: group_of(s.key)).values():
            for some in _pieces(same, most):
                part = _Part(j, some)
                part.batch, batch = batch, None  # a lease serves one load, so further parts are looked up again
                j.left += 1
                j.request.unsent += 1
                self._waiting.append(part)

    def finished(self) -> list[Done]:
        """Returns the jobs that have ended since the last call, each once."""
        self._advance()
        done, self._done = self._done, []
        return done

    @property
    def _hangs(self) -> bool:
        """Whether no load may be sent: the host's process is stopped, or has not ended an abandoned load."""
        return self._stopped or bool(self._left) or any(p.job.given_up for p in self._running)

    def _look(self, session: Session | None) -> None:
        """Asks whether the host's process runs, while an answer is awaited."""
        awaited = self._running or self._waiting or self._left or self._stopped
        if awaited or (self._last is not None and not self._last.done()):
            self._stopped = self._pulse.stopped(session)

    def _settle_left(self) -> None:
        over = [p for p in self._left if p.running is not None and p.running.over]
        if over:
            self._left = [p for p in self._left if p not in over]
            self._give_back({s.row for p in over for s in p.slots})

    def _advance(self) -> None:
        session = self._session()
        self._look(session)
        self._settle_left()
        running, self._running = self._running, []
        for part in running:
            assert part.running is not None
            if part.running.over:
                self._settle(part)
            elif not self._taken_back(part):
                self._running.append(part)
                self._hurry(part)
        waiting, self._waiting = self._waiting, deque()
        for part in sorted(waiting, key=lambda p: not p.job.loads):
            if session is None or part.job.given_up or self._stopped or (part.job.loads and self._hangs):
                self._fail(part)
            elif len(self._running) < (session.limits.jobs or math.inf):
                if not self._send(part, session):
                    self._waiting.append(part)
            else:
                self._waiting.append(part)

    def _send(self, part: _Part, session: Session) -> bool:
        """Sends or ends a part, and returns whether it did. A part waits while its chunks are being looked up."""
        r = part.job.request
        try:
            if not part.job.loads:
                part.running = session.store(self._store_chunks(r, part.slots), group=group_of(part.slots[0].key), request=r.number)
            else:
                batch = self._found(part)
                if batch is None:
                    return not part.slots
                part.running = batch.load([(s.key, s.row) for s in part.slots])
        except KvhostError:
            self._fail(part)
            return True
        r.session, part.since = session, time.monotonic()
        part.running.when_over(self._woken.set)
        self._running.append(part)
        self._sent(r)
        return True

    def _found(self, part: _Part) -> _Batch | None:
        """Returns the lookup that has leased all slots of a load. Slots without a chunk leave the part. Returns None
        while the answer is awaited, or if no slots are left, which ends the part."""
        batch = part.batch
        if not part.asked and (batch is None or not batch.leased):
            part.batch = batch = next(iter(self._ask(part.job.request, part.keys)), None)
            part.asked = True
        if batch is not None and not batch.over(self._times.lookup):
            return None
        leased = batch is not None and batch.leased
        there = [s for s in part.slots if leased and batch is not None and batch.has(s.key)]
        if there:
            kept = {s.key for s in there}
            self._lose(part.job, [k for k in part.keys if k not in kept])
            part.slots = there
            return batch
        self._fail(part)
        part.slots = []
        return None

    def _store_chunks(self, r: _Request, slots: Sequence[Slot]) -> list[StoreChunk]:
        chunks = []
        for s in slots:
            key, group = self.host_key(s.key), group_of(s.key)
            last, parent = r.last.get(group, (-1, b""))
            depth = last + 1 if s.depth < 0 else s.depth
            if depth != last + 1:
                parent = self.host_key(s.parent) if s.parent else b""
            chunks.append(StoreChunk(key, [s.row], parent if parent != key else b"", depth))
            r.last[group] = depth, key
        return chunks

    def _late(self, part: _Part) -> bool:
        seconds = time.monotonic() - part.since
        if isinstance(part.running, StoreJob):
            return seconds > self._times.store and not part.running.was_read
        return seconds > self._times.load

    def _taken_back(self, part: _Part) -> bool:
        """Withdraws a store that the host has not read in time. The host then does not publish it. An older host
        keeps the slots until it has cancelled the store."""
        job = part.running
        if not isinstance(job, StoreJob) or job.was_read or not (self._stopped or self._late(part)) or not job.withdraw():
            return False
        self._cancel(part)
        self._count("chunks_not_stored", len(part.slots))
        self._over(part.job, part.keys)
        return True

    def _hurry(self, part: _Part) -> None:
        """Asks the host to cancel a load that takes too long. The host has the slots until it has ended the load."""
        now = time.monotonic()
        if part.job.loads and not part.job.given_up:
            if self._stopped or now - part.since > self._times.load + _CANCEL_AGAIN:
                self._give_up(part.job)
        if self._late(part) and now - part.cancelled > _CANCEL_AGAIN:
            part.cancelled = now
            self._cancel(part)

    def _give_up(self, job: _Job) -> None:
        """Lets requests go on without a load. The host has its slots until it has ended the load."""
        if not self._set_aside(job.id):
            return
        log.error("kvhost: the host does not answer and has not ended a load of %d chunks, which are computed; their rows of the CPU "
                  "tier stay unused until it does or ends", len(job.keys))
        job.good = []
        self._lose(job, [k for k in job.keys if k not in job.bad])
        job.given_up = True
        self._unanswered -= 1

    def _cancel(self, part: _Part) -> None:
        assert part.running is not None
        part.running.cancel(wait=False)

    def _settle(self, part: _Part) -> None:
        job = part.running
        try:
            if isinstance(job, StoreJob):
                stored = job.published(0)
                by_key = {s.key: c.result for s, c in zip(part.slots, stored.chunks, strict=True)}
                good = [k for k, result in by_key.items() if result in (Result.STORED, Result.RESIDENT)]
                bad = [k for k, result in by_key.items() if result not in (Result.STORED, Result.RESIDENT, Result.REFUSED)]
                self._count("chunks_stored", sum(result == Result.STORED for result in by_key.values()))
                self._count("chunks_not_stored", len(bad))
                part.job.bytes += stored.bytes
            else:
                assert isinstance(job, LoadJob)
                loaded = job.wait(0)
                failed = {part.slots[f.chunk].key for f in loaded.failed}
                good = [k for k in part.keys if k not in failed and not part.job.given_up]
                bad = [k for k in part.keys if k in failed]
                self._count("chunks_loaded", len(good))
                part.job.bytes += loaded.bytes
        except KvhostError:
            good, bad = [], part.keys
            if isinstance(job, StoreJob):
                self._count("chunks_not_stored", len(bad))
        part.job.good += good
        self._over(part.job, bad)

    def _fail(self, part: _Part) -> None:
        """Ends an unsent part as failed."""
        if not part.job.loads:
            self._count("chunks_dropped", len(part.slots))
        self._sent(part.job.request)
        self._over(part.job, part.keys)

    def _lose(self, job: _Job, keys: Sequence[bytes]) -> None:
        """Records missing keys. Requests that asked for them do not get them as hits again, or they would retry the
        load for ever."""
        if job.given_up:
            return
        job.bad += keys
        if not job.loads or not keys:
            return
        self._count("chunks_not_loaded", len(keys))
        job.request.missing.update(keys)
        for r in self._requests.values():
            r.missing.update(k for k in keys if k in r.batches)

    def _over(self, job: _Job, bad: Sequence[bytes]) -> None:
        """Records the end of a part of the job."""
        self._lose(job, bad)
        job.left -= 1
        if job.left == 0:
            self._unanswered -= not job.given_up
            self._done.append(Done(job.id, job.good, job.bad, time.monotonic() - job.began, job.bytes))

    # ---- ends --------------------------------------------------------------------------------------------------------

    def end_request(self, id: str, hints: Hints) -> None:
        """Tells the host that a request has ended, after all its messages."""
        r = self._requests.pop(id, None)
        if r is None:
            return
        r.ended = hints
        self._release(r)
        self._tell_end(r)

    def _sent(self, r: _Request) -> None:
        r.unsent -= 1
        self._tell_end(r)

    def _tell_end(self, r: _Request) -> None:
        if r.ended is None or r.unsent or r.session is None:
            return
        r.session.end_request(r.number, r.ended, wait=False)

    def drain(self, give_up: float = math.inf, *, leave: bool = False) -> None:
        """Waits until all jobs have ended, some by cancellation. A stopped host keeps the slots of its loads until
        it goes on. This method leaves them to it after ``give_up`` seconds or, with ``leave``, once the host does
        not answer. With ``leave`` all jobs then have an answer, and :attr:`left` has the rows that must not be used
        yet."""
        began = time.monotonic()
        due, end = began + min(_DRAIN_SECONDS, give_up / 2), began + give_up
        cancelled = False
        while True:
            self._woken.clear()
            self._advance()
            if not self._running and not self._waiting:
                return
            if leave and self._stopped and not self._waiting and all(part.job.loads for part in self._running):
                self._leave()
                return
            now = time.monotonic()
            if not cancelled and now >= due:
                cancelled = True
                self._cancel_all()
            if now >= end:
                return
            self._woken.wait(_DRAIN_PAUSE)

    def _leave(self) -> None:
        left, self._running = self._running, []
        for part in left:
            if part.job.loads:
                self._cancel(part)
                self._left.append(part)
            self._over(part.job, part.keys)

    def _cancel_all(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for part in waiting:
            self._fail(part)
        for part in self._running:
            self._cancel(part)

    def new_generation(self) -> None:
        """Hides all stored chunks, since the model's weights may have changed."""
        self._generation = os.urandom(32)
        self._asking.clear()
        for r in self._requests.values():
            self._release(r)
            r.wanted.clear()
            r.last.clear()


def group_of(key: bytes) -> int:
    """Returns the group of one of vLLM's keys."""
    return int.from_bytes(key[-4:], "big")


def _by_group(items: Iterable[_T], group: Callable[[_T], int]) -> Mapping[int, list[_T]]:
    found: dict[int, list[_T]] = {}
    for item in items:
        found.setdefault(group(item), []).append(item)
    return found


def _pieces(items: Sequence[_T], most: int) -> list[Sequence[_T]]:
    most = most or len(items)
    return [items[at : at + most] for at in range(0, len(items), most)]
