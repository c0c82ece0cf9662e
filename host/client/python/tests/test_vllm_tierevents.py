"""What the tier tells routers of the host's events."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kvhost.events import Event
from kvhost.vllm.tierevents import TierEvents
from test_events import Host, batch, snapshot
from waits import until


def event(n: int, stored: bool = True, group: int = 0) -> Event:
    return Event(stored, bytes(16), group, bytes([n]) * 32)


class Rig:
    def __init__(self) -> None:
        self.host, self.now, self.alive, self._at = Host(), 1e9, True, 0
        self.events = TierEvents(self.host.open, lambda: self.alive, lambda: self.now)
        self._streams = 0
        self.snapshot()

    def snapshot(self, *events: Event) -> None:
        """The host's at the start of a stream."""
        until("the tier opened another stream", lambda: len(self.host.streams) > self._streams)
        self._streams += 1
        self.host.streams[-1].say(*snapshot(*events))
        self._settle()

    def say(self, *events: Event) -> None:
        self._at += 1
        self.host.streams[-1].say(batch(*events, at=self._at), batch(at=self._at))
        self._settle()

    def _settle(self) -> None:
        until("the tier has read what the host said", lambda: self.host.streams[-1].waits and not self.host.streams[-1].batches.qsize())

    def offer(self, *ns: int) -> None:
        for n in ns:
            self.events.offered(0, bytes([n]) * 32, b"%d" % n)

    def answer(self, n: int, there: bool = True) -> None:
        self.events.answered(0, bytes([n]) * 32, there)

    def take(self) -> list[str]:
        return [f"{'-' if removed else '+'}{key.decode()}" for key, removed in self.events.take()]


@pytest.fixture
def rig() -> Iterator[Rig]:
    r = Rig()
    yield r
    r.events.close()


def test_stored_and_removed(rig: Rig) -> None:
    rig.offer(1, 2, 3)
    rig.say(event(1), event(9), event(1, group=7))
    assert rig.take() == ["+1"], "want what this engine has offered, once the host has it"
    rig.answer(1)
    rig.answer(2)
    rig.answer(3, there=False)
    assert rig.take() == ["+2"], "want what another engine has stored before, and nothing twice"
    rig.say(event(1, stored=False), event(3), event(2, stored=False))
    assert rig.take() == ["-1", "-2"]
    rig.say(event(1))
    assert rig.take() == [], "another engine's: this one has described it no more"


def test_evicted_before_the_answer_was_seen(rig: Rig) -> None:
    rig.offer(1, 2)
    rig.say(event(1, stored=False), event(2, stored=False), event(2))
    assert rig.take() == ["+2"]
    rig.answer(1)
    rig.answer(2)
    assert rig.take() == [], "want no word of what has gone"


def test_a_snapshot_tells_what_has_gone(rig: Rig) -> None:
    rig.offer(1, 2)
    rig.say(event(1), event(2))
    rig.now = 0.0  # announced before any snapshot
    assert rig.take() == ["+1", "+2"]
    rig.host.streams[-1].say(None)
    rig.snapshot(event(2))
    assert rig.take() == ["-1"]


def test_a_host_that_stays_away(rig: Rig) -> None:
    rig.offer(1)
    rig.answer(1)
    assert rig.take() == ["+1"]
    rig.alive = False
    assert rig.take() == [], "a host that restarts keeps its chunks"
    rig.now += TierEvents.GONE_SECONDS + 1
    assert rig.take() == ["-1"]


def test_other_weights(rig: Rig) -> None:
    rig.offer(1)
    rig.answer(1)
    rig.events.forget()
    rig.say(event(1, stored=False))
    assert rig.take() == [], "routers have forgotten all of the engine"
