"""The worker's half of the vLLM connector: its jobs, and what it reports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from vllm_doubles import DoubleLink, DoubleSession

from kvhost import HostGone, KvhostError, Result
from kvhost.vllm.link import Link
from kvhost.vllm.orders import ChunkOrder, GroupLoad, LoadOrder, StepOrders, StoreOrder
from kvhost.vllm.settings import Settings
from kvhost.vllm.worker import Worker


def until(condition: Callable[[], bool]) -> None:
    due = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < due
        time.sleep(0.001)


class Rig:
    def __init__(self, stores: bool = True, blocks: int = 1000) -> None:
        self.session = DoubleSession()
        self.link = DoubleLink(self.session)
        self.w = Worker(Settings(fence_timeout=0.0), self.link, (0, 0), blocks, stores)  # type: ignore[arg-type]
        self.orders = 0
        self.read: dict[int, int] = {}
        self.stored: list[bytes] = []
        self.failed: dict[str, dict[int, bytes]] = {}

    def store(self, request: str, *blocks: int, ready: Callable[[], None] = lambda: None) -> int:
        self.orders += 1
        order = StoreOrder(self.orders, request, 1, [(0, [ChunkOrder(0, list(blocks), b"k%d" % self.orders)])])
        self.w.store(StepOrders(stores=[order]), ready)
        return self.orders

    def sent(self, n: int) -> None:
        until(lambda: len(self.session.stores) == n)

    def step(self, **orders: object) -> tuple[set[str], set[str], set[str]]:
        done = self.w.finished(StepOrders(**orders))  # type: ignore[arg-type]
        if (report := self.w.report()) is not None:
            self.read |= report.read
            self.stored += report.stored
            self.failed |= report.failed
        return done.sent, done.received, done.failed

    def load(self, request: str, *chunks: list[int], epoch: int = 0) -> None:
        orders = [ChunkOrder(i, blocks, b"k%d" % i) for i, blocks in enumerate(chunks)]
        self.w.begin_loads(StepOrders(loads=[LoadOrder(request, epoch, 8, [GroupLoad(0, [7], orders)])]))


@pytest.fixture
def rig() -> Iterator[Rig]:
    r = Rig()
    yield r
    r.w.close()


def test_blocks_are_given_back_when_read(rig: Rig) -> None:
    order = rig.store("a", 1, 2)
    rig.sent(1)
    assert rig.step(held=["a"]) == (set(), set(), set()) and not rig.read
    rig.session.stores[0].finish_reading()
    assert rig.step() == ({"a"}, set(), set()) and rig.read == {order: 1}
    assert rig.step() == (set(), set(), set())
    rig.session.stores[0].publish()
    rig.step()
    assert rig.stored == [b"k1"]


def test_stores_name_the_trace_of_their_request(rig: Rig) -> None:
    order = StoreOrder(1, "a", 1, [(0, [ChunkOrder(0, [1], b"k")])], "00-1-2-01")
    rig.w.store(StepOrders(stores=[order]), lambda: None)
    rig.sent(1)
    assert rig.session.traces == ["00-1-2-01"]


def test_nothing_is_held_for_a_request_without_stores(rig: Rig) -> None:
    assert rig.step(held=["a"])[0] == {"a"}


def test_a_fence_waits_only_for_blocks_that_are_reused(rig: Rig) -> None:
    rig.store("a", 1, 2)
    rig.store("b", 3, 4)
    rig.sent(2)
    rig.w.before_step(StepOrders(reused=[3, 9]))
    assert [j.cancelled for j in rig.session.stores] == [False, True]
    rig.store("b", 5, 6)  # b's chain has a hole now
    rig.step()
    assert len(rig.session.stores) == 2 and rig.read == {2: 1, 3: 1}


def test_a_fence_drops_what_waits_for_the_gpu(rig: Rig) -> None:
    computed = threading.Event()

    def ready() -> None:
        assert computed.wait(10)

    rig.store("a", 1, 2, ready=ready)
    rig.w.before_step(StepOrders(reused=[2]))
    rig.step(held=["a"])
    computed.set()
    rig.store("b", 7)
    rig.sent(1)
    assert rig.session.stores[0].chunks[0].blocks == [7] and rig.read == {1: 1}


def test_a_full_backlog_sheds_stores() -> None:
    rig = Rig(blocks=16)  # a quarter may wait
    rig.store("a", 1, 2, 3, 4)
    rig.store("b", 5)
    rig.step()
    assert rig.read == {2: 1}
    rig.sent(1)
    rig.session.stores[0].publish()
    rig.step()
    rig.store("b", 6)  # without its first chunk it has no parent
    rig.store("c", 7)
    rig.sent(2)
    assert rig.session.stores[1].chunks[0].blocks == [7]
    rig.w.close()


def test_replicated_bytes_are_stored_once() -> None:
    rig = Rig(stores=False)
    rig.store("a", 1)
    assert rig.step(held=["a"])[0] == {"a"} and rig.read == {1: 1} and not rig.session.stores
    rig.w.close()


def test_a_load(rig: Rig) -> None:
    rig.load("a", [1, 2], [3, 4])
    assert rig.step() == (set(), set(), set())
    assert rig.session.loads[0].lease == 7
    rig.session.loads[0].finish()
    assert rig.step() == (set(), {"a"}, set()) and rig.w.bad_blocks() == set()


def test_a_load_fails_by_block(rig: Rig) -> None:
    rig.load("a", [1, 2], [3, 4], [5, 6])
    rig.session.loads[0].finish([(1, 7), (2, 6)])  # damaged; the lease was over
    assert rig.step() == (set(), {"a"}, {"a"})
    assert rig.w.bad_blocks() == {3, 4, 5, 6} and rig.w.bad_blocks() == set()
    assert rig.failed == {"a": {1: b"k1", 2: b""}}


def test_a_lease_of_another_epoch_is_not_used(rig: Rig) -> None:
    rig.load("a", [1, 2], epoch=5)
    assert not rig.session.loads
    assert rig.step() == (set(), {"a"}, {"a"}) and rig.w.bad_blocks() == {1, 2}


def test_abort(rig: Rig) -> None:
    rig.load("a", [1, 2])
    rig.w.begin_loads(StepOrders(cancels=["a", "unknown"]))
    until(lambda: rig.session.loads[0].cancelled)
    assert rig.step()[1] == {"a"}


def test_the_host_dies(rig: Rig) -> None:
    rig.store("a", 1)
    rig.sent(1)
    rig.load("b", [2, 3])
    rig.session.die()
    assert rig.step(held=["a"]) == ({"a"}, {"b"}, {"b"})
    assert rig.w.bad_blocks() == {2, 3} and rig.failed == {"b": {0: b""}}
    rig.link.epoch = -1
    rig.store("c", 4)
    assert rig.step(held=["c"])[0] == {"c"}


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
            raise HostGone("down")
        self.opened.append((epoch, DoubleSession()))
        return [self.opened[-1][1]]


def test_a_link_that_leads_begins_a_new_epoch_after_a_loss() -> None:
    host = Host()
    link = Link("x", "socket", host, leads=True)  # type: ignore[arg-type]
    assert link.start(5) and link.epoch == 0
    host.down = True
    host.opened[0][1].die()
    assert link.epoch == -1 and link.sessions() == []
    until(lambda: link.wanted == 1)
    host.down = False
    until(lambda: link.epoch == 1)
    assert link.sessions(0) == [] and len(link.sessions(1)) == 1
    link.close()
    assert host.opened[1][1].ended.is_set()


def test_a_link_follows_and_sleeps() -> None:
    host = Host()
    link = Link("x", "socket", host, leads=False)  # type: ignore[arg-type]
    assert link.start(5)
    link.follow(3)
    until(lambda: link.epoch == 3)
    assert host.opened[0][1].ended.is_set()
    link.pause()
    assert link.sessions() == [] and host.opened[1][1].ended.is_set()
    assert link.resume(5) and link.epoch == 3
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
