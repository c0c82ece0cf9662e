"""A host's events: read across restarts into a bounded queue, and published in vLLM's format."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvhost import HostGoneError
from kvhost.events import Change, Changed, Event, EventBatch, EventReader, Position
from kvhost.events.__main__ import arguments
from kvhost.events.format import Format
from kvhost.events.publisher import END, Publisher, Residents

NAMESPACE = bytes(16)


def until(condition: Callable[[], object]) -> None:
    due = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < due
        time.sleep(0.001)


def event(n: int, stored: bool = True, group: int = 0) -> Event:
    return Event(stored, NAMESPACE, group, n.to_bytes(32, "big"), max(0, n - 1).to_bytes(32, "big") if stored else b"")


def batch(*events: Event, at: int) -> EventBatch:
    return EventBatch(list(events), snapshot=False, snapshot_end=False, after=Position(1, at))


def snapshot(*events: Event, at: int = 0, epoch: int = 1) -> list[EventBatch]:
    end = EventBatch([], snapshot=True, snapshot_end=True, after=Position(epoch, at))
    return [EventBatch([e], snapshot=True, snapshot_end=False, after=None) for e in events] + [end]


class Stream:
    """A host's stream: batches at the test's word, None for its end."""

    def __init__(self) -> None:
        self.batches: queue.SimpleQueue[EventBatch | Exception | None] = queue.SimpleQueue()
        self.sent = 0
        self.waits = False  # whether it was asked for more than it had
        self.closed = False

    def say(self, *batches: EventBatch | Exception | None) -> None:
        for b in batches:
            self.batches.put(b)

    def __iter__(self) -> Iterator[EventBatch]:
        while True:
            self.waits = self.batches.empty()
            if (b := self.batches.get()) is None:
                return
            self.waits = False
            if isinstance(b, Exception):
                raise b
            self.sent += 1
            yield b

    def close(self) -> None:
        self.closed = True
        self.batches.put(None)


class Host:
    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.asked: list[Position | None] = []
        self.down = 0  # so many more attempts fail

    def open(self, after: Position | None) -> Any:
        self.asked.append(after)
        if self.down:
            self.down -= 1
            raise HostGoneError("down")
        self.streams.append(Stream())
        return self.streams[-1]


class Rig:
    def __init__(self, **options: Any) -> None:
        self.host = Host()
        self.reader = EventReader(self.host.open, **{"limit": 100, **options})

    def stream(self, n: int) -> Stream:
        until(lambda: len(self.host.streams) > n)
        return self.host.streams[n]

    def read(self, count: int) -> list[str]:
        """The next changes, as words."""
        got: list[Change] = []
        due = time.monotonic() + 60
        while len(got) < count:
            assert self.reader.wait(max(0.0, due - time.monotonic())), got
            got += self.reader.take(count - len(got))
        return [c.kind.name.lower() + (f" {int.from_bytes(c.event.key, 'big')}" if c.event else "") for c in got]


@pytest.fixture
def rig() -> Iterator[Rig]:
    r = Rig()
    yield r
    r.reader.close()
    assert r.host.streams[-1].closed


def test_a_snapshot_and_what_follows(rig: Rig) -> None:
    rig.stream(0).say(*snapshot(event(1), event(2), at=7), batch(event(3), event(1, stored=False), at=9))
    assert rig.read(6) == ["reset", "stored 1", "stored 2", "complete", "stored 3", "evicted 1"]
    assert rig.reader.take(5) == []


def test_an_empty_snapshot(rig: Rig) -> None:
    rig.stream(0).say(*snapshot())
    assert rig.read(2) == ["reset", "complete"]


def test_a_lost_stream_resumes(rig: Rig) -> None:
    rig.stream(0).say(*snapshot(at=7), batch(event(3), at=8), HostGoneError("lost"))
    rig.stream(1).say(batch(event(4), at=9), None)
    rig.stream(2).say(batch(event(5), at=10))
    assert rig.read(5) == ["reset", "complete", "stored 3", "stored 4", "stored 5"]
    assert rig.host.asked == [None, Position(1, 8), Position(1, 9)]


def test_a_snapshot_that_breaks_off_is_read_again(rig: Rig) -> None:
    rig.stream(0).say(snapshot(event(1), event(2))[0], HostGoneError("lost"))
    rig.stream(1).say(*snapshot(event(1), event(2)))
    assert rig.read(6) == ["reset", "stored 1", "reset", "stored 1", "stored 2", "complete"]
    assert rig.host.asked == [None, None]


def test_a_host_that_restarts_is_asked_until_it_answers(rig: Rig) -> None:
    rig.host.down = 3
    rig.stream(0).say(*snapshot(event(1), at=5), HostGoneError("killed"))
    rig.stream(1).say(*snapshot(event(2), at=0, epoch=2))  # another epoch: what the first said is void
    assert rig.read(6) == ["reset", "stored 1", "complete", "reset", "stored 2", "complete"]
    assert rig.host.asked[4] == Position(1, 5)


def test_a_full_queue_stops_the_reading() -> None:
    """So the host's own log overflows, and the host sends a snapshot: nothing is dropped here."""
    rig = Rig(limit=4)
    stream = rig.stream(0)
    stream.say(*snapshot(), *(batch(event(n), event(n + 1), at=n) for n in range(0, 40, 2)))
    until(lambda: len(rig.reader._queue) == 4)
    sent = stream.sent
    assert sent <= 4
    stream.say(*snapshot(event(100)))  # the log overflowed
    assert rig.read(45) == ["reset", "complete", *(f"stored {n}" for n in range(40)), "reset", "stored 100", "complete"]
    rig.reader.close()


def test_a_full_reader_can_be_closed() -> None:
    rig = Rig(limit=1)
    rig.stream(0).say(*snapshot(*map(event, range(10))))
    until(lambda: len(rig.reader._queue) == 1)
    rig.reader.close()
    assert not rig.reader._thread.is_alive() and rig.host.streams[0].closed


def test_a_restart_begins_with_a_snapshot(rig: Rig) -> None:
    rig.stream(0).say(*snapshot(event(1)), batch(event(2), at=8))
    assert rig.read(1) == ["reset"]
    rig.reader.restart()
    assert rig.reader.take(10) == [] and rig.stream(0).closed
    rig.stream(1).say(*snapshot(event(3)))
    assert rig.read(3) == ["reset", "stored 3", "complete"]
    assert rig.host.asked == [None, None]


def test_a_full_reader_can_be_restarted() -> None:
    rig = Rig(limit=1)
    rig.stream(0).say(*snapshot(*map(event, range(10))))
    until(lambda: len(rig.reader._queue) == 1)
    rig.reader.restart()
    rig.stream(1).say(*snapshot(event(3)))
    assert rig.read(3) == ["reset", "stored 3", "complete"]
    rig.reader.close()


def test_unwanted_keys_are_dropped() -> None:
    rig = Rig(wanted=lambda e: e.key[-1] % 2 == 0)
    rig.stream(0).say(*snapshot(*map(event, range(5))))
    assert rig.read(5) == ["reset", "stored 0", "stored 2", "stored 4", "complete"]
    rig.reader.close()


# ---- the format ------------------------------------------------------------------------------------------------------


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """The wire format of vLLM 0.26, as its wheel defines it."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def stored(n: int) -> BlockStored:
    return BlockStored([n], n - 1 or None, [], 256, None, "DISK", None, group_idx=0, locality="LOCAL")


def removed(*n: int) -> BlockRemoved:
    return BlockRemoved(list(n), "DISK", group_idx=0, locality="LOCAL")


def changes(*batches: EventBatch) -> list[Change]:
    rig = Rig()
    rig.stream(0).say(*batches)
    rig.stream(0).say(batch(event(999), at=999))
    got: list[Change] = []
    while not got or got[-1].event is None or got[-1].event.key != event(999).key:
        rig.reader.wait(10)
        got += rig.reader.take(100)
    rig.reader.close()
    return got[:-1]


def decoded(events: Iterator[Any]) -> list[Any]:
    payload = msgspec.msgpack.encode([1.5, list(events)])
    return msgspec.msgpack.decode(payload, type=KVEventBatch).events


def test_what_differs_from_a_snapshot_is_published() -> None:
    residents = Residents(Format(arrays=False, whole_hashes=False, medium="DISK", block_size=256))
    both_go = batch(event(2, stored=False), event(1, stored=False), event(3), at=1)
    first = changes(*snapshot(event(1), event(2)), both_go)
    assert decoded(residents.apply(first)) == [AllBlocksCleared(), stored(1), stored(2), removed(2, 1), stored(3)]
    again = changes(*snapshot(event(3), event(4), epoch=2))
    assert decoded(residents.apply(again)) == [stored(4)]
    again = changes(*snapshot(event(4), epoch=3), batch(event(4), event(9, stored=False), at=1))
    assert decoded(residents.apply(again)) == [removed(3)]  # what is known is not said again


def test_arrays_and_whole_hashes() -> None:
    residents = Residents(Format(arrays=True, whole_hashes=True, medium="CPU", block_size=128))
    said = list(residents.apply(changes(*snapshot(event(7)), batch(event(7, stored=False), at=1))))
    key, parent = event(7).key, event(7).parent
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(said)) == [
        ["AllBlocksCleared"], ["BlockStored", [key], parent, [], 128, None, "CPU", None], ["BlockRemoved", [key], "CPU"]
    ]


class Subscriber:
    """A router's side, as vLLM's example subscriber does it."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.Context()
        self.events = self.context.socket(zmq.SUB)
        self.events.connect(f"ipc://{folder}/events")
        self.events.setsockopt_string(zmq.SUBSCRIBE, "kv@")
        self.events.setsockopt(zmq.RCVTIMEO, 10_000)
        self.decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
        self.folder = folder

    def next(self) -> tuple[str, int, list[Any]]:
        topic, number, payload = self.events.recv_multipart()
        return topic.decode(), int.from_bytes(number, "big"), self.decoder.decode(payload).events

    def replay(self, start: int) -> list[tuple[int, list[Any]]]:
        ask = self.context.socket(zmq.DEALER)
        ask.setsockopt(zmq.RCVTIMEO, 10_000)
        ask.connect(f"ipc://{self.folder}/replay")
        ask.send_multipart((b"", start.to_bytes(8, "big")))
        got = []
        while (message := ask.recv_multipart())[-2] != END:
            assert message[:2] == [b"", b"kv@node@model"]
            got.append((int.from_bytes(message[-2], "big"), self.decoder.decode(message[-1]).events))
        return got


def test_published_batches_and_their_replay(tmp_path: Path) -> None:
    publisher = Publisher(
        f"ipc://{tmp_path}/events", "kv@node@model", replay_endpoint=f"ipc://{tmp_path}/replay", buffer_steps=3
    )
    subscriber = Subscriber(tmp_path)
    format = Format(arrays=False, whole_hashes=False, medium="DISK", block_size=256)
    subscriber.events.setsockopt(zmq.RCVTIMEO, 20)
    first = None
    while first is None:  # a subscription takes a moment
        publisher.publish([format.cleared()])
        try:
            first = subscriber.next()
        except zmq.Again:
            pass
    topic, number, events = first
    assert topic == "kv@node@model" and events == [AllBlocksCleared()]
    subscriber.events.setsockopt(zmq.RCVTIMEO, 10_000)
    for n in range(1, 5):
        publisher.publish([format.stored(event(n))])
        assert subscriber.next() == ("kv@node@model", number + n, [stored(n)])

    over = threading.Event()

    def serve() -> None:
        while not over.wait(0.001):
            publisher.answer_replays()

    server = threading.Thread(target=serve)
    server.start()
    try:
        assert subscriber.replay(number + 3) == [(number + 3, [stored(3)]), (number + 4, [stored(4)])]
        assert [n for n, _ in subscriber.replay(0)] == [number + 2, number + 3, number + 4]  # three are kept
        assert subscriber.replay(number + 5) == []
    finally:
        over.set()
        server.join()
    subscriber.context.destroy(linger=0)
    publisher.close()


def test_an_endpoint_that_is_taken(tmp_path: Path) -> None:
    publisher = Publisher("tcp://*:0", "kv@")
    with pytest.raises(zmq.ZMQError):
        Publisher("tcp://*:nothing", "kv@")
    publisher.close()


@pytest.mark.parametrize("wrong", [["--namespace", "xy"], ["--namespace", "00"], ["--events", "lists"], ["--medium", "disk"]])
def test_wrong_arguments(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(["--topic", "kv@a@b", *wrong])
    assert wrong[0] in capsys.readouterr().err
    assert arguments(["--topic", "t", "--namespace", "0f" * 16]).namespace == b"\x0f" * 16
