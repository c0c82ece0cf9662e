"""Loads inside the step that computes behind them: which are, and what becomes of those that fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from test_vllm_scheduler import CHUNK, FULL, KEYS, TOKENS
from vllm_doubles import DoubleLink, DoublePool, DoubleSession, Load, request, step
from waits import left

from kvhost import Code
from kvhost.vllm import worker
from kvhost.vllm.holds import Holds
from kvhost.vllm.layers import HostGate, HostGates, StepLayers
from kvhost.vllm.orders import ChunkOrder, GroupLoad, LoadOrder, StepOrders, WorkerReport
from kvhost.vllm.scheduler import Scheduler
from kvhost.vllm.settings import Settings
from kvhost.vllm.worker import Worker

BLOCK = FULL.block_tokens


class Half:
    """A scheduler's half. Chunks take a millisecond each to load, and all of TOKENS are there."""

    def __init__(self, graph_tokens: int = 0, **settings: Any) -> None:
        self.session = DoubleSession()
        self.session.resident, self.session.micros_per_chunk = set(KEYS), 1000
        self.pool = DoublePool()
        self.s = Scheduler(
            Settings(**{"load_when": "always", "load_in": "auto", "lookup_wait": 0.0, **settings}), DoubleLink(self.session), (FULL,), 1, 1,  # type: ignore[arg-type]
            loads=True, step_tokens=1024, holds=Holds(self.pool, [(BLOCK, 0)], 1024, 0, 1), in_step=True, graph_tokens=graph_tokens,
        )
        self.s.reported(WorkerReport(epochs={(0, 0): 0}))
        self.blocks = 0

    def promise(self, id: str, tokens: list[int] = TOKENS) -> tuple[int, bool, Any]:
        r = request(id, tokens)
        n = self.s.matched(r, 0)
        assert n
        first, self.blocks = self.blocks + 1, self.blocks + -(-len(tokens) // BLOCK)
        self.s.allocated(r, [list(range(first, self.blocks + 1))], n)
        return n, self.s.loads_in_step(r), r

    def step(self, *scheduled: Any) -> StepOrders:
        return self.s.step(step({r.request_id: 1 for r in scheduled}))


def test_a_request_that_is_alone_loads_inside_its_step() -> None:
    half = Half()
    n, inside, r = half.promise("a")
    (order,) = half.step(r).loads
    assert (n, inside, order.in_step) == (4 * CHUNK, True, True)
    assert half.pool.held == set(range(1, 9)), "the blocks that the host fills are held until it has"
    half.s.reported(WorkerReport(free={order.id: 1}))  # type: ignore[arg-type]
    assert not half.pool.held


@pytest.mark.parametrize(("delay", "want"), [(0.0, False), (0.0039, False), (0.0041, True)])
def test_requests_that_run_are_held_up_for_step_delay_at_most(delay: float, want: bool) -> None:
    half = Half(step_delay=delay)
    other = request("runs", [1, 2, 3])
    half.s.matched(other, 0)
    half.s.allocated(other, [[90]], 0)
    half.step(other)
    assert half.promise("a")[1] == want


def test_what_the_step_loads_adds_up() -> None:
    half = Half(step_delay=0.0085)
    assert [half.promise(id)[1] for id in "abc"] == [True, True, False]


@pytest.mark.parametrize(("where", "want"), [("beside", [False, False]), ("step", [True, True])])
def test_the_operator_decides(where: str, want: list[bool]) -> None:
    half = Half(load_in=where, step_delay=0.0)
    assert [half.promise(id)[1] for id in "ab"] == want


@pytest.mark.parametrize(("graph_tokens", "left"), [(0, 2), (4 * CHUNK - 1, 2), (4 * CHUNK, 1)])
def test_a_whole_prompt_leaves_one_token_to_a_graph_or_two(graph_tokens: int, left: int) -> None:
    half = Half(graph_tokens)
    n, inside, r = half.promise("a", TOKENS[: 4 * CHUNK])
    assert (n, inside) == (4 * CHUNK - left, True)
    (order,) = half.step(r).loads
    assert [c.blocks for c in order.groups[0].chunks] == [[1, 2], [3, 4], [5, 6], [7, 8]]


def test_nothing_computed_behind_a_load_is_stored_before_its_result() -> None:
    half = Half()
    half.session.resident = set(KEYS[:2])
    n, _, r = half.promise("a")
    assert n == 2 * CHUNK
    r.num_computed_tokens = n
    assert not half.s.step(step({"a": 20})).stores
    r.num_computed_tokens = 36
    half.s.output()
    (store,) = half.s.step(step({"a": 1})).stores
    assert [c.index for c in store.chunks[0][1]] == [2, 3]


@pytest.mark.parametrize(("status", "want"), [("FINISHED_LENGTH_CAPPED", [2, 3]), ("FINISHED_ABORTED", None)])
def test_a_request_that_ends_with_the_step_of_its_load_is_stored(status: str, want: list[int] | None) -> None:
    """The engine ends it with the step's output, before the connector has that: the load has not failed."""
    half = Half()
    half.session.resident = set(KEYS[:2])
    n, _, r = half.promise("a")
    r.num_computed_tokens = n
    assert not half.s.step(step({"a": 20})).stores
    r.num_computed_tokens, r.status = 36, status
    half.s.finished(r)
    half.s.output()
    stores = half.s.step(step({})).stores
    assert ([c.index for c in stores[0].chunks[0][1]] if stores else None) == want


def test_what_was_computed_behind_bad_blocks_is_broken_too() -> None:
    half = Half()
    _, _, r = half.promise("a")
    (order,) = half.step(r).loads
    half.s.finished(r)  # aborted: the engine's cache still has its blocks
    report = WorkerReport(broken={3, 4}, failed={"a": {1: KEYS[1]}})
    report.free[order.id] = 1
    assert half.s.reported(report) == ([], [])
    assert half.s.broken(report) == {3, 4, 5, 6, 7, 8, 9}
    again = request("b", TOKENS)
    assert half.s.matched(again, 0) == CHUNK, "the bad chunk is not promised again"


def test_what_a_request_that_has_ended_computed_behind_bad_blocks_is_broken_too() -> None:
    half = Half()
    _, _, r = half.promise("a")
    other = request("b", TOKENS)
    half.s.matched(other, 36)
    half.s.allocated(other, [[*range(1, 10), 50]], 0)  # it shares the blocks, since the engine's cache has them at once
    (order,) = half.step(r, other).loads
    half.s.step(step({"b": 1}, {"b": ([51],)}))
    half.s.finished(other)
    report = WorkerReport(broken={5, 6}, failed={"a": {2: KEYS[2]}})
    report.free[order.id] = 1
    half.s.reported(report)
    assert half.s.broken(report) == {5, 6, 7, 8, 9, 50, 51}
    assert not half.s._tables


# ---- worker ----------------------------------------------------------------------------------------------------------


class Rank:
    def __init__(self) -> None:
        self.session = DoubleSession()
        self.session.in_step = self.loads.append  # type: ignore[attr-defined]
        self.layers = StepLayers(HostGates(30.0), {"first": 0, "second": 1})
        self.w = Worker(
            Settings(step_timeout=0.0), DoubleLink(self.session), (0, 0), True, layers=self.layers,  # type: ignore[arg-type]
        )

    loads: list[Load] = []

    def begin(self, *, layered: bool = True) -> Load:
        chunks = [ChunkOrder(i, [2 * i + 1, 2 * i + 2], b"k%d" % i) for i in range(2)]
        orders = StepOrders(loads=[LoadOrder(1, "a", 0, 16, [GroupLoad(0, [7], chunks)], in_step=True)])
        self.w.begin(orders, layered)
        return self.session.loads[-1]

    def end(self) -> WorkerReport:
        done = self.w.finished(StepOrders(), lambda: lambda: None)
        assert not done.received, "the request does not wait for it"
        report = self.w.report()
        assert report is not None
        return report


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    monkeypatch.setattr(worker, "_CANCEL_SECONDS_IN_STEP", 0.0)
    Rank.loads = []
    r = Rank()
    yield r
    r.w.close()


def test_each_layer_waits_for_its_own() -> None:
    gate = HostGate(30.0)
    passed = []

    def run() -> None:
        for i in range(3):
            gate.wait(i, lambda: False)
            passed.append(i)

    thread = threading.Thread(target=run)
    thread.start()
    gate.on_layer(0, [])
    gate.on_layer(1, [])
    gate.wait(1, lambda: False)
    assert 2 not in passed
    gate.over()
    thread.join(left())
    assert passed == [0, 1, 2]


def test_a_load_is_over_with_its_step(rank: Rank) -> None:
    load = rank.begin()
    load.finish([(1, Code.DAMAGED)])
    rank.w.wait_for_layer("first")
    rank.w.wait_for_layer("second")
    report = rank.end()
    assert dict(report.free) == {1: 1} and not report.loaded
    assert report.broken == {3, 4} == rank.w.bad_blocks() and report.failed == {"a": {1: b"k1"}}


def test_a_layer_that_the_model_did_not_ask_for(rank: Rank) -> None:
    rank.begin().finish()
    rank.w.wait_for_layer("first")
    assert rank.end().broken == {1, 2, 3, 4}, "the second layer may have been computed before it was there"


def test_a_load_that_ends_well_after_a_layer_was_computed_without_it(rank: Rank) -> None:
    rank.layers._gates = HostGates(0.0)
    load = rank.begin()
    rank.w.wait_for_layer("first")
    load.finish()
    rank.w.wait_for_layer("second")
    report = rank.end()
    assert report.broken == {1, 2, 3, 4} and report.failed == {"a": {0: b"", 1: b""}}
    assert dict(report.free) == {1: 1}


def test_a_step_that_is_one_graph_waits_for_all(rank: Rank) -> None:
    rank.session.in_step = lambda load: load.finish()
    rank.begin(layered=False)
    report = rank.end()
    assert not report.broken and not report.failed


def test_a_host_that_hangs_keeps_the_blocks(rank: Rank) -> None:
    rank.session.frozen = lambda: True
    load = rank.begin()
    gate = rank.w._in_step[0].gates[0][0]
    report = rank.end()
    assert load.cancelled and report.abandoned == {1: "a"} and not report.free
    assert report.broken == {1, 2, 3, 4} == rank.w.bad_blocks()
    gate.wait(1, lambda: False)  # no compute waits any more
    load.finish()
    assert dict(rank.end().free) == {1: 1}
