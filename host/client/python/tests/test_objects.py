"""What batches of objects are made of, without a host."""

from __future__ import annotations

import pytest
from kvhost import HostGone
from kvhost.objects import Connector, Kind, ObjectStore, Options, Space


def test_space_gives_each_byte_once() -> None:
    space = Space(100)
    tens = space.take(10, 4, 0)
    assert tens == [0, 1, 2, 3]
    assert space.take(30, 9, 0) == [2]  # bytes 60 to 90: 40 to 60 hold no multiple of 30
    assert space.take(10, 9, 0) == [4, 5, 9]
    with pytest.raises(TimeoutError):
        space.take(1, 1, 0)
    space.give(10, [3, 1])
    space.give(10, [2])
    assert space.take(15, 9, 0) == [1]  # 15 to 30 of the free 10 to 40
    space.give(15, [1])
    space.give(10, [0, 4, 5, 9])
    space.give(30, [2])
    assert space.free_bytes() == 100
    assert space.take(100, 9, 0) == [0]


def test_space_refuses_what_never_fits() -> None:
    with pytest.raises(ValueError, match="raise arena_bytes"):
        Space(100).take(101, 1, 0)


def test_no_host_is_tried_again_after_a_growing_pause(tmp_path: object) -> None:
    now = 0.0
    connector = Connector(Options(f"{tmp_path}/none", 4096, timeout=5), "t", clock=lambda: now)
    store = ObjectStore(connector)

    def attempt() -> bool:
        """Whether a connection was tried: it fails with gRPC's words, not with ours."""
        with pytest.raises(HostGone) as e:
            store.lookup(Kind("m", "t", (16,)), [bytes(32)])
        return "no host answers" not in str(e.value)

    assert not connector.gone
    assert attempt()
    assert connector.gone
    tries = []
    for _ in range(600):
        now += 0.05
        if attempt():
            tries.append(now)
    pauses = [b - a for a, b in zip(tries, tries[1:])]
    assert pauses == sorted(pauses) and 0.1 < pauses[0] < 1 and 4.9 < pauses[-1] < 5.2
    assert connector.losses == 0  # it was never there
    store.close()
    with pytest.raises(HostGone, match="closed"):
        store.lookup(Kind("m", "t", (16,)), [bytes(32)])


def test_options_are_checked() -> None:
    parsed = Options.parse("here", {"socket": "/s", "timeout": 2})
    assert (parsed.socket, parsed.timeout, parsed.sessions) == ("/s", 2, 64)
    for wrong in (
        {"sockte": "/s"},
        {"socket": ""},
        {"socket": 3},
        {"arena_bytes": "1GiB"},
        {"arena_bytes": 0},
        {"arena_bytes": True},
        {"arena_bytes": 1.5},
        {"timeout": 0},
        {"timeout": "1s"},
    ):
        with pytest.raises(ValueError, match=f"here.{next(iter(wrong))}: "):
            Options.parse("here", wrong)
