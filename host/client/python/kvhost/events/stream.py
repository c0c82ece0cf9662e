"""The host's stream of stored and removed chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import grpc

from kvhost.errors import OTHER_VERSION, HostGoneError, VersionError
from kvhost.forks import Origin
from kvhost.v1 import kvhost_pb2 as pb


@dataclass(frozen=True)
class Position:
    """The position of a reader of events. The default starts with a snapshot."""

    epoch: int = 0
    seq: int = 0


@dataclass(frozen=True)
class Event:
    stored: bool  # the chunk was stored; False: it was removed
    namespace: bytes  # digest of the namespace
    group: int
    key: bytes
    parent: bytes = b""  # parent of a stored chunk, if the host knows it


@dataclass(frozen=True)
class EventBatch:
    """Some events, to be applied in order.

    The batches of a snapshot list the resident chunks. At the first batch of a snapshot, forget all earlier chunks.
    ``after`` is the position at which to resume after this batch; None within a snapshot."""

    events: list[Event]
    snapshot: bool
    snapshot_end: bool
    after: Position | None


class EventStream:
    """An endless stream of batches of events. Iterate in a thread of your own; any thread may close it."""

    def __init__(
        self, path: str, channel: grpc.Channel, namespace: bytes, key_bytes: int, after: Position | None, *, owned: bool = False
    ) -> None:
        """``owned`` says that the stream closes the channel at its end."""
        self._path, self._origin = path, Origin()
        self._channel = channel if owned else None
        self._key_bytes = key_bytes
        call = channel.unary_stream(
            "/kvhost.v1.EngineService/Events",
            request_serializer=pb.EventsRequest.SerializeToString,
            response_deserializer=pb.EventsResponse.FromString,
        )
        at = after or Position()
        self._batches = call(pb.EventsRequest(namespace_digest=namespace, epoch=at.epoch, after=at.seq))

    @classmethod
    def connect(cls, path: str, namespace: bytes, key_bytes: int, after: Position | None = None) -> EventStream:
        """Returns a stream without a session, of the namespace with a digest, or of all namespaces if the digest is
        empty."""
        channel = grpc.insecure_channel("unix:" + path, options=[("grpc.use_local_subchannel_pool", 1)])
        return cls(path, channel, namespace, key_bytes, after, owned=True)

    def __iter__(self) -> Iterator[EventBatch]:
        self._origin.check()
        try:
            for m in self._batches:
                yield self._batch(m)
        except grpc.RpcError as e:
            if e.code() == grpc.StatusCode.CANCELLED:
                return  # closed here
            if e.code() == grpc.StatusCode.UNIMPLEMENTED:
                raise VersionError(f"{self._path}: {OTHER_VERSION}: {e.details()}") from None
            raise HostGoneError(f"{self._path}: {e.details()}") from None

    def _batch(self, m: pb.EventsResponse) -> EventBatch:
        n = self._key_bytes
        events = [
            Event(e.kind == pb.EVENT_KIND_STORED, e.namespace_digest, e.group, e.key[:n], e.parent[:n])
            for e in m.events
        ]
        return EventBatch(events, m.snapshot, m.snapshot_end, Position(m.epoch, m.seq) if m.epoch else None)

    def close(self) -> None:
        if not self._origin.here:
            return
        self._batches.cancel()
        if self._channel is not None:
            self._channel.close()
