"""Refusals have a class by their code, where callers want to tell them apart."""

import os
import socket
from pathlib import Path

import pytest

import kvhost
from kvhost import HostGoneError, Namespace, Session
from kvhost.wire import unreachable


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (1, kvhost.InvalidError), (2, kvhost.DisagreementError), (3, kvhost.LimitError), (4, kvhost.HostError), (6, kvhost.LeaseOverError),
        (7, kvhost.DamagedError), (8, kvhost.StorageError), (9, kvhost.CancelledError), (12, kvhost.DeniedError), (99, kvhost.HostError),
    ],
)  # fmt: skip
def test_class_by_code(code: int, kind: type) -> None:
    error = kvhost.HostError(code, "field", "text")
    assert type(error) is kind
    assert str(error) == "field: text"
    assert error.code == (code if code < 99 else kvhost.Code.UNSPECIFIED)


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
                Session(path, "e", Namespace(model="m", dtype="f", key_bytes=32, tokens_per_block=1, groups=[]))
        finally:
            os.seteuid(user)
            tmp_path.chmod(0o700)
    assert "the socket is left" in unreachable(path)
