"""Client of kvhost, the per-node KV-cache offload host.

A :class:`Session` is one stream to the host. Memory is shared, never copied through the socket: an :class:`Arena` is a
sealed memfd that both processes map, and stores and loads name blocks in it.
"""

from kvhost.adopted import AdoptedMemory
from kvhost.arena import Arena, SharedMemory
from kvhost.errors import (
    Cancelled,
    Code,
    Damaged,
    Denied,
    Disagreement,
    HostError,
    HostGone,
    Invalid,
    KvhostError,
    LeaseOver,
    OverLimit,
    StorageFailed,
)
from kvhost.events import Event, EventBatch, EventStream, Position
from kvhost.keys import KeyChain
from kvhost.semaphores import ArenaSemaphores, Semaphores, Timeline
from kvhost.session import (
    NOT_WANTED,
    BlockError,
    ChunkResult,
    DiscardResult,
    EndReason,
    Hints,
    LevelHits,
    LoadChunk,
    LoadJob,
    LoadResult,
    Lookup,
    PendingLookup,
    Result,
    Session,
    StoreChunk,
    StoreJob,
    StoreResult,
)
from kvhost.shape import Group, Namespace, Plane, Region

__all__ = [
    "NOT_WANTED", "AdoptedMemory", "Arena", "ArenaSemaphores", "BlockError", "Cancelled", "ChunkResult", "Code",
    "Damaged", "Denied", "Disagreement", "DiscardResult", "EndReason", "Event", "EventBatch", "EventStream",
    "Group", "Hints", "HostError", "HostGone", "Invalid", "KeyChain", "KvhostError", "LeaseOver", "LevelHits",
    "LoadChunk", "LoadJob", "LoadResult", "Lookup", "Namespace", "OverLimit", "PendingLookup", "Plane", "Position",
    "Region", "Result", "Semaphores", "Session", "SharedMemory", "StorageFailed", "StoreChunk", "StoreJob",
    "StoreResult", "Timeline",
]
