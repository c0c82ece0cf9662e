"""What differs between vLLM's versions, 0.26 to 0.33."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvhost.vllm.adapters import LoadedAdapters

log = logging.getLogger("vllm.kvhost")

#: vLLM from 0.32 on takes loads and failures in one answer; 0.26 asks for blocks only. None where it does not exist.
TransferResults: Any = getattr(base, "KVConnectorTransferResults", None)


class FailedLoads:
    """How an engine learns of loads that failed, all of which are asynchronous, and what it does then.

    | groups  | vLLM      | is told                  | under "recompute" it computes | under "fail"     |
    | one     | 0.26      | blocks                   | from the first bad block on   | ends the request |
    | one     | from 0.32 | blocks                   | from the first bad block on   | ends the request |
    | several | 0.26      | by ``restart``           | the whole request             | the whole too    |
    | several | from 0.32 | requests, not blocks     | the whole request             | ends the request |

    A load that was abandoned is told as with several groups, since its request must take other blocks. The request counts
    as received in each case. 0.32 starts a request over that is named, whatever its blocks say, and
    raises when several groups name blocks. 0.26 takes blocks only, and only with one group. Its scheduler
    restarts the requests in its ``failed_recving_kv_req_ids``, however, whatever the number of groups. This class finds
    the scheduler when it hands its block pool to the connector, and adds the requests."""

    def __init__(self, groups: int) -> None:
        """``groups`` counts all of the engine's KV cache groups, those too that are not offloaded."""
        self._by_block = groups == 1
        self._scheduler: Any = None

    def blocks(self, bad: set[int]) -> set[int]:
        """The blocks to name."""
        return bad if self._by_block else set()

    def requests(self, failed: set[str], abandoned: set[str]) -> set[str]:
        """The requests to name, where the engine takes them. Those with an abandoned load have failed, too."""
        return abandoned if self._by_block else failed

    def find_scheduler(self) -> None:
        """Call from ``bind_gpu_block_pool``: the scheduler, or a connector that wraps this one, is a caller."""
        frame = sys._getframe(1)
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(getattr(caller, "failed_recving_kv_req_ids", None), set):
                self._scheduler = caller
                return
            frame = frame.f_back  # type: ignore[assignment]

    @property
    def recoverable(self) -> bool:
        """Whether the engine can start a request over."""
        return TransferResults is not None or self._scheduler is not None

    def recomputes(self, policy: str) -> bool:
        """Whether the engine goes on with a request after a failed load. ``policy`` is what the connector was configured
        with, which is not the engine's own where another connector wraps it."""
        return bool(getattr(self._scheduler, "recompute_kv_load_failures", policy == "recompute"))

    @property
    def preempts(self) -> bool:
        """Whether requests that run can be started over, as one must be when a load inside its step has failed."""
        return self._by_block and all(
            hasattr(of, name)
            for of, name in (
                (self._scheduler, "_preempt_request"),
                (self._scheduler, "prev_step_scheduled_req_ids"),
                (getattr(self._scheduler, "kv_cache_manager", None), "evict_blocks"),
            )
        )

    def preempt(self, bad: set[int], broken: set[int]) -> None:
        """Starts the requests over that run with ``bad`` blocks, and has the engine's cache forget the ``broken`` ones: they
        are bad, or were computed behind bad ones. Call from ``update_connector_output``, in the step with the output of
        which the engine learned the bad blocks: it has dropped this output of the requests.

        Left to itself the engine computes the blocks anew where they are. A host that hangs may still write them, however,
        and the cache keeps the bad blocks of a request that was aborted, with those computed behind them (0.26 and 0.32)."""
        if not broken:
            return
        scheduler, now = self._scheduler, time.monotonic()
        manager = scheduler.kv_cache_manager
        for request in list(scheduler.running):
            (blocks,) = manager.get_block_ids(request.request_id)
            first = next((i for i, b in enumerate(blocks) if b in bad), None)
            if first is None:
                continue
            broken = broken | set(blocks[first:])
            scheduler.running.remove(request)
            if "drop_stale_output" in inspect.signature(scheduler._preempt_request).parameters:
                scheduler._preempt_request(request, now, drop_stale_output=True)
            else:
                scheduler._preempt_request(request, now)
                sampling = request.num_in_flight_tokens > 0 and not request.is_prefill_chunk
                request.async_tokens_to_discard = int(sampling)
                request.num_output_placeholders = 0
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        manager.evict_blocks(broken)

    def restart(self, failed: Sequence[Any], abandoned: Sequence[Any]) -> None:
        """Call from ``update_connector_output``, before the engine takes the requests for loaded."""
        if TransferResults is not None:
            return
        for request in [*abandoned, *(() if self._by_block else failed)]:
            request.num_computed_tokens = 0
            self._scheduler.failed_recving_kv_req_ids.add(request.request_id)


def offloaded(kv_cache_config: Any) -> Sequence[int]:
    """The KV cache groups with blocks that the engine finds again by their tokens. From 0.32 on there are others: a
    request's scratch, and windows that the engine computes anew after a hit."""
    ids: Sequence[int] | None = getattr(kv_cache_config, "prefix_cacheable_group_ids", None)
    return range(len(kv_cache_config.kv_cache_groups)) if ids is None else ids


def continues(vllm_config: Any) -> bool:
    """Whether the engine computes the same tokens behind a prefix that its cache has already. 0.32 does not where it
    turns its own prefix cache off, for the latent vectors of MLA on a processor without AMX."""
    on_cpu = vllm_config.device_config.device_type == "cpu"
    mla = getattr(vllm_config.model_config, "use_mla", False)
    return not (on_cpu and mla and not vllm_config.cache_config.enable_prefix_caching)


def shards(spec: Any, parallel_config: Any) -> int:
    """Over how many ranks decode context parallelism spreads a block's tokens. Before 0.32 it spreads all groups."""
    return int(parallel_config.decode_context_parallel_size) if getattr(spec, "dcp_sharded", True) else 1


def replicated(spec: Any, parallel_config: Any) -> bool:
    """Whether every rank of a stage holds the same bytes of a layer. From 0.32 on its spec says so; before, only the
    latent vectors of MLA were the same on all."""
    if shards(spec, parallel_config) > 1:
        return False
    return bool(spec.max_tp_shards == 1 if hasattr(spec, "max_tp_shards") else "MLA" in type(spec).__name__)


def window(spec: Any) -> int:
    """How many tokens of a sliding window the engine keeps."""
    return int(spec.sliding_window + getattr(spec, "extra_retained_tokens", 0))


def loaded_adapters(vllm_config: Any) -> LoadedAdapters | None:
    """What the worker loads of LoRA adapters. Call from ``register_kv_caches``: the model runner is a caller."""
    frame = sys._getframe(1) if vllm_config.lora_config is not None else None
    while frame is not None:
        manager = getattr(frame.f_locals.get("self"), "lora_manager", None)
        if manager is not None:
            from vllm.lora.utils import get_adapter_absolute_path

            return LoadedAdapters(manager, get_adapter_absolute_path)
        frame = frame.f_back
    if vllm_config.lora_config is not None:
        log.error("kvhost: NOT OFFLOADING requests with LoRA adapters: the model runner has no lora_manager")
    return None


def host_attention_isa(vllm_config: Any) -> str:
    """The instruction set of vLLM's CPU attention: it decides how a page is laid out."""
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    except ImportError:
        return ""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return str(_get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype))


def ranks() -> tuple[int, int]:
    """This worker's (pipeline stage, rank in the stage)."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return get_pp_group().rank_in_group, get_tp_group().rank_in_group


def waits_for_layers(forward_context: Any) -> bool:
    """Whether the step calls ``wait_for_layer_load`` before each layer's attention, and not one graph for all of them."""
    if getattr(forward_context, "attn_metadata", None) is None:
        return False  # the V2 runner's full graphs
    from vllm.config import CUDAGraphMode

    return bool(forward_context.cudagraph_runtime_mode != CUDAGraphMode.FULL)


def kinds(kv_cache_config: Any) -> Sequence[str]:
    """The name of each group's attention in events, such as full_attention."""
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    return [get_kv_cache_spec_kind(g.kv_cache_spec).value for g in kv_cache_config.kv_cache_groups]


def hash_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """How many tokens one of a request's block hashes covers."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


class Clearings:
    """Notices that the engine has emptied its prefix cache, and so tells routers to forget the engine.

    Connectors do not see ``reset_prefix_cache`` unless it empties theirs as well. From then on the block pool has
    another table of its cached blocks."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._table: Any = None

    def watch(self, block_pool: Any) -> None:
        """Call from ``bind_gpu_block_pool``."""
        self._pool = block_pool
        self.happened()

    @property
    def noticed(self) -> bool:
        """Whether they are, in this version."""
        return self._table is not None

    def happened(self) -> bool:
        """Since the last call."""
        last, self._table = self._table, getattr(self._pool, "cached_block_hash_to_block", None)
        return last is not self._table


def event_extra_keys(request: Any, first: int, end: int, block_tokens: int) -> list[tuple[Any, ...] | None] | None:
    """What the engine's hashes of these blocks cover besides tokens, as its own events name it. None if that is
    nothing."""
    from vllm.v1.core import kv_cache_utils

    keys: list[tuple[Any, ...] | None] = []
    item = 0
    for start in range(first, end, block_tokens):
        extra, item = kv_cache_utils.generate_block_hash_extra_keys(request, start, start + block_tokens, item)
        keys.append(extra)
    if not any(keys):
        return None
    published: Any = getattr(kv_cache_utils, "to_event_extra_keys", list)  # 0.33 tags the keys, but not in events
    return published(keys)  # type: ignore[no-any-return]


def engine_config() -> tuple[Any, Any]:
    """vLLM's configuration and that of its KV cache. Call where vLLM makes a tier of its offloading: it hands over neither,
    and has both in a caller. None where it has not."""
    frame = sys._getframe(1)
    while frame is not None:
        config, cache = (frame.f_locals.get(name) for name in ("vllm_config", "kv_cache_config"))
        if hasattr(config, "kv_transfer_config") and hasattr(cache, "kv_cache_groups"):
            return config, cache
        frame = frame.f_back  # type: ignore[assignment]
    return None, None


def keep_ended_requests() -> None:
    """For vLLM 0.26's manager of tiers, whichever those are. It forgets a request at its end, and ends the engine with a
    KeyError when the CPU tier has room only then for the request's last chunks. In 0.32 the request ends after them."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
    from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager as Manager

    plain = Manager.prepare_store
    if hasattr(RequestOffloadState, "finished_signaled") or hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def prepare_store(self: Any, keys: Any, req_context: Any) -> Any:
        ended = req_context.req_id not in self._req_state
        if ended:
            self.on_new_request(req_context)
        try:
            return plain(self, keys, req_context)
        finally:
            if ended:
                self.on_request_finished(req_context)

    Manager.prepare_store = prepare_store


def set_aside(offloading_spec: Any, load: Any) -> bool:
    """Gives the rows of a tier's load keys that are no request's: requests find their chunks missing and go on, and vLLM has no
    other use for the rows until the load is answered, as failed. Returns whether this vLLM lets it."""
    policy: Any = getattr(getattr(getattr(offloading_spec, "_manager", None), "primary_tier", None), "_policy", None)
    if not all(hasattr(policy, name) for name in ("get", "insert", "remove")):
        return False
    chunks = {key: policy.get(key) for key in load.keys}
    if any(chunk is None or chunk.is_ready for chunk in chunks.values()):
        return False
    keys = []
    for key, chunk in chunks.items():
        policy.remove(key)
        keys.append(b"%b kvhost %d" % (key, load.job_id))
        policy.insert(keys[-1], chunk)
    load.keys = keys
    return True


def row_tensors(kv_cache_config: Any, groups: Sequence[int]) -> list[tuple[int, dict[str, int]]] | None:
    """The tensors of vLLM's offloading in their order in a row: the bytes of a block, and how many of them each layer uses.
    Layers of several groups share a tensor. None where it is not known: layers lie side by side in a block, or a group's
    layers differ, of which the scheduler sees one."""
    specs: dict[str, Any] = {}
    for at in groups:
        group = kv_cache_config.kv_cache_groups[at]
        specs |= dict.fromkeys(group.layer_names, group.kv_cache_spec)
        if len(groups) > 1 and hasattr(group.kv_cache_spec, "kv_cache_specs"):
            return None
    tensors: dict[Any, dict[str, int]] = {}
    pages: dict[Any, int] = {}
    places = _places(kv_cache_config, specs)
    if places is None:
        return None
    for layer, place in places:
        pages.setdefault(place, specs[layer].page_size_bytes)
        used = _unpadded(specs[layer]) if len(groups) > 1 else pages[place]
        tensors.setdefault(place, {})[layer] = min(used, pages[place])
        if pages[place] != specs[layer].page_size_bytes:
            return None
    return [(pages[place], used) for place, used in tensors.items()]


def _places(kv_cache_config: Any, specs: dict[str, Any]) -> list[tuple[str, Any]] | None:
    """Layers in the order of their tensors, and what is the same for layers that share one."""
    if all(hasattr(t, "shared_by") for t in kv_cache_config.kv_cache_tensors):  # 0.26
        if any(t.block_stride for t in kv_cache_config.kv_cache_tensors):
            return None
        return [(layer, i) for i, t in enumerate(kv_cache_config.kv_cache_tensors) for layer in t.shared_by if layer in specs]
    at: dict[str, int] = {}
    for t in kv_cache_config.kv_cache_tensors:
        if any(t.block_stride != specs[layer].page_size_bytes for layer in t.layers if layer in specs):
            return None
        at |= {layer: t.offset + i * t.layer_stride for i, layer in enumerate(t.layers)}
    whole = {tuple(t.layers) for t in kv_cache_config.kv_cache_tensors}
    for group in kv_cache_config.kv_cache_groups:
        if tuple(group.layer_names) not in whole and group.layer_names[0] in specs:
            return None  # its layers differ
    return [(layer, at[layer]) for layer in specs]


def _unpadded(spec: Any) -> int:
    """The bytes of a page that are used, and copied."""
    if hasattr(spec, "unpadded_page_size_bytes"):
        return int(spec.unpadded_page_size_bytes)
    if getattr(spec, "page_size_padded", None) is None:
        return int(spec.page_size_bytes)
    return int(dataclasses.replace(spec, page_size_padded=None).page_size_bytes)


def block_hashes(cache_config: Any) -> tuple[str, int, bool]:
    """The algorithm of vLLM's block hashes, the bytes of each, and whether another process computes the same ones. What the
    chain of hashes begins with is in all of them."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    algorithm = str(cache_config.prefix_caching_hash_algo)
    fixed = hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED") and not algorithm.startswith("xxhash")  # 0.26 has none
    return algorithm, len(get_hash_fn_by_name(algorithm)(b"")), fixed or "PYTHONHASHSEED" in os.environ
