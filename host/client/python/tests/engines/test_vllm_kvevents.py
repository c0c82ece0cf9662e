"""What the connector makes of a host's events, with requests of vLLM's own and a double of the host's stream."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import needs
from processes import wait_for

needs("vllm")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from test_events import Host, Stream, batch, snapshot  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.block_pool import BlockPool  # noqa: E402
from vllm.v1.core.kv_cache_utils import (  # noqa: E402
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.request import Request  # noqa: E402

from kvhost import HostGoneError  # noqa: E402
from kvhost.events import Event, Position  # noqa: E402
from kvhost.keys import KeyChain  # noqa: E402
from kvhost.vllm import compat  # noqa: E402
from kvhost.vllm.groups import GroupPlan  # noqa: E402
from kvhost.vllm.kvevents import KVEvents  # noqa: E402

HASH, BLOCK, CHUNK = 16, 32, 64
TOKENS = list(range(300))
KEYS = KeyChain(CHUNK).extend(TOKENS)
init_none_hash(sha256)  # random: once for all requests


def request(tokens: list[int] = TOKENS, **options: Any) -> Request:
    params = SamplingParams(max_tokens=2)
    return Request("r", tokens, params, None, block_hasher=get_request_block_hasher(HASH, sha256), **options)


def of(key: bytes, stored: bool = True, group: int = 0) -> Event:
    return Event(stored, bytes(16), group, key)


class Rig:
    def __init__(self, stages: int = 1, groups: tuple[GroupPlan, ...] = (GroupPlan(0, BLOCK, CHUNK),)) -> None:
        self.hosts = [Host() for _ in range(stages)]
        self.later, self.alive = 0.0, True
        self.pool = BlockPool(4, enable_caching=True, hash_block_size=HASH, enable_kv_cache_events=True)
        clearings = compat.Clearings()
        clearings.watch(self.pool)
        self.events = KVEvents(
            groups, HASH, "DISK", stages, self.open, lambda: self.alive,
            cleared=clearings.happened, clock=lambda: time.monotonic() + self.later,
        )  # fmt: skip
        self.at = 0
        for stage in range(stages):
            self.stream(stage).say(*snapshot())
            self.settle(stage)
        assert self.events.take() == []

    def open(self, stage: int, after: Position | None) -> Any:
        return self.hosts[stage].open(after) if self.alive else None

    def found(self, r: Request, count: int) -> None:
        self.events.describe(r, KEYS, 0, count)
        self.events.found(KEYS[:count])

    def stream(self, stage: int = 0, n: int = 0) -> Stream:
        wait_for("the stream is open", lambda: len(self.hosts[stage].streams) > n)
        return self.hosts[stage].streams[n]

    def say(self, *events: Event, stage: int = 0, n: int = 0) -> None:
        """What the host says, which is read when this returns."""
        self.at += 1
        self.stream(stage, n).say(batch(*events, at=self.at), batch(at=self.at))
        self.settle(stage, n)

    def settle(self, stage: int = 0, n: int = 0) -> None:
        stream = self.stream(stage, n)
        wait_for("the stream is read", lambda: stream.waits and not stream.batches.qsize())

    def take(self) -> list[str]:
        """The events, as words: chunks by their number."""
        said = []
        for e in self.events.take():
            assert isinstance(e, (BlockStored, BlockRemoved)) and e.medium == "DISK"
            said.append(f"{'+' if isinstance(e, BlockStored) else '-'}{self.names[e.block_hashes[-1]]}")
        return said

    @property
    def names(self) -> dict[Any, int]:
        hashes = request().block_hashes
        return {maybe_convert_block_hash(hashes[(i + 1) * CHUNK // HASH - 1]): i for i in range(len(KEYS))}


def taken(rig: Rig) -> list[Any]:
    return list(rig.events.take())


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def rig(**options: Any) -> Rig:
        made.append(Rig(**options))
        return made[-1]

    yield rig
    for r in made:
        r.events.close()


def test_a_chunk_is_announced_when_the_host_has_it(make: Callable[..., Rig]) -> None:
    rig, r = make(), request()
    rig.events.describe(r, KEYS, 0, 3)
    assert rig.take() == []
    rig.say(of(KEYS[1]), of(KEYS[0]), of(b"another engine's".ljust(32)))
    first, second = taken(rig)  # whatever came first: routers look for a parent
    hashes = [maybe_convert_block_hash(h) for h in r.block_hashes]
    assert first == BlockStored(
        block_hashes=[hashes[1], hashes[3]], parent_block_hash=None, token_ids=TOKENS[:CHUNK], block_size=BLOCK,
        lora_id=None, medium="DISK", lora_name=None, group_idx=0, locality="LOCAL",
    )  # fmt: skip
    assert second.block_hashes == [hashes[5], hashes[7]] and second.parent_block_hash == hashes[3]
    rig.say(of(KEYS[1], stored=False), of(KEYS[2], stored=False))
    (removed,) = taken(rig)
    assert removed == BlockRemoved([hashes[5], hashes[7]], "DISK", group_idx=0, locality="LOCAL")


def test_what_a_lookup_found_is_announced(make: Callable[..., Rig]) -> None:
    rig, r = make(), request()
    rig.found(r, 2)
    assert rig.take() == ["+0", "+1"]
    rig.found(r, 3)
    assert rig.take() == ["+2"]
    rig.say(of(KEYS[1], stored=False), of(KEYS[2]))
    assert rig.take() == ["-1", "-2"]  # a lookup does not get past the second


@pytest.mark.parametrize(("length", "want"), [(1000, 2), (2000, 0)])
def test_a_text_of_the_clients_is_not_repeated_for_each_block_if_it_is_long(
    make: Callable[..., Rig], length: int, want: int
) -> None:
    rig = make()
    rig.found(request(cache_salt="s" * length), 2)
    assert len(taken(rig)) == want


def test_what_another_engine_stores_is_announced(make: Callable[..., Rig]) -> None:
    """Of a prompt that this one has looked up: its own store would find it there, and the host would say nothing."""
    rig, r = make(), request()
    rig.events.describe(r, KEYS, 0, 2)
    rig.say(of(KEYS[0]), of(KEYS[1]))
    assert rig.take() == ["+0", "+1"]
    rig.say(of(KEYS[0], stored=False))
    assert rig.take() == ["-0", "-1"]
    rig.say(of(KEYS[0]))
    assert rig.take() == ["+0", "+1"]


def test_every_pipeline_stage_must_have_it(make: Callable[..., Rig]) -> None:
    rig, r = make(stages=2), request()
    rig.events.describe(r, KEYS, 0, 2)
    rig.say(of(KEYS[0]), of(KEYS[1]))
    rig.say(of(KEYS[0]), stage=1)
    assert rig.take() == ["+0"]
    rig.say(of(KEYS[0], stored=False))
    rig.say(of(KEYS[1]), stage=1)
    assert rig.take() == ["-0"]
    rig.say(of(KEYS[0]))
    assert rig.take() == ["+0", "+1"]


def test_a_snapshot_tells_what_is_gone_and_what_came(make: Callable[..., Rig]) -> None:
    rig, r = make(), request()
    rig.found(r, 3)
    rig.events.describe(r, KEYS, 3, 4)
    assert rig.take() == ["+0", "+1", "+2"]
    rig.stream().say(HostGoneError("restarted"))
    rig.stream(n=1).say(*snapshot(of(KEYS[0]), of(KEYS[1]), of(KEYS[3]), epoch=2))
    rig.settle(n=1)
    assert rig.take() == ["-2"]
    rig.say(of(KEYS[2]), n=1)
    assert rig.take() == ["+2", "+3"]


def test_what_is_announced_while_a_snapshot_is_read_stays(make: Callable[..., Rig]) -> None:
    """The reader dropped it from the snapshot, because it was not known then."""
    rig, r = make(), request()
    rig.stream().say(*snapshot(of(KEYS[0])))
    rig.settle()
    rig.found(r, 1)
    assert rig.take() == ["+0"] and rig.take() == []


def test_what_is_evicted_while_a_snapshot_is_read_goes(make: Callable[..., Rig]) -> None:
    rig, r = make(), request()
    rig.found(r, 2)
    assert rig.take() == ["+0", "+1"]
    first, second, end = snapshot(of(KEYS[0]), of(KEYS[1]), at=9)
    rig.stream().say(first)
    rig.settle()
    assert rig.take() == []
    rig.stream().say(second, end, batch(of(KEYS[1], stored=False), at=10))  # the host says so behind the snapshot
    rig.settle()
    assert rig.take() == ["-1"]


def test_routers_that_were_made_to_forget(make: Callable[..., Rig]) -> None:
    """By the engine's AllBlocksCleared, which is published before what is announced again."""
    rig, r = make(), request()
    rig.found(r, 3)
    assert rig.take() == ["+0", "+1", "+2"]
    rig.say(of(KEYS[2], stored=False))
    rig.found(r, 1)
    assert rig.pool.reset_prefix_cache() and rig.pool.take_events() == [AllBlocksCleared()]
    assert rig.take() == ["+0", "+1"] and rig.take() == []
    rig.found(r, 2)
    assert rig.take() == []


def test_a_step_announces_so_many(make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVEvents, "MOST_SAID", 2)
    rig, r = make(), request()
    rig.found(r, 3)
    assert [rig.take() for _ in range(3)] == [["+0", "+1"], ["+2"], []]
    rig.pool.reset_prefix_cache()
    assert rig.take() == ["+0", "+1"]
    rig.pool.reset_prefix_cache()
    assert [rig.take() for _ in range(3)] == [["+0", "+1"], ["+2"], []]


def test_a_reset_that_fails_changes_nothing(make: Callable[..., Rig]) -> None:
    rig, r = make(), request()
    rig.found(r, 1)
    assert rig.take() == ["+0"]
    rig.pool.get_new_blocks(1)
    assert not rig.pool.reset_prefix_cache() and rig.take() == []


def test_a_host_that_stays_away_and_comes_back(make: Callable[..., Rig]) -> None:
    rig, r = make(), request()
    rig.found(r, 3)
    assert rig.take() == ["+0", "+1", "+2"]
    rig.alive, rig.later = False, 25.0
    rig.stream().say(HostGoneError("away"))
    assert rig.take() == []
    rig.later = 60.0
    assert rig.take() == ["-0", "-1", "-2"] and rig.take() == []
    rig.alive = True
    rig.stream(n=1).say(*snapshot(of(KEYS[0]), of(KEYS[1])))
    rig.settle(n=1)
    assert rig.hosts[0].asked[-1] is None, "the host was asked for what it still has"
    assert rig.take() == ["+0", "+1"]
    rig.say(of(KEYS[2]), n=1)
    assert rig.take() == ["+2"]


def test_a_host_that_is_back_soon_announces_nothing(make: Callable[..., Rig]) -> None:
    rig, r = make(), request()
    rig.found(r, 2)
    rig.say()
    assert rig.take() == ["+0", "+1"]
    rig.alive, rig.later = False, 25.0
    rig.stream().say(HostGoneError("away"))
    assert rig.take() == []
    rig.alive = True
    rig.say(of(KEYS[1], stored=False), n=1)
    assert rig.hosts[0].asked[-1] == Position(1, 1)
    assert rig.take() == ["-1"]


def test_new_weights(make: Callable[..., Rig]) -> None:
    rig, r = make(), request()
    rig.found(r, 1)
    rig.events.describe(r, KEYS, 1, 2)
    assert rig.take() == ["+0"]
    rig.events.forget()
    rig.say(of(KEYS[1]))
    assert rig.take() == ["-0"]
    rig.found(r, 2)
    assert rig.take() == ["+0", "+1"]
    rig.pool.reset_prefix_cache()  # as the engine does it: routers have forgotten all
    rig.events.forget()
    assert rig.take() == []


def test_the_memory_of_chunks_is_bounded(make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVEvents, "MOST_BYTES", 2 * 1500)
    rig, r, other = make(), request(), request(tokens=TOKENS[1:])
    rig.found(r, 2)
    assert rig.take() == ["+0", "+1"]
    rig.events.describe(other, KeyChain(CHUNK).extend(TOKENS[1:]), 0, 1)
    assert rig.take() == ["-0", "-1"]  # the second is not found without the first


def test_groups_with_a_window_have_no_events(make: Callable[..., Rig]) -> None:
    rig, r = make(groups=(GroupPlan(0, BLOCK, CHUNK), GroupPlan(1, HASH, CHUNK, window=50))), request()
    rig.events.describe(r, KEYS, 0, 1)
    rig.say(of(KEYS[0], group=1))
    assert rig.take() == []
    rig.say(of(KEYS[0]))
    assert rig.take() == ["+0"]


def test_all_groups_of_full_attention_must_have_it(make: Callable[..., Rig]) -> None:
    rig, r = make(groups=(GroupPlan(0, BLOCK, CHUNK), GroupPlan(2, HASH, CHUNK))), request()
    rig.events.describe(r, KEYS, 0, 1)
    rig.say(of(KEYS[0]))
    assert rig.take() == []
    rig.say(of(KEYS[0], group=2))
    both = taken(rig)
    assert [(e.group_idx, e.block_size, len(e.block_hashes)) for e in both] == [(0, BLOCK, 2), (2, HASH, 4)]
    rig.say(of(KEYS[0], stored=False))
    assert [(e.group_idx, e.block_hashes) for e in taken(rig)] == [(e.group_idx, e.block_hashes) for e in both]


def test_what_the_hashes_cover_besides_tokens(make: Callable[..., Rig]) -> None:
    rig = make()
    r = request(lora_request=LoRARequest("tuned", 3, "/lora"), cache_salt="salt")
    rig.found(r, 2)
    first, second = taken(rig)
    assert (first.lora_id, first.lora_name) == (3, "tuned")
    assert first.extra_keys == [("tuned", "salt"), ("tuned",)] and second.extra_keys == [("tuned",), ("tuned",)]


def test_an_adapter_that_was_replaced_in_place(make: Callable[..., Rig]) -> None:
    """The engine's hashes do not tell its KV from the old one's. Routers must not lose it when that goes."""
    rig, r = make(), request(lora_request=LoRARequest("tuned", 3, "/lora"))
    rig.found(r, 2)
    assert len(taken(rig)) == 2
    keys = [b"new 0".ljust(32), b"new 1".ljust(32)]
    rig.events.describe(r, keys, 0, 2)
    rig.say(of(keys[0]), of(keys[1]))
    assert [type(e) for e in taken(rig)] == [BlockRemoved, BlockRemoved, BlockStored, BlockStored]
    rig.say(of(KEYS[0], stored=False), of(KEYS[1], stored=False))
    assert rig.events.take() == []


def test_an_engine_that_hashes_nothing(make: Callable[..., Rig]) -> None:
    rig, r = make(), request()
    r.block_hashes.clear()
    rig.found(r, 2)
    rig.say(of(KEYS[1]))
    assert rig.take() == []
