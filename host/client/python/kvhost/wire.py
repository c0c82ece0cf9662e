"""The stream of a session: message ids, answers, and the socket for descriptors."""

from __future__ import annotations

import os
import queue
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from kvhost.errors import OTHER_VERSION, HostError, HostGoneError, VersionError
from kvhost.events.stream import EventStream, Position
from kvhost.forks import Origin
from kvhost.process import Process
from kvhost.v1 import kvhost_pb2 as pb

# A call gets every message with its id, on the receiving thread, and returns whether it is complete. It gets an
# exception if no further answer will come.
Call = Callable[[Any], bool]

HOST_USER = "KVHOST_HOST_USER"  # user ids that the host may have, separated by commas

#: Seconds to wait for a host's process that has begun to end. With much page-locked memory its end takes some seconds.
_END_SECONDS = 30.0

_OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.use_local_subchannel_pool", 1),
]


class Stream:
    """One session's stream. Any thread may start calls; one thread of its own receives."""

    def __init__(self, path: str) -> None:
        pid, uid = answering(path) or (0, os.geteuid())
        if why := _foreign(uid, path):
            raise HostGoneError(why)
        self.path = path
        self.host = Process(pid)
        self.origin = Origin()
        self._channel = grpc.insecure_channel("unix:" + path, options=_OPTIONS)
        self._out: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._calls: dict[int, Call] = {}
        self._last = 0
        self._cause: Exception | None = None
        self.ended = threading.Event()  # set when no further answer will come
        self._wakers: list[Callable[[], None]] = []
        session = self._channel.stream_stream(
            "/kvhost.v1.EngineService/Session",
            request_serializer=pb.SessionRequest.SerializeToString,
            response_deserializer=pb.SessionResponse.FromString,
        )
        self._responses: Any = session(iter(self._requests()))
        self._receiver = threading.Thread(target=self._receive, name="kvhost-receive", daemon=True)
        self._receiver.start()

    def _requests(self) -> Iterator[Any]:
        while (m := self._out.get()) is not None:
            yield m

    def _receive(self) -> None:
        why: Exception = HostGoneError("the host ended the session")
        try:
            for m in self._responses:
                with self._lock:
                    call = None if self._cause is not None else self._calls.get(m.id)
                if call is not None and call(m):
                    with self._lock:
                        self._calls.pop(m.id, None)
        except grpc.RpcError as e:
            why = self._gone(e)
            self.host.await_end(_END_SECONDS)  # until its end its GPU may write to the mapped memory
        finally:
            with self._lock:
                if self._cause is None:
                    self._cause = why
                calls, self._calls = self._calls, {}
            for call in calls.values():
                call(self._cause)
            self._out.put(None)
            with self._lock:
                self.ended.set()
                wakers, self._wakers = self._wakers, []
            for wake in wakers:
                wake()

    def when_ended(self, wake: Callable[[], None]) -> None:
        """Calls ``wake`` when no further answer will come, on the receiving thread, or at once. ``wake`` must be
        quick."""
        with self._lock:
            if not (ended := self.ended.is_set()):
                self._wakers.append(wake)
        if ended:
            wake()

    def _gone(self, e: grpc.RpcError) -> HostGoneError:
        why = e.details() if hasattr(e, "details") else str(e)
        if hasattr(e, "code") and e.code() is grpc.StatusCode.UNIMPLEMENTED:
            return VersionError(f"{self.path}: {OTHER_VERSION}: {why}")
        if hasattr(e, "code") and e.code() is grpc.StatusCode.UNAVAILABLE:  # the text is of gRPC's transport
            why = (
                f"the host closed the connection: it is ending, or does not let user {os.geteuid()} in, which socket_users or "
                "socket_groups in its configuration would"
            )
        return HostGoneError(unreachable(self.path) or f"{self.path}: {why}")

    def start(self, call: Call, **body: Any) -> int:
        """Sends a message. Ids are sent in ascending order, which the host requires."""
        self.origin.check()
        with self._lock:
            if self._cause is not None:
                raise self._cause
            self._last += 1
            self._calls[self._last] = call
            self._out.put(pb.SessionRequest(id=self._last, **body))
            return self._last

    def asked(self, **body: Any) -> Callable[[float], Any]:
        """Sends a message with one answer, and returns a function that waits for it for a number of seconds."""
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def call(m: Any) -> bool:
            answers.put(m)
            return True

        def wait(timeout: float) -> Any:
            try:
                m = answers.get(timeout=timeout)
            except queue.Empty:
                raise TimeoutError(f"no answer to {[*body][-1]} within {timeout} s") from None
            return checked(m)

        self.start(call, **body)
        return wait

    def status(self, timeout: float | None) -> pb.StatusResponse:
        self.origin.check()
        call = self._channel.unary_unary(
            "/kvhost.v1.StatusService/Status",
            request_serializer=pb.StatusRequest.SerializeToString,
            response_deserializer=pb.StatusResponse.FromString,
        )
        try:
            reply: pb.StatusResponse = call(pb.StatusRequest(), timeout=timeout)
            return reply
        except grpc.RpcError as e:
            raise self._gone(e) from None

    def events(self, namespace: bytes, key_bytes: int, after: Position | None) -> EventStream:
        self.origin.check()
        try:
            return EventStream(self.path, self._channel, namespace, key_bytes, after)
        except ValueError:  # gRPC's error for a closed channel
            raise HostGoneError("the session was closed here") from None

    def end(self) -> None:
        """Ends the stream of messages, upon which the host ends the session; ``ended`` is set when it has. It has no
        effect in a forked child."""
        if not self.origin.here:
            return
        with self._lock:
            if self._cause is None:
                self._cause = HostGoneError("the session was closed here")
        self._out.put(None)

    def close(self, wait: float | None = 5.0) -> None:
        """Breaks the stream if the host has not ended it within ``wait`` seconds. It has no effect in a forked
        child: the stream belongs to the parent."""
        if not self.origin.here:
            return
        other = threading.current_thread() is not self._receiver
        self.end()
        if other:
            self.ended.wait(wait)
        self._responses.cancel()
        if other:
            self._receiver.join()
        self._channel.close()


def unreachable(path: str) -> str:
    """Returns the reason for which a socket cannot be reached; "" if it can."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        s.settimeout(1.0)
        try:
            s.connect(path)
        except FileNotFoundError:
            return f"{path}: no host answers there: there is no such socket"
        except ConnectionRefusedError:
            return f"{path}: no host answers there: the socket is left of one that has ended"
        except PermissionError:
            return (
                f"{path}: permission denied: the socket, or a directory above it, refuses user {os.geteuid()}; "
                "socket_users or socket_groups in kvhost's configuration let users in"
            )
        except OSError as e:
            return f"{path}: {e.strerror or e}"
    return ""


def foreign(path: str) -> str:
    """Returns the reason for which a socket's server must not get this process's memory; "" if it may, or if no
    server answers."""
    found = answering(path)
    return _foreign(found[1], path) if found else ""


def answering(path: str) -> tuple[int, int] | None:
    """Returns the process and the user of a socket's server, also if it is stopped. The process is 0 in another PID namespace."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        s.settimeout(1.0)
        try:
            s.connect(path)
        except OSError:
            return None
        return _listener(s)


def _listener(s: socket.socket) -> tuple[int, int]:
    """Returns the process that called listen and its user, from the kernel."""
    pid, uid, _ = struct.unpack("3i", s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid & 0xFFFFFFFF


def _foreign(uid: int, path: str) -> str:
    """Returns the reason not to trust a host of a user. It is "" for root, for this process's user, for a user that
    the environment names, and for a user to whom root has given the directory."""
    if uid in (0, os.geteuid()) or str(uid) in os.environ.get(HOST_USER, "").split(",") or _given(os.path.dirname(path), uid):
        return ""
    return (
        f"{path}: user {uid} answers there, who is neither root nor user {os.geteuid()}, so that no memory is shared: "
        f"if that is the host's user, say so by {HOST_USER}={uid}"
    )


def _given(directory: str, uid: int) -> bool:
    """Whether root has given a user the directory, and no other user can write to it."""
    try:
        at = os.path.realpath(directory)
        owner = uid
        while True:
            found = os.stat(at)
            shared = found.st_mode & 0o022 and not (owner == 0 and found.st_mode & stat.S_ISVTX)
            if found.st_uid != owner or shared:
                return False
            if at == "/":
                return owner == 0
            at, owner = os.path.dirname(at), 0
    except OSError:
        return False


def checked(m: Any) -> Any:
    """Returns an answer, or raises it if it is an error."""
    if isinstance(m, Exception):
        raise m
    if m.WhichOneof("body") == "error":
        if m.error.field == "protocol":
            raise VersionError(f"{OTHER_VERSION}: protocol {m.error.message}")
        raise HostError(m.error.code, m.error.field, m.error.message)
    return m


def send_descriptor(path: str, nonce: bytes, tag: int, fd: int, timeout: float) -> None:
    """Sends a file descriptor to the host with a tag."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        s.settimeout(timeout)
        try:
            s.connect(path)
            if why := _foreign(_listener(s)[1], path):
                raise HostGoneError(why)
            socket.send_fds(s, [nonce + struct.pack("<Q", tag)], [fd])
            (refusal,) = struct.unpack("<I", _read(s, 4))
            text = _read(s, min(refusal, 1024)) if refusal else b""
        except TimeoutError:
            raise
        except OSError as e:
            raise HostGoneError(f"{path}: {e}") from e
    if text:
        raise HostError(1, "memfd", text.decode(errors="replace"))


def _read(s: socket.socket, n: int) -> bytes:
    got = b""
    while len(got) < n:
        part = s.recv(n - len(got))
        if not part:
            raise HostGoneError("the descriptor socket was closed")
        got += part
    return got
