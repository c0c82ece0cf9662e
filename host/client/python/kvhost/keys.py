"""Keys of chunks: a hash chain over everything that decides a chunk's KV.

A chunk's key covers the whole prefix up to its end. The chain depends neither on an engine's block hashes nor on
``PYTHONHASHSEED``, so it is stable across restarts and equal in all engines with the same namespace. A LoRA adapter is
identified by the content of its files. All integers are big-endian, all texts are preceded by their length in bytes (8
bytes):

    root   = BLAKE2b-256("kvhost chain 3" NUL, tokens per chunk (4 bytes), LoRA adapter, cache salt, generation)
    key(i) = BLAKE2b-256(key(i-1) or root, the chunk's token ids (4 bytes each),
                         for each multimodal item that overlaps the chunk: its first position relative to the chunk's
                         (8 bytes, signed), its length in tokens (4 bytes), BLAKE2b-256 of its identifier)

Clients choose the salt and the identifiers and their lengths, so each is read once only.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

KEY_BYTES = 32
ALGORITHM = "kvhost-blake2b-3"

_U32 = "I" if array("I").itemsize == 4 else "L"


@dataclass(frozen=True)
class Item:
    """A multimodal item of a prompt: placeholder tokens with KV that depends on the item's content."""

    start: int  # token position
    length: int  # tokens
    identifier: str


def _raw(s: str | bytes) -> bytes:
    return s.encode("utf-8", "surrogatepass") if isinstance(s, str) else s


def _tokens(ids: Sequence[int]) -> bytes:
    packed = array(_U32, ids)
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


class KeyChain:
    """The keys of one request's chunks, extended as its tokens become known."""

    ALGORITHM, KEY_BYTES = ALGORITHM, KEY_BYTES  # for the namespace

    def __init__(
        self,
        chunk_tokens: int,
        *,
        adapter: bytes = b"",
        salt: str = "",
        items: Sequence[Item] = (),
        generation: bytes = b"",
    ) -> None:
        """``adapter`` is a digest of a LoRA adapter's content. ``generation`` separates KV from before and after a
        change of the engine's weights."""
        self._size = chunk_tokens
        self._items = deque(
            (i.start, i.length, hashlib.blake2b(_raw(i.identifier), digest_size=KEY_BYTES).digest())
            for i in sorted(items, key=lambda i: i.start)
        )  # items that end after the last key's chunk
        root = hashlib.blake2b(b"kvhost chain 3\0" + struct.pack(">I", chunk_tokens), digest_size=KEY_BYTES)
        texts: tuple[str | bytes, ...] = adapter, salt, generation
        for raw in map(_raw, texts):
            root.update(struct.pack(">Q", len(raw)))
            root.update(raw)
        self._root = root.digest()
        self.keys: list[bytes] = []

    def extend(self, tokens: Sequence[int], count: int | None = None) -> list[bytes]:
        """Returns all keys of the full chunks in the first ``count`` tokens (default: all tokens)."""
        have = len(tokens) if count is None else min(count, len(tokens))
        for i in range(len(self.keys), have // self._size):
            start, end = i * self._size, (i + 1) * self._size
            h = hashlib.blake2b(self.keys[-1] if self.keys else self._root, digest_size=KEY_BYTES)
            h.update(_tokens(tokens[start:end]))
            while self._items and sum(self._items[0][:2]) <= start:
                self._items.popleft()
            for at, length, identifier in self._items:
                if at >= end:
                    break
                if at + length > start:
                    h.update(struct.pack(">qI", at - start, length) + identifier)
            self.keys.append(h.digest())
        return self.keys
