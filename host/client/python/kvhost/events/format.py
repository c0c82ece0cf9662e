"""vLLM's KV cache events on the wire, for processes without vLLM.

A batch is an array [seconds since 1970, events, data parallel rank]. Since vLLM 0.24 an event is a map, with its class
under "type" and without fields that have their defaults. Before, it was an array that begins with the class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvhost.events.stream import Event


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


_STORED: list[Any] = [
    ("block_hashes", list[int | bytes]), ("parent_block_hash", int | bytes | None), ("token_ids", list[int]),
    ("block_size", int), ("lora_id", int | None), ("medium", str | None), ("lora_name", str | None),
]
_STORED_SINCE_24: list[Any] = [
    ("extra_keys", list[Any] | None, None), ("group_idx", int | None, None), ("kv_cache_spec_kind", str | None, None),
    ("kv_cache_spec_sliding_window", int | None, None), ("locality", str | None, None),
]
_REMOVED: list[Any] = [("block_hashes", list[int | bytes]), ("medium", str | None)]
_REMOVED_SINCE_24: list[Any] = [("group_idx", int | None, None), ("locality", str | None, None)]


class Format:
    """Makes vLLM's events of the host's. A key is a block hash; tokens are not known."""

    def __init__(self, *, arrays: bool, whole_hashes: bool, medium: str, block_size: int) -> None:
        """``arrays``: events as arrays. ``whole_hashes``: keys as bytes, not as the number in their last 8 bytes."""
        self._arrays, self._whole, self._medium, self._block_size = arrays, whole_hashes, medium, block_size
        since = ([], []) if arrays else (_STORED_SINCE_24, _REMOVED_SINCE_24)
        options: dict[str, Any] = {"tag": True, "array_like": arrays, "omit_defaults": True}
        self.block_stored: Any = msgspec.defstruct("BlockStored", _STORED + since[0], **options)
        self.block_removed: Any = msgspec.defstruct("BlockRemoved", _REMOVED + since[1], **options)
        self.all_blocks_cleared: Any = msgspec.defstruct("AllBlocksCleared", [], **options)

    def _hash(self, key: bytes) -> int | bytes:
        return key if self._whole else int.from_bytes(key[-8:], "big")

    def stored(self, e: Event) -> Any:
        more = {} if self._arrays else {"group_idx": e.group, "locality": "LOCAL"}
        return self.block_stored(
            block_hashes=[self._hash(e.key)], parent_block_hash=self._hash(e.parent) if any(e.parent) else None,
            token_ids=[], block_size=self._block_size, lora_id=None, medium=self._medium, lora_name=None, **more,
        )

    def removed(self, group: int, keys: Sequence[bytes]) -> Any:
        more = {} if self._arrays else {"group_idx": group, "locality": "LOCAL"}
        return self.block_removed(block_hashes=[self._hash(k) for k in keys], medium=self._medium, **more)

    def cleared(self) -> Any:
        return self.all_blocks_cleared()
