"""A child that was forked from an engine ends at once, whatever the engine's threads held when it was forked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from forked import in_child
from vllm_doubles import DoubleSession
from waits import left

from kvhost.events import EventReader
from kvhost.objects import Connector, Options
from kvhost.link import Link


def link() -> tuple[Callable[[], None], Any]:
    session: Any = DoubleSession()
    made = Link("test", "/none", lambda epoch: [session], leads=True)
    assert made.start(left())
    return made.close, made._wake


def reader() -> tuple[Callable[[], None], Any]:
    made = EventReader(lambda after: None, limit=1)
    return made.close, made._wake


def connector() -> tuple[Callable[[], None], Any]:
    made = Connector(Options("/none"), "test")
    return made.close, made._lock


@pytest.mark.parametrize("make", [link, reader, connector])
def test_it_ends_at_once(make: Callable[[], tuple[Callable[[], None], Any]]) -> None:
    close, lock = make()
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            over.wait()

    other = threading.Thread(target=hold)
    other.start()
    held.wait()
    try:
        assert in_child(close) == "returned None"
    finally:
        over.set()
        other.join()
        close()


def test_a_child_has_no_connection() -> None:
    made = Connector(Options("/none"), "test")
    said = in_child(lambda: made.session(None, None).__enter__())  # type: ignore[arg-type]
    assert said.startswith("HostGoneError: the session is of process"), said
