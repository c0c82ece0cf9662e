"""Stores that are taken back from a real host, whose process is stopped anywhere in the middle of them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvhost import Arena, Group, Namespace, Plane, Region, Session, StoreChunk
from kvhost.errors import HostGoneError, HostStoppedError
from kvhost.objects import Connector, Kind, Mapping, ObjectStore, Options, Place, StoreObject
from kvhost.session import LoadChunk, Result
from waits import left, until

ROUNDS = int(os.environ.get("WITHDRAWAL_ROUNDS", "12"))
SEED = int(os.environ.get("WITHDRAWAL_SEED", "1"))

PAGE, PLANES, BLOCKS, CHUNKS = 256 << 10, 4, 2, 48
NAMESPACE = Namespace(
    model="m", dtype="f32", key_bytes=32, tokens_per_block=16, groups=[Group(0, BLOCKS, [Plane(i, 0, PAGE) for i in range(PLANES)], membership=True)],
)  # fmt: skip


class Host:
    def __init__(self, folder: Path, *flags: str, memory: str = "0") -> None:
        self.socket = str(folder / "s")
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [os.environ["KVHOST_BIN"], "--root", f"{folder}/kv=2GiB", "--socket", self.socket, "--http-listen", "", *flags],
                stdout=log, stderr=log, env=os.environ | {"KVHOST_STORE_MEMORY": memory},
            )
        until("the host's socket", lambda: self.process.poll() is not None or os.path.exists(self.socket), self.log.read_text)
        assert self.process.poll() is None, self.log.read_text()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        stopped = lambda: all(  # noqa: E731
            stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        )
        until("all threads are stopped", stopped)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Pages:
    """An arena with a place for each chunk."""

    def __init__(self) -> None:
        self.arena = Arena(PAGE * PLANES * BLOCKS * CHUNKS)

    def regions(self) -> list[Region]:
        return [Region(i * PAGE * BLOCKS * CHUNKS, PAGE, BLOCKS * CHUNKS) for i in range(PLANES)]

    def blocks(self, chunk: int) -> list[int]:
        return list(range(chunk * BLOCKS, (chunk + 1) * BLOCKS))

    def page(self, plane: int, block: int) -> memoryview:
        at = (plane * BLOCKS * CHUNKS + block) * PAGE
        return self.arena.view[at : at + PAGE]

    def fill(self, seed: int) -> None:
        for chunk in range(CHUNKS):
            for plane in range(PLANES):
                for b in self.blocks(chunk):
                    self.page(plane, b)[:] = content(seed, chunk, plane, b)

    def spoil(self) -> None:
        self.arena.view[:] = b"\xee" * self.arena.size


def content(seed: int, chunk: int, plane: int, block: int) -> bytes:
    return (b"%16d%16d%16d%16d" % (seed, chunk, plane, block)) * (PAGE // 64)


def key(seed: int, chunk: int) -> bytes:
    return b"%16d%16d" % (seed, chunk)


@pytest.fixture(params=["disk", "memory", "compressed"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    flags = ["--store-compression", "huffman"] if request.param == "compressed" else []
    h = Host(tmp_path, *flags, memory="1GiB" if request.param == "memory" else "0")
    yield h
    h.close()


def session(host: Host, pages: Pages, name: str) -> Session:
    s = Session(host.socket, name, NAMESPACE)
    s.register(0, pages.arena, pages.regions())
    return s


def test_what_is_taken_back_is_never_found(host: Host) -> None:
    """Whatever is found of a store is as it was before the client used the blocks again."""
    pages, found, taken = Pages(), 0, 0
    s = session(host, pages, "withdraws")
    assert s.share_withdrawals()
    for seed in range(SEED, SEED + ROUNDS):
        rng = random.Random(seed)
        pages.fill(seed)
        jobs = [
            s.store([StoreChunk(key(seed, c), pages.blocks(c)) for c in range(first, first + 4)]) for first in range(0, CHUNKS, 4)
        ]
        time.sleep(rng.random() * 0.1)
        host.stop()
        unread = [job for job in jobs if not job.was_read]
        for job in unread:
            assert job.withdraw() and job.was_read
        taken += len(unread)
        pages.spoil()
        host.go_on()
        for job in jobs:
            job.published(left())
        lookup = s.lookup([key(seed, c) for c in range(CHUNKS)])
        there = [c for c in range(CHUNKS) if lookup.has(c)]
        found += len(there)
        if there:
            result = s.load(lookup, [LoadChunk(c, pages.blocks(c)) for c in there]).wait(left())
            assert not result.failed, f"round {seed}: {result.failed}, want all loaded that was found"
        wrong = [
            c for c in there for plane in range(PLANES) for b in pages.blocks(c) if pages.page(plane, b) != content(seed, c, plane, b)
        ]
        assert not wrong, f"round {seed}: chunks {sorted(set(wrong))} hold what was written after they were taken back"
    assert taken and found, f"{taken} stores taken back, {found} chunks found in {ROUNDS} rounds, want some of each"
    s.close()


def test_a_session_that_is_closed_takes_back_what_was_not_read(host: Host) -> None:
    pages = Pages()
    s = session(host, pages, "closes")
    assert s.share_withdrawals()
    pages.fill(1)
    host.stop()
    s.store([StoreChunk(key(1, c), pages.blocks(c)) for c in range(CHUNKS)])
    s.close(0)
    pages.spoil()
    host.go_on()
    other = session(host, pages, "looks")
    lookup = other.lookup([key(1, c) for c in range(CHUNKS)])
    assert lookup.hits == 0, f"{lookup.hits} chunks are found, want none of a session that was closed before they were read"
    other.close()


def test_no_call_waits_for_a_stopped_host(host: Host) -> None:
    pages = Pages()
    s = session(host, pages, "waits")
    host.stop()
    for call in (s.ping, lambda: s.lookup([key(1, 0)]), lambda: s.discard([key(1, 0)]), lambda: session(host, pages, "comes")):
        begin = time.monotonic()
        with pytest.raises(HostStoppedError):
            call()
        assert time.monotonic() - begin < s._timeout, "want it to end before the time of a host that is slow is over"
    s.close(0)
    host.go_on()


@pytest.mark.parametrize("call", ["lookup", "touch", "discard", "store"])
def test_no_call_on_objects_in_place_waits_for_a_stopped_host(host: Host, call: str) -> None:
    """Only what a load was to fill is the host's until it goes on. A lookup copies nothing, and a store is taken back, whichever
    of them finds that the host is stopped."""
    pages, kind = Pages(), Kind("m", "test", (PAGE,))
    connector = Connector(Options(host.socket), "test")
    mapping = Mapping.find(pages.arena.address, pages.arena.size, pages.arena.fd)
    assert mapping is not None
    connector.put(kind, Place.of_blocks(mapping, pages.arena.address, pages.arena.size, PAGE))
    store = ObjectStore(connector)
    objects = [StoreObject(key(1, c), (pages.arena.address + c * PAGE,)) for c in range(CHUNKS)]
    assert store.store(kind, objects[:1]) == [Result.STORED]
    host.stop()
    ended: list[str] = []

    def ends(name: str, do: Callable[[], object]) -> None:
        try:
            do()
        except HostGoneError:
            ended.append(name)

    calls: dict[str, Callable[[], object]] = {
        "lookup": lambda: store.lookup(kind, [key(1, 0)]), "touch": lambda: store.touch(kind, [key(1, 0)]),
        "discard": lambda: store.discard(kind, [key(1, 0)]), "store": lambda: store.store(kind, objects),
    }
    threads = [threading.Thread(target=ends, args=(name, calls[name]), daemon=True) for name in {call, "store"}]
    for t in threads:
        t.start()
    for t in threads:
        t.join(left())
    assert sorted(ended) == sorted({call, "store"}), f"{ended} ended while the host was stopped, want {call} and the store"
    host.go_on()
    store.close()
