"""A host's events over ZMQ, as vLLM's ZmqEventPublisher sends an engine's."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import zmq

from kvhost.events.format import EventBatch, Format
from kvhost.events.reader import Change, Changed, EventReader

#: The sequence number that ends a replay.
END = (-1).to_bytes(8, "big", signed=True)

_BATCH = 1024  # events


class Publisher:
    """A PUB socket for batches, and a ROUTER socket that sends old ones again.

    A message is [topic, sequence number (8 bytes, big-endian), batch]. A request on the other socket is the sequence
    number to begin with. It is answered by the batches since, as far as they are kept, and one numbered -1."""

    def __init__(
        self, endpoint: str, topic: str, *, replay_endpoint: str = "", buffer_steps: int = 10_000, hwm: int = 100_000
    ) -> None:
        self._topic = topic.encode()
        self._context = zmq.Context()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._next = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._replay: Any = None
        try:
            self._publish = self._context.socket(zmq.PUB)
            self._publish.set_hwm(hwm)
            if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
                self._publish.bind(endpoint)
            else:
                self._publish.connect(endpoint)
            if replay_endpoint:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.bind(replay_endpoint)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise

    def publish(self, events: list[Any]) -> None:
        payload = self._encoder.encode(EventBatch(ts=time.time(), events=events))
        self._publish.send_multipart((self._topic, self._next.to_bytes(8, "big"), payload))
        self._sent.append((self._next, payload))
        self._next += 1

    def answer_replays(self) -> None:
        """Answers the requests that have come, without waiting for others."""
        while self._replay is not None and self._replay.poll(0):
            request = self._replay.recv_multipart()
            if len(request) != 3 or len(request[2]) != 8:
                continue  # nothing that could be answered
            client, start = request[0], int.from_bytes(request[2], "big")
            for number, payload in self._sent:
                if number >= start:
                    message = (client, b"", self._topic, number.to_bytes(8, "big"), payload)
                    self._replay.send_multipart(message)
            self._replay.send_multipart((client, b"", b"", END, b""))

    def close(self) -> None:
        self._context.destroy(linger=1000)


class Residents:
    """The keys that are announced. It turns a host's changes into events, and a snapshot into what differs."""

    def __init__(self, format: Format) -> None:
        self._format = format
        self._announced: set[tuple[bytes, int, bytes]] = set()
        self._snapshot: set[tuple[bytes, int, bytes]] | None = None
        self._cleared = False

    def apply(self, changes: Sequence[Change]) -> Iterator[Any]:
        gone: list[tuple[bytes, int, bytes]] = []  # evicted in a row
        for change in changes:
            e = change.event
            if e is not None and change.kind == Changed.EVICTED:
                chunk = (e.namespace, e.group, e.key)
                if chunk in self._announced:
                    self._announced.discard(chunk)
                    gone.append(chunk)
                continue
            yield from self._removed(gone)
            gone = []
            if e is not None:
                yield from self._stored((e.namespace, e.group, e.key), change)
            elif change.kind == Changed.RESET:
                self._snapshot = set()
                if not self._cleared:
                    self._cleared = True
                    yield self._format.cleared()  # what an earlier publisher has announced
            elif self._snapshot is not None:
                gone = sorted(self._announced - self._snapshot)
                self._announced = self._snapshot
                self._snapshot = None
        yield from self._removed(gone)

    def _stored(self, chunk: tuple[bytes, int, bytes], change: Change) -> Iterator[Any]:
        assert change.event is not None
        if self._snapshot is not None:
            self._snapshot.add(chunk)
        if chunk not in self._announced:
            self._announced.add(chunk)
            yield self._format.stored(change.event)

    def _removed(self, chunks: list[tuple[bytes, int, bytes]]) -> Iterator[Any]:
        for group in sorted({group for _, group, _ in chunks}):
            yield self._format.removed(group, [key for _, g, key in chunks if g == group])


class Service:
    """Publishes a reader's changes until it is stopped."""

    def __init__(self, reader: EventReader, publisher: Publisher, residents: Residents) -> None:
        self._reader, self._publisher, self._residents = reader, publisher, residents
        self._stopped = False

    def stop(self) -> None:
        """A signal handler may call it."""
        self._stopped = True

    def run(self) -> None:
        while not self._stopped:
            self._reader.wait(0.1)
            self._publisher.answer_replays()
            events = list(self._residents.apply(self._reader.take(_BATCH)))
            if events:
                self._publisher.publish(events)
