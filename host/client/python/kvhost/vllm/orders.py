"""The messages between the scheduler's half and the workers: orders of a step, and reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvhost.shape import Namespace
from kvhost.vllm.adapters import Content, Loaded, Rank

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
else:
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
    except ImportError:  # both halves are tested without vLLM, too
        KVConnectorMetadata = KVConnectorWorkerMetadata = object


@dataclass
class ChunkOrder:
    """A chunk of one group to store under a key, or a chunk of a lease to load into blocks."""

    index: int  # index in the request's chain
    blocks: list[int]
    key: bytes = b""
    parent: bytes = b""


@dataclass
class StoreOrder:
    id: int
    request_id: str
    request: int  # the request's number in the protocol
    chunks: list[tuple[int, list[ChunkOrder]]]  # (group, its chunks)
    traceparent: str = ""  # traceparent of the engine's span of the request
    adapter: Content | None = None  # the content of the request's LoRA adapter in the keys; None: no adapter


@dataclass
class GroupLoad:
    group: int
    leases: list[int]  # the lease of each pipeline stage
    chunks: list[ChunkOrder]


@dataclass
class LoadOrder:
    id: int
    request_id: str
    epoch: int  # epoch of the sessions that granted the leases
    tokens: int
    groups: list[GroupLoad]
    adapter: Content | None = None  # as in a store order
    in_step: bool = False  # the order's step computes behind the load


@dataclass
class StepOrders(KVConnectorMetadata):
    epoch: int = 0  # epoch of the sessions that the workers should have
    stores: list[StoreOrder] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    cancels: list[int] = field(default_factory=list)  # numbers of load orders to cancel
    ended: list[tuple[str, int]] = field(default_factory=list)  # requests that have ended, and their numbers
    forward: bool = True  # whether the step computes anything


def node() -> str:
    """Returns a name of the machine that is the same in all of its containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclass
class Registration:
    """The result of one worker's registration of the KV caches: the namespace of its bytes, or the reason for a
    refusal."""

    namespace: Namespace | None = None
    refusal: str = ""
    node: str = field(default_factory=node)


class LoadTime(NamedTuple):
    """The time of a rank's complete load."""

    order: int
    tokens: int
    seconds: float  # seconds until the worker noticed its end
    over: float  # time of its end, by time.monotonic


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """The workers' report since the last one."""

    registered: dict[tuple[int, int], Registration] = field(default_factory=dict)  # (stage, rank), in its first report
    epochs: dict[tuple[int, int], int] = field(default_factory=dict)  # (stage, rank): epoch of its session, -1 for none
    free: Counter[int] = field(default_factory=Counter)  # by order: number of ranks on which the host has ended the use of its blocks
    stored: list[bytes] = field(default_factory=list)  # keys of chunks that were written, and were not resident before
    failed: dict[str, dict[int, bytes]] = field(default_factory=dict)  # by request and chunk index: the key if its bytes are bad, else b""
    broken: set[int] = field(default_factory=set)  # blocks that a failed load inside the step did not fill
    abandoned: dict[int, str] = field(default_factory=dict)  # requests of loads that the host neither ends nor cancels, by order
    dropped: Counter[str] = field(default_factory=Counter)  # number of chunks that were not sent, by cause
    loads: list[LoadTime] = field(default_factory=list)
    loaded: Counter[str] = field(default_factory=Counter)  # by request: number of ranks on which its load is over or failed
    adapters: dict[Rank, dict[int, Loaded]] = field(default_factory=dict)  # the adapters that each rank has loaded, by number

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        self.registered |= other.registered
        self.epochs |= other.epochs
        self.free += other.free
        self.stored += other.stored
        for request, chunks in other.failed.items():
            mine = self.failed.setdefault(request, {})
            for i, bad in chunks.items():
                mine[i] = mine.get(i) or bad
        self.broken |= other.broken
        self.abandoned |= other.abandoned
        self.dropped += other.dropped
        self.loads += other.loads
        self.loaded += other.loaded
        self.adapters |= other.adapters
        return self
