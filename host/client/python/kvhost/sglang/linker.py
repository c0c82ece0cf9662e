"""kvhost behind SGLang's device pools, without copies in SGLang's host memory."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker
from sglang.srt.runtime_context import get_model, get_parallel, get_serving

from kvhost.background import Background
from kvhost.content import Changing
from kvhost.errors import HostStoppedError, KvhostError, Refused, VersionError
from kvhost.link import Link
from kvhost.memory import share
from kvhost.objects import HostOptions
from kvhost.objects.kind import KEY_BYTES
from kvhost.pulse import PAUSE, SILENT, Pulse, patiently
from kvhost.session import LoadChunk, Result, Session, StoreChunk, StoreJob
from kvhost.shape import Namespace, page_dtype
from kvhost.sglang import identity, plugin
from kvhost.sglang.batches import Batch, Found, Part, failed_chunks
from kvhost.sglang.devicepools import DevicePages, layout, pool_group
from kvhost.sglang.hits import restorable_lengths

log = logging.getLogger("kvhost")

_FIRST_CONNECT = 3.0  # seconds that SGLang's start waits for the host
_CANCEL_SECONDS = 5.0  # seconds from the cancellation of a load until the host counts as hanging
_AVOID_SECONDS = 60.0  # seconds for which a page that was not delivered is not looked up
_MOST_AVOIDED = 1 << 16
_SAY_SECONDS = 10.0
_KILL_SECONDS = 20.0  # seconds that SGLang waits for a stopped host of its own, which may write to the GPU


@dataclass
class LinkerOptions(HostOptions):
    """``tenant`` is the host's number for this server. The timeouts, in seconds, bound a lookup, the loads of a
    batch, the reading of a store, and the wait for stores at the end."""

    tenant: int = 0
    lookup_timeout: float = 1.0
    load_timeout: float = 60.0
    read_timeout: float = 10.0
    shutdown_wait: float = 3.0


@dataclass
class _Offload:
    """A store of pages, which SGLang keeps until it is over."""

    transfers: list[Any]
    names: list[list[bytes]]
    ready: list[Any]  # events of the device that mark written pages
    jobs: list[StoreJob] = field(default_factory=list)
    started: float = 0.0
    dropped: bool = False  # the store was dropped, and SGLang may use its pages

    @property
    def over(self) -> bool:
        return self.dropped or (self.started > 0 and all(j.over for j in self.jobs))

    def stored(self) -> bool:
        try:
            results = [c.result for j in self.jobs for c in j.published(0).chunks]
        except (KvhostError, TimeoutError):
            return False
        return not self.dropped and all(r in (Result.STORED, Result.RESIDENT) for r in results)

    def take_back(self) -> None:
        """Withdraws the store. The host does not publish pages that it has not read by now, even if it is stopped."""
        for job in self.jobs:
            if not job.was_read:
                job.withdraw()
        self.dropped = True


class KvhostLinker(UnifiedCacheLinker):
    """Pages of SGLang's device pools in a kvhost on this machine: they are loaded layer by layer while the forward runs.

    Without a host, or with a stopped one, nothing is found and nothing is stored. SGLang's thread waits for a lookup's
    answer, and for loads that have begun, both for a bounded time."""

    def __init__(
        self, server_args: Any, params: Any, *, components: set[Any], extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        self.forward_stream = forward_stream
        self._options = LinkerOptions.parse("unified_cache_external_linker_config.linker_extra_config", extra_config or {})
        self._generation = plugin.generation
        try:
            plugin.check()
            if params.pp_size > 1 or get_parallel().attn_dcp_size > 1:
                raise Refused("SGLang does not intersect what pipeline stages, or ranks of decode context parallelism, find: want one")
            self._pool_group = pool_group(params, components)
            self.pools = self._pool_group.entry_map
            pools = [DevicePages.of(i, e) for i, e in enumerate(self.pools.values())]
            self._pools = {p.entry.name.value: p for p in pools}
            tensors = [buffer for e in self.pools.values() for buffer in e.kv_buffer]
            self._memory = share(tensors, [page for p in pools for page in p.pages])
            self._namespace = self._name(params, tensors)
        except (Refused, Changing) as e:
            raise ValueError(f"kvhost: {e}") from e
        self._groups = [params.attn_cp_cache_group, params.attn_tp_cache_group]
        if not any(_size(g) > 1 for g in self._groups):
            self._groups = [params.tp_cache_group]
        self.layer_done_counter = LayerWiseLoadCounter(self._pool_group.num_layers)
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self.counts: Counter[str] = Counter()
        self._numbers = itertools.count(1)
        self._opened = itertools.count(1)
        self._engine = f"sglang-{os.getpid()}-{os.urandom(4).hex()}"
        self._found: dict[str, Found] = {}
        self._queued: dict[str, tuple[Found, list[tuple[Any, list[int]]]]] = {}
        self._avoided: dict[bytes, float] = {}  # names of avoided pages, with the end of that time
        self._avoiding = threading.Lock()
        self._batches: dict[int, Batch] = {}
        self._offloads: deque[_Offload] = deque()
        self._sending = threading.Lock()  # held while a store begins, and while the pools' memory changes
        self._pulse = Pulse(self._options.lookup_timeout)
        self._link = Link("sglang", self._options.socket, self._open, leads=False)
        self._loading, self._offloading = Background("kvhost-load", log), Background("kvhost-offload", log)
        self._link.start(_FIRST_CONNECT)

    # ---- the host ----------------------------------------------------------------------------------------------------

    def _name(self, params: Any, tensors: Sequence[Any]) -> Namespace:
        group = params.attn_tp_cache_group or params.tp_cache_group
        config = HiCacheStorageConfig(
            tp_rank=_rank(group), tp_size=max(_size(group), 1), pp_rank=0, pp_size=1, attn_cp_rank=params.attn_cp_rank,
            attn_cp_size=params.attn_cp_size, is_mla_model=self._pool_group.rank_replicated, enable_storage_metrics=False,
            is_page_first_layout=False, model_name=get_serving().served_model_name or get_model().model_path,
        )
        pools = [*self._pools.values()]
        kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
        extra = [("form", "device"), ("layout", layout(pools)), ("rank", identity.rank(config, "")), *identity.model(), *self._options.apart]
        return Namespace(
            model=config.model_name or "unknown", dtype=" ".join(kinds), key_bytes=KEY_BYTES, tokens_per_block=params.page_size,
            groups=[p.group for p in pools], engine="sglang", extra=dict(extra), page_dtype=page_dtype(tensor.dtype for tensor in tensors),
        )

    def _open(self, epoch: int) -> list[Session]:
        if self._options.own is not None:
            self._options.own.ensure()
        session = Session(
            self._options.socket, f"{self._engine}-{next(self._opened)}", self._namespace, tenant=self._options.tenant,
            device_uuid=self._memory.device_uuid or None, timeout=self._options.timeout,
        )
        try:
            if not session.share_withdrawals():
                raise VersionError("the host is older than this package")
            for p in self._pools.values():
                self._memory.register(session, p.group.id, p.pages)
        except BaseException as e:
            session.close(0.0 if isinstance(e, HostStoppedError) else 5.0)
            raise
        return [session]

    def _session(self) -> Session | None:
        """Returns the session if the host answers and the names of pages are valid; otherwise None."""
        session = self._latest()
        return None if session is None or self._generation.unsure or self._pulse.stopped(session) else session

    def _latest(self) -> Session | None:
        return next(iter(self._link.sessions(self._link.wanted)), None)

    def _names(self, keys: Sequence[str]) -> list[bytes]:
        return [identity.host_key(k, self._generation.name) for k in keys]

    # ---- lookups -----------------------------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        wanted = self._pool_group.resolve_transfers(transfers)
        session = self._session()
        if not wanted or session is None:
            return []
        most = min(session.limits.keys_per_lookup, session.limits.chunks_per_job)
        names = self._names(next(t.keys for t in transfers if t.name == PoolName.KV)[:most])
        self._forget_old()
        known = self._found.get(rid)
        if known is not None and known.session is session and known.names == names:
            return known.lengths
        self._forget(rid)
        found = self._ask(session, names, wanted)
        if found is None or not found.lengths:
            if found is not None:
                self._end(found)
            return []
        self._found[rid] = found
        self.counts["hits"] += 1
        return found.lengths

    def _ask(self, session: Session, names: list[bytes], wanted: Sequence[Any]) -> Found | None:
        number, began = next(self._numbers), time.monotonic()
        self.counts["lookups"] += 1
        try:
            pending = {
                t.name.value: session.start_lookup(
                    names, group=self._pools[t.name.value].group.id, request=number,
                    prefetch=self._options.prefetch and session.levels > 1,
                ) for t in wanted
            }
            due = began + self._options.lookup_timeout
            replies = {name: p.result(max(0.0, due - time.monotonic())) for name, p in pending.items()}
        except (KvhostError, TimeoutError) as e:
            log.warning("kvhost: lookup of %d pages: %s", len(names), e)
            self._end_request(session, number)
            return None
        lengths = set(range(1, len(names) + 1))
        for t in wanted:
            there = replies[t.name.value]
            lengths &= restorable_lengths(t, [there.has(i) and name not in self._avoided for i, name in enumerate(names)])
        return Found(number, session, names, replies, began + session.lease_seconds / 2, sorted(lengths))

    def _forget_old(self) -> None:
        """Forgets old lookups, since SGLang does not report the end of requests that were never loaded."""
        now = time.monotonic()
        for rid in [rid for rid, f in self._found.items() if f.until < now]:
            self._forget(rid)
        self._look_again(lambda name, until: until < now)

    def _forget(self, rid: str) -> None:
        if (found := self._found.pop(rid, None)) is not None:
            self._end(found)

    def _end(self, found: Found) -> None:
        self._end_request(found.session, found.number)

    @staticmethod
    def _end_request(session: Session, number: int) -> None:
        """Gives the leases back, also those of answers that have not come."""
        session.end_request(number, wait=False)

    # ---- loads -------------------------------------------------------------------------------------------------------

    def load(self, rid: str, transfers: list[Any]) -> bool:
        wanted = self._pool_group.resolve_transfers(transfers, allow_partial=True, allow_missing_kv=True)
        if not wanted:
            return False
        if rid in self._queued:
            raise RuntimeError(f"kvhost: a load of request {rid} is queued already")
        found = self._found.pop(rid, None)
        chosen = self._chosen(found, wanted) if found is not None else None
        if not self._all_ranks(chosen is not None):  # all ranks of SGLang compute
            if found is not None:
                self._end(found)
            self.counts["missed"] += 1
            return False
        assert found is not None and chosen is not None
        self._queued[rid] = (found, chosen)
        return True

    def _chosen(self, found: Found, wanted: Sequence[Any]) -> list[tuple[Any, list[int]]] | None:
        """Returns the looked-up pages of each transfer; None if they cannot be loaded now."""
        if self._session() is not found.session or found.until < time.monotonic():
            return None
        index = {name: i for i, name in enumerate(found.names)}
        try:
            return [(t, [index[name] for name in self._names(t.keys)]) for t in wanted]
        except KeyError:
            return None

    def _all_ranks(self, may: bool) -> bool:
        """Returns whether all ranks agree. Every rank takes the same branch, or SGLang's ranks would wait for each
        other."""
        flag = torch.tensor([int(may)], dtype=torch.int)
        for group in self._groups:
            if _size(group) > 1:
                torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=group)
        return bool(flag.item())

    def cancel_queued_load(self, rid: str) -> bool:
        queued = self._queued.pop(rid, None)
        if queued is not None:
            self._end(queued[0])
        return queued is not None

    def start_layer_wise_loading(self) -> int:
        if not self._queued:
            return -1
        queued, self._queued = self._queued, {}
        batch = Batch(self.layer_done_counter, [*queued], self.record_offload_ready())
        self._batches[batch.index] = batch
        self._loading.put(lambda: self._load_batch(batch, [*queued.values()]))
        return batch.index

    def _load_batch(self, batch: Batch, queued: Sequence[tuple[Found, list[tuple[Any, list[int]]]]]) -> None:
        """Loads a batch. Runs on the loading thread."""
        session, due = queued[0][0].session, time.monotonic() + self._options.load_timeout
        try:
            for event in batch.device_ready:  # a forward under way may still write to pages of requests that have ended
                event.synchronize()
            for found, chosen in queued:
                for t, pages in chosen:
                    pool = self._pools[t.name.value]
                    chunks = [LoadChunk(i, [b]) for i, b in zip(pages, pool.blocks(t.host_indices), strict=True)]
                    batch.parts.append(Part(batch, pool, found.pools[t.name.value], [found.names[i] for i in pages], chunks))
            for part in batch.parts:
                part.begin(session)
            pulse = Pulse(self._options.lookup_timeout)
            lost = [why for part in batch.parts if (why := self._settle(part, session, pulse, due))]
            if lost:
                raise KvhostError("; ".join(lost))
            batch.landed()
            self.counts["loads"] += len(batch.rids)
            self.counts["loaded pages"] += sum(len(p.chunks) for p in batch.parts)
        except BaseException as e:
            batch.fail(e)
            batch.hangs = not _cancelled(batch, 0 if isinstance(e, HostStoppedError) else _CANCEL_SECONDS)
            self.counts["aborted"] += len(batch.rids)
            log.error("kvhost: SGLang aborts %d requests that were loading, %s; asked again they are computed: %s", len(batch.rids),
                      ", ".join(batch.rids), e)
        finally:
            for found, _ in queued:
                self._end(found)
            batch.quiet.set()

    def _settle(self, part: Part, session: Session, pulse: Pulse, due: float) -> str:
        """Waits for a load. Pages that were not delivered are looked up and loaded once more, since another root or
        peer may have them. Returns the reason of a failure; "" if all pages were delivered."""
        assert part.job is not None
        failed = failed_chunks(self._wait(part, session, pulse, due))
        if failed:
            why = f"{len(failed)} of {len(part.chunks)} pages were not delivered: {part.job.wait(0).failed[0].error}"
            names = [part.names[i] for i in failed]
            self.counts["retried pages"] += len(failed)
            pending = session.start_lookup(names, group=part.pool.group.id)
            again = patiently(session, pending.result, max(PAUSE, due - time.monotonic()))
            if again.hits == len(names):
                part.job = session.load(again, [LoadChunk(n, part.chunks[i].blocks) for n, i in enumerate(failed)])
                failed = failed_chunks(self._wait(part, session, pulse, due))
            else:
                again.release(wait=False)
            if failed:
                self._avoid(names)
                return why
        part.done()
        return ""

    def _wait(self, part: Part, session: Session, pulse: Pulse, due: float) -> Any:
        assert part.job is not None
        while True:
            try:
                result = part.job.wait(PAUSE)
            except TimeoutError:
                if pulse.stopped(session):
                    raise HostStoppedError(SILENT) from None
                if time.monotonic() > due:
                    self._avoid(part.names)
                    raise KvhostError(f"the host has not loaded {len(part.chunks)} pages within {self._options.load_timeout} s") from None
                continue
            if result.cancelled:
                raise KvhostError("the load was cancelled")
            return result

    def _avoid(self, names: Sequence[bytes]) -> None:
        """Avoids pages for a time, so that their requests are computed even if the host has hits."""
        until = time.monotonic() + _AVOID_SECONDS
        with self._avoiding:
            if len(self._avoided) < _MOST_AVOIDED:
                self._avoided = self._avoided | dict.fromkeys(names, until)

    def _look_again(self, may: Callable[[bytes, float], bool]) -> None:
        if self._avoided:
            with self._avoiding:
                self._avoided = {name: until for name, until in self._avoided.items() if not may(name, until)}

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        landed = self.layer_done_counter.finish(counter_index)
        batch = self._batches.pop(counter_index, None)
        if batch is not None:
            batch.quiet.wait()
            if batch.hangs:
                self._take_back(batch)
        return bool(landed)

    def _take_back(self, batch: Batch) -> None:
        """Takes the pools' memory back, since the host may still write to pages that SGLang is about to use for
        other requests."""
        with self._sending:  # a store that begins afterwards reads SGLang's new pages
            for offload in self._offloads:
                offload.take_back()
            if self._memory.take_back():
                self._link.follow(self._link.wanted + 1)
                log.warning("kvhost: the host hangs in the middle of a load: SGLang's pools have other memory now")
                return
        began, session = time.monotonic(), self._latest()
        while not _cancelled(batch, min(_SAY_SECONDS, _KILL_SECONDS)):
            hangs = time.monotonic() - began
            what = "continue its process (kill -CONT) or end it (kill -KILL)"
            if self._options.own is not None and session is not None and hangs >= _KILL_SECONDS:
                session.kill_host()
                what = "SGLang has started it, and kills it"
            log.error("kvhost: the host hangs since %.0f s in the middle of a load to the GPU, and SGLang waits: %s", hangs, what)

    # ---- offloads ----------------------------------------------------------------------------------------------------

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        wanted = self._pool_group.resolve_transfers(transfers, allow_partial=True)
        if not wanted:
            return False
        offload = _Offload(wanted, [self._names(t.keys) for t in wanted], self.record_offload_ready())
        self._offloads.append(offload)
        if self._session() is None:
            offload.dropped = True
        else:
            self._offloading.put(lambda: self._store(offload))
        return True

    def _store(self, offload: _Offload) -> None:
        """Stores pages once the device has written them. Runs on the offloading thread."""
        try:
            for event in offload.ready:
                event.synchronize()
            chunks = [self._chunks(t, names) for t, names in zip(offload.transfers, offload.names)]
            with self._sending:
                session = self._latest()
                if session is None or offload.dropped:
                    offload.dropped = True
                    return
                most = session.limits.chunks_per_job
                for t, of in zip(offload.transfers, chunks):
                    group = self._pools[t.name.value].group.id
                    offload.jobs += [session.store(of[first : first + most], group=group) for first in range(0, len(of), most)]
                offload.started = time.monotonic()
        except BaseException as e:
            offload.take_back()
            if not isinstance(e, KvhostError):
                raise

    def _chunks(self, transfer: Any, names: Sequence[bytes]) -> list[StoreChunk]:
        blocks = self._pools[transfer.name.value].blocks(transfer.host_indices)
        parents = [b"", *names[:-1]]
        return [StoreChunk(n, [b], parent, i) for i, (n, b, parent) in enumerate(zip(names, blocks, parents, strict=True))]

    def num_completed_offloads(self) -> int:
        self._take_late_back()
        return sum(1 for _ in itertools.takewhile(lambda o: o.over, self._offloads))

    def _take_late_back(self) -> None:
        now = time.monotonic()
        running = [o for o in self._offloads if o.started and not o.over]
        if not running:
            return
        stopped = now - running[0].started > PAUSE and (session := self._latest()) is not None and self._pulse.stopped(session)
        for o in running:
            if stopped or now - o.started > self._options.read_timeout:
                o.take_back()
                self.counts["taken back"] += 1

    def pop_completed_offload(self) -> bool:
        offload = self._offloads.popleft()
        stored = offload.stored()
        if stored and self._avoided:
            fresh = {name for names in offload.names for name in names}
            self._look_again(lambda name, until: name in fresh)
        self.counts["stored" if stored else "not stored"] += 1
        return stored

    # ---- the end -----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        for rid in [*self._queued]:
            self.cancel_queued_load(rid)
        for rid in [*self._found]:
            self._forget(rid)
        for index in [*self._batches]:
            self.finish_layer_wise_loading(index)
        self._flush()
        for offload in self._offloads:
            if not offload.over:
                offload.take_back()
        self._offloads.clear()
        self.layer_done_counter.reset()

    def _flush(self) -> None:
        """Waits until the threads have begun all queued work."""
        self._loading.flush()
        self._offloading.flush()

    def close(self) -> None:
        """Ends the linker. Stores have a limited time to be written."""
        self._flush()
        due = time.monotonic() + self._options.shutdown_wait
        for offload in self._offloads:
            for job in offload.jobs:
                try:
                    job.published(max(0.0, due - time.monotonic()))
                except (KvhostError, TimeoutError):
                    pass
        self.reset()
        self._loading.close()
        self._offloading.close()
        self._link.close()
        log.info("kvhost: SGLang's linker: %s", ", ".join(f"{n} {name}" for name, n in sorted(self.counts.items())))


def _cancelled(batch: Batch, seconds: float) -> bool:
    """Cancels the loads of a batch, and returns whether every one has ended within the given seconds."""
    due = time.monotonic() + seconds
    jobs = [p.job for p in batch.parts if p.job is not None and not p.job.over]
    for job in jobs:
        job.cancel(wait=False)
    for job in jobs:
        try:
            job.wait(max(0.0, due - time.monotonic()))
        except TimeoutError:
            return False
        except KvhostError:
            pass
    return True


def _size(group: Any) -> int:
    return torch.distributed.get_world_size(group=group) if group is not None and torch.distributed.is_initialized() else 1


def _rank(group: Any) -> int:
    return torch.distributed.get_rank(group=group) if group is not None and torch.distributed.is_initialized() else 0
