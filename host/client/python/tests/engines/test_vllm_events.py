"""KV cache events of a real engine, as a router sees them with vLLM's own classes."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm_model as model
from needs import needs
from processes import DEADLINE, Host, wait_for
from vllm_engine import BLOCK, CHUNK, Engine, Tokens

needs("vllm")

import zmq  # noqa: E402
from msgspec.msgpack import Decoder  # noqa: E402
from vllm.distributed.kv_events import (  # noqa: E402
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)

import kvhost  # noqa: E402
from kvhost.keys import KeyChain  # noqa: E402


def prompt(seed: int, length: int = 1500) -> Tokens:
    return random.Random(seed).choices(range(3, model.VOCAB), k=length)


LONG = [prompt(i) for i in range(3)]
CHUNKS = 1500 // CHUNK


class Router:
    """Subscribes, and asks for what it missed."""

    def __init__(self, events: str, replay: str) -> None:
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.connect(events)
        self._events.setsockopt_string(zmq.SUBSCRIBE, "kv@")
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(replay)
        self._decoder = Decoder(type=KVEventBatch)
        self._next = 0
        self.seen: list[Any] = []

    def catch_up(self) -> None:
        """All that was published since the last call."""
        self._replay.send_multipart((b"", self._next.to_bytes(8, "big")))
        while True:
            assert self._replay.poll(int(1000 * DEADLINE)), "no answer to a replay request"
            *_, number, payload = self._replay.recv_multipart()
            if number == ZmqEventPublisher.END_SEQ:
                break
            self._take(int.from_bytes(number, "big"), payload)
        while self._events.poll(0):
            _, number, payload = self._events.recv_multipart()
            self._take(int.from_bytes(number, "big"), payload)

    def _take(self, number: int, payload: bytes) -> None:
        if number < self._next:
            return  # the replay had it
        assert number == self._next, "a batch was lost"
        self._next += 1
        self.seen += self._decoder.decode(payload).events

    def of(self, medium: str) -> list[Any]:
        return [e for e in self.seen if getattr(e, "medium", None) == medium]

    def resident(self, medium: str) -> dict[int, BlockStored]:
        """By block hash: what is announced now."""
        there: dict[int, BlockStored] = {}
        for e in self.seen:
            if isinstance(e, AllBlocksCleared):
                there.clear()
            for h in e.block_hashes if getattr(e, "medium", None) == medium else ():
                if isinstance(e, BlockStored):
                    there[h] = e
                else:
                    assert there.pop(h, None) is not None, "something was removed that was not there"
        return there

    def close(self) -> None:
        self._context.destroy(linger=0)


class Setting:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model.write(folder / "llama", model.config(3), seed=7)
        self.host = Host(folder, capacity="64MiB")
        self.host.start()
        topic = "kv@node@model"
        at = {name: f"ipc://{folder}/{name}" for name in ("engine", "engine-replay")}
        events = {
            "enable_kv_cache_events": True, "publisher": "zmq", "topic": topic, "endpoint": at["engine"],
            "replay_endpoint": at["engine-replay"],
        }  # fmt: skip
        self.engine = Engine(folder, "engine", folder / "llama", self.host, blocks=200, vllm={"kv_events_config": events})
        self.of_engine = Router(at["engine"], at["engine-replay"])

    def settle(self, true: Any) -> None:
        """Steps until the engine's events say so: they are published with a step's output."""

        def settled() -> bool:
            self.engine.generate([[5, 6, 7]], 2)
            self.of_engine.catch_up()
            return bool(true())

        wait_for("the engine's events", settled)

    def resident_keys(self) -> set[bytes]:
        stream = kvhost.EventStream.connect(self.host.socket, b"", 32)
        keys: set[bytes] = set()
        for batch in stream:
            keys |= {e.key for e in batch.events}
            if batch.snapshot_end:
                break
        stream.close()
        return keys

    def close(self) -> None:
        self.of_engine.close()
        self.engine.kill()
        self.host.kill()


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    s = Setting(tmp_path_factory.mktemp("events"))
    yield s
    s.close()


def tokens_of(resident: dict[int, BlockStored], prompt: Tokens) -> int:
    """How many leading tokens of a prompt a router finds, by following parents and tokens."""
    found, parent = 0, None
    events = {(e.parent_block_hash, tuple(e.token_ids)): e for e in resident.values()}
    while (e := events.get((parent, tuple(prompt[found : found + CHUNK])))) is not None:
        found, parent = found + CHUNK, e.block_hashes[-1]
    return found


def keys(prompt: Tokens) -> list[bytes]:
    return KeyChain(CHUNK).extend(prompt)


def test_stored_chunks_have_the_engines_own_hashes(setting: Setting) -> None:
    setting.engine.one_by_one(LONG)
    setting.settle(lambda: len(setting.of_engine.of("DISK")) == 3 * CHUNKS)
    of_gpu: dict[Any, list[int]] = {}
    (kind,) = {e.kv_cache_spec_kind for e in setting.of_engine.of("GPU") if isinstance(e, BlockStored)}
    assert kind
    for e in setting.of_engine.of("GPU"):
        if isinstance(e, BlockStored):
            for i, h in enumerate(e.block_hashes):
                of_gpu[h] = e.token_ids[i * e.block_size : (i + 1) * e.block_size]
    for e in setting.of_engine.of("DISK"):
        assert isinstance(e, BlockStored) and e.block_size == BLOCK and (e.group_idx, e.locality) == (0, "LOCAL")
        assert e.kv_cache_spec_kind == kind
        assert e.token_ids == [t for h in e.block_hashes for t in of_gpu[h]] and len(e.token_ids) == CHUNK
    resident = setting.of_engine.resident("DISK")
    assert [tokens_of(resident, p) for p in LONG] == [CHUNKS * CHUNK] * 3
    assert tokens_of(resident, LONG[0][1:]) == 0


def test_after_a_reset_all_is_told_again(setting: Setting) -> None:
    """Behind the AllBlocksCleared with which routers forget it. A hit is not told again."""
    before = len(setting.of_engine.seen)

    def of_disk() -> list[Any]:
        return [e for e in setting.of_engine.seen[before:] if getattr(e, "medium", "") == "DISK"]

    setting.engine.reset()
    setting.settle(lambda: len(of_disk()) == 3 * CHUNKS)
    cleared = setting.of_engine.seen.index(AllBlocksCleared(), before)
    assert cleared < setting.of_engine.seen.index(of_disk()[0], before)
    resident = setting.of_engine.resident("DISK")
    assert [tokens_of(resident, p) for p in LONG] == [CHUNKS * CHUNK] * 3
    assert [n for _, n in setting.engine.one_by_one(LONG)] == [CHUNKS * CHUNK] * 3
    setting.settle(lambda: True)
    assert len(of_disk()) == 3 * CHUNKS


def test_a_host_that_was_killed_comes_back(setting: Setting) -> None:
    """The host's stream begins again with a snapshot, and the engine tells only what differs."""
    setting.host.stop(signal.SIGKILL)
    setting.host.start()
    more = prompt(50, 600)

    def stored() -> bool:
        setting.engine.reset()
        setting.engine.generate([more])
        setting.of_engine.catch_up()
        return tokens_of(setting.of_engine.resident("DISK"), more) == 600 // CHUNK * CHUNK

    wait_for("a new chunk is announced", stored)
    resident = setting.of_engine.resident("DISK")
    assert [tokens_of(resident, p) for p in LONG] == [CHUNKS * CHUNK] * 3  # no false removals


def test_evictions(setting: Setting) -> None:
    """64 MiB hold 80 chunks or so."""
    crowd = [prompt(100 + i) for i in range(24)]
    setting.engine.generate(crowd, 1)
    setting.settle(lambda: any(isinstance(e, BlockRemoved) for e in setting.of_engine.of("DISK")))

    def agree() -> bool:
        setting.engine.generate([[5, 6, 7]], 2)
        setting.of_engine.catch_up()
        there = setting.resident_keys()
        resident = setting.of_engine.resident("DISK")
        told = {k for p in LONG + crowd for k in keys(p)[: tokens_of(resident, p) // CHUNK]}
        return bool(told) and told <= there

    wait_for("the engine's events agree with the host", agree)
