"""vLLM's KV cache events for what kvhost keeps: the host's events, in terms of the engine's block hashes and tokens.

The host knows chunks by the connector's keys. A router knows blocks by the engine's hashes, and by their tokens. The
scheduler's half tells this module which chunks its requests have; what the host says about other keys is dropped."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvhost.events import Change, Changed, Event, EventReader, EventStream, Position
from kvhost.vllm import compat
from kvhost.vllm.groups import GroupPlan

log = logging.getLogger("vllm.kvhost")

Id = tuple[int, bytes]  # a chunk: its group and key

_OPTIONAL = {"group_idx", "locality"} & set(BlockStored.__struct_fields__) & set(BlockRemoved.__struct_fields__)


@dataclass
class Expected:
    """A chunk that the host may have soon."""

    event: BlockStored
    stages: int = 0  # those that have it, as bits


class KVEvents:
    """The events of one engine core. Its methods run on the scheduler's thread, and wait for nothing.

    Only groups of full attention are told of: routers have no use for the others. A chunk counts as stored when all
    pipeline stages have it."""

    #: Chunks that are described and not stored yet. The oldest are forgotten: the host did not keep them.
    MOST_EXPECTED = 4096
    #: Chunks that are announced. Beyond that the oldest are announced as removed.
    MOST_ANNOUNCED = 1 << 17
    #: Changes of the host that are taken in a step.
    MOST_TAKEN = 1024
    #: After so long without a host all that was announced is announced as removed.
    GONE_SECONDS = 30.0

    def __init__(
        self,
        groups: Sequence[GroupPlan],
        hash_tokens: int,
        medium: str,
        stages: int,
        open: Callable[[int, Position | None], EventStream | None],
        alive: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``hash_tokens`` are those that one of a request's block hashes covers. ``open`` starts a stage's stream."""
        self._groups = {g.id: g for g in groups if not g.window}
        self._hash_tokens, self._medium, self._alive, self._clock = hash_tokens, medium, alive, clock
        self._expected: OrderedDict[Id, Expected] = OrderedDict()
        self._announced: OrderedDict[Id, tuple[float, list[Any]]] = OrderedDict()  # when, and their block hashes
        self._resident: dict[int, set[Id]] = {}  # by stage, while its snapshot is read: announced ones that it has
        self._queue: list[KVCacheEvent] = []
        self._all_stages = (1 << stages) - 1
        self._seen = clock()  # when the host was there last
        self._readers = [
            EventReader(
                lambda after, stage=stage: open(stage, after),  # type: ignore[misc]
                limit=1 << 14, wanted=self._wanted, name=f"-{stage}",
            )
            for stage in range(stages)
        ]

    def _wanted(self, e: Event) -> bool:
        """On a reader's thread."""
        chunk = (e.group, e.key)
        return chunk in self._expected or chunk in self._announced

    # ---- what the scheduler knows ------------------------------------------------------------------------------------

    def ordered(self, request: Any, group: int, index: int, key: bytes) -> None:
        """A chunk of a request is about to be stored."""
        chunk = (group, key)
        if chunk in self._announced or chunk in self._expected:
            return
        if (event := self._describe(request, group, index)) is None:
            return
        self._expected[chunk] = Expected(event)
        while len(self._expected) > self.MOST_EXPECTED:
            self._expected.popitem(last=False)

    def found(self, request: Any, keys: Sequence[bytes]) -> None:
        """The host has these leading chunks of a request, in all groups."""
        for group in self._groups:
            for index, key in enumerate(keys):
                chunk = (group, key)
                if chunk in self._announced:
                    continue
                expected = self._expected.pop(chunk, None)
                event = expected.event if expected else self._describe(request, group, index)
                if event is not None:
                    self._announce(chunk, event)

    def forget(self) -> None:
        """Nothing that was announced can be found any more."""
        self._expected.clear()
        for chunk in list(self._announced):
            self._remove(chunk)

    def _describe(self, request: Any, group: int, index: int) -> BlockStored | None:
        g = self._groups.get(group)
        if g is None:
            return None
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
        more: dict[str, Any] = {"group_idx": group, "locality": "LOCAL"}
        return BlockStored(
            block_hashes=names,
            parent_block_hash=maybe_convert_block_hash(hashes[first // self._hash_tokens - 1]) if first else None,
            token_ids=list(request.all_token_ids[first:end]),
            block_size=g.block_tokens,
            lora_id=lora.adapter_id if lora else None,
            medium=self._medium,
            lora_name=lora.name if lora else None,
            extra_keys=compat.event_extra_keys(request, first, end, g.block_tokens),
            **{name: more[name] for name in _OPTIONAL},
        )

    # ---- what the host says ------------------------------------------------------------------------------------------

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call."""
        for stage, reader in enumerate(self._readers):
            for change in reader.take(self.MOST_TAKEN):
                self._apply(stage, change)
        if self._alive():
            self._seen = self._clock()
        elif self._announced and self._clock() - self._seen > self.GONE_SECONDS:
            self.forget()
        events, self._queue = self._queue, []
        return events

    def _apply(self, stage: int, change: Change) -> None:
        kind, e = change.kind, change.event
        if kind == Changed.RESET:
            # The reader may have dropped those that were announced since.
            self._resident[stage] = {c for c, (when, _) in self._announced.items() if when >= change.when}
            for expected in self._expected.values():
                expected.stages &= ~(1 << stage)
        elif kind == Changed.COMPLETE:
            there = self._resident.pop(stage, set())
            for chunk in [c for c in self._announced if c not in there]:
                self._remove(chunk)
        else:
            assert e is not None
            chunk = (e.group, e.key)
            if kind == Changed.STORED:
                self._stored(stage, chunk)
            elif chunk in self._announced:
                self._remove(chunk)
            elif chunk in self._expected:
                self._expected[chunk].stages &= ~(1 << stage)

    def _stored(self, stage: int, chunk: Id) -> None:
        if stage in self._resident:
            self._resident[stage].add(chunk)
        if (expected := self._expected.get(chunk)) is None:
            return
        expected.stages |= 1 << stage
        if expected.stages == self._all_stages:
            del self._expected[chunk]
            self._announce(chunk, expected.event)

    def _announce(self, chunk: Id, event: BlockStored) -> None:
        for resident in self._resident.values():
            resident.add(chunk)  # newer than the snapshot that is being read
        self._announced[chunk] = (self._clock(), event.block_hashes)
        self._queue.append(event)
        while len(self._announced) > self.MOST_ANNOUNCED:
            self._remove(next(iter(self._announced)))

    def _remove(self, chunk: Id) -> None:
        more: dict[str, Any] = {"group_idx": chunk[0], "locality": "LOCAL"}
        _, hashes = self._announced.pop(chunk)
        self._queue.append(
            BlockRemoved(block_hashes=hashes, medium=self._medium, **{name: more[name] for name in _OPTIONAL})
        )

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
