"""vLLM's KV cache events for the chunks in kvhost: the host's events, in terms of the engine's block hashes and tokens.

The host knows chunks by the connector's keys. A router knows blocks by the engine's hashes, and by their tokens. The
scheduler's half describes the chunks of its requests; the host's events about other keys are dropped."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvhost.events import Change, Changed, Event, EventReader, EventStream, Position
from kvhost.vllm import compat
from kvhost.vllm.chunktree import Chunk, ChunkTree
from kvhost.vllm.groups import GroupPlan

_OPTIONAL = {"group_idx", "locality"} & set(BlockStored.__struct_fields__) & set(BlockRemoved.__struct_fields__)


class _Hashes(msgspec.Struct):
    """The fields of an encoded BlockStored that a removal needs."""

    block_hashes: list[int | bytes]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(BlockStored).decode
_decode_hashes = msgspec.msgpack.Decoder(_Hashes).decode


class KVEvents:
    """The events of one engine core. Its methods run on the scheduler's thread, and wait for nothing.

    Only groups of full attention have events, since routers do not use others. A chunk is announced while all of these
    groups have it and every chunk before it, on all pipeline stages."""

    #: The most bytes of chunks that can be announced. Above that the oldest are announced as removed.
    MOST_BYTES = 1 << 28
    #: The most changes of the host that a step takes, and the most events that it returns.
    MOST_TAKEN, MOST_SAID = 1024, 256
    #: The most characters of a client's text, a picture's name or a salt, which the events of each block repeat.
    #: Requests with longer texts have no events.
    LONGEST_TEXT = 1024
    #: Seconds without a host after which all announced chunks are announced as removed.
    GONE_SECONDS = 30.0

    def __init__(
        self,
        groups: Sequence[GroupPlan],
        hash_tokens: int,
        medium: str,
        stages: int,
        open: Callable[[int, Position | None], EventStream | None],
        alive: Callable[[], bool],
        *,
        cleared: Callable[[], bool],
        kinds: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``hash_tokens`` is the number of tokens that a block hash covers. ``open`` starts a stage's stream.
        ``cleared`` returns whether the engine has made routers forget everything since its last call. ``kinds`` are
        the names of the groups' attention in the engine's own events."""
        self._groups = [g for g in groups if not g.window]
        self._at = {g.id: at for at, g in enumerate(self._groups)}
        self._hash_tokens, self._medium = hash_tokens, medium
        self._alive, self._cleared, self._kinds, self._clock = alive, cleared, kinds, clock
        self._tree = ChunkTree(stages * len(self._groups), self.MOST_BYTES)
        self._snapshots: dict[int, tuple[float, dict[bytes, int]]] = {}  # by stage: time of the snapshot's begin, and its chunks so far
        self._seen, self._away = clock(), False  # time at which the host was last there
        self._readers = [
            EventReader(
                lambda after, stage=stage: open(stage, after),  # type: ignore[misc]
                limit=1 << 14, wanted=self._wanted, name=f"-{stage}",
            )
            for stage in range(stages)
        ]

    def _wanted(self, e: Event) -> bool:
        """Whether an event is of use. Runs on a reader's thread."""
        return e.group in self._at and e.key in self._tree

    def _part(self, stage: int, group: int) -> int:
        """Returns the bit of a group in a pipeline stage, one of the parts that a chunk of the tree needs."""
        return 1 << (stage * len(self._at) + self._at[group])

    # ---- what the scheduler knows ------------------------------------------------------------------------------------

    def describe(self, request: Any, keys: Sequence[bytes], first: int, end: int) -> None:
        """Describes the chunks of a request. Call it before they are looked up or stored, since the host's events
        about other chunks are dropped."""
        texts = [request.cache_salt or "", *(f.identifier for f in request.mm_features or ())]
        if any(len(text) > self.LONGEST_TEXT for text in texts):
            return
        for i in range(first, end if self._groups else first):
            if keys[i] in self._tree:
                continue
            events = [e for g in self._groups if (e := self._describe(request, g, i)) is not None]
            if len(events) < len(self._groups):
                return
            chunk = Chunk(keys[i - 1] if i else b"", events[0].block_hashes[-1], [_encode(e) for e in events])
            self._tree.add(keys[i], chunk)

    def found(self, keys: Sequence[bytes]) -> None:
        """Records that the host has these leading chunks of a request, in all groups."""
        now = self._clock()
        for key in keys:
            self._tree.found(key, now)

    def forget(self) -> None:
        """Records that no announced chunk can be found any more."""
        self._take_clearing()
        self._tree.forget()

    def _describe(self, request: Any, g: GroupPlan, index: int) -> BlockStored | None:
        first, end = index * g.chunk_tokens, (index + 1) * g.chunk_tokens
        hashes = request.block_hashes
        if len(hashes) * self._hash_tokens < end:
            return None  # prefix caching is off, so the engine hashes nothing
        scale = g.block_tokens // self._hash_tokens
        names = [
            maybe_convert_block_hash(hashes[i * scale + scale - 1])
            for i in range(first // g.block_tokens, end // g.block_tokens)
        ]
        lora = request.lora_request
        return BlockStored(
            block_hashes=names,
            parent_block_hash=maybe_convert_block_hash(hashes[first // self._hash_tokens - 1]) if first else None,
            token_ids=list(request.all_token_ids[first:end]),
            block_size=g.block_tokens,
            lora_id=lora.adapter_id if lora else None,
            medium=self._medium,
            lora_name=lora.name if lora else None,
            extra_keys=compat.event_extra_keys(request, first, end, g.block_tokens),
            **self._optional(g),
            **({"kv_cache_spec_kind": self._kinds[g.id]} if self._kinds else {}),
        )

    def _optional(self, g: GroupPlan) -> dict[str, Any]:
        more: dict[str, Any] = {"group_idx": g.id, "locality": "LOCAL"}
        return {name: more[name] for name in _OPTIONAL}

    # ---- what the host says ------------------------------------------------------------------------------------------

    def take(self) -> list[KVCacheEvent]:
        """Returns the events since the last call. The engine publishes its own events first, among them an
        AllBlocksCleared that was made before this call."""
        self._take_clearing()
        for stage, reader in enumerate(self._readers):
            for change in reader.take(self.MOST_TAKEN):
                self._apply(stage, change)
        self._look_for_the_host()
        gone, come = self._tree.take(self.MOST_SAID)
        events: list[KVCacheEvent] = [e for chunk in gone for e in self._removed(chunk)]
        return events + [_decode(e) for chunk in come for e in chunk.events]

    def _take_clearing(self) -> None:
        if self._cleared():
            self._tree.untold()

    def _look_for_the_host(self) -> None:
        if self._alive():
            self._seen, self._away = self._clock(), False
        elif not self._away and self._clock() - self._seen > self.GONE_SECONDS:
            self._away = True
            self._snapshots.clear()
            self._tree.none()
            for reader in self._readers:
                reader.restart()  # a snapshot has the host's chunks when it is back

    def _apply(self, stage: int, change: Change) -> None:
        kind, e = change.kind, change.event
        if kind == Changed.RESET:
            # The reader may have dropped changes of chunks that were described only later. A lookup has found these
            # chunks, or will find them.
            self._snapshots[stage] = (change.when, {})
        elif kind == Changed.COMPLETE:
            since, there = self._snapshots.pop(stage, (0.0, {}))
            self._tree.only(sum(self._part(stage, group) for group in self._at), there, since)
        else:
            assert e is not None
            part = self._part(stage, e.group)
            if kind == Changed.EVICTED:
                self._tree.evicted(e.key, part)
                return
            self._tree.stored(e.key, part)
            if stage in self._snapshots:
                _, there = self._snapshots[stage]
                there[e.key] = there.get(e.key, 0) | part

    def _removed(self, chunk: Chunk) -> list[BlockRemoved]:
        return [
            BlockRemoved(block_hashes=_decode_hashes(e).block_hashes, medium=self._medium, **self._optional(g))
            for g, e in zip(self._groups, chunk.events, strict=True)
        ]

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
