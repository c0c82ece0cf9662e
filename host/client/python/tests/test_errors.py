"""Refusals have a class by their code, where callers want to tell them apart."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

import kvhost
from kvhost import HostGoneError, Namespace, Session
from kvhost.objects import Options
from kvhost.objects.connection import Connector
from kvhost.objects.kind import Kind
from kvhost.v1 import kvhost_pb2 as pb
from kvhost.wire import checked, unreachable


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (1, kvhost.InvalidError), (2, kvhost.DisagreementError), (3, kvhost.LimitError), (4, kvhost.UnknownError), (6, kvhost.LeaseOverError),
        (7, kvhost.DamagedError), (8, kvhost.StorageError), (9, kvhost.CancelledError), (12, kvhost.DeniedError), (99, kvhost.HostError),
    ],
)  # fmt: skip
def test_class_by_code(code: int, kind: type) -> None:
    error = kvhost.HostError(code, "field", "text")
    assert type(error) is kind
    assert str(error) == "field: text"
    assert error.code == (code if code < 99 else kvhost.Code.UNSPECIFIED)


SPACE = Namespace(model="m", dtype="f", key_bytes=32, tokens_per_block=1, groups=[])


def test_a_host_of_another_version_is_not_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = str(tmp_path / "s")
    other = grpc.server(ThreadPoolExecutor(1))  # without this version's services
    other.add_insecure_port(f"unix:{path}")
    other.start()
    try:
        with pytest.raises(kvhost.VersionError, match="of another version than this package"):
            Session(path, "e", SPACE)
        events = kvhost.EventStream.connect(path, b"", 32)
        with pytest.raises(kvhost.VersionError):
            next(iter(events))
        events.close()
        kind = Kind("m", "e", (4096,))
        connector = Connector(Options(socket=path), "e")
        for _ in range(2):  # the second is within the pause
            with pytest.raises(kvhost.VersionError), connector.session(kind, None):
                pass
        connector.close()
    finally:
        other.stop(None)
    assert [r.message for r in caplog.records if "of another version, every lookup misses" in r.message]


def test_a_protocol_of_another_version_is_told() -> None:
    answer = pb.SessionResponse(error=pb.Error(code=1, field="protocol", message="1, this host speaks 2"))
    with pytest.raises(kvhost.VersionError, match="protocol 1, this host speaks 2"):
        checked(answer)


def test_an_arena_has_a_size() -> None:
    with pytest.raises(ValueError, match="0 bytes"):
        kvhost.Arena(0)
    arena = kvhost.Arena(4096)
    assert repr(arena) == "Arena(4096)"
    arena.close()
    assert repr(arena) == "<closed Arena>"


def test_a_socket_that_cannot_be_reached_says_why(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    assert "no such socket" in unreachable(path)
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(path)
        s.listen()
        assert unreachable(path) == ""
        tmp_path.chmod(0o700)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)  # root may enter any directory
        else:
            tmp_path.chmod(0)
        try:
            assert "permission denied" in unreachable(path), "want the cause and not that no host answers"
            with pytest.raises(HostGoneError, match="permission denied"):
                Session(path, "e", SPACE)
        finally:
            os.seteuid(user)
            tmp_path.chmod(0o700)
    assert "the socket is left" in unreachable(path)
