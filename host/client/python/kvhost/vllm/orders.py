"""What the scheduler's connector tells the workers each step, and what they answer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvhost.shape import Namespace

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorWorkerMetadata,
    )
else:
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import (
            KVConnectorHandshakeMetadata,
            KVConnectorMetadata,
            KVConnectorWorkerMetadata,
        )
    except ImportError:  # both halves are tested without vLLM, too
        KVConnectorHandshakeMetadata = KVConnectorMetadata = KVConnectorWorkerMetadata = object


@dataclass
class ChunkOrder:
    """A chunk of one group: what to store under a key, or a key of a lease and where to load it."""

    index: int  # in the request's chain
    blocks: list[int]
    key: bytes = b""
    parent: bytes = b""


@dataclass
class StoreOrder:
    id: int
    request_id: str
    request: int  # the number in the protocol
    chunks: list[tuple[int, list[ChunkOrder]]]  # (group, its chunks)
    traceparent: str = ""  # of the engine's span of the request


@dataclass
class GroupLoad:
    group: int
    leases: list[int]  # of each pipeline stage
    chunks: list[ChunkOrder]


@dataclass
class LoadOrder:
    request_id: str
    epoch: int  # of the sessions that granted the leases
    tokens: int
    groups: list[GroupLoad]


@dataclass
class StepOrders(KVConnectorMetadata):
    epoch: int = 0  # of the sessions that the workers should have
    stores: list[StoreOrder] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)  # requests whose load is not wanted any more
    held: list[str] = field(default_factory=list)  # finished requests whose blocks wait for their stores
    ended: list[tuple[str, int]] = field(default_factory=list)  # requests that are over, and their numbers
    reused: list[int] = field(default_factory=list)  # blocks that this step or a load may overwrite
    forward: bool = True  # whether the step computes anything


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """What one worker found when the KV caches were registered."""

    refusal: str = ""  # why it does not offload
    namespace: Namespace | None = None
    epoch: int = -1  # of its session, -1 while it has none


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What happened on the workers since the last report."""

    epochs: dict[tuple[int, int], int] = field(default_factory=dict)  # (stage, rank): epoch of its session, -1 for none
    read: Counter[int] = field(default_factory=Counter)  # store orders: on how many ranks the blocks were read
    stored: list[bytes] = field(default_factory=list)  # keys that were written anew
    failed: dict[str, dict[int, bytes]] = field(default_factory=dict)  # request: chunk index: its key if it is bad
    loads: list[tuple[int, float]] = field(default_factory=list)  # (tokens, seconds)

    def __bool__(self) -> bool:
        return bool(self.epochs or self.read or self.stored or self.failed or self.loads)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        self.epochs |= other.epochs
        self.read += other.read
        self.stored += other.stored
        for request, chunks in other.failed.items():
            mine = self.failed.setdefault(request, {})
            for i, bad in chunks.items():
                mine[i] = mine.get(i) or bad
        self.loads += other.loads
        return self
