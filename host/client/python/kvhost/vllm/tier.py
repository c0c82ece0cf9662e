"""KvhostTier: a tier of vLLM's own offloading with its chunks in kvhost.

vLLM copies KV between the GPU and its CPU tier, which is shared memory that the host maps. One session in the
scheduler's process serves all ranks of the engine."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import LookupResult, OffloadingCounterMetadata, OffloadingEvent, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvhost.arena import SharedMemory
from kvhost.errors import Refused
from kvhost.events import EventStream, Position
from kvhost.forks import Origin
from kvhost.link import Link
from kvhost.session import Session
from kvhost.shape import Namespace, Region
from kvhost.vllm import compat, hints, tierrows
from kvhost.vllm.identity import Named
from kvhost.vllm.settings import Settings
from kvhost.vllm.tierevents import TierEvents
from kvhost.vllm.tierjobs import Slot, TierJobs, Times, group_of
from kvhost.vllm.worker import open_session

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

log = logging.getLogger("vllm.kvhost")

_FIRST_CONNECT = 3.0  # seconds that a starting engine waits for the host
_SETTINGS = (
    "socket", "root", "memory", "tenant", "model", "revision", "extra", "share", "lookup_timeout", "load_timeout", "read_timeout",
    "shutdown_wait",
)
_OWN = ("enable_kv_events", "locality")

#: The counters ``vllm:kvhost_tier_<name>``, with their descriptions.
COUNTERS = {
    "lookups": "Chunks looked up in kvhost",
    "lookups_timed_out": "Chunks of lookups that kvhost did not answer in time",
    "chunks_loaded": "Chunks that kvhost delivered into vLLM's CPU tier",
    "chunks_not_loaded": "Chunks whose load failed; the engine computes them",
    "chunks_stored": "Chunks that kvhost wrote anew",
    "chunks_not_stored": "Chunks that kvhost failed or was too busy to store",
    "chunks_dropped": "Chunks that were not offered to kvhost: no host was there",
}
_METRIC = "vllm:kvhost_tier_"
_RESULT = {f.name for f in dataclasses.fields(JobResult)}
_EVENT = {f.name for f in dataclasses.fields(OffloadingEvent)}


class KvhostTier(SecondaryTierManager):
    """Keeps the chunks of vLLM's CPU tier in kvhost."""

    medium = base.Medium.STORAGE if hasattr(base, "Medium") else "STORAGE"  # 0.26

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {_METRIC + name: OffloadingCounterMetadata(documentation=text) for name, text in COUNTERS.items()}

    def __init__(
        self, offloading_spec: OffloadingSpec, primary_kv_view: memoryview, tier_type: str, *more: Any, **options: Any
    ) -> None:
        """``more`` and the option ``backpressure_detector`` are vLLM's, other options are the tier's settings."""
        detector = {n: options.pop(n) for n in ("backpressure_detector",) if n in options}
        super().__init__(offloading_spec, primary_kv_view, tier_type, *more, **detector)
        compat.mend_offloading()
        options.pop("module_path", None)
        options.pop("backpressure", None)
        own = {n: options.pop(n) for n in _OWN if n in options}
        self._settings = Settings.parse(options, f"secondary_tiers, {tier_type}", _SETTINGS, _OWN)
        self.locality = base.Locality(own["locality"]) if own.get("locality") is not None else None
        publishes = own.get("enable_kv_events") and offloading_spec.kv_events_config.enable_kv_cache_events
        if own.get("enable_kv_events") and not publishes:
            log.warning("kvhost: the tier publishes no events: the engine does not, which --kv-events-config changes")
        self._origin = Origin()
        self._events: TierEvents | None = None
        self._offered: dict[int, list[Any]] = {}  # by job: keys of stores whose answers are published to routers
        self._link: Link | None = None
        self._memory: SharedMemory | None = None
        self._fd = -1
        self._loads: dict[int, Any] = {}  # vLLM's jobs of loads
        self._unread: set[str] = set()  # requests that forbid to load
        self._tokens: dict[int, int] = {}  # tokens of a chunk, by group
        self._key_bytes = 0
        try:
            self._start(offloading_spec, primary_kv_view)
        except Refused as e:
            self._refuse(str(e))
        except Exception:  # compat does not know this vLLM
            log.exception("kvhost: NOT OFFLOADING: this vLLM's offloading is not that of 0.26 to 0.33. The engine runs without "
                          "this tier")
        if publishes:
            self._events = TierEvents(self._stream, lambda: bool(self._sessions()))
        s = self._settings
        self._jobs = TierJobs(
            self._link or _Nowhere(), self._tokens, self._key_bytes, Times(s.lookup_timeout, s.load_timeout, s.read_timeout),
            lambda job: compat.set_aside(offloading_spec, self._loads[job]),
            lambda rows: compat.give_back_rows(offloading_spec, rows),
        )

    @staticmethod
    def _refuse(why: str) -> None:
        log.error("kvhost: NOT OFFLOADING: %s. The engine runs without this tier", why)

    def _start(self, spec: Any, view: memoryview) -> None:
        config, cache = compat.engine_config()
        if config is None:
            raise Refused("this vLLM does not show its configuration where it makes its tiers, and nothing else says what "
                          "must agree for KV to be shared")
        heads = int(config.model_config.get_total_num_kv_heads()) if tierrows.shares(spec.config, self._settings) else 0
        rows = tierrows.groups(spec.config, cache, heads)
        namespace = tierrows.namespace(config, cache, spec.config, self._settings, rows)
        fd = getattr(getattr(spec, "_scheduler_mmap", None), "fd", None)
        if fd is None or os.fstat(fd).st_size < view.nbytes:
            raise Refused("vLLM's CPU tier is not the shared memory that it is in vLLM 0.26 to 0.33")
        self._fd = os.dup(fd)
        self._tokens, self._key_bytes = {r.id: r.tokens for r in rows}, namespace.key_bytes
        count, stride = view.shape or (0, 0)

        named = Named(namespace, config, lambda space: None, self._refuse)

        def open(epoch: int) -> list[Session]:
            space = named()
            if self._settings.own is not None:
                self._settings.own.ensure()
            if self._memory is None:
                self._memory = SharedMemory(self._fd)
            return open_session(lambda: self._open(epoch, space), register)

        def register(session: Session) -> None:
            assert self._memory is not None
            for r in rows:
                session.register(r.id, self._memory, [Region(at, stride, count) for at, _ in r.runs])
            session.share_withdrawals()

        self._link = Link("tier", self._settings.path, open, leads=True, log=log)
        self._link.start(_FIRST_CONNECT)
        log.info("kvhost: tier of %d rows; %s", count, ", ".join(
            f"group {r.id}: {sum(n for _, n in r.runs)} of {stride} bytes per chunk of {r.tokens} tokens" for r in rows))

    def _sessions(self) -> list[Session]:
        return self._link.sessions() if self._link is not None else []

    def _stream(self, after: Position | None) -> EventStream | None:
        return next((s.events(after) for s in self._sessions()), None)

    def _open(self, epoch: int, namespace: Namespace) -> Session:
        engine = f"{self._offloading_spec.config.engine_id}/tier/{epoch}"
        return Session(
            self._settings.path, engine, namespace, tenant=self._settings.tenant, unsealed_memory=True, timeout=10.0
        )

    # ---- requests ----------------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        if hints.forbids(req_context, "load"):
            self._unread.add(req_context.req_id)
        return RequestOffloadingContext()

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        if req_context.req_id in self._unread:
            return LookupResult.MISS
        found = self._jobs.lookup(req_context.req_id, key)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_request_finished(self, req_context: Any) -> None:
        self._unread.discard(req_context.req_id)
        self._jobs.end_request(req_context.req_id, hints.of_client(req_context))

    def on_schedule_end(self, context: Any) -> None:
        self._jobs.flush(context.new_req_ids)

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: Any) -> None:
        context = job_metadata.req_context
        slots = [] if hints.forbids(context, "store") else self._slots(job_metadata, links=True)
        if self._events is not None:
            self._offered[job_metadata.job_id] = [s.key for s in slots]
            for s in slots:
                self._events.offered(group_of(s.key), self._jobs.host_key(s.key), s.key)
        self._jobs.store(job_metadata.job_id, context.req_id, slots)

    def submit_load(self, job_metadata: Any) -> None:
        self._loads[job_metadata.job_id] = job_metadata
        self._jobs.load(job_metadata.job_id, job_metadata.req_context.req_id, self._slots(job_metadata, links=False))

    def _slots(self, job: Any, *, links: bool) -> list[Slot]:
        """Returns the slots of a job; with ``links`` they have each chunk's place in the prompt, as far as vLLM has
        it."""
        rows, positions = compat.rows(job), compat.positions(job.req_context)
        if rows is None:
            return [Slot(bytes(key), -1) for key in job.keys]
        if not links or not positions:
            return [Slot(bytes(key), row) for key, row in zip(job.keys, rows, strict=True)]
        slots: list[Slot] = []
        before: dict[tuple[bytes, int], bytes] | None = None
        last = self._jobs.stored_last(job.req_context.req_id)
        for key, row in zip(job.keys, rows, strict=True):
            group = int.from_bytes(key[-4:], "big")
            tokens = self._tokens.get(group, 1)
            depth = max(0, -(-positions.get(key, 0) // tokens) - 1)
            parent = b""
            if depth and last.get(group) != depth - 1:
                if before is None:
                    before = {(k[-4:], at): bytes(k) for k, at in positions.items()}
                parent = before.get((key[-4:], depth * tokens), b"")
            last[group] = depth
            slots.append(Slot(bytes(key), row, depth, parent))
        return slots

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        for done in self._jobs.finished():
            loads = self._loads.pop(done.id, None) is not None
            if self._events is not None:
                there = set(done.good)
                for key in self._offered.pop(done.id, ()):
                    self._events.answered(group_of(key), self._jobs.host_key(key), key in there)
            told = {
                "job_id": done.id, "success": not done.bad, "transfer_time": done.seconds, "transfer_bytes": done.bytes,
                "successful_keys": tuple(done.good) if loads and done.bad and done.good else None,
            }
            results.append(JobResult(**{name: value for name, value in told.items() if name in _RESULT}))
        return results

    def has_pending_work(self) -> bool:
        return self._jobs.pending

    def drain_jobs(self) -> None:
        """Ends all jobs. vLLM calls this when it empties its caches for sleep or other weights; the tier has no
        other notice of that."""
        self._jobs.drain(leave=compat.leave_rows(self._offloading_spec, lambda: self._jobs.left))
        self._jobs.new_generation()
        self._offered.clear()
        if self._events is not None:
            self._events.forget()

    def shutdown(self) -> None:
        if not self._origin.here:
            return
        self._jobs.drain(self._settings.shutdown_wait)
        if self._events is not None:
            self._events.close()
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._memory is not None:
            self._memory.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def take_events(self) -> Iterable[OffloadingEvent]:
        changes = self._events.take() if self._events is not None else []
        for removed, some in itertools.groupby(changes, lambda change: change[1]):
            told = {"removed": removed, "locality": self.locality, "removal_expected": True}
            yield OffloadingEvent(
                keys=[key for key, _ in some], medium=self.medium, **{n: v for n, v in told.items() if n in _EVENT},
            )

    def get_stats(self) -> OffloadingConnectorStats | None:
        counts, self._jobs.counts = self._jobs.counts, {}
        if not counts:
            return None
        stats = OffloadingConnectorStats()
        for name, n in counts.items():
            stats.increase_counter(_METRIC + name, n)
        return stats


class _Nowhere:
    """The sessions of a tier that has refused the model."""

    def sessions(self) -> list[Session]:
        return []
