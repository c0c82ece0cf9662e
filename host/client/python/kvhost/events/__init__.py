"""What becomes resident in the host, and what goes: the host's stream, and a publisher of it in vLLM's format.

``python -m kvhost.events`` is the publisher (README.md beside this file)."""

from kvhost.events.reader import Change, Changed, EventReader
from kvhost.events.stream import Event, EventBatch, EventStream, Position

__all__ = ["Change", "Changed", "Event", "EventBatch", "EventReader", "EventStream", "Position"]
