"""The L2 adapter of LMCache's MP server."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, TypeVar

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface, L2TaskId
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from kvhost.errors import HostGoneError, KvhostError
from kvhost.forks import Origin
from kvhost.lmcache.config import KvhostL2AdapterConfig
from kvhost.lmcache.keys import Chains, host_key
from kvhost.lmcache.residents import Residents
from kvhost.lmcache.tenants import tenant
from kvhost.objects import Connector, Kind, Locks, Mapping, ObjectStore, Place, StoreObject
from kvhost.session import DiscardResult, Result
from kvhost.shape import page_dtype

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryTags  # from 0.5.7 on

log = logging.getLogger("kvhost")

_MOST_TOUCHES = 64  # most touches that wait for the host; further ones are dropped

_R = TypeVar("_R")


class _Tasks(Generic[_R]):
    """The tasks of one sort: their threads, their results, and the notifier of results."""

    def __init__(self, name: str, threads: int, ids: Callable[[], int], host: Connector) -> None:
        self._host = host
        self._pool = ThreadPoolExecutor(threads, f"kvhost-{name}")
        self._queued: dict[L2TaskId, tuple[Future[None], Callable[[], _R]]] = {}
        host.on_fence.append(self.fail_queued)
        self._name, self._ids = name, ids
        self._lock = threading.Lock()
        self._done: dict[L2TaskId, _R] = {}
        self._notifier = create_event_notifier()
        self.fd: int = self._notifier.fileno()

    def submit(self, work: Callable[[], _R], failed: Callable[[], _R]) -> L2TaskId:
        """Queues work. If it raises, its result is that of ``failed``."""
        task = self._ids()

        def run() -> None:
            with self._lock:
                self._queued.pop(task, None)
            try:
                result = work()
            except HostGoneError:
                result = failed()
            except Exception as e:
                level = logging.WARNING if isinstance(e, KvhostError) else logging.ERROR
                log.log(level, "LMCache %s task %d: failed: %s", self._name, task, e, exc_info=level == logging.ERROR)
                result = failed()
            with self._lock:
                self._done[task] = result
            self._notifier.notify()

        with self._lock:
            self._queued[task] = self._pool.submit(run), failed
        if self._host.fenced:
            self.fail_queued()
        return task

    def fail_queued(self) -> None:
        """Fails the tasks that no thread has begun, since all threads may wait for a stopped host."""
        with self._lock:
            over = {task: failed() for task, (future, failed) in self._queued.items() if future.cancel()}
            for task in over:
                del self._queued[task]
            self._done |= over
        if over:
            self._notifier.notify()

    def pop(self, task: L2TaskId) -> _R | None:
        with self._lock:
            return self._done.pop(task, None)

    def pop_all(self) -> dict[L2TaskId, _R]:
        with self._lock:
            done, self._done = self._done, {}
        return done

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._notifier.close()


class KvhostL2Adapter(L2AdapterInterface):
    """LMCache's L2 in a kvhost on this machine. The host evicts by its own policies, so LMCache sees no capacity.

    Without a host, lookups miss, stores fail, and no call waits. The host is used again when it is back."""

    def __init__(self, config: KvhostL2AdapterConfig, l1_memory_desc: L1MemoryDesc | None = None) -> None:
        super().__init__()
        options = config.options
        self._origin = Origin()
        self._options, self._tenants = options, options.tenants
        self._host = Connector(options, "lmcache")
        self._store = ObjectStore(self._host)
        self._l1 = l1_memory_desc
        self._mapping: Mapping | None = None
        if l1_memory_desc is not None:
            self._mapping = Mapping.find(l1_memory_desc.ptr, l1_memory_desc.size)
        self._kinds: set[Kind] = set()  # kinds with a place in the pool
        self._lock = threading.Lock()
        self._last_task = 0
        self._sizes: dict[tuple[str, int, int], int] = {}  # sizes of objects, by row, since layouts do not cover serdes
        self._dtypes: dict[tuple[str, int, int], str] = {}  # data types of objects, by row
        self._chains = Chains()
        self._locks = Locks()
        self._residents: Residents[ObjectKey] = Residents()
        self._stores: _Tasks[L2StoreResult] = _Tasks("store", options.threads, self._next_task, self._host)
        self._lookups: _Tasks[Bitmap] = _Tasks("lookup", 1, self._next_task, self._host)
        self._loads: _Tasks[Bitmap] = _Tasks("load", options.threads, self._next_task, self._host)
        self._toucher = ThreadPoolExecutor(1, "kvhost-touch")
        self._touches = threading.Semaphore(_MOST_TOUCHES)

    def get_store_event_fd(self) -> int:
        return self._stores.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.fd

    def get_load_event_fd(self) -> int:
        return self._loads.fd

    # Stores

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        return self._stores.submit(lambda: self._do_store(keys, objects), lambda: L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[L2TaskId, L2StoreResult]:
        return self._stores.pop_all()

    def _do_store(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2StoreResult:
        """Returns whether all objects were stored, since LMCache may drop objects from L1 that L2 reports as stored."""
        kept, stored_bytes = 0, 0
        for kind, members in self._by_kind(keys, objects).items():
            results = self._store.store(kind, [self._object(keys[i], objects[i]) for i in members])
            resident = [keys[i] for i, r in zip(members, results) if r in (Result.STORED, Result.RESIDENT)]
            kept += len(resident)
            stored_bytes += results.count(Result.STORED) * kind.object_bytes
            self._learn_resident(resident, kind.object_bytes)
        return L2StoreResult(kept == len(keys), stored_bytes)

    def _object(self, key: ObjectKey, memory: MemoryObj) -> StoreObject:
        digest = host_key(key)
        with self._lock:
            parent, depth = self._chains.place(digest)
        return StoreObject(digest, (memory.data_ptr,), parent, depth)

    # Lookups and locks

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> L2TaskId:
        return self._lookups.submit(lambda: self._do_lookup(keys, group_layout_descs), lambda: Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: L2TaskId) -> Bitmap | None:
        return self._lookups.pop(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        for hit in self._locks.drop([host_key(key) for key in keys]):
            hit.release()

    def _do_lookup(self, keys: list[ObjectKey], layouts: dict[int, MemoryLayoutDesc]) -> Bitmap:
        bitmap = Bitmap(len(keys))
        digests = [host_key(key) for key in keys]
        with self._lock:
            self._chains.learn(keys, digests)
        members: dict[Kind, list[int]] = defaultdict(list)
        for i, key in enumerate(keys):
            layout = layouts.get(key.object_group_id)
            size = self._sizes.get(_row(key)) or _layout_bytes(layout)
            if layout is not None:
                self._dtypes.setdefault(_row(key), page_dtype(layout.dtypes))
            if kind := self._kind(key, size):
                members[kind].append(i)
        for kind, places in members.items():
            try:
                hit = self._store.lookup(kind, [digests[i] for i in places])
            except HostGoneError:
                continue  # these keys are misses; earlier hits stay locked
            self._locks.hold(kind, hit)
            bitmap.batched_set([i for i, found in zip(places, hit.found) if found])
            self._learn_resident([keys[i] for i, found in zip(places, hit.found) if found], kind.object_bytes)
            self._learn_gone([keys[i] for i, found in zip(places, hit.found) if not found], kind.object_bytes)
        return bitmap

    # Loads

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        work = []
        for kind, members in self._by_kind(keys, objects).items():
            digests = [host_key(keys[i]) for i in members]
            work.append((kind, members, digests, self._locks.take(kind, digests)))

        def load() -> Bitmap:
            bitmap = Bitmap(len(keys))
            for kind, members, digests, hit in work:
                try:
                    loaded = self._store.load(kind, digests, [(objects[i].data_ptr,) for i in members], hit)
                except HostGoneError:
                    continue
                bitmap.batched_set([i for i, ok in zip(members, loaded) if ok])
            if bitmap.popcount():
                self._notify_keys_accessed([keys[i] for i in bitmap.get_indices_list()])
            return bitmap

        return self._loads.submit(load, lambda: Bitmap(len(keys)))

    def query_load_result(self, task_id: L2TaskId) -> Bitmap | None:
        return self._loads.pop(task_id)

    # Other calls of LMCache

    def get_memory_tags(self) -> MemoryTags:
        """Returns the places of objects, for requests that only accept some places. LMCache calls it from 0.5.7 on."""
        from lmcache.v1.distributed.api import MemoryResidency, MemorySegment, MemoryTags

        o = self._options
        in_memory = bool(o.memory) and not o.root
        shared = o.shared or o.root.startswith("s3://")
        return MemoryTags(
            MemorySegment.DRAM if in_memory else MemorySegment.STORAGE, MemoryResidency.REMOTE if shared else MemoryResidency.LOCAL
        )

    def submit_touch(self, keys: list[ObjectKey]) -> None:
        """Reports objects that LMCache has used from its L1 to the host's policies, unless the host is slow."""
        self._notify_keys_accessed(keys)
        members: dict[Kind, list[bytes]] = defaultdict(list)
        for key in keys:
            if kind := self._kind(key, self._sizes.get(_row(key), 0)):
                members[kind].append(host_key(key))
        if members and self._touches.acquire(blocking=False):
            self._toucher.submit(self._touch, members)

    def _touch(self, members: dict[Kind, list[bytes]]) -> None:
        try:
            for kind, digests in members.items():
                self._store.touch(kind, digests)
        except HostGoneError:
            pass  # the objects keep their age
        except Exception as e:
            log.warning("LMCache's use of %d objects was not told: %s", sum(map(len, members.values())), e)
        finally:
            self._touches.release()

    def delete(self, keys: list[ObjectKey]) -> None:
        """Deletes objects from the host. Objects in use stay. It never raises, since LMCache's eviction does not
        expect that."""
        members: dict[Kind, list[ObjectKey]] = defaultdict(list)
        for key in keys:
            if kind := self._kind(key, self._sizes.get(_row(key), 0)):
                members[kind].append(key)
        if unknown := len(keys) - sum(map(len, members.values())):
            log.warning("LMCache wants %d objects deleted of a size that it has not named yet: they stay", unknown)
        for kind, mine in members.items():
            try:
                self._delete(kind, mine)
            except KvhostError as e:
                log.warning("LMCache wants %d objects deleted, they stay: %s", len(mine), e)

    def _delete(self, kind: Kind, keys: list[ObjectKey]) -> None:
        results = self._store.discard(kind, [host_key(key) for key in keys])
        gone = (DiscardResult.REMOVED, DiscardResult.ABSENT)
        self._learn_gone([key for key, r in zip(keys, results) if r in gone], kind.object_bytes)
        for result in set(results).difference(gone):
            log.info("LMCache wants %d objects deleted that stay: %s", results.count(result), result.name)

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """Lists the objects that this server has stored or found, except those that it has missed since. Objects of
        other servers are not listed."""
        page, following = self._residents.page(model_name, page_size, cursor)
        return KeyListPage(tuple(KeyEntry(key.to_encoded_object_key(), size) for key, size in page), following)

    def report_status(self) -> dict[str, object]:
        status = self._store.status()
        return {
            "is_healthy": not status["gone"],
            "type": type(self).__name__,
            **status,
            "l1_is_shared": self._mapping is not None,
            "known_objects": len(self._residents),
            "locks": self._locks.count(),
        }

    def close(self) -> None:
        if not self._origin.here:
            return
        self._store.close()  # running calls fail at once
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.close()
        self._toucher.shutdown(cancel_futures=True)

    # Private methods

    def _next_task(self) -> L2TaskId:
        with self._lock:
            self._last_task += 1
            return self._last_task

    def _by_kind(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> dict[Kind, list[int]]:
        members: dict[Kind, list[int]] = defaultdict(list)
        for i, (key, memory) in enumerate(zip(keys, objects, strict=True)):
            size = memory.get_size()
            self._sizes[_row(key)] = size
            self._dtypes[_row(key)] = _memory_dtype(memory)
            if kind := self._kind(key, size):
                members[kind].append(i)
        return members

    def _kind(self, key: ObjectKey, size: int) -> Kind | None:
        """Returns the kind of an object; None while its size is unknown."""
        if size == 0:
            return None
        group = (("object_group", str(key.object_group_id)), *self._options.apart)
        kind = Kind(
            key.model_name, "lmcache", (size,), tenant(key.cache_salt, self._tenants), extra=group,
            page_dtype=self._dtypes.get(_row(key), ""),
        )  # fmt: skip
        if self._mapping is not None and self._l1 is not None and kind not in self._kinds:
            self._kinds.add(kind)
            # L1 puts objects of one size side by side. Other objects pass through the arena.
            self._host.put(kind, Place.of_blocks(self._mapping, self._l1.ptr, self._l1.size, size))
        return kind

    def _learn_resident(self, keys: list[ObjectKey], size: int) -> None:
        if new := self._residents.add(keys, size):
            self._notify_keys_stored(new, [size] * len(new))

    def _learn_gone(self, keys: list[ObjectKey], size: int) -> None:
        if gone := self._residents.remove(keys, size):
            self._notify_keys_deleted(gone, [size] * len(gone))


def _row(key: ObjectKey) -> tuple[str, int, int]:
    """Returns the key fields that objects of one size share."""
    return key.model_name, key.kv_rank, key.object_group_id


def _memory_dtype(memory: MemoryObj) -> str:
    meta = memory.metadata
    return page_dtype(meta.dtypes or ([meta.dtype] if meta.dtype is not None else ()))


def _layout_bytes(layout: MemoryLayoutDesc | None) -> int:
    """Returns the bytes of an object; 0 if the layout does not have them."""
    if layout is None:
        return 0
    return sum(shape.numel() * dtype.itemsize for shape, dtype in zip(layout.shapes, layout.dtypes))
