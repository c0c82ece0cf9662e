"""The worker's half of the vLLM connector: its jobs, and what it reports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from vllm_doubles import DoubleLink, DoubleSession

from kvhost import HostGoneError, KvhostError, Result
from kvhost.link import Link
from kvhost.vllm.orders import ChunkOrder, GroupLoad, LoadOrder, StepOrders, StoreOrder
from kvhost.vllm.settings import Settings
from kvhost.vllm.worker import Worker
from waits import until


class Rig:
    def __init__(self, stores: bool = True, **settings: float) -> None:
        self.session = DoubleSession()
        self.link = DoubleLink(self.session)
        self.w = Worker(Settings(**settings), self.link, (0, 0), stores)  # type: ignore[arg-type]
        self.orders = 0
        self.free: dict[int, int] = {}
        self.abandoned: dict[int, str] = {}
        self.dropped: dict[str, int] = {}
        self.stored: list[bytes] = []
        self.failed: dict[str, dict[int, bytes]] = {}

    def store(self, request: str, *blocks: int, ready: Callable[[], None] = lambda: None) -> int:
        self.orders += 1
        order = StoreOrder(self.orders, request, 1, [(0, [ChunkOrder(0, list(blocks), b"k%d" % self.orders)])])
        self.w.store(StepOrders(stores=[order]), ready)
        return self.orders

    def sent(self, n: int) -> None:
        until("stores", lambda: len(self.session.stores) == n)

    def step(self, **orders: object) -> tuple[set[str], set[str]]:
        done = self.w.finished(StepOrders(**orders), lambda: lambda: None)  # type: ignore[arg-type]
        if (report := self.w.report()) is not None:
            self.free |= report.free
            self.abandoned |= report.abandoned
            self.dropped |= report.dropped
            self.stored += report.stored
            self.failed |= report.failed
        return done.received, done.failed

    def load(self, request: str, *chunks: list[int], epoch: int = 0) -> int:
        orders = [ChunkOrder(i, blocks, b"k%d" % i) for i, blocks in enumerate(chunks)]
        self.orders += 1
        self.w.begin(StepOrders(loads=[LoadOrder(self.orders, request, epoch, 8, [GroupLoad(0, [7], orders)])]))
        return self.orders


@pytest.fixture
def rig() -> Iterator[Rig]:
    r = Rig()
    yield r
    r.w.close()


def test_blocks_are_free_when_read(rig: Rig) -> None:
    order = rig.store("a", 1, 2)
    rig.sent(1)
    rig.step()
    assert not rig.free
    rig.session.stores[0].finish_reading()
    rig.step()
    assert rig.free == {order: 1}
    rig.session.stores[0].publish()
    rig.step()
    assert rig.stored == [b"k1"] and rig.free == {order: 1}


def test_stores_name_the_trace_of_their_request(rig: Rig) -> None:
    order = StoreOrder(1, "a", 1, [(0, [ChunkOrder(0, [1], b"k")])], "00-1-2-01")
    rig.w.store(StepOrders(stores=[order]), lambda: None)
    rig.sent(1)
    assert rig.session.traces == ["00-1-2-01"]


def test_stores_of_a_step_without_computation_are_sent(rig: Rig) -> None:
    order = StoreOrder(9, "a", 1, [(0, [ChunkOrder(0, [1], b"k")])])
    rig.step(stores=[order], forward=False)
    rig.sent(1)


def test_a_store_that_is_not_read_is_cancelled() -> None:
    rig = Rig(read_timeout=0.0)
    order = rig.store("a", 1)
    rig.sent(1)
    until("an order that is free", lambda: rig.step() == (set(), set()) and rig.free == {order: 1})
    assert rig.session.stores[0].cancelled and rig.dropped == {"the host had not read them within 0.0 s": 1}
    rig.w.close()


def test_a_chunk_that_was_not_sent_leaves_its_followers_without_a_parent(rig: Rig) -> None:
    rig.link.epoch = -1
    first = rig.store("a", 1)
    rig.step()
    rig.link.epoch = 0
    second = rig.store("a", 2)
    rig.store("b", 3)
    rig.sent(1)
    rig.step()
    assert rig.session.stores[0].chunks[0].blocks == [3]
    assert rig.free == {first: 1, second: 1} and rig.dropped == {"no session with the host": 1}
    rig.step(ended=[("a", 1)])
    rig.store("a", 4)
    rig.sent(2)


def test_replicated_bytes_are_stored_once() -> None:
    rig = Rig(stores=False)
    order = rig.store("a", 1)
    rig.step()
    assert rig.free == {order: 1} and not rig.session.stores and not rig.dropped
    rig.w.close()


@pytest.mark.parametrize("written", [True, False])
def test_an_ending_engine_waits_for_its_stores(written: bool, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(shutdown_wait=60.0 if written else 0.0)
    rig.store("a", 1)
    rig.sent(1)
    late = threading.Timer(0.05, rig.session.stores[0].publish)
    if written:
        late.start()
    rig.w.close()
    assert rig.session.stores[0].over == written
    assert ("1 chunks may not be stored" in caplog.text) != written


def test_a_load_that_the_host_neither_ends_nor_cancels_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(load_timeout=0.0)
    rig.session.frozen = lambda: True
    monkeypatch.setattr("kvhost.vllm.worker._CANCEL_SECONDS", 0.0)
    order = rig.load("a", [1, 2], [3, 4])
    until("the request ends both ways", lambda: rig.step() == ({"a"}, {"a"}))
    assert rig.abandoned == {order: "a"} and rig.failed == {"a": {0: b"", 1: b""}}
    assert not rig.free and not rig.w.bad_blocks(), "its blocks stay the host's, and the request takes others"
    assert rig.step() == (set(), set())
    rig.session.frozen = lambda: False
    rig.session.loads[0].cancel()
    assert rig.step() == (set(), set()) and rig.free == {order: 1}
    rig.w.close()


def test_a_load(rig: Rig) -> None:
    rig.load("a", [1, 2], [3, 4])
    assert rig.step() == (set(), set())
    assert rig.session.loads[0].lease == 7
    rig.session.loads[0].finish()
    assert rig.step() == ({"a"}, set()) and rig.w.bad_blocks() == set()


def test_a_load_fails_by_block(rig: Rig) -> None:
    rig.load("a", [1, 2], [3, 4], [5, 6])
    rig.session.loads[0].finish([(1, 7), (2, 6)])  # damaged; the lease was over
    assert rig.step() == ({"a"}, {"a"})
    assert rig.w.bad_blocks() == {3, 4, 5, 6} and rig.w.bad_blocks() == set()
    assert rig.failed == {"a": {1: b"k1", 2: b""}}


def test_a_lease_of_another_epoch_is_not_used(rig: Rig) -> None:
    rig.load("a", [1, 2], epoch=5)
    assert not rig.session.loads
    assert rig.step() == ({"a"}, {"a"}) and rig.w.bad_blocks() == {1, 2}


def test_abort(rig: Rig) -> None:
    order = rig.load("a", [1, 2])
    rig.w.begin(StepOrders(cancels=[order, 99]))
    assert rig.session.loads[0].cancelled
    assert rig.step()[0] == {"a"}


def test_the_host_dies(rig: Rig) -> None:
    store = rig.store("a", 1)
    rig.sent(1)
    load = rig.load("b", [2, 3])
    rig.session.die()
    assert rig.step() == ({"b"}, {"b"}) and rig.free == {store: 1, load: 1}
    assert rig.w.bad_blocks() == {2, 3} and rig.failed == {"b": {0: b""}}
    rig.link.epoch = -1
    other = rig.store("c", 4)
    rig.step()
    assert rig.free[other] == 1 and rig.dropped == {"no session with the host": 1}


def test_a_failed_store_is_told(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.store("a", 1)
    rig.sent(1)
    rig.session.stores[0].publish(Result.FAILED)
    rig.step()
    assert "was not stored" in caplog.text and not rig.stored


class Host:
    """Counts what a link opens, and refuses while it is down."""

    def __init__(self) -> None:
        self.down = False
        self.opened: list[tuple[int, DoubleSession]] = []

    def __call__(self, epoch: int) -> list[DoubleSession]:
        if self.down:
            raise HostGoneError("down")
        self.opened.append((epoch, DoubleSession()))
        return [self.opened[-1][1]]


def test_a_link_that_leads_begins_a_new_epoch_after_a_loss() -> None:
    host = Host()
    link = Link("x", "socket", host, leads=True)  # type: ignore[arg-type]
    assert link.start(5) and link.epoch == 0
    host.down = True
    host.opened[0][1].die()
    assert link.epoch == -1 and link.sessions() == []
    until("a connection that is wanted", lambda: link.wanted == 1)
    host.down = False
    until("the first connection", lambda: link.epoch == 1)
    assert link.sessions(0) == [] and len(link.sessions(1)) == 1
    link.close()
    assert host.opened[1][1].ended.is_set()


def test_a_link_at_rest_wakes_for_events_alone() -> None:
    """Each wake-up costs the engine's process some of its time."""
    waits: list[float | None] = []

    class Counted(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            if threading.current_thread() is link._thread:
                waits.append(timeout)
            return super().wait(timeout)

    host = Host()
    link = Link("x", "socket", host, leads=True)  # type: ignore[arg-type]
    link._wake = Counted()
    assert link.start(5)
    until("a link that waits", lambda: waits)
    host.opened[0][1].die()
    until("the second session", lambda: link.epoch == 1)
    link.close()
    assert set(waits) == {None}, f"the link's thread waited {waits}, want it to wait until something happens"


def test_a_link_follows_and_sleeps() -> None:
    host = Host()
    link = Link("x", "socket", host, leads=False)  # type: ignore[arg-type]
    assert link.start(5)
    link.follow(3)
    until("the third connection", lambda: link.epoch == 3)
    assert host.opened[0][1].ended.is_set()
    link.pause()
    assert link.sessions() == [] and host.opened[1][1].ended.is_set()
    assert link.resume(5) and link.epoch == 3
    link.close()


def test_a_link_sleeps_though_its_host_does_not_end_a_session() -> None:
    host = Host()
    link = Link("x", "socket", host, leads=False)  # type: ignore[arg-type]
    assert link.start(5)
    session = host.opened[0][1]
    session.frozen = lambda: True
    link.follow(3)
    assert not session.ended.is_set(), "want blocks that the host may touch to be its own"
    link.pause(0.0)
    assert session.ended.is_set() and len(host.opened) == 1
    link.close()


def test_a_host_that_refuses_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    refusals = iter([KvhostError("model"), KvhostError("model")])

    def open(epoch: int) -> list[DoubleSession]:
        for e in refusals:
            raise e
        return [DoubleSession()]

    link = Link("x", "socket", open, leads=True)  # type: ignore[arg-type]
    assert link.start(5)
    assert caplog.text.count("cannot connect") == 1
    link.close()
