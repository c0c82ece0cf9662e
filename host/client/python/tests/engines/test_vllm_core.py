"""The connector under vLLM's own scheduler: what becomes of requests and blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import needs

needs("vllm")

from vllm.v1.request import RequestStatus  # noqa: E402
from vllm_core import BLOCK, CHUNK, Ahead, Core, keys  # noqa: E402

from kvhost import Code  # noqa: E402
from kvhost.vllm import compat  # noqa: E402

PROMPT = list(range(100, 100 + 4 * CHUNK + 5))


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Core]]:
    made: list[Core] = []

    def core(kind: type[Core] = Core, **options: Any) -> Core:
        made.append(kind(tmp_path, monkeypatch, **options))
        return made[-1]

    yield core
    for c in made:
        c.close()


def publish_all(core: Core) -> None:
    """The host reads and stores whatever it was given."""
    for job in core.session.stores:
        if not job.over:
            job.finish_reading()
            job.publish()
            core.session.resident |= {c.key for c in job.chunks}


def test_a_miss_is_computed_and_stored(make: Callable[..., Core]) -> None:
    core = make()
    r = core.add("a", PROMPT)
    assert core.step() == {"a": len(PROMPT)}
    assert [c.key for c in core.session.stores[0].chunks] == keys(PROMPT)
    table = core.scheduler.kv_cache_manager.get_block_ids("a")[0]
    assert [b for c in core.session.stores[0].chunks for b in c.blocks] == table[: 4 * CHUNK // BLOCK]
    publish_all(core)
    assert core.run(r) == [1]
    core.check_idle()


def test_a_load_runs_beside_other_requests(make: Callable[..., Core]) -> None:
    core = make()
    core.session.resident = set(keys(PROMPT))
    a = core.add("a", PROMPT)
    other = core.add("other", range(500, 540), answer=3)
    assert core.step() == {"other": 40}
    assert a.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert core.step() == {"other": 1}
    (load,) = core.session.loads
    table = core.scheduler.kv_cache_manager.get_block_ids("a")[0]
    assert [b for c in load.chunks for b in c.blocks] == table[: 4 * CHUNK // BLOCK]
    load.finish()
    assert core.run(a) == [5, 1] and core.run(other) == []
    publish_all(core)
    core.check_idle()


def test_a_load_continues_what_the_engine_has_cached(make: Callable[..., Core]) -> None:
    core = make()
    first = core.add("first", PROMPT[: CHUNK + BLOCK + 1])
    core.run(first)
    publish_all(core)
    core.session.resident = set(keys(PROMPT))
    a = core.add("a", PROMPT)
    core.step()
    (load,) = core.session.loads
    assert [c.index for c in load.chunks] == [1, 2, 3] and load.chunks[0].blocks[0] == 0xFFFFFFFF
    load.finish()
    assert core.run(a) == [5, 1]
    publish_all(core)
    core.check_idle()


def test_a_whole_prompt_that_hits(make: Callable[..., Core]) -> None:
    core = make()
    prompt = PROMPT[: 4 * CHUNK]
    core.session.resident = set(keys(prompt))
    a = core.add("a", prompt)
    core.step()
    core.session.loads[0].finish()
    assert core.run(a) == [1, 1]  # its last token is computed to have something to sample from
    publish_all(core)
    core.check_idle()


@pytest.mark.parametrize("bad", [0, 2])
def test_a_failed_load_is_computed_and_not_promised_again(make: Callable[..., Core], bad: int) -> None:
    core = make()
    core.session.resident = set(keys(PROMPT))
    a = core.add("a", PROMPT)
    core.step()
    blocks = core.session.loads[0].chunks[bad].blocks
    core.session.loads[0].finish([(bad, Code.DAMAGED)])
    assert core.run(a) == [len(PROMPT) - bad * CHUNK, 1]
    assert core.invalid == set(blocks) and len(core.session.loads) == 1
    assert [c.key for c in core.session.stores[0].chunks] == keys(PROMPT)[bad:]  # it may mend what was damaged
    core.session.stores[0].finish_reading()
    core.step()

    core.scheduler.reset_prefix_cache()
    b = core.add("b", PROMPT)
    core.step()
    if bad:
        assert [c.index for c in core.session.loads[1].chunks] == list(range(bad))
        core.session.loads[1].finish()
    assert core.run(b)[-1] == 1
    core.session.stores[0].publish()  # stored anew
    publish_all(core)
    core.step()
    core.scheduler.reset_prefix_cache()
    c = core.add("c", PROMPT)
    core.step()
    assert [x.index for x in core.session.loads[-1].chunks] == [0, 1, 2, 3]
    core.session.loads[-1].finish()
    assert core.run(c) == [5, 1]
    publish_all(core)
    core.check_idle()


@pytest.mark.parametrize("window", [0, 40])
def test_a_failed_load_under_the_policy_that_fails(
    make: Callable[..., Core], caplog: pytest.LogCaptureFixture, window: int
) -> None:
    """The engine ends the request, and the chunk is not promised to the next one. With several groups 0.26 goes on."""
    core = make(on_failure="fail", window=window)
    assert 'add "kv_load_failure_policy":"recompute" to the outermost object of --kv-transfer-config' in caplog.text
    core.session.resident = set(keys(PROMPT))
    a = core.add("a", PROMPT)
    core.step()
    for load in core.session.loads:
        load.finish([(1, Code.IO)] if len(load.chunks) == 4 else [])
    ends = not window or compat.TransferResults is not None
    assert core.run(a) == ([] if ends else [len(PROMPT), 1])
    assert (a.status == RequestStatus.FINISHED_ERROR) == ends
    assert "1 chunks of request a were not loaded" in caplog.text and "computing" not in caplog.text
    publish_all(core)
    core.check_idle()
    if not ends:
        return  # it was stored anew
    core.scheduler.reset_prefix_cache()
    core.session.resident, before = set(keys(PROMPT)), len(core.session.loads)
    b = core.add("b", PROMPT)
    core.step()
    promised = core.session.loads[before:]
    assert [[c.index for c in load.chunks] for load in promised] == [[0]] * len(core.connector._scheduler._groups)
    for load in promised:
        load.finish()
    assert core.run(b) == [len(PROMPT) - CHUNK, 1]
    publish_all(core)
    core.check_idle()


def test_the_engines_own_policy_counts(make: Callable[..., Core], caplog: pytest.LogCaptureFixture) -> None:
    """Inside another connector this one's own setting is not the engine's."""
    core = make(on_failure="recompute")
    assert "kv_load_failure_policy" not in caplog.text
    assert core.connector._failed.recomputes("fail") and not compat.FailedLoads(1).recomputes("fail")


def test_a_lost_lease_is_computed_and_promised_again(make: Callable[..., Core]) -> None:
    core = make()
    core.session.resident = set(keys(PROMPT))
    a = core.add("a", PROMPT)
    core.step()
    core.session.loads[0].finish([(i, Code.LEASE_OVER) for i in range(4)])
    assert core.run(a) == [len(PROMPT), 1]
    publish_all(core)
    core.step()
    core.scheduler.reset_prefix_cache()
    b = core.add("b", PROMPT)
    core.step()
    assert len(core.session.loads) == 2
    core.session.loads[1].finish()
    assert core.run(b) == [5, 1]
    publish_all(core)
    core.check_idle()


def test_the_host_dies_in_mid_load(make: Callable[..., Core]) -> None:
    core = make()
    core.session.resident = set(keys(PROMPT))
    a = core.add("a", PROMPT)
    core.step()
    core.session.die()
    assert core.run(a) == [len(PROMPT), 1]
    core.check_idle()


def test_several_groups_recover_from_a_failed_load(make: Callable[..., Core]) -> None:
    """This vLLM has no way to name failed blocks of several groups: the request starts over."""
    core = make(window=40)
    core.session.resident = set(keys(PROMPT))
    a = core.add("a", PROMPT)
    core.step()
    full, window = core.session.loads
    assert [c.index for c in full.chunks] == [0, 1, 2, 3] and [c.index for c in window.chunks] == [2, 3]
    full.finish()
    window.finish([(1, Code.IO)])
    assert core.run(a) == [len(PROMPT), 1]
    publish_all(core)
    core.step()
    assert core.scheduler.reset_prefix_cache()
    core.session.resident = set(keys(PROMPT))
    b = core.add("b", PROMPT)
    core.step()
    for load in core.session.loads[2:]:
        load.finish()
    assert core.run(b) == [5, 1]
    publish_all(core)
    core.check_idle()


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_that_is_scheduled_ahead_of_a_load(make: Callable[..., Core], fails: bool) -> None:
    """It gives no token of a request whose load, inside the step before it, has failed."""
    core = make(Ahead, load_in="step")
    core.session.resident = set(keys(PROMPT))
    core.session.in_step = lambda load: load.finish([(1, Code.IO)] if fails and len(core.session.loads) == 1 else [])
    a, b = core.add("a", PROMPT, answer=4), core.add("b", range(1000, 1000 + len(PROMPT)), answer=4)
    computed = [core.step().get("a", 0) for _ in range(30)]
    assert a.is_finished() and b.is_finished()
    assert list(b.output_token_ids) == [1, 2, 3, 4]
    want = [3, 4, 5, 6] if fails else [1, 2, 3, 4]
    assert list(a.output_token_ids) == want, "want a token of each step but those behind the load"
    assert len(core.session.loads) == 1 and bool(core.invalid) == fails
    anew = len(PROMPT) - CHUNK if fails else 0
    assert sum(n for n in computed if n > 1) == 5 + anew, f"want what was not loaded computed, got {computed}"
    publish_all(core)
    core.check_idle()


def test_an_abort_in_mid_load(make: Callable[..., Core]) -> None:
    """The blocks are given back when the host has stopped to write, not before."""
    core = make()
    core.session.resident = set(keys(PROMPT))
    before = core.free_blocks
    core.add("a", PROMPT)
    core.step()
    (load,) = core.session.loads
    core.session.frozen = lambda: True
    core.abort("a")
    for _ in range(3):
        core.step()
    assert core.free_blocks < before and "a" in core.scheduler.requests
    core.session.frozen = lambda: False
    load.cancel()
    core.check_idle()
    assert core.session.ended_requests == [1, 1]  # by each half


def test_an_abort_while_the_lookup_runs(make: Callable[..., Core]) -> None:
    core = make(lookup_timeout=60.0)
    core.session.answers = False
    core.session.resident = set(keys(PROMPT))
    core.add("a", PROMPT)
    assert core.step() == {} and core.step() == {}
    core.abort("a")
    core.session.lookups[0].reply()
    core.check_idle()
    assert core.session.ended_requests == [1, 1]  # which ends the lease


def test_blocks_are_freed_when_the_host_has_read_them(make: Callable[..., Core]) -> None:
    core = make()
    before = core.free_blocks
    a = core.add("a", PROMPT, answer=1)
    core.step()
    assert a.is_finished() and "a" not in core.scheduler.requests
    core.step()
    assert core.free_blocks == before - len(PROMPT) // CHUNK * CHUNK // BLOCK
    assert core.scheduler.has_requests(), "the engine goes on until the host has read them"
    core.session.stores[0].finish_reading()
    core.check_idle()
    core.session.stores[0].publish()
    core.check_idle()


def test_chunked_prefill_stores_as_it_goes(make: Callable[..., Core]) -> None:
    core = make(step_tokens=48)
    a = core.add("a", PROMPT)
    ordered = []
    while not a.is_finished():
        core.step()
        ordered.append(sum(len(s.chunks) for s in core.session.stores))
    assert ordered == [1, 3, 4, 4]  # after 48, 96 and 133 tokens, and one that was generated
    stored = [c for s in core.session.stores for c in s.chunks]
    assert [c.key for c in stored] == keys(PROMPT) and [c.depth for c in stored] == [0, 1, 2, 3]
    assert [c.parent for c in stored] == [b"", *keys(PROMPT)[:3]]
    publish_all(core)
    core.check_idle()


def test_preemption_with_pending_stores(make: Callable[..., Core]) -> None:
    """Both requests fit when they start, and not when they end. The host has read nothing when one is preempted: the
    engine does not compute in the blocks that the host may still read."""
    core = make(blocks=28)
    a, b = core.add("a", PROMPT, answer=120), core.add("b", range(1000, 1000 + len(PROMPT)), answer=120)
    preempted = False

    def apart(written: dict[int, str]) -> None:
        for job in core.session.stores:
            unread = set() if job.was_read else {x for c in job.chunks for x in c.blocks}
            if preempted:
                assert not unread & written.keys(), f"blocks {unread & written.keys()} are written and not read"

    for n in range(400):
        preempted = preempted or RequestStatus.PREEMPTED in (a.status, b.status)
        core.step(apart)
        if preempted and n % 20 == 0:
            for job in core.session.stores:
                if not job.over:
                    job.finish_reading()
        if a.is_finished() and b.is_finished():
            break
    assert preempted and a.is_finished() and b.is_finished()
    assert a.num_output_tokens == b.num_output_tokens == 120
    assert not any(s.cancelled for s in core.session.stores)
    core.step()  # the last store may be ordered with it: 0.32 waits a time for blocks before it preempts
    publish_all(core)
    core.check_idle()


def test_a_miss_does_not_stand_in_the_way_of_those_that_were_loaded(make: Callable[..., Core]) -> None:
    """Its lookup is answered last, so it is first in the queue when the others hold the blocks that it lacks."""
    core = make(blocks=28, lookup_timeout=60.0)
    first, second = range(1000, 1000 + len(PROMPT)), range(2000, 2000 + len(PROMPT))
    core.session.answers = False
    large = core.add("large", range(5000, 5000 + 14 * BLOCK))
    core.step()
    core.session.resident = set(keys(first)) | set(keys(second))
    core.session.answers = True
    loaded = [core.add("first", first), core.add("second", second)]
    core.step()
    for load in core.session.loads:
        load.finish()
    core.session.lookups[0].reply()
    for _ in range(40):
        core.step()
        for load in core.session.loads:
            if not load.over:
                load.finish()
        publish_all(core)
    assert [r.status.name for r in (large, *loaded) if not r.is_finished()] == []
    core.check_idle()


def test_a_preempted_request_is_looked_up_again(make: Callable[..., Core]) -> None:
    core = make(blocks=20)
    a, b = core.add("a", PROMPT, answer=60), core.add("b", range(1000, 1000 + len(PROMPT)), answer=60)
    while RequestStatus.PREEMPTED not in (a.status, b.status):
        core.step()
        publish_all(core)
    assert not core.session.loads
    for _ in range(200):
        core.step()
        publish_all(core)
        for load in core.session.loads:
            if not load.over:
                load.finish()
        if a.is_finished() and b.is_finished():
            break
    assert a.is_finished() and b.is_finished()
    assert core.session.loads  # what the host had of it came back
    core.check_idle()


def test_a_crowd(make: Callable[..., Core]) -> None:
    """Random prompts that share beginnings, a host that answers late, fails and forgets: nothing leaks."""
    rng = random.Random(5)
    core = make(blocks=60, step_tokens=96)
    heads = [[rng.randrange(1000) for _ in range(8 * CHUNK)] for _ in range(12)]
    requests = []
    for i in range(100):
        head = rng.choice(heads)[: rng.randrange(8 * CHUNK)]
        prompt = head + [rng.randrange(1000) for _ in range(rng.randrange(1, 60))]
        requests.append(core.add(str(i), prompt, answer=rng.randrange(1, 20)))
    for n in range(3000):
        core.step()
        for job in list(core.session.stores):
            if not job.over and rng.random() < 0.3:
                job.finish_reading()
                if rng.random() < 0.5:
                    job.publish()
                    core.session.resident |= {c.key for c in job.chunks}
        for load in list(core.session.loads):
            if not load.over and rng.random() < 0.3:
                bad = [(i, rng.choice([Code.DAMAGED, Code.LEASE_OVER])) for i in range(len(load.chunks))]
                load.finish([f for f in bad if rng.random() < 0.1])
        if n % 50 == 10:
            core.abort(rng.choice(requests).request_id)
        if n % 37 == 0:
            core.session.resident = {k for k in core.session.resident if rng.random() < 0.8}
        if all(r.is_finished() for r in requests):
            break
    assert all(r.is_finished() for r in requests)
    assert len(core.session.loads) > 10 and core.invalid
    core.step()  # orders what the last request has left to store
    publish_all(core)
    core.check_idle()
