"""The traffic of the tier in vLLM's offloading, with a host that answers at the test's word."""

from __future__ import annotations

import dataclasses
import random
import time
from types import SimpleNamespace as Record
from typing import Any

import pytest
from kvhost.session import EndReason, Hints, Result
from kvhost.vllm import hints
from kvhost.vllm.tierjobs import Done, Slot, TierJobs, Times
from vllm_doubles import DoubleLink, DoubleSession

GROUPS = (0, 3)


def key(n: int, group: int = 0) -> bytes:
    """vLLM's."""
    return n.to_bytes(32, "little") + group.to_bytes(4, "big")


def host_key(n: int) -> bytes:
    return key(n)[:32]


class Rig:
    def __init__(self, **times: float) -> None:
        self.session = DoubleSession()
        self.session.membership = set(GROUPS)
        self.link = DoubleLink(self.session)
        self.aside: list[int] = []
        self.can_set_aside = True
        self.jobs = TierJobs(self.link, GROUPS, 32, Times(**times), self._set_aside)  # type: ignore[arg-type]

    def _set_aside(self, job: int) -> bool:
        self.aside.append(job)
        return self.can_set_aside

    def has(self, *ns: int) -> None:
        self.session.resident |= {host_key(n) for n in ns}

    def found(self, request: str, *keys: bytes) -> list[bool | None]:
        return [self.jobs.lookup(request, k) for k in keys]

    def ask(self, request: str, *keys: bytes) -> list[bool | None]:
        """What a second step learns."""
        assert set(self.found(request, *keys)) == {None}, "want keys that were not asked for"
        self.jobs.flush()
        return self.found(request, *keys)

    def new_host(self) -> None:
        self.session.die()
        self.session = DoubleSession()
        self.session.membership = set(GROUPS)
        self.link.up = [self.session]

    def done(self) -> dict[int, Done]:
        done = self.jobs.finished()
        assert len({d.id for d in done}) == len(done), "a job was answered twice"
        return {d.id: d for d in done}


@pytest.fixture
def rig() -> Rig:
    return Rig()


def slots(*keys: bytes) -> list[Slot]:
    return [Slot(k, 100 + i) for i, k in enumerate(keys)]


def sent(job: Any) -> list[tuple[int, int]]:
    """A load's chunks: index of the key in its lookup, and row."""
    return [(c.index, *c.blocks) for c in job.chunks]


def test_lookups_of_a_step_are_one_message_for_each_request_and_group(rig: Rig) -> None:
    rig.has(1, 2)
    asked = [key(1), key(9), key(2, 3), key(2)]
    assert rig.found("a", *asked) == [None] * 4 and rig.found("b", key(1)) == [None]
    assert not rig.session.lookups, f"{len(rig.session.lookups)} messages before the step has ended, want none"
    rig.jobs.flush()
    assert [(p.group, len(p.keys)) for p in rig.session.lookups] == [(0, 3), (3, 1), (0, 1)]
    assert rig.found("a", *asked) == [True, False, True, True]
    rig.has(9)
    assert rig.found("a", key(9)) == [False], "a miss is final for its request"
    assert rig.found("b", key(9)) == [None], "and for no other"
    assert rig.jobs.counts["lookups"] == 5, f"counted {rig.jobs.counts}, want 5 lookups"


def test_a_lookup_without_an_answer_is_a_miss() -> None:
    rig = Rig(lookup=0.0)
    rig.session.answers = False
    assert rig.ask("a", key(1), key(2)) == [False, False]
    assert rig.jobs.counts["lookups_timed_out"] == 2, f"counted {rig.jobs.counts}, want 2 timed out"


def test_keys_of_another_engine_are_misses(rig: Rig) -> None:
    assert rig.found("a", key(1, group=1), b"short") == [False, False]
    rig.jobs.store(1, "a", slots(key(1, group=1), key(2)))
    rig.session.stores[0].publish()
    assert (rig.done()[1].good, rig.session.stores[0].chunks[0].key) == ([key(2)], host_key(2))


def test_a_load_is_under_the_lookups_lease_and_names_what_failed(rig: Rig) -> None:
    rig.has(1, 2, 3)
    assert rig.ask("a", key(1), key(2), key(3), key(3, 3)) == [True] * 4
    assert rig.ask("b", key(2), key(3)) == [True] * 2
    rig.jobs.load(1, "a", slots(key(3), key(1), key(3, 3)))
    first, second = rig.session.loads
    assert (sent(first), sent(second)) == ([(2, 100), (0, 101)], [(0, 102)])
    assert (first.lease, second.lease) == (1, 2), "want each group's own lease"
    first.finish(failures=[(0, 7)])
    assert rig.done() == {}, "a job is over when all its parts are"
    second.finish()
    done = rig.done()[1]
    assert (done.good, done.bad) == ([key(1), key(3, 3)], [key(3)])
    assert rig.found("a", key(3)) == [False], "what failed is not promised to its request again"
    assert rig.found("b", key(2), key(3)) == [True, False], "nor to others that have asked for it"
    assert rig.found("a", key(1)) == [True], "what was loaded is still there"


def test_a_lease_that_was_used_is_asked_for_again(rig: Rig) -> None:
    rig.has(1, 2, 3)
    assert rig.ask("a", key(1), key(2), key(3)) == [True] * 3
    rig.jobs.load(1, "a", slots(key(1)))
    rig.session.resident.remove(host_key(3))
    rig.session.answers = False
    rig.jobs.load(2, "a", slots(key(2), key(3)))
    assert [sent(job) for job in rig.session.loads] == [[(0, 100)]], "the second load has no lease yet"
    rig.session.lookups[-1].reply()
    rig.jobs.flush()
    assert [sent(job) for job in rig.session.loads] == [[(0, 100)], [(0, 100)]]
    for job in rig.session.loads:
        job.finish()
    done = rig.done()
    assert (done[1].good, done[2].good, done[2].bad) == ([key(1)], [key(2)], [key(3)])


def test_a_store_has_an_answer_for_each_chunk(rig: Rig) -> None:
    keys = [key(n) for n in range(1, 6)]
    rig.jobs.store(7, "a", slots(*keys))
    results = (Result.STORED, Result.RESIDENT, Result.REFUSED, Result.SHED, Result.FAILED)
    rig.session.stores[0].publish(*results)
    done = rig.done()[7]
    assert (done.good, done.bad) == (keys[:2], keys[3:]), "what a policy refuses has not failed, and is not there"
    assert rig.jobs.counts == {"chunks_stored": 1, "chunks_not_stored": 2}


def test_a_chunk_is_stored_behind_the_one_before_it(rig: Rig) -> None:
    def links() -> list[tuple[bytes, int]]:
        return [(c.parent or b"", c.depth) for c in rig.session.stores[-1].chunks]

    rig.jobs.store(1, "a", [Slot(key(1), 0, 0), Slot(key(2), 1, 1), Slot(key(5), 2, 4, key(4))])
    assert links() == [(b"", 0), (host_key(1), 1), (host_key(4), 4)]
    rig.jobs.store(2, "a", [Slot(key(6), 0, 5)])
    assert links() == [(host_key(5), 5)], "want the chunk that the job before it ended with"
    rig.jobs.store(3, "b", slots(key(11), key(12)))
    assert links() == [(b"", 0), (host_key(11), 1)], "vLLM 0.26 tells no places: in the order of the job"


def test_the_hosts_limits(rig: Rig) -> None:
    rig.session.limits = Record(keys_per_lookup=3, chunks_per_job=2, jobs=2)
    keys = [key(n) for n in range(1, 6)]
    rig.has(*range(1, 6))
    rig.jobs.store(1, "a", slots(*keys))
    assert [len(s.chunks) for s in rig.session.stores] == [2, 2], "want two jobs at a time"
    assert rig.ask("b", *keys) == [True] * 5
    assert [len(p.keys) for p in rig.session.lookups] == [3, 2]
    rig.jobs.load(2, "b", slots(*keys[:3]))
    rig.session.stores[0].publish()
    rig.session.stores[1].publish()
    for _ in range(2):
        rig.jobs.flush()
    assert [len(x.chunks) for x in rig.session.loads] == [2, 1], "want the load before the store that waited longer"
    for job in rig.session.loads:
        job.finish()
    rig.jobs.flush()
    assert len(rig.session.stores) == 3, f"{len(rig.session.stores)} stores were sent, want the third, too"
    rig.session.stores[2].publish()
    done = rig.done()
    assert (done[1].good, done[2].good) == (keys, keys[:3])


def test_a_host_that_goes_and_comes_back(rig: Rig) -> None:
    rig.has(1, 2)
    assert rig.ask("a", key(1), key(2)) == [True, True]
    rig.jobs.store(1, "a", slots(key(3)))
    rig.jobs.load(2, "a", slots(key(1)))
    rig.new_host()
    done = rig.done()
    assert (done[1].bad, done[2].bad) == ([key(3)], [key(1)])
    assert rig.found("a", key(2)) == [None], "a lease of the old session is none of the new one's"
    rig.jobs.flush()
    assert rig.found("a", key(2)) == [False]

    rig.link.up = []
    assert rig.found("b", key(2)) == [False], "want a miss at once while no host is there"
    rig.jobs.store(3, "b", slots(key(3)))
    rig.jobs.load(4, "b", slots(key(2)))
    done = rig.done()
    assert (done[3].bad, done[4].bad) == ([key(3)], [key(2)])
    assert rig.jobs.counts["chunks_dropped"] == 1, f"counted {rig.jobs.counts}, want 1 dropped"
    rig.link.up = [rig.session]
    rig.has(7)
    assert rig.ask("b", key(7)) == [True]


def test_what_takes_too_long_is_cancelled() -> None:
    rig = Rig(load=0.0, store=0.0)
    rig.has(1)
    assert rig.ask("a", key(1)) == [True]
    rig.jobs.load(1, "a", slots(key(1)))
    rig.jobs.store(2, "a", slots(key(2)))
    rig.jobs.store(3, "a", slots(key(3)))
    rig.session.stores[1].finish_reading()
    for _ in range(2):
        rig.jobs.flush()
    assert [rig.session.loads[0].cancelled, *(s.cancelled for s in rig.session.stores)] == [True, True, False]
    done = rig.done()
    assert (done[1].bad, done[2].bad, 3 in done) == ([key(1)], [key(2)], False)


def test_a_hanging_host_keeps_its_slots(rig: Rig) -> None:
    rig.session.frozen = lambda: True
    rig.jobs.store(1, "a", slots(key(1)))
    rig.jobs.drain(give_up=0.0)
    assert rig.session.stores[0].cancelled, "want the store cancelled"
    assert rig.done() == {} and rig.jobs.pending, "its slots are the host's until it has ended the job"
    rig.session.die()
    assert rig.done()[1].bad == [key(1)]
    assert not rig.jobs.pending, "no job is left"


def test_a_request_ends_after_what_was_sent_for_it(rig: Rig) -> None:
    rig.session.limits = Record(keys_per_lookup=9, chunks_per_job=9, jobs=1)
    rig.has(1)
    told = Hints(return_seconds=30)
    rig.jobs.end_request("none", told)
    rig.jobs.lookup("unasked", key(1))
    rig.jobs.end_request("unasked", told)
    rig.jobs.flush()
    assert not rig.session.lookups and not rig.session.ended_requests, "the host has not heard of these"

    assert rig.ask("a", key(1)) == [True]
    rig.jobs.store(1, "a", slots(key(2)))
    rig.jobs.store(2, "a", slots(key(3)))
    rig.jobs.end_request("a", told)
    assert rig.session.released == [1], "want the lease back"
    assert not rig.session.ended_requests, "a store of the request was not sent yet"
    rig.session.stores[0].publish()
    rig.jobs.flush()
    assert len(rig.session.stores) == 2 and rig.session.hints == [told]


def test_leases_go_back_once_a_request_runs(rig: Rig) -> None:
    rig.has(1, 2)
    assert rig.ask("a", key(1)) == [True] and rig.ask("b", key(2)) == [True]
    rig.jobs.flush(["a"])
    assert rig.session.released == [1]


def test_after_other_weights_nothing_is_found(rig: Rig) -> None:
    rig.has(1)
    assert rig.ask("a", key(1)) == [True]
    rig.jobs.new_generation()
    assert rig.ask("a", key(1)) == [False]
    rig.jobs.store(1, "a", slots(key(1)))
    stored = rig.session.stores[0].chunks[0].key
    assert stored != host_key(1) and len(stored) == 32
    rig.session.resident.add(stored)
    assert rig.ask("b", key(1)) == [True]


def test_what_a_client_says() -> None:
    def said(params: Any, *actions: Any) -> Any:
        return Record(kv_transfer_params=params, kv_hints=Record(actions=actions) if actions else None)

    def action(payload: dict[str, Any], kind: str = "kvhost", version: str = "1") -> Any:
        return Record(action_type=kind, action_version=version, payload=payload)

    told = {"tool_call": True, "return_seconds": 30}
    want = Hints(reason=EndReason.TOOL_CALL, return_seconds=30.0)
    assert hints.of_client(said({"kvhost": told})) == want, "the tier is not told why a request ends"
    assert hints.of_client(said(None, action({"store": True}, kind="other"), action(told))) == want, "an orchestrator's word"
    assert hints.of_client(said({"kvhost": told}), EndReason.LENGTH) == dataclasses.replace(want, reason=EndReason.LENGTH)
    for params in (None, {}, {"kvhost": 3}, {"kvhost": {"return_seconds": -1}}):
        assert hints.of_client(said(params)) == Hints(), f"{params} was understood"
    both = said({"kvhost": {"store": True}}, action({"store": False, "load": False}), action({"tool_call": True}, version="2"))
    assert (hints.forbids(both, "store"), hints.forbids(both, "load")) == (False, True), "want the client's word to stand"
    assert hints.of_client(both) == Hints(), "an action of another version was understood"


@pytest.mark.parametrize("seed", range(60))
def test_every_job_is_answered_once(seed: int) -> None:
    """Whatever comes in which order, a host's death and one that is stopped for a while included."""
    rng = random.Random(seed)
    rig = Rig(lookup=rng.choice([0.001, 1.0]))
    keys = [key(n, g) for n in range(1, 9) for g in GROUPS]
    asked: dict[int, set[bytes]] = {}
    answered: dict[int, Done] = {}
    rows: set[int] = set()  # of jobs that are not answered

    def take() -> None:
        for id, done in rig.done().items():
            assert id in asked and id not in answered, f"job {id} was answered twice, or never asked for"
            assert len(done.good) + len(done.bad) == len(set(done.good) | set(done.bad)), "a key has two answers"
            assert set(done.good) | set(done.bad) <= asked[id], "a key of another job"
            if id % 2:  # a load: no policy refuses it
                assert set(done.good) | set(done.bad) == asked[id], "a key has no answer"
            answered[id] = done
            rows.difference_update(range(100 * id, 100 * id + len(asked[id])))

    def end(job: Any) -> None:
        if job.over:
            return
        has = set() if getattr(job, "withdrawn", False) else {row for c in job.chunks for row in c.blocks}
        assert rows >= has, "the host has rows of a job that was answered"
        if hasattr(job, "lease"):
            job.finish([(i, 7) for i in range(len(job.chunks)) if rng.random() < 0.3])
        else:
            job.publish(*(rng.choice(list(Result)[1:]) for _ in job.chunks))

    for n in range(1, 120):
        rig.session.answers = rng.random() < 0.7
        rig.session.limits = Record(keys_per_lookup=3, chunks_per_job=rng.choice([2, 9]), jobs=rng.choice([1, 4]))
        rig.has(*(i for i in range(1, 9) if rng.random() < 0.2))
        request, some = f"r{rng.randrange(4)}", rng.sample(keys, rng.randrange(1, 6))
        what = rng.randrange(9)
        if what < 3:
            rig.found(request, *some)
        elif what < 6:
            id = 2 * n + (what == 3)
            asked[id] = set(some)
            rows.update(range(100 * id, 100 * id + len(some)))
            parts = [Slot(k, 100 * id + i) for i, k in enumerate(some)]
            (rig.jobs.load if id % 2 else rig.jobs.store)(id, request, parts)
        elif what == 6:
            rig.jobs.end_request(request, Hints())
        elif what == 7 and rng.random() < 0.2:
            rig.new_host()
        elif what == 8:
            rig.session.frozen = rng.choice([lambda: False, lambda: True])
        for job in [*rig.session.loads, *rig.session.stores]:
            if rng.random() < 0.2:
                end(job)
        for lookup in rig.session.lookups:
            if not lookup.done() and rng.random() < 0.3:
                lookup.reply()
        rig.jobs.flush([request] if rng.random() < 0.2 else [])
        take()
    rig.session.go_on()
    while rig.jobs.pending or rig.jobs._running:
        for lookup in rig.session.lookups:
            if not lookup.done():
                lookup.reply()
        rig.jobs.flush()
        for job in [*rig.session.loads, *rig.session.stores]:
            end(job)
        take()
    assert answered.keys() == asked.keys() and not rows, "a job has no answer"
    ended = rig.session.ended_requests
    assert len(ended) == len(set(ended)), "a request ended twice"
