"""The scheduler's half of the vLLM connector: what it promises, orders and keeps."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_doubles import DoubleLink, DoublePool, DoubleSession, request, step

from kvhost import NOT_WANTED, EndReason, Hints
from kvhost.vllm import scheduler
from kvhost.vllm.groups import GroupPlan, chunk_size, longest_hit
from kvhost.vllm.hints import of_request
from kvhost.vllm.holds import Holds
from kvhost.keys import KeyChain
from kvhost.vllm.lookups import RequestLookup
from kvhost.vllm.orders import LoadOrder, LoadTime, WorkerReport
from kvhost.vllm.scheduler import Scheduler
from kvhost.vllm.settings import Settings

BLOCK, CHUNK = 4, 8
FULL = GroupPlan(0, BLOCK, CHUNK)
TOKENS = list(range(100, 136))  # four chunks and a half
KEYS = KeyChain(CHUNK).extend(TOKENS)


class Rig:
    def __init__(
        self, groups: tuple[GroupPlan, ...] = (FULL,), ranks: int = 1, blocks: int = 1000, pool: DoublePool | None = None,
        **settings: Any,
    ) -> None:
        self.session = DoubleSession()
        self.session.membership = {g.id for g in groups if g.window}
        self.link = DoubleLink(self.session)
        options = {"load_when": "always", "lookup_wait": 0.0, **settings}
        self.groups = groups
        self.pool = pool or DoublePool(blocks)
        self.holds = Holds(self.pool, [(g.block_tokens, g.window) for g in groups], 1024, 0, ranks)
        self.s = Scheduler(
            Settings(**options), self.link, groups, ranks, 1, loads=True, step_tokens=1024,  # type: ignore[arg-type]
            holds=self.holds,
        )
        self.s.reported(WorkerReport(epochs={(0, r): 0 for r in range(ranks)}))

    def table(self, tokens: int, start: int = 1) -> list[list[int]]:
        return [[start + 100 * g.id + i for i in range(-(-tokens // BLOCK))] for g in self.groups]

    def promised(self, r: Any, computed: int = 0) -> LoadOrder:
        n = self.s.matched(r, computed)
        assert n
        self.s.allocated(r, self.table(computed + n), n)
        (order,) = self.s.step(step({})).loads
        return order

    def run(self, r: Any, scheduled: int, blocks: Any = None) -> list[tuple[int, list[int]]]:
        """A step of one request; the (chunk, blocks) that were ordered of its first group."""
        orders = self.s.step(step({r.request_id: scheduled}, {r.request_id: blocks} if blocks else None))
        r.num_computed_tokens += scheduled
        return [(c.index, c.blocks) for o in orders.stores for g, cs in o.chunks for c in cs if g == 0]


def test_a_miss_then_stores_chunk_by_chunk() -> None:
    rig, r = Rig(), request("a", TOKENS)
    assert rig.s.matched(r, 0) == 0
    rig.s.allocated(r, rig.table(20), 0)
    assert rig.run(r, 20) == [(0, [1, 2]), (1, [3, 4])]
    assert rig.run(r, 3, ([6],)) == []
    assert rig.run(r, 13, ([7, 8, 9],)) == [(2, [5, 6]), (3, [7, 8])]
    for n in range(3):  # decoding: a chunk when its last token is known and computed
        r.all_token_ids.append(n)
        r.num_tokens += 1
        assert rig.run(r, 1, ([10],) if n == 0 else None) == []
    r.all_token_ids.append(3)
    r.num_tokens += 1
    assert rig.run(r, 1) == [(4, [9, 10])]


@pytest.mark.parametrize(("levels", "option", "want"), [(2, True, True), (1, True, False), (2, False, False)])
def test_a_lookup_prefetches_where_there_are_levels(levels: int, option: bool, want: bool) -> None:
    rig = Rig(prefetch=option)
    rig.session.levels = levels
    rig.s.matched(request("a", TOKENS), 0)
    assert rig.session.prefetches == [want]


def test_the_clients_trace_is_passed_on() -> None:
    rig, r, other = Rig(), request("a", TOKENS), request("b", TOKENS)
    r.trace_headers = {"traceparent": "00-1-2-01"}
    other.trace_headers = None
    for q in (r, other):
        assert rig.s.matched(q, 0) == 0
    assert rig.session.traces == ["00-1-2-01", ""]
    rig.s.allocated(r, rig.table(20), 0)
    (order,) = rig.s.step(step({"a": 20})).stores
    assert order.traceparent == "00-1-2-01"


def test_a_trace_that_is_none_is_not_repeated_in_each_message() -> None:
    rig, r = Rig(), request("a", TOKENS)
    r.trace_headers = {"traceparent": "x" * (8 << 20)}
    assert rig.s.matched(r, 0) == 0
    assert rig.session.traces == [""]


def test_nothing_is_stored_until_another_connectors_load_is_proven() -> None:
    """Its step's output tells whether it failed; other steps are scheduled before that comes."""
    rig, r, other = Rig(), request("a", TOKENS), request("b", range(500, 536))
    for q in (r, other):
        assert rig.s.matched(q, 0) == 0
        rig.s.allocated(q, rig.table(36, start=1 if q is r else 50), 0)
    r.num_computed_tokens = 16  # by another connector, in this step
    assert rig.run(r, 4) == []
    assert rig.run(other, 8) == []
    rig.s.output()
    assert rig.run(r, 4) == [(0, [1, 2]), (1, [3, 4]), (2, [5, 6])]
    assert rig.run(other, 8) == [(0, [50, 51]), (1, [52, 53])]


def test_only_prompts_are_stored_if_so_set() -> None:
    rig, r = Rig(store="prompt"), request("a", TOKENS[:16], prompt=8)
    rig.s.matched(r, 0)
    rig.s.allocated(r, rig.table(16), 0)
    assert rig.run(r, 16) == [(0, [1, 2])]


def test_placeholders_and_drafts_are_not_stored() -> None:
    rig, r = Rig(), request("a", TOKENS[:7])
    rig.s.matched(r, 0)
    rig.s.allocated(r, rig.table(16), 0)
    assert rig.run(r, 12) == []  # seven tokens are known; the others may turn out different


def test_a_hit_is_loaded_behind_what_the_engine_has() -> None:
    rig, r = Rig(), request("a", TOKENS)
    rig.session.resident = set(KEYS[:3])
    order = rig.promised(r, computed=12)  # a chunk and a half
    assert order.tokens == 12
    assert [(c.index, c.blocks, c.key) for c in order.groups[0].chunks] == [
        (1, [NOT_WANTED, 4], KEYS[1]), (2, [5, 6], KEYS[2])
    ]
    rig.s.allocated(r, rig.table(36), 0)  # the second call, when the load is over
    r.num_computed_tokens = 24
    assert rig.run(r, 12) == [(3, [7, 8])]
    assert rig.session.released == []


def test_nothing_beyond_what_the_engine_has() -> None:
    rig, r = Rig(), request("a", TOKENS)
    rig.session.resident = set(KEYS[:1])
    assert rig.s.matched(r, 8) == 0
    assert rig.session.released == [1]
    rig.s.allocated(r, rig.table(36), 0)
    r.num_computed_tokens = 8
    assert [i for i, _ in rig.run(r, 28)] == [1, 2, 3]


def test_a_slow_lookup_does_not_hold_the_scheduler() -> None:
    rig, r = Rig(lookup_timeout=60.0), request("a", TOKENS)
    rig.session.answers = False
    assert rig.s.matched(r, 0) is None and rig.s.matched(r, 0) is None
    assert len(rig.session.lookups) == 1
    rig.session.resident = set(KEYS)
    rig.session.lookups[0].reply()
    assert rig.s.matched(r, 0) == 32
    rig2 = Rig(lookup_timeout=0.0)
    rig2.session.answers = False
    assert rig2.s.matched(request("b", TOKENS), 0) == 0


def test_an_old_lease_is_asked_for_again() -> None:
    rig, r = Rig(), request("a", TOKENS)
    rig.session.resident, rig.session.lease_seconds = set(KEYS), 0.0
    assert rig.s.matched(r, 0) == 32
    assert rig.s.matched(r, 0) == 32  # the engine had no room meanwhile
    assert len(rig.session.lookups) == 2 and rig.session.released == [1]


def test_requests_wait_until_every_worker_has_reported() -> None:
    """An idle engine has no steps, so its workers learn of a host that came back by the step of this request."""
    rig, r = Rig(ranks=2), request("a", TOKENS)
    rig.session.resident = set(KEYS)
    rig.s.reported(WorkerReport(epochs={(0, 1): -1}))
    assert rig.s.matched(r, 0) is None
    rig.s.reported(WorkerReport(epochs={(0, 1): 0}))
    assert rig.s.matched(r, 0) == 32
    rig.link.epoch = rig.link.wanted = 1
    assert rig.s.matched(r, 0) is None
    assert rig.s.step(step({})).epoch == 1
    rig.s.reported(WorkerReport(epochs={(0, 0): 1}))
    assert rig.s.matched(r, 0) is None
    rig.s.reported(WorkerReport(epochs={(0, 1): 1}))
    assert rig.s.matched(r, 0) == 32


def test_requests_wait_for_the_first_connection() -> None:
    rig, r = Rig(), request("a", TOKENS)
    rig.session.resident = set(KEYS)
    rig.link.epoch, rig.link.starting = -1, True
    assert rig.s.matched(r, 0) is None
    rig.link.starting = False
    assert rig.s.matched(r, 0) == 0  # no host
    rig.link.epoch = 0
    assert rig.s.matched(r, 0) == 32


def test_requests_wait_no_longer_than_lookup_timeout_in_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: now))
    rig = Rig(ranks=2, lookup_timeout=1.0)
    rig.session.resident = set(KEYS)
    for rig.link.epoch in (1, 2):
        rig.s.reported(WorkerReport(epochs={(0, 0): rig.link.epoch}))  # the other worker cannot connect
        assert rig.s.matched(request("a", TOKENS), 0) is None
        now += 0.9
        assert rig.s.matched(request("b", TOKENS), 0) is None
        now += 0.1
        assert [rig.s.matched(request(name, TOKENS), 0) for name in "abc"] == [0, 0, 0]


def test_a_load_is_over_when_it_is_on_every_rank() -> None:
    rig, r = Rig(ranks=2), request("a", TOKENS)
    rig.session.resident = set(KEYS)
    rig.promised(r)
    one = WorkerReport(loaded=Counter(a=1))
    assert rig.s.received(None, {"a", "other"}) == {"other"}  # another connector's word, for both ranks
    assert rig.s.received(one, set()) == set()
    assert rig.s.received(one, {"a"}) == {"a"}
    assert rig.s.received(None, {"a"}) == {"a"}  # not a load of this connector


def test_a_load_is_over_though_the_engine_has_counted_another_connectors_word() -> None:
    rig, r = Rig(ranks=2), request("a", TOKENS)
    rig.session.resident = set(KEYS)
    rig.promised(r)
    one = WorkerReport(loaded=Counter(a=1))
    assert rig.s.received(one, {"a"}) == set()  # the first rank's two reports count as two ranks'
    assert rig.s.received(one, set()) == {"a"}


def test_a_failed_load_is_not_promised_again() -> None:
    rig, a = Rig(), request("a", TOKENS)
    rig.session.resident = set(KEYS)
    rig.promised(a)
    assert rig.s.reported(WorkerReport(failed={"a": {1: KEYS[1], 2: b""}})) == ([a], [])
    assert rig.s.matched(a, 0) == 0
    rig.s.allocated(a, rig.table(36), 0)
    assert rig.run(a, 36) == [(1, [3, 4]), (2, [5, 6]), (3, [7, 8])]  # it may mend them
    b = request("b", TOKENS)
    assert rig.s.matched(b, 0) == 8  # up to the bad chunk
    rig.s.reported(WorkerReport(stored=[KEYS[1]]))
    assert rig.s.matched(request("c", TOKENS), 0) == 32


def free(rig: Rig, order: int) -> None:
    report = WorkerReport()
    report.free[order] = 1
    rig.s.reported(report)


def test_blocks_are_held_until_every_rank_has_read_them() -> None:
    rig, r = Rig(ranks=2), request("a", TOKENS)
    rig.s.matched(r, 0)
    rig.s.allocated(r, rig.table(36), 0)
    (store,) = rig.s.step(step({"a": 36})).stores
    r.num_computed_tokens = 36
    rig.s.finished(r)
    assert rig.pool.held == set(range(1, 9)) and rig.s.pending
    free(rig, store.id)
    assert rig.pool.held == set(range(1, 9)), "one of two ranks has read"
    free(rig, store.id)
    assert not rig.pool.held and not rig.s.pending


def test_a_step_without_work_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """While stores are read, and no request is there; while a lookup is not answered; not when a load runs."""
    rested: list[float] = []
    monkeypatch.setattr(scheduler.time, "sleep", rested.append)
    done = RequestLookup.done

    def waited(self: RequestLookup, timeout: float = 0) -> bool:
        rested.extend([timeout] if timeout else [])
        return done(self, 0)

    monkeypatch.setattr(RequestLookup, "done", waited)
    rig, r = Rig(), request("a", TOKENS)
    rig.session.answers = False
    assert rig.s.matched(r, 0) is None and not rested
    rig.s.step(step({}))
    assert rested == [0.005], "want a wait for the lookup"
    rig.session.lookups[-1].reply()
    assert rig.s.matched(r, 0) == 0
    rig.s.allocated(r, rig.table(36), 0)
    (store,) = rig.s.step(step({"a": 36})).stores
    r.num_computed_tokens = 36
    rig.s.step(step({}))
    assert rested == [0.005], "want no rest while a request is there"
    rig.s.finished(r)
    assert rig.s.step(step({})).ended and rested == [0.005], "want no rest before the workers know what has ended"
    for _ in range(20):
        rig.s.step(step({}))
    assert rested[1:3] == [0.0015, 0.002] and rested[-1] == max(rested) == 0.005, f"{rested}, want rests that grow to 5 ms"
    free(rig, store.id)
    del rested[:]
    rig.s.step(step({}))
    assert not rested, "want no rest when the host has read all"
    rig.session.answers, rig.session.resident = True, set(KEYS)
    rig.promised(request("b", TOKENS))
    rig.s.step(step({}))
    assert not rested, "want no rest while a load runs"


def test_stores_wait_for_room_in_their_order() -> None:
    """A quarter of 17 blocks may be held: two chunks at a time."""
    rig, r = Rig(blocks=18), request("a", TOKENS)
    rig.s.matched(r, 0)
    rig.s.allocated(r, rig.table(36), 0)
    (first,) = rig.s.step(step({"a": 36})).stores
    r.num_computed_tokens = 36
    assert [c.index for c in first.chunks[0][1]] == [0, 1]
    assert not rig.s.step(step({"a": 1})).stores, "nothing was read"
    free(rig, first.id)
    (second,) = rig.s.step(step({"a": 1})).stores
    assert [c.index for c in second.chunks[0][1]] == [2, 3]


def test_a_request_that_ends_leaves_all_that_no_other_needs() -> None:
    """Nor does it wait for what the host has read by now: vLLM ends requests before it passes the workers' reports on."""
    rig = Rig(blocks=18)
    for name, tokens in ("a", TOKENS), ("b", [7 * t for t in TOKENS]):
        r = request(name, tokens)
        rig.s.matched(r, 0)
        rig.s.allocated(r, rig.table(36, 1 if name == "a" else 9), 0)
        stores = rig.s.step(step({name: 36})).stores
        r.num_computed_tokens = 36
        rig.s.finished(r)
        stores += rig.s.step(step({})).stores
        assert [c.index for s in stores for c in s.chunks[0][1]] == [0, 1, 2, 3], f"chunks of {name} that were ordered"
    assert not rig.s.counts.get("chunks_dropped")


def test_a_request_that_ends_leaves_what_fits_and_counts_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    rig, r = Rig(blocks=18), request("a", TOKENS)
    rig.s.new_request(request("large", list(range(1000, 1048))))  # thirteen blocks with its next token's
    rig.s.matched(r, 0)
    rig.s.allocated(r, rig.table(36), 0)
    (first,) = rig.s.step(step({"a": 36})).stores
    r.num_computed_tokens = 36
    rig.s.finished(r)
    assert not rig.s.step(step({})).stores and rig.s.counts["chunks_dropped"] == 2
    assert "2 chunks were computed and not stored: no more blocks could be held" in caplog.text
    free(rig, first.id)
    b = request("b", TOKENS)
    rig.s.matched(b, 0)
    rig.s.allocated(b, rig.table(36), 0)
    (first,) = rig.s.step(step({"b": 36})).stores
    b.num_computed_tokens = 36
    free(rig, first.id)
    rig.s.finished(b)
    (last,) = rig.s.step(step({})).stores
    assert [c.index for c in last.chunks[0][1]] == [2, 3] and last.chunks[0][1][0].parent == KEYS[1]


def test_chunks_of_a_hosts_absence_are_stored_when_it_is_back() -> None:
    rig, r = Rig(), request("a", TOKENS)
    rig.link.epoch = -1
    assert rig.s.matched(r, 0) == 0
    rig.s.allocated(r, rig.table(36), 0)
    assert rig.run(r, 20) == []
    rig.link.epoch = 0
    assert [i for i, _ in rig.run(r, 16)] == [0, 1, 2, 3]


def test_another_host_is_asked_anew() -> None:
    """Its leases have the same numbers as those of the host that was asked."""
    rig, r = Rig(), request("a", TOKENS)
    rig.session.resident = set(KEYS)
    rig.session.answers = False
    assert rig.s.matched(r, 0) is None
    rig.session.lookups[0].reply()
    second = DoubleSession()
    second.resident = set(KEYS[:1])
    rig.link.up, rig.link.epoch = [second], 1
    rig.s.reported(WorkerReport(epochs={(0, 0): 1}))
    assert rig.s.matched(r, 0) == CHUNK, "the second host has one chunk"
    rig.s.allocated(r, rig.table(36), CHUNK)
    (order,) = rig.s.step(step({})).loads
    assert order.epoch == 1 and len(second.lookups) == 1


def test_a_promise_does_not_outlive_its_host() -> None:
    rig, r = Rig(), request("a", TOKENS)
    rig.session.resident = set(KEYS)
    n = rig.s.matched(r, 0)
    rig.link.up, rig.link.epoch = [DoubleSession()], 1
    rig.s.allocated(r, rig.table(36), n)
    (order,) = rig.s.step(step({})).loads
    assert order.epoch == 0, "the workers have no session of it"


def test_abort_in_mid_load_cancels() -> None:
    rig, r = Rig(), request("a", TOKENS)
    rig.session.resident = set(KEYS)
    order = rig.promised(r)
    rig.s.finished(r)
    orders = rig.s.step(step({}))
    assert orders.cancels == [order.id] and orders.ended == [("a", 1)]
    assert rig.session.ended_requests == [1]
    assert rig.pool.held == set(range(1, 9)), "the host may still write them"
    free(rig, order.id)
    assert not rig.pool.held


def test_a_load_that_the_host_does_not_end_is_given_up_with_its_blocks() -> None:
    rig, r = Rig(), request("a", TOKENS)
    rig.session.resident = set(KEYS)
    order = rig.promised(r)
    chunks = {c.index: b"" for c in order.groups[0].chunks}
    report = WorkerReport(failed={"a": chunks}, abandoned={order.id: "a"})
    assert rig.s.reported(report) == ([], [r])
    assert rig.s.matched(r, 0) == 0
    assert rig.pool.held == set(range(1, 9)) and not rig.s.pending, "want an engine that may pause all the same"
    free(rig, order.id)
    assert not rig.pool.held


def test_a_request_that_ends_after_its_load_failed_waits_no_more() -> None:
    rig, r = Rig(), request("a", TOKENS)
    rig.session.resident = set(KEYS)
    order = rig.promised(r)
    rig.s.reported(WorkerReport(failed={"a": {0: b""}}))
    free(rig, order.id)
    rig.s.finished(r)
    assert not rig.holds.waiting, "room would stay reserved for it"


def test_less_is_loaded_than_was_promised() -> None:
    """The engine may cut what it was promised: no block beyond that is written."""
    rig, r = Rig(), request("a", TOKENS)
    rig.session.resident = set(KEYS)
    assert rig.s.matched(r, 4) == 28
    rig.s.allocated(r, rig.table(20), 16)
    (order,) = rig.s.step(step({})).loads
    assert order.tokens == 16
    assert [(c.index, c.blocks) for c in order.groups[0].chunks] == [
        (0, [NOT_WANTED, 2]), (1, [3, 4]), (2, [5, NOT_WANTED])
    ]


def test_loads_leave_blocks_for_the_largest_request() -> None:
    rig = Rig(blocks=20, lookup_timeout=60.0)
    rig.session.resident = set(KEYS)
    large = request("large", list(range(1000, 1040)))  # ten blocks, eleven with its next token's
    rig.s.new_request(large)
    rig.promised(request("a", TOKENS))  # eight of the nineteen
    assert rig.s.matched(request("b", TOKENS), 0) is None, "it waits for a's"
    rig2 = Rig(blocks=20, lookup_timeout=0.0)
    rig2.session.resident = set(KEYS)
    rig2.s.new_request(request("large", list(range(1000, 1048))))
    rig2.promised(request("a", TOKENS[:20]))  # two chunks
    assert rig2.s.matched(request("b", TOKENS), 0) == 8, "one chunk still fits"


def test_a_request_without_room_is_passed_over_when_nothing_runs() -> None:
    rig = Rig(blocks=20)
    rig.session.resident = set(KEYS)
    rig.promised(request("a", TOKENS))
    rig.s.step(step({}))
    rig.s.step(step({}))
    b = request("b", list(range(1000, 1060)))  # fifteen blocks, and eleven are free
    assert [rig.s.matched(b, 0), rig.s.step(step({})) and rig.s.matched(b, 0)] == [None, 0]
    rig.s.step(step({"a": 4}))
    assert rig.s.matched(b, 0) == 0, "something runs"


def test_hints() -> None:
    rig, r = Rig(), request("a", TOKENS, prompt=30)
    rig.s.matched(r, 0)
    r.status, r.priority = "FINISHED_STOPPED", -2
    rig.s.finished(r)
    want = Hints(EndReason.STOP, tokens_in=30, tokens_out=6, priority=-2)
    assert rig.session.hints == [want]
    r.kv_transfer_params = {"kvhost": {"tool_call": True, "return_seconds": 2.5}}
    assert of_request(r) == dataclasses.replace(want, reason=EndReason.TOOL_CALL, return_seconds=2.5)
    r.kv_transfer_params, r.status = {"kvhost": {"return_seconds": "soon"}}, "FINISHED_ABORTED"
    assert of_request(r) == dataclasses.replace(want, reason=EndReason.ABORT)
    r.kv_transfer_params, r.status = {"kvhost": 7}, "FINISHED_ERROR"
    assert of_request(r) == dataclasses.replace(want, reason=EndReason.UNSPECIFIED)


@pytest.mark.parametrize(
    ("said", "loads", "stores"),
    [({"load": False}, False, True), ({"store": False}, True, False), ({"load": 0, "store": "no"}, True, True), (3, True, True)],
)
def test_a_client_forbids(said: Any, loads: bool, stores: bool) -> None:
    rig, r, again = Rig(), request("a", TOKENS), request("b", TOKENS)
    r.kv_transfer_params = again.kv_transfer_params = {"kvhost": said}
    assert rig.s.matched(r, 0) == 0
    rig.s.allocated(r, rig.table(36), 0)
    assert [chunk for chunk, _ in rig.run(r, 36)] == ([0, 1, 2, 3] if stores else [])
    rig.s.finished(r)
    assert not rig.s.counts.get("chunks_dropped"), "a chunk that its client does not want stored is not lost"
    rig.session.resident = set(KEYS)
    assert bool(rig.s.matched(again, 0)) == loads


def test_a_new_generation_finds_nothing() -> None:
    rig = Rig()
    rig.session.resident = set(KEYS)
    rig.s.new_generation(b"weights changed")
    assert rig.s.matched(request("a", TOKENS), 0) == 0


def test_embeddings_have_no_keys() -> None:
    rig, r = Rig(), request("a", TOKENS)
    r.prompt_embeds = object()
    assert rig.s.matched(r, 0) == 0 and not rig.session.lookups


def test_sliding_window() -> None:
    window = GroupPlan(1, BLOCK, CHUNK, window=10)
    assert list(window.needed(4)) == [2, 3]  # tokens 23 to 31 are in the window of token 32
    assert [window.skipped(n) for n in (9, 10, 32)] == [0, 1, 23]
    rig, r = Rig((FULL, window)), request("a", TOKENS)
    rig.session.resident = set(KEYS)
    n = rig.s.matched(r, 0)
    assert n == 32
    rig.s.allocated(r, [[1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 0, 11, 12, 13]], n)
    (order,) = rig.s.step(step({})).loads
    assert [(c.index, c.blocks) for c in order.groups[1].chunks] == [(2, [NOT_WANTED, 11]), (3, [12, 13])]
    assert [c.index for c in order.groups[0].chunks] == [0, 1, 2, 3]


def test_a_window_group_is_stored_while_it_is_held() -> None:
    window = GroupPlan(1, BLOCK, CHUNK, window=3)
    rig, r = Rig((FULL, window)), request("a", TOKENS)
    rig.s.matched(r, 0)
    rig.s.allocated(r, rig.table(36), 0)

    def ordered(scheduled: int) -> dict[int, list[int]]:
        stores = rig.s.step(step({"a": scheduled})).stores
        r.num_computed_tokens += scheduled
        return {g: [c.index for c in chunks] for o in stores for g, chunks in o.chunks}

    assert ordered(14) == {0: [0], 1: [0]}
    assert ordered(10) == {0: [1, 2], 1: [2]}  # the first block of chunk 1 is behind the window by now


def test_what_a_window_passed_while_there_was_no_room_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    """A quarter of 34 blocks may be held: two chunks of both groups at a time."""
    rig, r = Rig((FULL, GroupPlan(1, BLOCK, CHUNK, window=3)), blocks=35), request("a", TOKENS)
    rig.s.matched(r, 0)
    rig.s.allocated(r, [list(range(1, 10)), list(range(11, 20))], 0)
    (first,) = rig.s.step(step({"a": 36})).stores
    r.num_computed_tokens = 36
    assert [[c.index for c in chunks] for _, chunks in first.chunks] == [[0, 1], [0, 1]]
    assert not rig.s.counts.get("chunks_dropped"), "what waits for room is not dropped"
    free(rig, first.id)
    (second,) = rig.s.step(step({"a": 1})).stores
    assert [(g, [c.index for c in chunks]) for g, chunks in second.chunks] == [(0, [2, 3])]
    assert rig.s.counts["chunks_dropped"] == 2, "chunks of the window's group that were computed and cannot be stored any more"
    assert "1 chunks were computed and not stored: their sliding window had passed them" in caplog.text


def test_longest_hit() -> None:
    window = GroupPlan(1, BLOCK, CHUNK, window=9)
    there = {0: {0, 1, 2, 3}, 1: {0, 2}}
    assert longest_hit((FULL, window), 6, lambda g, i: i in there[g]) == 3
    there[1] = {3}
    assert longest_hit((FULL, window), 6, lambda g, i: i in there[g]) == 4
    assert longest_hit((FULL,), 6, lambda g, i: False) == 0
    assert chunk_size(256, [16]) == 256 and chunk_size(256, [16, 48]) == 288 and chunk_size(100, [128]) == 128


def test_the_phases_of_a_load_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two ranks reports the load with its free blocks; the later end counts, once."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    rig, r = Rig(ranks=2), request("a", TOKENS)
    rig.session.resident, rig.session.answers = set(KEYS), False

    def after(seconds: float) -> None:
        clock.now += seconds

    assert rig.s.matched(r, 0) is None
    after(0.25)
    rig.session.lookups[-1].reply()
    n = rig.s.matched(r, 0)
    assert n and n > 0
    after(0.5)
    rig.s.allocated(r, rig.table(n), n)
    (order,) = rig.s.step(step({})).loads
    after(3)
    report = WorkerReport()
    for over in (101.75, 102.75):
        report.aggregate(WorkerReport(
            free=Counter([order.id]), loads=[LoadTime(order.id, n, 2.5, over)], loaded=Counter([r.request_id]),
        ))
    rig.s.reported(report)
    rig.s.received(report, {r.request_id})
    after(0.125)
    rig.run(r, len(TOKENS) - n)
    took = {name: value for name, value in rig.s.counts.items() if name.endswith("_seconds")}
    assert took == {
        "lookup_seconds": [0.25], "wait_seconds": [0.5], "load_seconds": [2.0], "notice_seconds": [1.0], "schedule_seconds": [0.125],
    }


def test_slow_loads_are_computed() -> None:
    rig, a = Rig(load_when="faster"), request("a", TOKENS)
    rig.session.resident = set(KEYS)
    rig.s._choice.compute.step(1024, 0.1024)
    rig.s._choice.load.add(1000, 1.0)
    assert rig.s.matched(a, 0) == 0 and rig.s.counts["hits_not_loaded_whole"] == 1
    rig.session.micros_per_chunk = 700  # the host has the better estimate: 0.8 ms to compute a chunk
    assert rig.s.matched(request("b", TOKENS), 0) == 32
    rig.session.micros_per_chunk = 900
    assert rig.s.matched(request("c", TOKENS), 0) == 0


def test_the_part_of_a_hit_that_pays_is_loaded() -> None:
    rig, a = Rig(load_when="faster"), request("a", TOKENS)
    rig.session.resident = set(KEYS)
    for _ in range(3):
        rig.s._choice.compute.step(1024, 0.1024)  # 0.8 ms a chunk
    rig.session.micros_per_chunk, rig.session.fast_chunks = 200, 2  # the other two take 2 ms each
    order = rig.promised(a)
    assert order.tokens == 2 * CHUNK and [c.index for c in order.groups[0].chunks] == [0, 1]
    assert rig.s.counts["hits_not_loaded_whole"] == 1
    b = request("b", TOKENS)
    assert rig.s.matched(b, 2 * CHUNK) == 0  # the engine has what pays
    rig.session.micros_per_chunk = 30
    assert rig.s.matched(request("c", TOKENS), 0) == 4 * CHUNK
    assert rig.s.matched(request("d", TOKENS), CHUNK + BLOCK) == 3 * CHUNK - BLOCK


def test_what_is_computed_comes_near() -> None:
    """The engine stores what it has computed although a farther level has it, and nothing that is near already."""
    for fast, stored in ((2, [2, 3]), (0, [])):
        rig, a = Rig(load_when="faster"), request("a", TOKENS)
        rig.session.resident = set(KEYS[:4])
        for _ in range(3):
            rig.s._choice.compute.step(1024, 0.1024)
        rig.session.micros_per_chunk, rig.session.fast_chunks = 200 if fast else 2000, fast
        n = rig.s.matched(a, 0)
        assert n == fast * CHUNK
        rig.s.allocated(a, rig.table(len(TOKENS)), n)
        if n:
            (order,) = rig.s.step(step({})).loads
            report = WorkerReport(free=Counter([order.id]), loaded=Counter(["a"]))
            rig.s.reported(report)
            rig.s.received(report, {"a"})
            a.num_computed_tokens = n
        assert [i for i, _ in rig.run(a, len(TOKENS) - n)] == stored


def test_a_window_counts_only_what_is_loaded_of_it() -> None:
    window = GroupPlan(1, BLOCK, CHUNK, window=10)
    session = DoubleSession()
    session.resident, session.micros_per_chunk, session.membership = set(KEYS), 100, {1}
    session.membership_micros = 400
    lookup = RequestLookup([session], (FULL, window), KEYS, 1, 1)  # type: ignore[list-item]
    assert lookup.done()
    ((chunks, seconds),) = lookup.parts(0, 4)
    assert chunks == 4 and seconds == pytest.approx(600e-6)  # four chunks of the one, two of the other


@pytest.mark.parametrize(
    "extra",
    [
        {"chunk": 1}, {"load_when": "never"}, {"store": "some"}, {"chunk_tokens": 0}, {"chunk_tokens": "256"},
        {"chunk_tokens": 256.0}, {"chunk_tokens": True}, {"load_timeout": -1}, {"load_timeout": "60"},
        {"lookup_wait": float("nan")}, {"prefetch": "true"}, {"prefetch": 1}, {"socket": 7}, {"model": None},
        {"tenant": -1}, {"tenant": 1 << 32}, {"extra": "text"}, {"extra": {"a": 1}}, {"events_medium": "disk"},
    ],
)
def test_wrong_settings_are_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(extra))):
        Settings.parse(extra)


def test_settings_of_the_right_types_are_taken() -> None:
    s = Settings.parse({"load_timeout": 5, "extra": {"a": "b"}, "prefetch": False, "tenant": 3})
    assert (s.load_timeout, s.extra, s.prefetch, s.tenant) == (5, {"a": "b"}, False, 3)
