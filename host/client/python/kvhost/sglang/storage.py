"""The storage of SGLang's hierarchical cache."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from kvhost.content import Changing
from kvhost.errors import HostGoneError, KvhostError
from kvhost.objects import Addresses, Connector, Kind, Locks, ObjectStore, Options, StoreObject
from kvhost.session import Result
from kvhost.sglang import plugin
from kvhost.sglang.hits import leading, restorable_lengths
from kvhost.sglang.identity import host_key, kind, model
from kvhost.sglang.pools import Pool, addresses, flat_size, page_sizes, shared_place

log = logging.getLogger("kvhost")

_KV = PoolName.KV.value


@dataclass
class StorageOptions(Options):
    """``tenant`` is the host's number for this server."""

    tenant: int = 0


class KvhostStorage(HiCacheStorage):
    """Pages of SGLang's host pools in a kvhost on this machine.

    Without a host nothing is found, stores fail, and no call waits; the host is used again when it is back. An error in
    a batch fails the pages that it concerns. Hits of ``batch_exists`` stay until they are read or their lease ends.

    With ``interface_v1`` pages are read and written in place in the pool. Without it, and for ``get`` and ``set``,
    SGLang first copies each page into a tensor of its own; such pages are objects of another kind."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        extra = storage_config.extra_config or {}
        options = StorageOptions.parse("extra_config.kvhost", extra.get("kvhost", {}))
        self._tenant = options.tenant
        if storage_config.should_split_heads:
            raise ValueError("kvhost: tp_lcm_size splits pages between ranks, which is not supported: leave it out")
        plugin.check()
        try:
            self._model = (*model(), *options.apart)
        except Changing as e:
            raise ValueError(f"kvhost: {e}: start SGLang again") from e
        self._generation = plugin.generation
        self._config = storage_config
        self._in_place = bool(extra.get("interface_v1", 0))
        self._host = Connector(options, "sglang")
        self._store = ObjectStore(self._host)
        self._locks = Locks()
        self._pools: dict[str, Pool] = {}

    # Pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        pool = self._pool(_KV, mem_pool_host)
        if self._in_place and pool.buffers is None:
            layout = getattr(mem_pool_host, "layout", "?")
            raise ValueError(
                f"kvhost: layout {layout!r} has no page buffers: want --hicache-mem-layout page_first_direct or "
                "page_first, or no interface_v1"
            )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._pool(_name(host_pool_name), host_pool)

    def _pool(self, name: str, raw: Any) -> Pool:
        sizes, flat = page_sizes(raw), flat_size(raw)
        pool = self._pools[name] = Pool(
            name,
            raw,
            kind(self._config, raw, name, "buffers", sizes, self._tenant, self._model) if sizes else None,
            kind(self._config, raw, name, "flat", [flat], self._tenant, self._model) if flat else None,
        )
        if pool.buffers is not None and (place := shared_place(pool)):
            self._host.put(pool.buffers, place)
        return pool

    # The host

    def _key(self, page_hash: str) -> bytes:
        return host_key(page_hash, self._generation.name)

    def _found(self, of: Kind | None, keys: Sequence[bytes]) -> list[bool]:
        """Returns the keys that exist, and leases them."""
        if of is None or not keys or self._generation.unsure:
            return [False] * len(keys)
        try:
            hit = self._store.lookup(of, keys)
        except KvhostError as e:
            _say("lookup", e)
            return [False] * len(keys)
        self._locks.hold(of, hit)
        return hit.found

    def _read(self, of: Kind | None, keys: Sequence[bytes], pages: Sequence[Addresses]) -> list[bool]:
        if of is None or not keys or self._generation.unsure:
            return [False] * len(keys)
        hit = self._locks.take(of, keys)
        try:
            return self._store.load(of, keys, pages, hit)
        except KvhostError as e:
            _say("load", e)
            return [False] * len(keys)
        finally:
            if hit is not None:
                self._locks.drop(keys)

    def _write(
        self, of: Kind | None, keys: Sequence[bytes], pages: Sequence[Addresses], prefix: Sequence[str] | None
    ) -> list[bool]:
        """Stores pages, and returns which were stored. The host may refuse a page, or have no room for it."""
        if of is None or not keys or self._generation.unsure:
            return [False] * len(keys)
        before = self._key(prefix[-1]) if prefix else b""
        parents = [before, *keys[:-1]]
        depth = len(prefix or ())
        objects = [
            StoreObject(key, p, parent, depth + i) for i, (key, p, parent) in enumerate(zip(keys, pages, parents))
        ]
        try:
            results = self._store.store(of, objects)
        except KvhostError as e:
            _say("store", e)
            return [False] * len(keys)
        return [r in (Result.STORED, Result.RESIDENT) for r in results]

    # Pages in place

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        kv = self._pools.get(_KV)
        if kv is None:
            return 0
        return leading(self._found(kv.buffers if self._in_place else kv.flat, [self._key(k) for k in keys]))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._transfer(PoolTransfer(PoolName.KV, host_indices, keys=keys), None, write=False)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._transfer(PoolTransfer(PoolName.KV, host_indices, keys=keys), extra_info, write=True)

    def _transfer(
        self, of: PoolTransfer, extra_info: HiCacheStorageExtraInfo | None, *, write: bool
    ) -> list[bool]:
        """Moves the pages of one pool."""
        name, keys, indices = _name(of.name), of.keys or [], of.host_indices
        pool = self._pools.get(name)
        slots = -1 if indices is None else int(indices.numel())
        if pool is None or indices is None or slots != len(keys) * pool.page_slots:
            log.error("SGLang pool %s: %d pages and %d indices, nothing is moved", name, len(keys), slots)
            return [False] * len(keys)
        names = [self._key(k) for k in keys]
        prefix = extra_info.prefix_keys if extra_info is not None else None
        if pool.buffers is not None:
            where = addresses(pool, indices)
            return self._write(pool.buffers, names, where, prefix) if write else self._read(pool.buffers, names, where)
        first = [int(i) for i in indices[:: pool.page_slots]]
        if write:
            copies = [pool.raw.get_data_page(i, flat=True).contiguous() for i in first]
            return self._write(pool.flat, names, [(c.data_ptr(),) for c in copies], prefix)
        copies = [pool.raw.get_dummy_flat_data_page() for _ in first]
        read = self._read(pool.flat, names, [(c.data_ptr(),) for c in copies])
        for i, copy, ok in zip(first, copies, read):
            if ok:
                pool.raw.set_from_flat_data_page(i, copy)
        return read

    # Several pools

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        kv = self.batch_exists(keys, extra_info)
        pages: dict[str, int] = {PoolName.KV: kv} if kv else {}
        restorable = list(range(1, kv + 1))
        for transfer in pool_transfers or []:
            if not restorable:
                break
            pool = self._pools.get(_name(transfer.name))
            of = (pool.buffers or pool.flat) if pool is not None else None
            found = self._found(of, [self._key(k) for k in keys[:kv]])
            lengths = restorable_lengths(transfer, found)
            if lengths:
                pages[transfer.name] = max(lengths)
            restorable = [n for n in restorable if n in lengths]
        return PoolTransferResult(restorable[-1] if restorable else 0, pages, restorable)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {t.name: self._transfer(t, None, write=False) for t in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {t.name: self._transfer(t, extra_info, write=True) for t in transfers}

    # Pages as tensors

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        if target_location is None:
            return None
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        targets: list[torch.Tensor] = list(target_locations or [])
        if not keys or len(targets) != len(keys):
            return [None] * len(keys)
        ok = self._read(self._flat(targets[0]), [self._key(k) for k in keys], [(t.data_ptr(),) for t in targets])
        return [t if read else None for t, read in zip(targets, ok)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        value = value if value is not None else target_location
        return value is not None and self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        given = list(values if values is not None else target_locations or [])
        if len(given) != len(keys):
            return False
        tensors: list[torch.Tensor] = [t.contiguous() for t in given]
        if not tensors:
            return True
        names = [self._key(k) for k in keys]
        return all(self._write(self._flat(tensors[0]), names, [(t.data_ptr(),) for t in tensors], None))

    def exists(self, key: str) -> bool:
        """Returns whether ``set`` has stored a key."""
        kv = self._pools.get(_KV)
        return kv is not None and self._found(kv.flat, [self._key(key)])[0]

    def _flat(self, like: torch.Tensor) -> Kind | None:
        """Returns the kind of flat pages of the KV pool. A tensor of another size is not one of its pages."""
        kv, size = self._pools.get(_KV), like.numel() * like.element_size()
        return kv.flat if kv is not None and kv.flat is not None and kv.flat.object_bytes == size else None

    # The rest

    def clear(self) -> None:
        """Hides all stored pages from this server. They stay in the host until they are evicted, since other servers
        share them."""
        self._generation.next("clear")

    def get_status(self) -> dict[str, object]:
        return {**self._store.status(), "locks": self._locks.count()}

    def close(self) -> None:
        self._store.close()


def _name(name: Any) -> str:
    """Returns a pool's name, which SGLang gives as an enum or as its value."""
    return str(getattr(name, "value", name))


def _say(what: str, e: KvhostError) -> None:
    """Logs an error, except that the host is gone, which was logged at the loss."""
    if not isinstance(e, HostGoneError):
        log.warning("SGLang %s: failed: %s", what, e)
