"""What differs between vLLM's versions, 0.26 to 0.33."""

from __future__ import annotations

import sys
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

#: vLLM 0.33 takes loads and failures in one answer; 0.26 asks for blocks only. None where it does not exist.
TransferResults: Any = getattr(base, "KVConnectorTransferResults", None)


class HybridRecovery:
    """Restarts a request whose load failed in an engine with several KV cache groups.

    From 0.33 on the engine does that itself, given ``failed_recving``. 0.26 takes failed blocks instead, and only with
    one group. Its scheduler restarts the requests in its ``failed_recving_kv_req_ids``, however, whatever the number of
    groups. This class finds the scheduler when it hands its block pool to the connector, and adds the requests."""

    def __init__(self) -> None:
        self._scheduler: Any = None

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
    def possible(self) -> bool:
        return TransferResults is not None or self._scheduler is not None

    def restart(self, requests: list[Any]) -> None:
        """Call from ``update_connector_output``, before the engine takes the requests for loaded."""
        if TransferResults is not None:
            return
        for request in requests:
            request.num_computed_tokens = 0
            self._scheduler.failed_recving_kv_req_ids.add(request.request_id)


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


def hash_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """How many tokens one of a request's block hashes covers."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


class Clearings:
    """Notices that the engine has emptied its prefix cache, and so tells routers to forget the engine.

    Connectors are not told of ``reset_prefix_cache`` unless it empties theirs as well. From then on the block pool has
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
