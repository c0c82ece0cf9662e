"""The differences between vLLM's versions 0.26 to 0.33.

Many of the interfaces are not public. If a version lacks one, or has it in another form, the answer is "no": the engine
runs without the feature that needs it, and its log says so once."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1 import kv_cache_interface as _kv_cache_interface

from kvhost.errors import Refused
from kvhost.vllm.adapters import LoadedAdapters

log = logging.getLogger("vllm.kvhost")


_said: set[str] = set()


def _not_known(what: str, so: str, why: str = "") -> None:
    """Logs once that an interface is missing."""
    if what not in _said:
        _said.add(what)
        log.error("kvhost: this vLLM's %s is not that of 0.26 to 0.33%s: %s", what, f" ({why})" if why else "", so)


def _takes(f: Any, *names: str) -> bool:
    """Whether a function has parameters of these names, and no other required ones."""
    try:
        parameters = inspect.signature(f).parameters
    except (TypeError, ValueError):
        return False
    needed = {n for n, p in parameters.items() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    return needed <= {*names} <= parameters.keys()


def _transfer_results() -> Any:
    results = getattr(base, "KVConnectorTransferResults", None)
    if results is not None and not _takes(results, "finished_sending", "finished_recving", "failed_recving"):
        _not_known("KVConnectorTransferResults", "failed loads are told as 0.26 is told them")
        return None
    return results


#: The class by which vLLM from 0.32 on gets loads and failures in one answer. None in 0.26, which asks for blocks only.
TransferResults: Any = _transfer_results()


_DROPS = "drop_stale_output"


class FailedLoads:
    """Reports failed loads to an engine. All loads are asynchronous.

    | groups  | vLLM      | kvhost reports           | under "recompute" it computes | under "fail"     |
    | one     | 0.26      | blocks                   | from the first bad block on   | ends the request |
    | one     | from 0.32 | blocks                   | from the first bad block on   | ends the request |
    | several | 0.26      | by ``restart``           | the whole request             | the whole too    |
    | several | from 0.32 | requests, not blocks     | the whole request             | ends the request |

    An abandoned load is reported as if there were several groups, since its request must take other blocks. In each
    case the request counts as received. vLLM 0.32 restarts each named request, whatever its blocks, and raises if
    several groups name blocks. vLLM 0.26 accepts only blocks, and only of one group. But its scheduler restarts the
    requests in ``failed_recving_kv_req_ids`` with any number of groups. This class finds the scheduler when the
    connector gets its block pool, and adds the requests there."""

    def __init__(self, groups: int) -> None:
        """``groups`` is the number of all KV cache groups of the engine, offloaded or not."""
        self._by_block = groups == 1
        self._scheduler: Any = None

    def blocks(self, bad: set[int]) -> set[int]:
        """Returns the blocks to report."""
        return bad if self._by_block else set()

    def requests(self, failed: set[str], abandoned: set[str]) -> set[str]:
        """Returns the requests to report, if the engine accepts requests. Requests with an abandoned load count as
        failed."""
        return abandoned if self._by_block else failed

    def find_scheduler(self) -> None:
        """Finds the engine's scheduler among the callers. Call it from ``bind_gpu_block_pool``, which the scheduler
        calls, or a connector that wraps this one."""
        frame = sys._getframe(1)
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(getattr(caller, "failed_recving_kv_req_ids", None), set):
                self._scheduler = caller
                return
            frame = frame.f_back  # type: ignore[assignment]

    @property
    def recoverable(self) -> bool:
        """Whether the engine can restart a request."""
        return TransferResults is not None or self._scheduler is not None

    def recomputes(self, policy: str) -> bool:
        """Whether the engine computes a request after a failed load. ``policy`` is the connector's setting, which
        differs from the engine's if another connector wraps it."""
        return bool(getattr(self._scheduler, "recompute_kv_load_failures", policy == "recompute"))

    @property
    def preempts(self) -> bool:
        """Whether running requests can be restarted. A failed load inside a step needs that."""
        if not self._by_block or self._scheduler is None:
            return False
        scheduler, preempt = self._scheduler, getattr(self._scheduler, "_preempt_request", None)
        manager = getattr(scheduler, "kv_cache_manager", None)
        known = (
            isinstance(getattr(scheduler, "running", None), list)
            and isinstance(getattr(scheduler, "prev_step_scheduled_req_ids", None), set)
            and _takes(getattr(manager, "get_block_ids", None), "request_id")
            and _takes(getattr(manager, "evict_blocks", None), "block_ids")
            and _takes(preempt, "request", "timestamp", *([_DROPS] if hasattr(base, "KVConnectorTransferResults") else []))
        )
        if not known:
            _not_known("scheduler", "no load runs inside a step")
        return known

    def preempt(self, bad: set[int], broken: set[int]) -> None:
        """Restarts the running requests that have ``bad`` blocks. Removes the ``broken`` blocks from the engine's
        cache: the bad ones, and those computed from them. Call it from ``update_connector_output``, in the step with
        the output that reported the bad blocks: the engine has dropped this output of the requests.

        Otherwise the engine would compute the blocks again in place, while a hanging host may still write to them.
        Its cache would also keep the bad blocks of an aborted request and the blocks computed from them (0.26 and
        0.32)."""
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
            if hasattr(base, "KVConnectorTransferResults"):
                scheduler._preempt_request(request, now, **{_DROPS: True})
            else:  # 0.26
                scheduler._preempt_request(request, now)
                sampling = request.num_in_flight_tokens > 0 and not request.is_prefill_chunk
                request.async_tokens_to_discard = int(sampling)
                request.num_output_placeholders = 0
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        manager.evict_blocks(broken)

    def restart(self, failed: Sequence[Any], abandoned: Sequence[Any]) -> None:
        """Restarts failed requests. Call it from ``update_connector_output``, before the engine counts the requests
        as loaded."""
        if TransferResults is not None:
            return
        for request in [*abandoned, *(() if self._by_block else failed)]:
            request.num_computed_tokens = 0
            self._scheduler.failed_recving_kv_req_ids.add(request.request_id)


def offloaded(kv_cache_config: Any) -> Sequence[int]:
    """Returns the KV cache groups with blocks that the engine can find by their tokens. From 0.32 on there are also
    groups without such blocks: temporary memory of a request, and windows that the engine computes again after a
    hit."""
    ids: Sequence[int] | None = getattr(kv_cache_config, "prefix_cacheable_group_ids", None)
    return range(len(kv_cache_config.kv_cache_groups)) if ids is None else ids


def continues(vllm_config: Any) -> bool:
    """Whether a cached prefix leaves the tokens after it unchanged. In vLLM 0.32 it does not if vLLM has disabled
    its own prefix cache, as for MLA on a processor without AMX."""
    on_cpu = vllm_config.device_config.device_type == "cpu"
    mla = getattr(vllm_config.model_config, "use_mla", False)
    return not (on_cpu and mla and not vllm_config.cache_config.enable_prefix_caching)


def shards(spec: Any, parallel_config: Any) -> int:
    """Returns the number of ranks that decode context parallelism spreads a block's tokens over. Before 0.32 it
    spreads all groups."""
    return int(parallel_config.decode_context_parallel_size) if getattr(spec, "dcp_sharded", True) else 1


def replicated(spec: Any, parallel_config: Any) -> bool:
    """Whether every rank of a stage holds the same bytes of a layer. From 0.32 on the layer's spec has the answer.
    Before, only the latent vectors of MLA were equal on all ranks."""
    if shards(spec, parallel_config) > 1:
        return False
    return bool(spec.max_tp_shards == 1 if hasattr(spec, "max_tp_shards") else "MLA" in type(spec).__name__)


def head_slots(spec: Any) -> int:
    """Returns the number of heads of a block in a layer's tensor."""
    return int(getattr(spec, "num_heads", spec.num_kv_heads))


#: True in versions whose specs have the number of heads of a page: their tensors have heads before tokens.
_NAMED_LAYOUTS = hasattr(_kv_cache_interface.AttentionSpec, "num_heads")


def heads_first(vllm_config: Any) -> bool:
    """Whether heads come before tokens in the shape of a layer's tensor, independent of their order in memory."""
    return _NAMED_LAYOUTS or vllm_config.device_config.device_type == "cpu"


def heads_together(vllm_config: Any) -> str | None:
    """Returns the name of the layout that keeps a head's tokens in a block side by side, or None if the connector
    cannot choose it."""
    model = vllm_config.model_config
    if vllm_config.device_config.device_type == "cpu" or model is None or getattr(model, "use_mla", False):
        return None
    return "LBHNC" if _NAMED_LAYOUTS else "HND"


def window(spec: Any) -> int:
    """Returns the number of tokens of a sliding window that the engine keeps."""
    return int(spec.sliding_window + getattr(spec, "extra_retained_tokens", 0))


def loaded_adapters(vllm_config: Any) -> LoadedAdapters | None:
    """Returns the worker's manager of LoRA adapters. Call it from ``register_kv_caches``, which the model runner
    calls."""
    frame = sys._getframe(1) if vllm_config.lora_config is not None else None
    while frame is not None:
        manager = getattr(frame.f_locals.get("self"), "lora_manager", None)
        if hasattr(manager, "list_adapters") and _takes(getattr(manager, "_load_adapter", None), "lora_request"):
            with suppress(ImportError):
                from vllm.lora.utils import get_adapter_absolute_path

                return LoadedAdapters(manager, get_adapter_absolute_path)
        frame = frame.f_back
    if vllm_config.lora_config is not None:
        _not_known("lora_manager", "NOT OFFLOADING requests with LoRA adapters")
    return None


def holds_blocks(pool: Any) -> bool:
    """Whether the engine's block pool lets a connector hold blocks."""
    names = ("num_gpu_blocks", "get_num_free_blocks", "touch", "free_blocks", "blocks")
    known = all(hasattr(pool, name) for name in names)
    if not known:
        _not_known("block pool", "NOT OFFLOADING, since the host's blocks cannot be held")
    return known


def host_attention_isa(vllm_config: Any) -> str:
    """Returns the instruction set of vLLM's CPU attention, which decides the layout of a page."""
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    except ImportError:
        raise Refused("this vLLM does not name the instruction set that decides the layout of a page") from None
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return str(_get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype))


def ranks() -> tuple[int, int]:
    """Returns this worker's (pipeline stage, rank in the stage)."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return get_pp_group().rank_in_group, get_tp_group().rank_in_group


def waits_for_layers(forward_context: Any) -> bool:
    """Whether the step calls ``wait_for_layer_load`` before each layer's attention, and not one graph for all of them."""
    if getattr(forward_context, "attn_metadata", None) is None:
        return False  # the V2 runner's full graphs
    from vllm.config import CUDAGraphMode

    return bool(getattr(forward_context, "cudagraph_runtime_mode", CUDAGraphMode.FULL) != CUDAGraphMode.FULL)


def decodes_in_a_graph(vllm_config: Any) -> bool:
    """Whether a step in which each request computes one token may run as one CUDA graph."""
    from vllm.config import CUDAGraphMode

    mode = getattr(vllm_config.compilation_config, "cudagraph_mode", None)
    return isinstance(mode, CUDAGraphMode) and CUDAGraphMode.decode_mode(mode) == CUDAGraphMode.FULL


def kinds(kv_cache_config: Any) -> Sequence[str]:
    """Returns the name of each group's attention in events, such as full_attention."""
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    return [get_kv_cache_spec_kind(g.kv_cache_spec).value for g in kv_cache_config.kv_cache_groups]


def hash_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """Returns the number of tokens that one block hash covers."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


class Clearings:
    """Detects that the engine has emptied its prefix cache. The engine's event then makes routers forget the engine's
    blocks.

    vLLM does not tell connectors about ``reset_prefix_cache`` unless it empties their cache as well. But the block
    pool then has another table of cached blocks, which this class looks for."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._table: Any = None

    def watch(self, block_pool: Any) -> None:
        """Begins to watch the pool. Call it from ``bind_gpu_block_pool``."""
        self._pool = block_pool
        self.happened()

    @property
    def noticed(self) -> bool:
        """Whether clearings can be detected in this version."""
        return self._table is not None

    def happened(self) -> bool:
        """Whether the cache was emptied since the last call."""
        last, self._table = self._table, getattr(self._pool, "cached_block_hash_to_block", None)
        return last is not self._table


_DESCRIBED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys")


def describes_events() -> bool:
    """Whether blocks can be described as the engine's own events describe them."""
    known = False
    with suppress(ImportError):
        from vllm.distributed.kv_events import BlockStored
        from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, resolve_kv_cache_block_sizes
        from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

        known = (
            _takes(generate_block_hash_extra_keys, "request", "start_token_idx", "end_token_idx", "start_mm_idx")
            and _takes(resolve_kv_cache_block_sizes, "kv_cache_config", "vllm_config")
            and callable(get_kv_cache_spec_kind)
            and _takes(BlockStored, *_DESCRIBED)
        )
    if not known:
        _not_known("form of KV events", "routers learn nothing of the host")
    return known


def reset_past_holds(block_pool: Any, let_go: Callable[[], AbstractContextManager[None]]) -> None:
    """Lets the engine empty its prefix cache while blocks are held for the host. Otherwise the engine refuses while
    a block has a reference, its callers fail, and a stopped host could keep the references for any time."""
    plain = block_pool.reset_prefix_cache

    @functools.wraps(plain)
    def reset_prefix_cache() -> Any:
        with let_go():
            return plain()

    block_pool.reset_prefix_cache = reset_prefix_cache


def event_extra_keys(request: Any, first: int, end: int, block_tokens: int) -> list[tuple[Any, ...] | None] | None:
    """Returns what the engine's hashes of these blocks cover apart from tokens, in the form of the engine's own
    events. Returns None if they cover only tokens."""
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
    """Returns vLLM's configuration and its KV cache's configuration, or None for both. It finds them in the frames
    of its callers, since vLLM passes neither to a tier of its offloading. Call it where vLLM makes the tier."""
    frame = sys._getframe(1)
    while frame is not None:
        config, cache = (frame.f_locals.get(name) for name in ("vllm_config", "kv_cache_config"))
        if hasattr(config, "kv_transfer_config") and hasattr(cache, "kv_cache_groups"):
            return config, cache
        frame = frame.f_back  # type: ignore[assignment]
    return None, None


def mend_offloading() -> None:
    """Corrects faults of vLLM 0.26's offloading, which exist with any tier. They end the engine or store blocks that
    were not computed."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
        from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
    except ImportError:
        return  # later versions have them in another place
    plain = getattr(RequestOffloadState, "storable_chunks", None)
    old = not hasattr(RequestOffloadState, "finished_signaled") and _takes(plain, "self", "group_config", "num_offloadable_tokens")
    if old and not hasattr(plain, "__wrapped__"):
        _keep_ended_requests(TieringOffloadingManager)
        _store_what_was_computed(RequestOffloadState)


def _keep_ended_requests(manager: Any) -> None:
    """vLLM 0.26 forgets a request at its end. If the CPU tier gets room for the request's last chunks only
    afterwards, a KeyError ends the engine. In 0.32 the request ends after its chunks."""
    plain = manager.prepare_store

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

    manager.prepare_store = prepare_store


def _store_what_was_computed(state: Any) -> None:
    """vLLM 0.26 stores all tokens of a request that has ended. If the client has gone, some tokens were not
    computed: those without blocks end the engine with an AssertionError, and for the others vLLM stores the old
    content of their blocks. In requests that were not aborted only the last token has no KV."""
    plain = state.storable_chunks

    @functools.wraps(plain)
    def storable_chunks(self: Any, group_config: Any, num_offloadable_tokens: int) -> Any:
        if self.req.is_finished():
            aborted = self.req.status.name == "FINISHED_ABORTED"
            answered = max(self.req.num_prompt_tokens, self.req.num_tokens - 1)
            num_offloadable_tokens = min(num_offloadable_tokens, self.req.num_computed_tokens if aborted else answered)
        blocks = self.group_states[group_config.group_idx].block_ids
        return min(plain(self, group_config, num_offloadable_tokens), len(blocks) // self.config.blocks_per_chunk)

    state.storable_chunks = storable_chunks


def rows(job: Any) -> list[int] | None:
    """Returns the rows of the CPU tier that a tier's job reads or fills; None if they are not known."""
    ids = getattr(job, "chunk_ids", None)
    if ids is None:
        ids = getattr(job, "block_ids", None)  # 0.26
    try:
        found = [int(row) for row in ids]  # type: ignore[union-attr]
    except (TypeError, ValueError):
        found = []
    if len(found) == len(job.keys):
        return found
    _not_known("job of a tier", "its chunks are neither stored nor loaded")
    return None


def positions(req_context: Any) -> Mapping[Any, int]:
    """Returns the number of tokens up to each chunk's end, by key, as far as vLLM has it."""
    known = getattr(req_context, "_offload_key_positions", None)  # 0.26 does not have it
    return known if isinstance(known, dict) else {}


def set_aside(offloading_spec: Any, load: Any) -> bool:
    """Renames the rows of a tier's load to keys that no request has. Requests then find their chunks missing and go
    on, and vLLM does not use the rows until the load is answered as failed. Returns whether this vLLM allows it."""
    policy: Any = getattr(getattr(getattr(offloading_spec, "_manager", None), "primary_tier", None), "_policy", None)
    why, keys, placed = "", load.keys, []
    chunks: dict[bytes, Any] = {}
    try:
        insert = _insertion(policy, load)
        chunks = {key: policy.get(key) for key in keys}
        if any(chunk is None or chunk.is_ready for chunk in chunks.values()):
            return False
        load.keys = [b"%b kvhost %d" % (key, load.job_id) for key in chunks]
        for to, chunk in zip(load.keys, chunks.values(), strict=True):
            placed.append(to)
            insert(to, chunk)
        for key in chunks:
            policy.remove(key)
        return True
    except Exception as e:
        why = f"{type(e).__name__}: {e}"
    _not_known("cache policy of the CPU tier", "requests wait for a load that the host does not end", why)
    with suppress(Exception):
        load.keys = keys
    for key, chunk in chunks.items():  # each chunk has a key at every moment
        with suppress(Exception):
            if policy.get(key) is None:
                insert(key, chunk)
    for to in placed:
        with suppress(Exception):
            policy.remove(to)
    return False


def _insertion(policy: Any, load: Any) -> Callable[[Any, Any], None]:
    """Returns the function that gives a chunk a key. From 0.33 on vLLM ranks chunks by their requests."""
    *_, last = inspect.signature(policy.insert).parameters
    more = {last: load.req_context} if last == "req_context" else {}
    return functools.partial(policy.insert, **more)


def leave_rows(offloading_spec: Any, rows: Callable[[], Collection[int]]) -> bool:
    """Keeps rows out of use when vLLM empties the CPU tier, since an unanswered load may still write to them.
    ``rows`` then returns those rows. Returns whether this vLLM allows it."""
    tier = getattr(getattr(offloading_spec, "_manager", None), "primary_tier", None)
    total, taken = _row_counts(tier)
    if not total:
        return False
    plain = tier.reset_cache
    if hasattr(plain, "__wrapped__"):
        return True

    @functools.wraps(plain)
    def reset_cache() -> None:
        plain()
        left = set(rows())
        if left:
            setattr(tier, taken, total)
            tier._free_list[:] = [row for row in range(total) if row not in left]

    tier.reset_cache = reset_cache
    return True


def give_back_rows(offloading_spec: Any, rows: Iterable[int]) -> None:
    """Returns rows to vLLM that :func:`leave_rows` has kept out of use."""
    offloading_spec._manager.primary_tier._free_list.extend(rows)


def _row_counts(tier: Any) -> tuple[int, str]:
    """Returns the number of rows of a CPU tier, and the name of the attribute that counts all rows taken so far. The
    number is 0 if it is not known."""
    if isinstance(getattr(tier, "_free_list", None), list):
        for total, taken in (("_num_chunks", "_num_allocated_chunks"), ("_num_blocks", "_num_allocated_blocks")):  # 0.26
            if hasattr(tier, total) and hasattr(tier, taken):
                return int(getattr(tier, total)), taken
    return 0, ""


def row_tensors(kv_cache_config: Any, groups: Sequence[int]) -> list[tuple[int, dict[str, int]]] | None:
    """Returns the tensors of vLLM's offloading in their order in a row: the bytes of a block, and the bytes that
    each layer uses. Layers of several groups share a tensor. Returns None if the tensors are not known: layers lie
    side by side in a block, or the layers of a group differ, since the scheduler sees only one of them."""
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
    """Returns the layers in the order of their tensors, and an id that layers of one tensor share."""
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
    """Returns the used bytes of a page, which are copied."""
    if hasattr(spec, "unpadded_page_size_bytes"):
        return int(spec.unpadded_page_size_bytes)
    if getattr(spec, "page_size_padded", None) is None:
        return int(spec.page_size_bytes)
    return int(dataclasses.replace(spec, page_size_padded=None).page_size_bytes)


def block_hashes(cache_config: Any) -> tuple[str, int, bool]:
    """Returns the algorithm of vLLM's block hashes, the bytes of each, and whether another process computes the same
    ones. All hashes of a chain depend on its first value."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    algorithm = str(cache_config.prefix_caching_hash_algo)
    fixed = hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED") and not algorithm.startswith("xxhash")  # 0.26 has none
    return algorithm, len(get_hash_fn_by_name(algorithm)(b"")), fixed or "PYTHONHASHSEED" in os.environ
