"""What the adapter for LMCache is made of, without LMCache."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from kvhost.lmcache.keys import Chains, host_key
from kvhost.lmcache.residents import Residents
from kvhost.lmcache.tenants import HASHED, TenantError, check_tenants, tenant
from kvhost.objects import Kind, Locks

KIND = Kind("m", "lmcache", (4096,))


@dataclass(frozen=True)
class Key:
    chunk_hash: bytes
    model_name: str = "m"
    kv_rank: int = 1 << 24 | 1 << 8
    object_group_id: int = 0
    cache_salt: str = ""


def hit(*keys: bytes) -> Any:
    return SimpleNamespace(index={k: i for i, k in enumerate(keys)}, session=SimpleNamespace(lease_seconds=60.0))


def test_all_but_the_model_is_in_the_key() -> None:
    base = Key(bytes(32))
    others = [
        replace(base, chunk_hash=b"\1" + bytes(31)),
        replace(base, kv_rank=2 << 24 | 2 << 8),
        replace(base, object_group_id=1),
        replace(base, cache_salt="a"),
        replace(base, cache_salt="ab"),
        replace(base, cache_salt="a", chunk_hash=b"b" + bytes(32)),
    ]
    made = {host_key(k) for k in [base, *others]}
    assert len(made) == 1 + len(others)
    assert all(len(k) == 32 for k in made)
    # Stored objects are found under these by later versions, too.
    assert host_key(base).hex() == "27d841b714c96709b4dca4e9b12a03bf79b51a8c98d9c792b0651d79d31cd7d1"



def test_a_client_chooses_the_salt() -> None:
    """It may be of any length, and no text at all. What is on disks keeps its name."""
    salts = ["s" * n for n in (1, (1 << 16) - 1, 1 << 16, 1 << 20)] + ["\ud800", "\ud801"]
    made = {host_key(Key(bytes(32), cache_salt=salt)) for salt in salts}
    assert len(made) == len(salts), f"{len(salts)} salts make {len(made)} keys, want one each"
    assert all(tenant(salt, {}) >= HASHED for salt in salts)
    whole = Key(bytes(32), cache_salt="s" * (8 << 20))
    begin = time.process_time()
    host_key(whole), tenant(whole.cache_salt, {})
    once, begin = time.process_time() - begin, time.process_time()
    for n in range(100):
        host_key(replace(whole, chunk_hash=n.to_bytes(32, "big"))), tenant(whole.cache_salt, {})
    assert time.process_time() - begin < 10 * once, "want a salt of 8 MiB read once for all keys of a prompt"


def test_no_field_of_a_key_moves_into_another() -> None:
    seen: dict[bytes, Key] = {}
    texts = ["", "a", "aa", "\0", "\0\0a", "a" * 300]
    for salt in texts:
        for chunk in [t.encode() for t in texts]:
            for rank, group in ((0, 0), (0, 1), (1, 0), (97, 0), (0, 97), (1 << 24, 256)):
                k = Key(chunk, kv_rank=rank, object_group_id=group, cache_salt=salt)
                made = host_key(k)
                assert made not in seen, f"{k} has the key of {seen[made]}"
                seen[made] = k


def test_tenants() -> None:
    assert tenant("", {}) == 0
    assert tenant("", {"": 3}) == 3
    assert tenant("team", {"team": 7}) == 7
    made = tenant("team", {})
    assert made == tenant("team", {"other": 1}) and HASHED <= made < 0xFFFFFFFF
    check_tenants({"a": 0, "b": HASHED - 1})
    for wrong in ({"a": -1}, {"a": HASHED}, {"a": "1"}, {"a": True}, ["a"]):
        with pytest.raises(TenantError):
            check_tenants(wrong)


def test_a_lookup_tells_the_order_of_a_prompt() -> None:
    chains = Chains(most=4)
    ranks = [Key(bytes([c]) * 32, kv_rank=r) for r in (1, 2) for c in (1, 2)]
    names = [host_key(k) for k in ranks]
    chains.learn(ranks, names)
    assert [chains.place(n) for n in names] == [(b"", 0), (names[0], 1), (b"", 0), (names[2], 1)]
    more = [Key(b"x" * 32)]
    chains.learn(more, [b"x"])
    assert chains.place(names[0]) == (b"", 0)  # the oldest made room
    assert chains.place(names[1]) == (names[0], 1)


def test_a_load_takes_the_lease_that_fits_best() -> None:
    locks, small, large = Locks(), hit(b"a", b"b"), hit(b"a", b"b", b"c")
    locks.hold(KIND, large)
    locks.hold(KIND, small)
    assert locks.take(KIND, [b"a", b"b"]) is small
    assert locks.take(KIND, [b"a", b"b"]) is large
    assert locks.take(KIND, [b"a", b"b"]) is None
    assert locks.take(Kind("other", "lmcache", (4096,)), [b"a"]) is None


def test_what_is_unlocked_before_the_load_is_released_when_nothing_is_left() -> None:
    locks, one = Locks(), hit(b"a", b"b", b"c")
    locks.hold(KIND, one)
    assert locks.drop([b"c"]) == []
    assert locks.take(KIND, [b"a", b"b", b"c"]) is None  # c is not locked any more
    assert locks.drop([b"a", b"b"]) == [one]
    assert locks.count() == 0
    assert locks.drop([b"a"]) == []


def test_two_requests_with_the_same_keys_keep_their_leases() -> None:
    locks, first, second = Locks(), hit(b"a", b"b"), hit(b"a", b"b")
    locks.hold(KIND, first)
    locks.hold(KIND, second)
    mine = locks.take(KIND, [b"a", b"b"])
    assert locks.drop([b"a", b"b"]) == []  # of the one that was loaded: its lease is used up
    other = locks.take(KIND, [b"a", b"b"])
    assert {id(mine), id(other)} == {id(first), id(second)}
    assert locks.drop([b"a", b"b"]) == []
    assert locks.count() == 0


def test_locks_that_nobody_drops_are_forgotten_when_their_leases_are_over() -> None:
    now = 0.0
    locks = Locks(clock=lambda: now)
    locks.hold(KIND, hit(b"a"))
    now = 119
    locks.hold(KIND, hit(b"b"))
    assert locks.count() == 2
    now = 121
    locks.hold(KIND, hit())
    locks.hold(KIND, hit(b"c"))
    assert locks.count() == 2 and locks.take(KIND, [b"a"]) is None


def test_residents_are_listed_in_pages() -> None:
    known: Residents[Key] = Residents()
    all_keys = [Key(bytes([i]) * 32, model_name=m) for m in ("m", "n") for i in range(5)]
    assert known.add(all_keys, 10) == all_keys
    assert known.add(all_keys[:1], 10) == []
    seen, cursor = [], None
    while True:
        page, cursor = known.page("n", 2, cursor)
        seen += [key for key, _ in page]
        if cursor is None:
            break
        known.remove(seen[-1:], 10)  # what goes between two pages does not disturb
    assert seen == all_keys[5:]
    assert known.remove(all_keys[:1], 11) == []  # another size is another object
    assert known.remove([all_keys[0], all_keys[-2], Key(b"?" * 32)], 10) == all_keys[:1]
    assert len(known) == 7
    for wrong in ((0, None), (-1, None), (1, "x")):
        with pytest.raises(ValueError):
            known.page(None, *wrong)
