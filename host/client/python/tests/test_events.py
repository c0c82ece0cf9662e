"""A host's events: read across restarts into a bounded queue."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import pytest

from kvhost import HostGoneError
from kvhost.events import Change, Event, EventBatch, EventReader, Position
from waits import left, until

NAMESPACE = bytes(16)


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
        until("a stream", lambda: len(self.host.streams) > n)
        return self.host.streams[n]

    def read(self, count: int) -> list[str]:
        """The next changes, as words."""
        got: list[Change] = []
        while len(got) < count:
            assert self.reader.wait(left()), got
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
    until("four batches that wait", lambda: len(rig.reader._queue) == 4)
    sent = stream.sent
    assert sent <= 4
    stream.say(*snapshot(event(100)))  # the log overflowed
    assert rig.read(45) == ["reset", "complete", *(f"stored {n}" for n in range(40)), "reset", "stored 100", "complete"]
    rig.reader.close()


def test_a_full_reader_can_be_closed() -> None:
    rig = Rig(limit=1)
    rig.stream(0).say(*snapshot(*map(event, range(10))))
    until("a batch that waits", lambda: len(rig.reader._queue) == 1)
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
    until("a batch that waits", lambda: len(rig.reader._queue) == 1)
    rig.reader.restart()
    rig.stream(1).say(*snapshot(event(3)))
    assert rig.read(3) == ["reset", "stored 3", "complete"]
    rig.reader.close()


def test_unwanted_keys_are_dropped() -> None:
    rig = Rig(wanted=lambda e: e.key[-1] % 2 == 0)
    rig.stream(0).say(*snapshot(*map(event, range(5))))
    assert rig.read(5) == ["reset", "stored 0", "stored 2", "stored 4", "complete"]
    rig.reader.close()
