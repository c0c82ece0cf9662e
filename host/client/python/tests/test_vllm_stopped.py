"""A host whose process is stopped: how long each half of the connector, and the tier, go on with it, and what they hold.

Time is the test's own: a step takes a hundredth of a second."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace as Record
from typing import Any

import pytest
from test_vllm_scheduler import BLOCK, KEYS, TOKENS
from test_vllm_scheduler import Rig as Half
from test_vllm_tierjobs import Rig as Tier
from test_vllm_tierjobs import key, slots
from test_vllm_worker import Rig as Rank
from test_vllm_worker import until
from vllm_doubles import Clock, DoubleLink, DoubleSession, Load, request, step

from kvhost import HostGoneError
from kvhost.vllm import lookups, scheduler, tierjobs, worker
from kvhost.vllm.layers import HostGates, StepLayers
from kvhost.vllm.orders import ChunkOrder, GroupLoad, LoadOrder, StepOrders, WorkerReport
from kvhost.pulse import PAUSE, Pulse
from kvhost.vllm.settings import Settings
from kvhost.vllm.worker import Worker

STEP = 0.01
#: The longest that anything may wait for a host that is stopped, by the settings here.
TIMEOUT = 1.0
BOUND = TIMEOUT + 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (scheduler, lookups, worker, tierjobs):
        monkeypatch.setattr(module, "time", clock)
    return clock


def within(clock: Clock, go: Callable[[], object], over: Callable[[], bool], what: str) -> float:
    """Steps until it is over; the time that it took."""
    begin = clock.now
    while not over():
        assert clock.now - begin < 10 * BOUND, f"never: {what}"
        clock.now += STEP
        go()
    assert clock.now - begin <= BOUND, f"{what} after {clock.now - begin:.2f} s, want at most {BOUND} s"
    return clock.now - begin


# ---- the pulse -------------------------------------------------------------------------------------------------------


def test_a_host_that_answers_is_asked_now_and_then(clock: Clock) -> None:
    session, pulse = DoubleSession(), Pulse(TIMEOUT, clock.monotonic)
    for _ in range(300):
        assert not pulse.stopped(session)  # type: ignore[arg-type]
        clock.now += STEP
    assert 3 / PAUSE - 2 <= len(session.pings) <= 3 / PAUSE + 1, f"{len(session.pings)} pings in 3 s, want one in {PAUSE} s"


def test_a_host_is_stopped_until_it_answers(clock: Clock) -> None:
    session, pulse = DoubleSession(), Pulse(TIMEOUT, clock.monotonic)
    session.frozen = lambda: True
    ask = lambda: pulse.stopped(session)  # type: ignore[arg-type]  # noqa: E731
    assert TIMEOUT < within(clock, ask, ask, "the host is known to be stopped")
    assert len(session.pings) == 1, f"{len(session.pings)} pings, want one that is not answered to be enough"
    clock.now += 100
    assert ask(), "want it stopped as long as it does not answer"
    session.go_on()
    assert not ask()


def test_an_engine_that_was_stopped_itself_blames_no_host(clock: Clock) -> None:
    session, pulse = DoubleSession(), Pulse(TIMEOUT, clock.monotonic)
    session.frozen = lambda: True
    ask = lambda: pulse.stopped(session)  # type: ignore[arg-type]  # noqa: E731
    ask()
    clock.now += 3600  # the answer has come, and the thread that takes it has yet to run
    assert not ask(), "want another look before the host is blamed"
    session.go_on()
    clock.now += 1
    assert not ask()


def test_a_session_that_has_ended_is_not_stopped(clock: Clock) -> None:
    session, pulse = DoubleSession(), Pulse(TIMEOUT, clock.monotonic)
    session.die()
    assert not pulse.stopped(session) and not pulse.stopped(None)  # type: ignore[arg-type]


# ---- stores ----------------------------------------------------------------------------------------------------------


def test_stores_are_taken_back_from_a_stopped_host(clock: Clock) -> None:
    rank = Rank()
    orders = [rank.store(r, b) for r, b in (("a", 1), ("b", 2), ("c", 3))]
    rank.sent(3)
    rank.session.stores[0].finish_reading()
    rank.step()
    assert rank.free == {orders[0]: 1}
    rank.session.frozen = lambda: True
    within(clock, rank.step, lambda: len(rank.free) == 3, "the blocks of unread stores are free")
    assert rank.session.withdrawn == [2, 3] and rank.dropped == {"the host does not answer": 2}
    late = rank.store("d", 4)
    rank.step()
    assert rank.free[late] == 1 and len(rank.session.stores) == 3, "want no store sent to a host that does not answer"
    rank.session.go_on()
    rank.store("e", 5)
    rank.sent(4)
    rank.session.die()
    rank.w.close()


def test_stores_of_a_slow_host_wait_for_read_timeout(clock: Clock) -> None:
    rank = Rank(read_timeout=10.0)
    order = rank.store("a", 1)
    rank.sent(1)
    for _ in range(900):
        clock.now += STEP
        rank.step()
    assert not rank.free and not rank.session.withdrawn, "want a host that answers to have its time"
    rank.session.stores[0].cancel = lambda wait=True: None  # type: ignore[method-assign]  # it takes its time for that, too
    for _ in range(110):
        clock.now += STEP
        rank.step()
    assert rank.free == {order: 1} and rank.session.withdrawn == [1]
    rank.session.die()
    rank.w.close()


def test_an_older_host_keeps_the_blocks_of_stores(clock: Clock) -> None:
    rank = Rank()
    rank.session._withdrawals = None
    order = rank.store("a", 1)
    rank.sent(1)
    rank.session.frozen = lambda: True
    for _ in range(400):
        clock.now += STEP
        rank.step()
    assert rank.session.stores[0].cancelled and not rank.free, "want the store cancelled, and its blocks the host's"
    rank.session.go_on()
    rank.session.stores[0].cancel()
    rank.step()
    assert rank.free == {order: 1}
    rank.w.close()


# ---- loads -----------------------------------------------------------------------------------------------------------


def test_a_load_is_given_up_and_no_other_is_sent(clock: Clock) -> None:
    rank = Rank()
    rank.session.frozen = lambda: True
    first = rank.load("a", [1, 2])
    within(clock, lambda: rank.step(), lambda: bool(rank.abandoned), "the load is given up")
    assert rank.abandoned == {first: "a"} and rank.session.loads[0].cancelled and first not in rank.free
    second = rank.load("b", [3, 4])
    assert rank.step() == ({"b"}, {"b"}) and rank.free == {second: 1}, "want it failed at once, and its blocks free"
    assert len(rank.session.loads) == 1, "want no further load sent to the host"
    rank.session.go_on()
    rank.session.loads[0].finish()
    rank.step()
    assert rank.free[first] == 1
    rank.load("c", [5])
    assert len(rank.session.loads) == 2
    rank.session.die()
    rank.w.close()


def test_a_load_that_was_cancelled_is_given_up_as_soon(clock: Clock) -> None:
    rank = Rank(load_timeout=0.0)
    rank.session.frozen = lambda: True
    order = rank.load("a", [1, 2])
    within(clock, lambda: rank.step(), lambda: rank.abandoned == {order: "a"}, "the load is given up")
    rank.session.die()
    rank.w.close()


class Inside:
    """A rank whose loads run inside steps. What waits for the host in the real time of a step takes that long here."""

    def __init__(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.session = clock, DoubleSession()
        self.session.in_step = lambda load: None
        self.session.frozen = lambda: True
        self.w = Worker(
            Settings(), DoubleLink(self.session), (0, 0), True,  # type: ignore[arg-type]
            layers=StepLayers(HostGates(0.0), {"layer": 0}),
        )

        def wait(load: Load, timeout: float | None = None) -> Any:
            if load.over:
                return plain(load, timeout)
            clock.now += timeout or 0.0
            raise TimeoutError

        plain = Load.wait
        monkeypatch.setattr(Load, "wait", wait)

    def step(self, *ids: int) -> float:
        """A step with so many loads: how long it takes."""
        begin = self.clock.now
        chunks = [ChunkOrder(0, [1, 2], b"k")]
        self.w.begin(StepOrders(loads=[LoadOrder(i, str(i), 0, 16, [GroupLoad(0, [7], chunks)], in_step=True) for i in ids]), True)
        self.w.wait_for_layer("layer")
        self.w.finished(StepOrders(), lambda: lambda: None)
        return self.clock.now - begin


def test_loads_inside_steps_cost_one_wait(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = Inside(clock, monkeypatch)
    first = inside.step(1, 2, 3)
    assert TIMEOUT < first <= BOUND, f"the step with the first loads took {first:.2f} s, want at most {BOUND}"
    report = inside.w.report()
    assert report is not None and report.abandoned == {1: "1", 2: "2", 3: "3"}
    later = inside.step(4) + inside.step(5, 6)
    assert later == 0, f"further steps with loads took {later:.2f} s, want no wait"
    assert len(inside.session.loads) == 3, "want no further load sent"
    report = inside.w.report()
    assert report is not None and set(report.failed) == {"4", "5", "6"} and not report.abandoned
    inside.session.go_on()
    for load in inside.session.loads:
        load.finish()
    inside.step()
    inside.session.in_step = lambda load: load.finish()
    inside.step(7)
    assert len(inside.session.loads) == 4, "want loads again once the host has ended those"
    inside.w.close()


def test_a_load_inside_a_step_of_a_slow_host_is_cancelled(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = Inside(clock, monkeypatch)
    inside.session.frozen = lambda: False
    took = inside.step(1)
    assert abs(took - 2.0) < 0.1, f"the step took {took:.2f} s, want step_timeout"
    report = inside.w.report()
    assert report is not None and not report.abandoned, "want the load ended by the host"
    inside.w.close()


# ---- the scheduler's half --------------------------------------------------------------------------------------------


def test_requests_wait_once_for_a_stopped_host(clock: Clock) -> None:
    half = Half()
    half.session.resident = set(KEYS)
    half.session.answers, half.session.frozen = False, lambda: True
    rs = [request(str(i), [*range(i), *TOKENS]) for i in range(20)]
    waiting = list(rs)

    def go() -> None:
        waiting[:] = [r for r in waiting if half.s.matched(r, 0) is None]

    go()
    assert len(waiting) == 20
    within(clock, go, lambda: not waiting, "all requests are computed")
    asked = len(half.session.lookups)
    clock.now += 3600
    assert half.s.matched(request("later", TOKENS), 0) == 0, "want no request to wait that comes later"
    assert len(half.session.lookups) == asked, "want nothing asked of a host that does not answer"
    half.session.go_on()
    half.session.answers = True
    assert half.s.matched(request("after", TOKENS), 0) == 32


def test_an_answer_from_before_the_stop_is_not_loaded(clock: Clock) -> None:
    half, r = Half(), request("a", TOKENS)
    half.session.resident = set(KEYS)
    assert half.s.matched(r, 0) == 32
    half.session.frozen = lambda: True
    clock.now += PAUSE
    within(clock, lambda: half.s.matched(r, 0), lambda: half.s.matched(r, 0) == 0, "nothing is promised any more")
    half.s.allocated(r, half.table(len(TOKENS)), 0)
    assert half.session.released == [1], f"released {half.session.released}, want the lease of the answer"


def test_the_scheduler_waits_for_one_lookup_at_a_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    half = Half(lookup_wait=0.002)
    half.session.answers, half.session.frozen = False, lambda: True
    waits: list[float] = []
    done = lookups.RequestLookup.done

    def counted(lookup: Any, timeout: float = 0) -> bool:
        waits.append(timeout)
        return done(lookup, 0)

    monkeypatch.setattr(lookups.RequestLookup, "done", counted)
    for i in range(100):
        assert half.s.matched(request(str(i), [*range(i), *TOKENS]), 0) is None
    assert sum(waits) == 0.002, f"a crowd held the scheduler up for {sum(waits):.3f} s, want one lookup_wait"
    half.session.lookups[0].reply()
    assert half.s.matched(request("next", [1, *TOKENS]), 0) is None
    assert sum(waits) == 0.004, "want it to wait for another once that was answered"


def test_nothing_is_stored_at_a_stopped_host(clock: Clock) -> None:
    half, r = Half(), request("a", TOKENS)
    assert half.s.matched(r, 0) == 0
    half.s.allocated(r, half.table(len(TOKENS)), 0)
    half.session.frozen = lambda: True
    clock.now += PAUSE
    stopped = lambda: half.s._stopped()  # noqa: E731
    within(clock, stopped, stopped, "the host is known to be stopped")
    assert half.run(r, 20) == [], "want no chunk ordered"
    half.session.go_on()
    assert half.run(r, 16) == [(0, [1, 2]), (1, [3, 4]), (2, [5, 6]), (3, [7, 8])], "want them stored once it answers"
    half.session.frozen = lambda: True
    clock.now += PAUSE
    within(clock, stopped, stopped, "the host is known to be stopped")
    r.all_token_ids += range(8)
    r.num_tokens += 8
    half.run(r, 8, ([10, 11],))
    half.s.finished(r)
    assert half.s.counts["chunks_dropped"] == 1


def test_no_load_is_promised_until_one_that_hangs_has_ended() -> None:
    half, r = Half(ranks=2), request("a", TOKENS)
    half.session.resident = set(KEYS)
    order = half.promised(r)
    half.s.reported(WorkerReport(failed={"a": {0: b""}}, abandoned={order.id: "a"}))
    assert half.s.matched(request("b", TOKENS), 0) == 0
    half.s.reported(WorkerReport(free={order.id: 1}))  # type: ignore[arg-type]
    assert half.s.matched(request("b", TOKENS), 0) == 0, "want none until all ranks' have ended"
    half.s.reported(WorkerReport(free={order.id: 1}))  # type: ignore[arg-type]
    assert half.s.matched(request("b", TOKENS), 0) == 32


@pytest.mark.parametrize("in_step", [False, True])
def test_loads_leave_room_for_the_largest_request(clock: Clock, in_step: bool) -> None:
    """Also for those that wait for the loads, and for one that has not come yet."""
    half = Half(blocks=1 + 24, load_in="step" if in_step else "beside")
    half.s._in_step_allowed, half.s._longest = in_step, 10 * BLOCK
    half.session.resident = set(KEYS)
    loaded = []
    for i in range(4):
        r = request(str(i), [*TOKENS])
        n = half.s.matched(r, 0)
        if n is None:
            clock.now += BOUND
            n = half.s.matched(r, 0)
        loaded.append(n)
        half.s.allocated(r, half.table(len(TOKENS), start=1 + 9 * (i % 2)), n or 0)
        half.s.step(step({r.request_id: 1} if in_step else {}))
    blocks = [-(-(n or 0) // BLOCK) for n in loaded]
    assert blocks[0] == 8 and sum(blocks) <= 24 - 10, f"loads hold {blocks} of 24 blocks, want 10 left for a request"


@pytest.mark.parametrize(("in_step", "beside", "want"), [(False, 0, 32), (False, 5, 24), (True, 0, 32), (True, 5, 32)])
def test_a_request_longer_than_half_of_the_blocks_loads(in_step: bool, beside: int, want: int) -> None:
    """It cannot have its 9 of 12 blocks twice. Beside the steps its load leaves what the largest of the others needs."""
    half = Half(blocks=1 + 12, load_in="step" if in_step else "beside")
    half.s._in_step_allowed = in_step
    half.session.resident = set(KEYS)
    if beside:
        other = request("other", [7] * (beside * BLOCK - 1))
        assert half.s.matched(other, 0) == 0, "want no hit for the other one"
    assert half.s.matched(request("a", TOKENS), 0) == want, f"want {want} tokens beside a request of {beside} blocks"


@pytest.mark.parametrize("in_step", [False, True])
def test_a_long_request_with_a_short_hit_can_start_over(clock: Clock, in_step: bool) -> None:
    """Its 7 of 12 blocks are there even if the 4 of its load and the 3 of the load before it stay the host's."""
    half = Half(blocks=1 + 12, load_in="step" if in_step else "beside")
    half.s._in_step_allowed = in_step
    half.session.resident = set(KEYS[:2])
    first, r = request("first", TOKENS[: 3 * BLOCK]), request("a", TOKENS[: 7 * BLOCK - 1])
    assert half.s.matched(first, 0) == 2 * BLOCK
    half.s.allocated(first, [[1, 2, 3]], 2 * BLOCK)
    assert half.s.matched(r, 0) is None, "want it to wait for the blocks of the load before it"
    clock.now += BOUND
    assert half.s.matched(r, 0) == 2 * BLOCK, "want the part of its hit beside which it finds all of its blocks"


def test_two_hosts_leave_room_for_the_largest_request(clock: Clock) -> None:
    """Both are stopped, one amid a load, the other one with blocks that it has not read."""
    one = Half(blocks=1 + 24)
    other = Half(pool=one.pool)
    one.s._longest = other.s._longest = 10 * BLOCK
    one.session.resident, r, stores = set(KEYS), request("a", TOKENS), request("b", [7, *TOKENS])
    assert one.promised(r).groups, "want the one host to load 8 of 24 blocks"
    assert other.s.matched(stores, 0) == 0
    other.s.allocated(stores, [list(range(9, 18))], 0)
    other.run(stores, len(TOKENS) + 1)
    held = len(one.pool.held)
    assert held == 8 + 6, f"{held} of 24 blocks are held, want 10 left for a request, and of the store's the quarter that may be unread"
    other.session.resident = set(KEYS)
    again = request("c", TOKENS)
    assert other.s.matched(again, 0) is None, "want the other one to wait for the first one's blocks"
    clock.now += BOUND
    promised = other.s.matched(again, 0)
    assert promised is not None and held + promised // BLOCK <= 24 - 10, f"{promised} tokens promised beside {held} blocks, want 10 left"


def test_a_cache_is_emptied_past_what_is_held() -> None:
    half, r = Half(), request("a", TOKENS)
    half.session.resident = set(KEYS)
    half.promised(r)
    held = half.pool.held
    with half.holds.let_go():
        assert not half.pool.held
    assert held and half.pool.held == held


# ---- the tier --------------------------------------------------------------------------------------------------------


def tier_of(*resident: int) -> Tier:
    tier = Tier(lookup=TIMEOUT)
    tier.has(*resident)
    return tier


def test_the_tier_goes_on_without_a_stopped_host(clock: Clock) -> None:
    tier = tier_of(1, 2)
    assert tier.ask("a", key(1), key(2)) == [True, True] and tier.ask("b", key(1)) == [True]
    tier.session.frozen = lambda: True
    tier.jobs.load(1, "a", slots(key(1)))
    tier.jobs.store(2, "a", slots(key(3)))
    answered: dict[int, Any] = {}

    def go() -> None:
        tier.jobs.flush()
        answered.update(tier.done())

    within(clock, go, lambda: tier.aside == [1] and 2 in answered, "the load is set aside, and the store is over")
    assert answered[2].bad == [key(3)] and tier.session.withdrawn == [1] and 1 not in answered
    assert tier.found("a", key(1), key(2)) + tier.found("b", key(1)) == [False] * 3, "want all to be computed"
    assert tier.found("c", key(7)) == [False], "want nothing asked of a host that does not answer"
    tier.jobs.store(3, "c", slots(key(8)))
    assert tier.done()[3].bad == [key(8)] and len(tier.session.stores) == 1, "want no store sent to it"
    assert not tier.jobs.pending, "want an engine that may pause"
    tier.session.go_on()
    tier.session.loads[0].finish()
    done = tier.done()[1]
    assert (done.good, done.bad) == ([], [key(1)]), "what was loaded too late is not there"
    assert tier.ask("d", key(2)) == [True]


def test_a_lookup_of_the_tier_does_not_wait_longer_than_its_time(clock: Clock) -> None:
    tier = tier_of(1)
    tier.session.answers, tier.session.frozen = False, lambda: True
    tier.jobs.lookup("a", key(1))
    within(clock, tier.jobs.flush, lambda: tier.found("a", key(1)) == [False], "the lookup is a miss")


def test_a_job_of_the_tier_that_is_not_sent_ends(clock: Clock) -> None:
    tier = tier_of(1)
    tier.session.limits = Record(keys_per_lookup=9, chunks_per_job=9, jobs=1)
    assert tier.ask("a", key(1)) == [True]
    tier.jobs.store(1, "a", slots(key(2)))
    tier.session.frozen = lambda: True
    tier.jobs.load(2, "a", slots(key(1)))
    tier.jobs.store(3, "a", slots(key(3)))
    answered: dict[int, Any] = {}
    within(clock, lambda: answered.update(tier.done()), lambda: set(answered) == {1, 2, 3}, "all jobs are over")


class Woken:
    """The drain's pauses take their time."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def clear(self) -> None:
        pass

    def set(self) -> None:
        pass

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds


@pytest.mark.parametrize("older", [False, True])
def test_a_drain_leaves_rows_to_a_stopped_host(clock: Clock, older: bool) -> None:
    tier = tier_of(1)
    given: list[int] = []
    tier.jobs._give_back = given.extend
    tier.jobs._woken = Woken(clock)  # type: ignore[assignment]
    assert tier.ask("a", key(1)) == [True]
    tier.session.frozen = lambda: True
    tier.jobs.load(1, "a", slots(key(1)))
    tier.jobs.store(2, "a", slots(key(3)))
    if older:
        tier.session.stores[0]._withdrawals = None
        tier.jobs.drain(5.0, leave=True)
        assert 2 not in tier.done(), "want the rows of a store that cannot be taken back to be the host's"
        return
    begin = clock.now
    tier.jobs.drain(leave=True)
    assert clock.now - begin <= BOUND, f"the drain took {clock.now - begin:.2f} s, want at most {BOUND}"
    done = tier.done()
    assert done[1].bad == [key(1)] and done[2].bad == [key(3)], f"{done}, want an answer to each job"
    assert tier.jobs.left == {100} and not given, "want the load's row kept from all others"
    tier.jobs.drain(leave=True)
    assert tier.jobs.left == {100}
    tier.session.go_on()
    tier.session.loads[0].finish()
    tier.jobs.flush()
    assert given == [100] and not tier.jobs.left


def test_a_host_that_dies_gives_the_rows_back(clock: Clock) -> None:
    tier = tier_of(1)
    given: list[int] = []
    tier.jobs._give_back = given.extend
    tier.jobs._woken = Woken(clock)  # type: ignore[assignment]
    assert tier.ask("a", key(1)) == [True]
    tier.session.frozen = lambda: True
    tier.jobs.load(1, "a", slots(key(1)))
    tier.jobs.drain(leave=True)
    tier.session.loads[0]._end(HostGoneError("gone"))
    tier.jobs.flush()
    assert given == [100]
