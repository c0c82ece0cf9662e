"""The model's KV by vLLM's configuration: groups, namespace, and refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvhost.errors import Refused
from kvhost.keys import ALGORITHM, KEY_BYTES
from kvhost.shape import Namespace, page_dtype
from kvhost.vllm import compat, identity
from kvhost.vllm.groups import GroupPlan, chunk_size
from kvhost.vllm.regions import GroupRegions
from kvhost.vllm.settings import Settings
from kvhost.vllm.sizes import Sizes, in_order, sizes

# Dimensions in which an engine may be parallel. The sizes of TP, PP and DCP, and each stage's layers, are in the
# namespace. DP and EP do not change the content of a rank.
_PARALLEL = {
    "tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size", "data_parallel_size",
}
# Specs by the name of their class. Any other class, and a derived class with a meaning of its own, is refused.
_FULL = {"FullAttentionSpec", "MLAAttentionSpec", "TQFullAttentionSpec", "SinkFullAttentionSpec"}
_WINDOW = {"SlidingWindowSpec", "SlidingWindowMLASpec"}

NO_CONTINUATION = (
    "MLA on this processor: vLLM computes other tokens behind a prefix of an earlier step, and turns its own prefix cache off"
)


def _layer_specs(group: Any) -> dict[str, Any]:
    spec = group.kv_cache_spec
    each = getattr(spec, "kv_cache_specs", None)  # layers of one kind that differ in size
    return {name: each[name] if each else spec for name in group.layer_names}


def plan_groups(vllm_config: Any, kv_cache_config: Any, settings: Settings) -> list[GroupPlan]:
    """Returns the cache's groups, or the reason for which they are not offloaded."""
    parallel = vllm_config.parallel_config
    for name, size in vars(parallel).items():
        if name.endswith("_parallel_size") and name not in _PARALLEL and (size or 1) > 1:
            raise Refused(f"{name} is {size}, want 1")
    if not compat.continues(vllm_config):
        raise Refused(NO_CONTINUATION)
    if not (offloaded := compat.offloaded(kv_cache_config)):
        raise Refused("the model has no KV cache whose blocks the engine finds again by their tokens")
    found: list[tuple[int, int, int]] = []  # (group, block tokens, window)
    for at in offloaded:
        group = kv_cache_config.kv_cache_groups[at]
        if getattr(group, "host_resident", False):
            raise Refused(f"KV cache group {at} lies in host memory, in a pool of its own (HiSparse)")
        specs = list(_layer_specs(group).values())
        names = {type(s).__name__ for s in specs}
        if not names <= _FULL and not names <= _WINDOW:
            kinds = ", ".join(sorted(names))
            raise Refused(f"KV cache group {at} is {kinds}; KvhostConnector supports full, MLA and sliding-window attention: for "
                          'others use the tier of vLLM\'s offloading, "secondary_tiers": [{"type": "kvhost", ...}]')
        windows = {compat.window(s) for s in specs} if names <= _WINDOW else {0}
        if len(windows) > 1:
            raise Refused(f"KV cache group {at} has windows of {sorted(windows)} tokens")
        block = group.kv_cache_spec.block_size * compat.shards(group.kv_cache_spec, parallel)
        found.append((at, block, windows.pop()))
    tokens = chunk_size(settings.chunk_tokens, [block for _, block, _ in found])
    return [GroupPlan(at, block, tokens, window) for at, block, window in found]


def pool_groups(vllm_config: Any, kv_cache_config: Any) -> list[tuple[int, int]]:
    """Returns all groups that use blocks of the engine's pool, offloaded or not: (tokens of a block, window or 0)."""
    found = []
    for group in kv_cache_config.kv_cache_groups:
        spec, parallel = group.kv_cache_spec, vllm_config.parallel_config
        windows = [compat.window(s) for s in _layer_specs(group).values() if type(s).__name__ in _WINDOW]
        found.append((spec.block_size * compat.shards(spec, parallel), max(windows, default=0)))
    return found


def _offloaded_specs(kv_cache_config: Any) -> list[tuple[str, Any]]:
    groups = [kv_cache_config.kv_cache_groups[at] for at in compat.offloaded(kv_cache_config)]
    return [layer for g in groups for layer in _layer_specs(g).items()]


def layers(kv_cache_config: Any) -> list[str]:
    """Returns the layers that are offloaded."""
    return [name for name, _ in _offloaded_specs(kv_cache_config)]


def replicated(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether every rank of a stage holds the same bytes."""
    parallel = vllm_config.parallel_config
    return all(compat.replicated(spec, parallel) for _, spec in _offloaded_specs(kv_cache_config))


def shared_sizes(vllm_config: Any, kv_cache_config: Any, settings: Settings) -> Sizes | None:
    """Returns the units that sizes share; None if each size has chunks of its own."""
    if not settings.share:
        return None
    specs = [spec for _, spec in _offloaded_specs(kv_cache_config)]
    return sizes(vllm_config, specs, replicated(vllm_config, kv_cache_config))


def stores(vllm_config: Any, kv_cache_config: Any, settings: Settings, rank: int) -> bool:
    """Whether a rank of a stage stores its bytes: one of the ranks with the same bytes does."""
    shared = shared_sizes(vllm_config, kv_cache_config, settings)
    return shared.stores(rank) if shared else not (replicated(vllm_config, kv_cache_config) and rank)


def group_regions(
    kv_cache_config: Any, plans: Sequence[GroupPlan], tensors: Mapping[str, Any], shared: Sizes | None = None
) -> list[GroupRegions]:
    """Returns the pages of every group in the engine's tensors."""
    groups = []
    for plan in plans:
        layers = []
        for name, spec in _layer_specs(kv_cache_config.kv_cache_groups[plan.id]).items():
            tensor = tensors.get(name)
            if tensor is None or not hasattr(tensor, "data_ptr"):
                raise Refused(f"layer {name}: its cache is {type(tensor).__name__}, not one tensor")
            size = getattr(spec, "unpadded_page_size_bytes", None) or spec.page_size_bytes
            layers.append((name, tensor, size))
        groups.append(GroupRegions(plan, layers, kv_cache_config.num_blocks, shared))
    return groups


def namespace(
    vllm_config: Any, kv_cache_config: Any, settings: Settings, regions: Sequence[GroupRegions],
    tensors: Mapping[str, Any], stage: int,
) -> Namespace:
    """Returns everything that must agree for engines to share bytes, except the weights
    (:func:`kvhost.vllm.identity.weighed`). Each pipeline stage has a namespace of its own."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    plans, backends = [r.plan for r in regions], _backends(vllm_config, tensors)
    shared = shared_sizes(vllm_config, kv_cache_config, settings)
    on_cpu = all(t.device.type == "cpu" for t in tensors.values())
    specs: list[Any] = [[n, type(s).__name__, s.block_size, s.page_size_bytes] for n, s in _offloaded_specs(kv_cache_config)]
    if shared:  # fields that differ between sizes are left out, and the block size if blocks of other sizes have the same bytes
        blocks = [] if in_order(backends) and not on_cpu else [p.block_tokens for p in plans]
        specs = [[[n, type(s).__name__] for n, s in _offloaded_specs(kv_cache_config)], shared.heads, blocks]
    extra = {
        "chunk_tokens": str(plans[0].chunk_tokens),
        "layout": identity.digest([[r.layout for r in regions], specs, backends]),
        "stage": f"{stage}/{parallel.pipeline_parallel_size}",
        "context_parallel": f"{parallel.decode_context_parallel_size}/{parallel.cp_kv_cache_interleave_size}",
        **identity.facts(vllm_config, settings),
    }
    if on_cpu:
        extra["isa"] = compat.host_attention_isa(vllm_config)
    return Namespace(
        model=settings.model or str(model.model), revision=settings.revision or str(model.revision or ""),
        dtype=f"{cache.cache_dtype}/{str(model.dtype).removeprefix('torch.')}", engine="vllm",
        hash_algorithm=ALGORITHM, key_bytes=KEY_BYTES, tokens_per_block=1 if shared else plans[0].block_tokens,
        tensor_parallel=parallel.tensor_parallel_size, units=shared.units if shared else 0,
        replicated=not shared and replicated(vllm_config, kv_cache_config),
        groups=[r.group for r in regions], extra=extra, page_dtype=page_dtype(t.dtype for t in tensors.values()),
    )


def _backends(vllm_config: Any, tensors: Mapping[str, Any]) -> list[str]:
    layers = vllm_config.compilation_config.static_forward_context
    found = set()
    for name in tensors:
        backend = getattr(layers.get(name), "get_attn_backend", None)
        if backend is not None:
            found.add(backend().get_name())
    return sorted(found)
