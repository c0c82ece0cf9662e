"""Client of kvhost, the per-node KV-cache offload host.

A :class:`Session` is one stream to the host. Memory is shared, never copied through the socket: an :class:`Arena` is a
sealed memfd that both processes map, and stores and loads name blocks in it.
"""

from importlib import metadata

from kvhost.adopted import AdoptedMemory
from kvhost.arena import Arena, SharedMemory
from kvhost.errors import (
    CancelledError,
    Code,
    DamagedError,
    DeniedError,
    DisagreementError,
    HostError,
    HostGoneError,
    HostStoppedError,
    InvalidError,
    KvhostError,
    LeaseOverError,
    LimitError,
    StorageError,
    UnknownError,
    VersionError,
)
from kvhost.events import Event, EventBatch, EventStream, Position
from kvhost.keys import KeyChain
from kvhost.semaphores import ArenaSemaphores, Semaphores, Timeline
from kvhost.session import (
    NOT_WANTED,
    BlockFailure,
    ChunkResult,
    DiscardResult,
    EndReason,
    Hints,
    LevelHits,
    Limits,
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

try:
    __version__ = metadata.version("kvhost")
except metadata.PackageNotFoundError:  # from its sources, by PYTHONPATH
    __version__ = "0+unknown"

__all__ = [
    "AdoptedMemory", "Arena", "ArenaSemaphores", "BlockFailure", "CancelledError", "ChunkResult", "Code",
    "DamagedError", "DeniedError", "DisagreementError", "DiscardResult", "EndReason", "Event", "EventBatch",
    "EventStream", "Group", "Hints", "HostError", "HostGoneError", "HostStoppedError", "InvalidError", "KeyChain", "KvhostError",
    "LeaseOverError", "LevelHits", "LimitError", "Limits", "LoadChunk", "LoadJob", "LoadResult", "Lookup",
    "NOT_WANTED", "Namespace", "PendingLookup", "Plane", "Position", "Region", "Result", "Semaphores", "Session",
    "SharedMemory", "StorageError", "StoreChunk", "StoreJob", "StoreResult", "Timeline", "UnknownError", "VersionError",
]
