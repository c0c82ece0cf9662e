"""What the scheduler's connector tells the workers each step, and what they answer."""

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
    adapter: Content | None = None  # what the keys say of the request's LoRA adapter


@dataclass
class GroupLoad:
    group: int
    leases: list[int]  # of each pipeline stage
    chunks: list[ChunkOrder]


@dataclass
class LoadOrder:
    id: int
    request_id: str
    epoch: int  # of the sessions that granted the leases
    tokens: int
    groups: list[GroupLoad]
    adapter: Content | None = None  # likewise
    in_step: bool = False  # the step that it belongs to computes behind it


@dataclass
class StepOrders(KVConnectorMetadata):
    epoch: int = 0  # of the sessions that the workers should have
    stores: list[StoreOrder] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    cancels: list[int] = field(default_factory=list)  # load orders that are not wanted any more
    ended: list[tuple[str, int]] = field(default_factory=list)  # requests that are over, and their numbers
    forward: bool = True  # whether the step computes anything


def node() -> str:
    """The machine, in the same words in all of its containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclass
class Registration:
    """What one worker found when the KV caches were registered: the namespace of its bytes, or why it refuses them."""

    namespace: Namespace | None = None
    refusal: str = ""
    node: str = field(default_factory=node)


class LoadTime(NamedTuple):
    """How long a rank's load took that loaded all."""

    order: int
    tokens: int
    seconds: float  # until the worker saw its end
    over: float  # when it ended, by time.monotonic


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What happened on the workers since the last report."""

    registered: dict[tuple[int, int], Registration] = field(default_factory=dict)  # (stage, rank), in its first report
    epochs: dict[tuple[int, int], int] = field(default_factory=dict)  # (stage, rank): epoch of its session, -1 for none
    free: Counter[int] = field(default_factory=Counter)  # orders: on how many ranks the host touches their blocks no more
    stored: list[bytes] = field(default_factory=list)  # keys that were written anew
    failed: dict[str, dict[int, bytes]] = field(default_factory=dict)  # request: chunk index: its key if it is bad
    broken: set[int] = field(default_factory=set)  # blocks that a load inside the step was to fill, and has not
    abandoned: dict[int, str] = field(default_factory=dict)  # loads that the host neither ends nor cancels: their requests
    dropped: Counter[str] = field(default_factory=Counter)  # chunks that were not sent, by cause
    loads: list[LoadTime] = field(default_factory=list)
    loaded: Counter[str] = field(default_factory=Counter)  # requests: on how many ranks their load is over, or failed
    adapters: dict[Rank, dict[int, Loaded]] = field(default_factory=dict)  # all that a rank has loaded, by number

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
