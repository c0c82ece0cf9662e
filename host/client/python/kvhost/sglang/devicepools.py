"""SGLang's device pools as groups of the host, with the place of each layer's part of a page."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _stage_local_layer_mapping, _swa_layer_mappings
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    DevicePoolEntry,
    DevicePoolGroup,
    _mamba_device_pool_entry,
    _mha_device_pool_entry,
    resolve_hybrid_device_pool_group,
)
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from kvhost.errors import Refused
from kvhost.memory import PagesAt
from kvhost.shape import Group, Plane

_FULL, _SWA, _MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA


def pool_group(params: Any, components: set[Any]) -> Any:
    """Returns SGLang's own group of pools. For models without one it makes a group of the same classes: models with
    full attention, alone or with windows, and hybrids of full attention and Mamba without MLA."""
    kvcache, page = params.token_to_kv_pool_allocator.get_kvcache(), params.page_size
    entries = [] if params.mtp_draft_device_pools or params.mtp_draft_mamba_pools else [*_entries(kvcache, params, components, page)]
    if not entries:
        return resolve_hybrid_device_pool_group(kvcache=kvcache, page_size=page, params=params, components=components)
    for draft in params.sidecar_draft_device_pools:
        if type(draft) is not MHATokenToKVPool or draft.page_size != page:
            raise Refused(f"a draft model's cache is {type(draft).__name__} with pages of {draft.page_size} tokens: want "
                          f"MHATokenToKVPool with {page}")
        entries.append(_mha_device_pool_entry(
            PoolName.DRAFT, draft, {i: i for i in range(draft.layer_num)}, page, indices_from_pool=PoolName.KV
        ))
    layers = 1 + max(layer for e in entries for layer in e.layer_mapping)
    return DevicePoolGroup(entries, layers, page, rank_replicated=type(kvcache) is MLATokenToKVPool)


def _entries(kvcache: Any, params: Any, components: set[Any], page: int) -> Iterator[Any]:
    if type(kvcache) is MHATokenToKVPool and components == {_FULL}:
        yield _mha_device_pool_entry(PoolName.KV, kvcache, {i: i for i in range(kvcache.layer_num)}, page)
    elif type(kvcache) is MLATokenToKVPool and components == {_FULL}:
        yield DevicePoolEntry(
            name=PoolName.KV, indices_from_pool=PoolName.KV, device_pool=kvcache, components=[kvcache.kv_buffer],
            layer_mapping={i: i for i in range(kvcache.layer_num)}, page_size=page, rows_are_pages=False,
        )
    elif type(kvcache) is SWAKVPool and components == {_FULL, _SWA} and _plain(kvcache.full_kv_pool, kvcache.swa_kv_pool):
        full, window = _swa_layer_mappings(kvcache)
        yield _mha_device_pool_entry(PoolName.KV, kvcache.full_kv_pool, full, page)
        yield _mha_device_pool_entry(PoolName.SWA, kvcache.swa_kv_pool, window, page)
    elif type(kvcache) is HybridLinearKVPool and components == {_FULL, _MAMBA} and _plain(kvcache.full_kv_pool):
        full = _stage_local_layer_mapping(kvcache.full_attention_layer_id_mapping, kvcache.start_layer)
        yield _mha_device_pool_entry(PoolName.KV, kvcache.full_kv_pool, full, page)
        yield _mamba_device_pool_entry(params.req_to_token_pool, kvcache.start_layer)


def _plain(*pools: Any) -> bool:
    return all(type(p) is MHATokenToKVPool for p in pools)


@dataclass(frozen=True)
class DevicePages:
    """One pool: a page is a chunk of one block, with a plane for each run of bytes of each layer."""

    entry: Any  # SGLang's DevicePoolEntry
    group: Group
    pages: tuple[PagesAt, ...]
    layers: tuple[int, ...]  # SGLang's transfer layers, in the order of a load

    @classmethod
    def of(cls, id: int, entry: Any) -> DevicePages:
        layers = tuple(sorted(entry.layer_mapping))
        planes, pages = [], []
        for at, layer in enumerate(layers):
            mapped = entry.layer_mapping[layer]
            buffers = [mapped] if isinstance(mapped, int) else list(mapped)
            parts = [(i, j) for i in range(len(entry.components)) for j in buffers]
            for part, (i, j) in enumerate(parts):
                address, stride, size = entry.buffer_meta[i][j]
                buffer = entry.components[i][j]
                if not buffer[0].is_contiguous() or (entry._row_span > 1 and stride * entry._row_span != size):
                    raise Refused(f"pool {entry.name.value}: a page of layer {layer} is not one run of bytes")
                planes.append(Plane(at, part, size))
                pages.append(PagesAt(address, stride * entry._row_span, buffer.shape[0] // entry._row_span))
        return cls(entry, Group(id, 1, planes, membership=True), tuple(pages), layers)

    def blocks(self, indices: Any) -> list[int]:
        """Returns the pages of a transfer, the slots of which are whole pages."""
        return [row // self.entry._row_span for row in self.entry.prepare_locations(indices)]

    @property
    def layout(self) -> list[Any]:
        """Returns the description that must agree for servers to share bytes of a page."""
        e = self.entry
        buffers = [[[str(b.dtype), *b.shape[1:]] for b in component] for component in e.components]
        return [e.name.value, e.indices_from_pool.value, type(e.device_pool).__name__, e.page_size, e._row_span, buffers,
                sorted([layer, mapped] for layer, mapped in e.layer_mapping.items())]


def layout(pools: Sequence[DevicePages]) -> str:
    return hashlib.blake2b(json.dumps([p.layout for p in pools]).encode(), digest_size=16).hexdigest()
