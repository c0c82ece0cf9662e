"""One rank of SGLang without its model: its own pools, allocators, tree and linker wrapper, on the processor. What a model would
write to the pools is made of the tokens, so that a page with any other bytes is seen."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from processes import DEADLINE, wait_for
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.components.base import LinkerTransferPhase
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.sampling.sampling_params import SamplingParams

from kvhost.adopted import separate_allocations
from kvhost.pulse import Pulse

FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA
LAYERS, HEADS, DIM = 6, 16, 64
_DTYPE, _MEMORY = torch.bfloat16, {"device": "cpu", "enable_memory_saver": False}


@dataclass(frozen=True)
class Shape:
    """A kind of model."""

    components: tuple[Any, ...] = (FULL,)
    page: int = 16
    slots: int = 1024
    mla: bool = False
    window: int | None = None
    full: tuple[int, ...] = tuple(range(LAYERS))  # layers with full attention

    @property
    def others(self) -> list[int]:
        return [i for i in range(LAYERS) if i not in self.full]


SHAPES = {
    "full": Shape(),
    "mla": Shape(mla=True),
    "swa": Shape((FULL, SWA), window=40, full=(1, 3, 5)),
    "mamba": Shape((FULL, MAMBA), page=1, full=(2, 5)),
}


@dataclass
class Served:
    """What became of a request."""

    device: int  # tokens of its prefix that the pools had
    loaded: int  # that the linker has promised
    aborted: bool
    wrong: list[str] = field(default_factory=list)  # bytes of the prefix that are none of its tokens


class Rank:
    """A scheduler's part of it. ``forwards`` are called before each layer."""

    def __init__(self, shape: Shape, extra: dict[str, Any], slots: int = 0, backend: str = "python", **params: Any) -> None:
        self.shape, self.slots = shape, slots or shape.slots
        separate_allocations(True)
        try:
            self._make(params | {"tree_core_backend": backend})
        finally:
            separate_allocations(False)
        self.linker: Any = create_unified_cache_linker(
            None, self.params, backend="dynamic", components=set(self.cache.components),
            config={"linker": "KvhostLinker", "linker_module_path": "kvhost.sglang",
                    "linker_extra_config": {"lookup_timeout": DEADLINE, **extra}},
        )
        self.cache.init_cache_linker(self.linker)
        self.counter = self.cache.linker.layer_done_counter
        self.kv.register_layer_transfer_counter(self.counter)
        self._rids = itertools.count()

    def _make(self, params: dict[str, Any]) -> None:
        s = self.shape
        sizes = {"size": self.slots, "page_size": s.page, "dtype": _DTYPE, "device": "cpu"}
        heads = {"head_num": HEADS, "head_dim": DIM}
        rows = {"size": 32, "max_context_len": 2 * s.slots, **_MEMORY}
        self.rows: Any = ReqToTokenPool(**rows)
        if MAMBA in s.components:
            state = Mamba2StateShape.create(
                tp_world_size=1, intermediate_size=256, n_groups=1, num_heads=2, head_dim=16, state_size=16, conv_kernel=4,
            )
            self.rows = HybridReqToTokenPool(
                **rows, mamba_size=64, mamba_spec_state_size=32, cache_params=Mamba2CacheParams(shape=state, layers=s.others),
                mamba_layer_ids=s.others, enable_mamba_extra_buffer=False, speculative_num_draft_tokens=3,
            )
            self.kv: Any = HybridLinearKVPool(
                **sizes, **heads, full_attention_layer_ids=list(s.full), mamba_pool=self.rows.mamba_pool,
            )
        elif SWA in s.components:
            self.kv = SWAKVPool(**sizes, **heads, size_swa=self.slots, swa_attention_layer_ids=s.others,
                                full_attention_layer_ids=list(s.full))
        elif s.mla:
            self.kv = MLATokenToKVPool(**sizes, kv_lora_rank=64, qk_rope_head_dim=64, layer_num=LAYERS, enable_memory_saver=False)
        else:
            self.kv = MHATokenToKVPool(**sizes, **heads, layer_num=LAYERS, enable_memory_saver=False)
        if SWA in s.components:
            self.allocator: Any = SWATokenToKVPoolAllocator(**sizes, size_swa=self.slots, kvcache=self.kv, need_sort=False)
        elif s.page == 1:
            self.allocator = TokenToKVPoolAllocator(size=self.slots, dtype=_DTYPE, device="cpu", kvcache=self.kv, need_sort=False)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(**sizes, kvcache=self.kv, need_sort=False)
        self.params = CacheInitParams(
            disable=False, req_to_token_pool=self.rows, token_to_kv_pool_allocator=self.allocator, page_size=s.page,
            tree_components=s.components, sliding_window_size=s.window, **params,
        )
        self.cache = UnifiedRadixCache(self.params)

    def waits(self, seconds: float = DEADLINE) -> None:
        """How long a lookup waits from now on: for less only where a test stops the host, as one that is slow is not stopped."""
        self.linker._options, self.linker._pulse = replace(self.linker._options, lookup_timeout=seconds), Pulse(seconds)

    # ---- what the model's bytes are ----------------------------------------------------------------------------------

    def buffers(self, layer: int) -> list[Any]:
        """The layer's pools, after the wait that an attention's access has."""
        if layer in self.shape.full and self.shape.mla:
            return [self.kv.get_key_buffer(layer)]
        if layer in self.shape.full or SWA in self.shape.components:
            return [self.kv.get_key_buffer(layer), self.kv.get_value_buffer(layer)]
        cache = self.rows.mamba2_layer_cache(layer)
        return [cache.temporal, *cache.conv]

    # ---- a request ---------------------------------------------------------------------------------------------------

    def request(self, tokens: Sequence[int], extra_key: str | None = None) -> Any:
        return Req(rid=f"r{next(self._rids)}", origin_input_text="", origin_input_ids=array("q", tokens),
                   sampling_params=SamplingParams(temperature=0, max_new_tokens=1), extra_key=extra_key)

    def admit(self, req: Any) -> tuple[int, int]:
        """Tokens of its prefix on the device, and those that a load was queued for."""
        req.init_next_round_input(self.cache)
        device, req.host_loaded_length = req.prefix_len, 0
        if req.host_hit_length:
            loaded, req.last_node = self.cache.init_load_back(InitLoadBackParams(
                best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req,
            ))
            req.host_loaded_length = loaded
            req.prefix_len += loaded
        req.lock = self.cache.lock(req.last_node)
        return device, req.host_loaded_length

    def admitted(self, req: Any) -> Served:
        return Served(*self.admit(req), False)

    def abort(self, req: Any) -> None:
        """The client goes away before the forward: SGLang cancels the load, and frees its slots."""
        self._place(req)
        self.cache.release_aborted_request(req.cache_request_handle)
        req.skip_radix_cache_insert = True
        req.finished_reason = FINISH_LENGTH(0)
        release_kv_cache(req, self.cache, checkpoint=True)

    def keys(self, tokens: Sequence[int]) -> list[str]:
        """SGLang's hashes of a prompt's pages."""
        whole = array("q", tokens[: len(tokens) // self.shape.page * self.shape.page])
        return list(get_storage_hash_str(RadixKey(whole), None, page_size=self.shape.page))

    def lengths(self, tokens: Sequence[int]) -> list[int]:
        """Those that the linker finds, in pages, for SGLang's own lookup of a prompt."""
        keys = self.keys(tokens)
        transfers = [c.build_external_linker_transfer(LinkerTransferPhase.LOOKUP, None, keys) for c in self.cache._components_tuple]
        return list(self.linker.lookup("lengths", transfers))

    def serve(self, tokens: Sequence[int], before: Callable[[int], None] = lambda layer: None) -> Served:
        return self.serve_all([tokens], before)[0]

    def serve_all(self, prompts: Sequence[Sequence[int]], before: Callable[[int], None] = lambda layer: None) -> list[Served]:
        """One batch, with a forward over all layers. ``before`` is called before each of them."""
        reqs = [self.request(t) for t in prompts]
        served = [self.admitted(r) for r in reqs]
        self.forward(reqs, served, before)
        return served

    def forward(self, reqs: Sequence[Any], served: Sequence[Served], before: Callable[[int], None] = lambda layer: None) -> None:
        self.counter.set_consumer(self.cache.ready_to_load_host_cache())
        for req in reqs:
            self._place(req)
            if (source := req.kv.mamba_cow_src_index) is not None:  # of a state that the tree keeps
                self.rows.copy_mamba_state(source, req.kv.mamba_pool_idx.reshape(1))
                req.kv.mamba_cow_src_index = None
        for layer in range(LAYERS):
            before(layer)
            for req, s in zip(reqs, served, strict=True):
                self._layer(req, layer, s)
        failed = self.cache.finish_external_linker_loads(list(reqs))
        for req, s in zip(reqs, served, strict=True):
            s.aborted = req in failed
            req.finished_reason = FINISH_LENGTH(0)
            release_kv_cache(req, self.cache, checkpoint=True)

    def _place(self, req: Any) -> None:
        """The request's row: its prefix, and slots for the rest."""
        n, prefix = len(req.origin_input_ids), req.prefix_len
        assert self.rows.alloc([req]) is not None
        rest = self._slots(-(-(n - prefix) // self.shape.page) * self.shape.page)
        self.rows.write((req.kv.req_pool_idx, slice(0, prefix)), self.cache.prefix_device_indices(req))
        self.rows.write((req.kv.req_pool_idx, slice(prefix, n)), rest[: n - prefix])
        req.extend_end = req.kv.kv_committed_len = req.kv.kv_allocated_len = n

    def _slots(self, n: int) -> Any:
        if SWA not in self.shape.components:
            if (short := n - self.allocator.available_size()) > 0:
                self.cache.evict(EvictParams(num_tokens=short))
            slots = self.allocator.alloc(n)
            assert slots is not None
            return slots
        both = self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator
        short = [max(0, n - a.available_size()) for a in both]
        if any(short):
            self.cache.evict(EvictParams(num_tokens=short[0], swa_num_tokens=short[1]))
        full, swa = (a.alloc(n) for a in both)
        assert full is not None and swa is not None
        self.allocator.set_full_to_swa_mapping(full, swa)
        return full

    def _layer(self, req: Any, layer: int, served: Served) -> None:
        n, prefix = len(req.origin_input_ids), req.prefix_len
        row = self.rows.req_to_token[req.kv.req_pool_idx, :n].to(torch.int64)
        sums = prefix_sums(req.origin_input_ids)
        state = layer not in self.shape.full and MAMBA in self.shape.components
        buffers = self.buffers(layer)
        if state:
            where = req.kv.mamba_pool_idx.reshape(1)
            seen, written = (sums[prefix - 1 : prefix], where) if prefix else (sums[:0], where[:0]), (sums[n - 1 : n], where)
        else:
            rows = row if layer in self.shape.full else self.kv.full_to_swa_index_mapping[row]
            first = 0 if layer in self.shape.full else max(0, prefix - self.shape.window)
            seen, written = (sums[first:prefix], rows[first:prefix]), (sums[prefix:], rows[prefix:])
        for part, buffer in enumerate(buffers):
            want, got = content(seen[0], layer, part, buffer), buffer[seen[1]]
            if not torch.equal(want, got):
                served.wrong.append(f"layer {layer}, part {part}")
            buffer[written[1]] = content(written[0], layer, part, buffer)

    # ---- what is seen from outside -----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Every offload is over, and SGLang has been told."""
        wait_for("the offloads", lambda: self.cache.check_hicache_events() or not self.cache.linker.pending_offloads)

    def forget(self) -> None:
        """SGLang's tree is empty, and its pools hold something else, in another order of pages."""
        self.settle()
        self.cache.evict(EvictParams(num_tokens=self.slots, swa_num_tokens=self.slots, mamba_num=64))
        self.poison()

    def poison(self) -> None:
        for entry in self.linker.pools.values():
            for buffer in entry.kv_buffer:
                buffer.view(torch.uint8).random_()
        for a in self._allocators():
            a.free_pages = a.free_pages[torch.randperm(len(a.free_pages))]

    def _allocators(self) -> list[Any]:
        return [self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator] if SWA in self.shape.components else [self.allocator]

    def leaks(self) -> dict[str, int]:
        """Slots that are neither free nor the tree's."""
        c, found = self.cache, {}
        full = self._allocators()[0]
        found["full"] = self.slots - full.available_size() - c.full_evictable_size() - c.full_protected_size()
        if SWA in self.shape.components:
            found["swa"] = self.slots - self._allocators()[1].available_size() - c.swa_evictable_size() - c.swa_protected_size()
        if MAMBA in self.shape.components:
            found["mamba"] = 64 - self.rows.mamba_allocator.available_size() - c.mamba_evictable_size() - c.mamba_protected_size()
        return {name: n for name, n in found.items() if n}

    def restart_pools(self) -> None:
        """After the tree's reset, as SGLang's flush_cache does."""
        self.rows.clear()
        self.allocator.clear()
        self.poison()

    def close(self) -> None:
        self.cache.release_host_resources()


def prefix_sums(tokens: Sequence[int]) -> Any:
    """What stands for all tokens up to each."""
    found, h = [], 7
    for t in tokens:
        h = (h * 1000003 + t + 1) % ((1 << 31) - 1)
        found.append(h)
    return torch.tensor(found, dtype=torch.int64)


def content(sums: Any, layer: int, part: int, like: Any) -> Any:
    """What a model writes for tokens: small whole numbers, which every floating type holds."""
    n = like[0].numel()
    values = (sums[:, None] * (31 * layer + 7 * part + 3) + torch.arange(n)[None] * 17) % 127
    return values.to(like.dtype).reshape(len(sums), *like.shape[1:])
