"""The host's keys of LMCache's objects."""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Protocol

from kvhost.objects.kind import KEY_BYTES

_CHAINED_KEYS = 1 << 16
_LONGEST_SALT = (1 << 16) - 1  # most bytes of a salt that is used as it is


class ObjectKey(Protocol):
    """The used fields of LMCache's ``ObjectKey``."""

    @property
    def chunk_hash(self) -> bytes: ...
    @property
    def model_name(self) -> str: ...
    @property
    def kv_rank(self) -> int: ...
    @property
    def object_group_id(self) -> int: ...
    @property
    def cache_salt(self) -> str: ...


def host_key(key: ObjectKey) -> bytes:
    """Returns the host's key: a hash of all of an object's identity except the model, which is the chunk's hash,
    rank, group and salt."""
    salt, form = _salted(key.cache_salt)
    parts = struct.pack("<IIH", key.kv_rank, key.object_group_id, len(salt)) + salt + key.chunk_hash
    return hashlib.blake2b(parts, digest_size=KEY_BYTES, person=form).digest()


@functools.lru_cache(maxsize=1)  # a salt may be of any length, and all keys of a prompt have the same one
def _salted(salt: str) -> tuple[bytes, bytes]:
    """Returns a salt, or the digest of a long one, and the form of the keys with it."""
    raw = salt.encode("utf-8", "surrogatepass")
    if len(raw) <= _LONGEST_SALT:
        return raw, b"kvhost.lmcache.1"
    return hashlib.blake2b(raw, digest_size=KEY_BYTES).digest(), b"kvhost.lmcache.2"


class Chains:
    """The order of objects in prompts, which the host's policies need. LMCache's keys do not contain it, but a
    lookup names a prompt's chunks in order, rank by rank and group by group, and precedes the store."""

    def __init__(self, most: int = _CHAINED_KEYS) -> None:
        self._most = most
        self._places: dict[bytes, tuple[bytes, int]] = {}  # by key: the preceding key, and the number of preceding keys; oldest first

    def learn(self, keys: Iterable[ObjectKey], digests: Sequence[bytes]) -> None:
        """Records the keys of one lookup."""
        last: dict[tuple[int, int], tuple[bytes, int]] = {}
        for key, digest in zip(keys, digests):
            row = (key.object_group_id, key.kv_rank)
            parent, depth = last.get(row, (b"", 0))
            self._places.pop(digest, None)
            self._places[digest] = (parent, depth)
            last[row] = (digest, depth + 1)
        while len(self._places) > self._most:
            del self._places[next(iter(self._places))]

    def place(self, digest: bytes) -> tuple[bytes, int]:
        """Returns the parent and the depth of a key. An unknown key starts a prefix."""
        return self._places.get(digest, (b"", 0))
