"""The chunks that an engine can describe, and the routers' knowledge of them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Chunk:
    parent: bytes  # the key of the chunk before it, empty for a prompt's first
    name: Hashable  # routers' name of the chunk
    events: Sequence[bytes]  # events that announce the chunk
    parts: int = 0  # parts in the host, one bit each
    found: float = 0.0  # time of the last lookup that found it


class ChunkTree:
    """A lookup stops at the first chunk that is missing. So a chunk counts for routers while it is *reachable*: the
    host has all parts of it and of every chunk before it. :meth:`take` returns the chunks that became reachable,
    parents before their children, and those that ceased to be. The others are kept: the host may get them again.

    ``in`` may be used on any thread, all methods only on one."""

    #: Bytes of a chunk besides its events, as measured.
    OVERHEAD = 1000

    def __init__(self, parts: int, most_bytes: int) -> None:
        """``parts`` is the number of parts of a chunk. Above ``most_bytes`` the chunks that were unused for longest
        are forgotten."""
        self._whole, self._most_bytes = (1 << parts) - 1, most_bytes
        self._bytes = 0
        self._chunks: OrderedDict[bytes, Chunk] = OrderedDict()  # in the order of their last requests
        self._children: dict[bytes, set[bytes]] = {}
        self._roots: dict[Hashable, bytes] = {}  # keys of first chunks, by name
        self._told: dict[bytes, None] = {}  # announced chunks; parents come first, as in _due
        self._due: dict[bytes, None] = {}  # reachable chunks that are not announced
        self._gone: deque[Chunk] = deque()  # unreachable chunks whose removal is not announced

    def __contains__(self, key: bytes) -> bool:
        return key in self._chunks

    def __len__(self) -> int:
        return len(self._chunks)

    # ---- chunks ------------------------------------------------------------------------------------------------------

    def add(self, key: bytes, chunk: Chunk) -> None:
        """Adds a new chunk. A prompt's first chunk replaces an older one of the same name: routers cannot
        distinguish the two, and the engine no longer uses the older one (its adapter's files were replaced)."""
        if chunk.parent:
            self._children.setdefault(chunk.parent, set()).add(key)
        else:
            if (other := self._roots.get(chunk.name)) is not None:
                self._forget(other)
            self._roots[chunk.name] = key
        self._chunks[key] = chunk
        self._bytes += self._size(chunk)
        while self._bytes > self._most_bytes:
            self._forget(next(iter(self._chunks)))

    def found(self, key: bytes, when: float) -> None:
        """Records that a lookup has found all parts of a chunk."""
        if (chunk := self._chunks.get(key)) is not None:
            chunk.found = when
            self._chunks.move_to_end(key)
            self.stored(key, self._whole)

    def stored(self, key: bytes, parts: int) -> None:
        if (chunk := self._chunks.get(key)) is not None:
            chunk.parts |= parts
            if not chunk.parent or self._reachable(chunk.parent):
                self._reach(key)

    def evicted(self, key: bytes, parts: int) -> None:
        if (chunk := self._chunks.get(key)) is not None:
            chunk.parts &= ~parts
            if chunk.parts != self._whole:
                self._cut(key)

    def only(self, parts: int, there: Mapping[bytes, int], since: float) -> None:
        """Records a snapshot: the host has only the parts in ``there``, and all parts of chunks that were found at
        or after ``since``."""
        for key, chunk in list(self._chunks.items()):
            lost = chunk.parts & parts & ~there.get(key, 0)
            if lost and chunk.found < since:
                self.evicted(key, lost)

    def none(self) -> None:
        """Records that the host has no chunks."""
        self._gone += [self._chunks[key] for key in self._told]
        self._told, self._due = {}, {}
        for chunk in self._chunks.values():
            chunk.parts = 0

    def forget(self) -> None:
        """Removes all chunks, which cannot be found any more."""
        self.none()
        for known in (self._chunks, self._children, self._roots):
            known.clear()
        self._bytes = 0

    def _size(self, chunk: Chunk) -> int:
        return sum(map(len, chunk.events)) + self.OVERHEAD

    def _forget(self, key: bytes) -> None:
        self._cut(key)
        chunk = self._chunks.pop(key)
        self._bytes -= self._size(chunk)
        if chunk.parent:
            siblings = self._children[chunk.parent]
            siblings.discard(key)
            if not siblings:
                del self._children[chunk.parent]
        else:
            del self._roots[chunk.name]

    # ---- routers -----------------------------------------------------------------------------------------------------

    def take(self, most: int) -> tuple[list[Chunk], list[Chunk]]:
        """Returns at most the given number of chunks: first those that became unreachable, then those that became
        reachable."""
        gone = [self._gone.popleft() for _ in range(min(most, len(self._gone)))]
        come = [key for key, _ in zip(self._due, range(most - len(gone)), strict=False)]
        for key in come:
            del self._due[key]
            self._told[key] = None
        return gone, [self._chunks[key] for key in come]

    def untold(self) -> None:
        """Records that routers have forgotten all chunks."""
        self._gone.clear()
        self._told, self._due = {}, self._told | self._due

    def _reachable(self, key: bytes) -> bool:
        return key in self._told or key in self._due

    def _reach(self, key: bytes) -> None:
        keys = [key]
        while keys:
            key = keys.pop()
            if self._chunks[key].parts == self._whole and not self._reachable(key):
                self._due[key] = None
                keys += self._children.get(key, ())

    def _cut(self, key: bytes) -> None:
        keys = [key]
        while keys:
            key = keys.pop()
            if key in self._due:
                del self._due[key]
            elif key in self._told:
                del self._told[key]
                self._gone.append(self._chunks[key])
            else:
                continue
            keys += self._children.get(key, ())
