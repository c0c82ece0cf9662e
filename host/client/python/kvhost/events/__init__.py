"""The host's stream of stored and removed chunks, for connectors (README.md in this directory)."""

from kvhost.events.reader import Change, Changed, EventReader
from kvhost.events.stream import Event, EventBatch, EventStream, Position

#: Names of tiers below a GPU. Dynamo's indexer drops events with another one, and with these in lower case.
MEDIUMS = (
    "CPU", "CPU_PINNED", "CPU_TIER1", "CPU_TIER2", "DISK", "NVME", "STORAGE", "EXTERNAL", "NETWORK", "REMOTE", "SHARED"
)

__all__ = ["MEDIUMS", "Change", "Changed", "Event", "EventBatch", "EventReader", "EventStream", "Position"]
