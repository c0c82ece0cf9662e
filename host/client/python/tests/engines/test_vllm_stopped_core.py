"""vLLM's own scheduler with the connector, and a host whose process is stopped. Time is the test's own: a step takes a hundredth of a
second. No request waits longer than ``lookup_timeout`` and a second, whatever came before it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import needs

needs("vllm")

from vllm.v1.request import Request  # noqa: E402
from vllm_core import BLOCK, CHUNK, Core, keys  # noqa: E402
from vllm_doubles import Clock, Store  # noqa: E402

from kvhost.vllm import lookups, scheduler, worker  # noqa: E402

BLOCKS, TIMEOUT, STEP = 64, 1.0, 0.01
LENGTH = 6 * CHUNK + 5


class Stopped:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        for module in (scheduler, lookups, worker):
            monkeypatch.setattr(module, "time", self.clock)
        self.core = Core(folder, monkeypatch, blocks=BLOCKS, lookup_timeout=TIMEOUT, read_timeout=10.0, shutdown_wait=0.0)
        monkeypatch.setattr(self.core.worker, "_wait_for_a_job", lambda seconds: None)
        self._last = 0

    @property
    def session(self) -> Any:
        return self.core.session

    def stop(self) -> None:
        self.session.frozen, self.session.answers = lambda: True, False

    def fresh(self, length: int = LENGTH) -> list[int]:
        self._last += 1
        return [self._last * 10_000 + i for i in range(length)]

    def add(self, tokens: list[int]) -> Request:
        self._last += 1
        return self.core.add(f"r{self._last}", tokens)

    def step(self) -> None:
        self.core.step(self._apart)
        self.clock.now += STEP

    def _apart(self, written: dict[int, str]) -> None:
        """No block that the host may touch is written."""
        for job in [*self.session.stores, *self.session.loads]:
            if not (job.was_read if isinstance(job, Store) else job.over):
                touched = {b for c in job.chunks for b in c.blocks} & written.keys()
                assert not touched, f"the step writes blocks {touched} of {job}"

    def answered(self, *requests: Request) -> None:
        begin = self.clock.now
        while waiting := [r for r in requests if not r.is_finished()]:
            took = self.clock.now - begin
            assert took <= TIMEOUT + 1.0, f"{len(waiting)} of {len(requests)} requests wait for {took:.2f} s, {self.core.free_blocks} blocks are free"
            self.step()


@pytest.fixture
def it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stopped]:
    stopped = Stopped(tmp_path, monkeypatch)
    yield stopped
    stopped.session.die()
    stopped.core.close()


def test_prompts_one_after_another(it: Stopped) -> None:
    it.stop()
    for _ in range(30):
        it.answered(it.add(it.fresh()))


def test_prompts_after_a_stop_in_the_middle_of_stores(it: Stopped) -> None:
    for _ in range(5):
        it.answered(it.add(it.fresh()))
    assert it.core.free_blocks < LENGTH // BLOCK and not it.session.withdrawn, "want nearly all blocks held for the host to read"
    it.stop()
    for _ in range(10):
        it.answered(it.add(it.fresh()))
    assert it.session.withdrawn, "want the unread stores taken back"


def test_a_crowd_and_the_longest_request(it: Stopped) -> None:
    it.stop()
    it.answered(*(it.add(it.fresh()) for _ in range(12)))
    it.answered(it.add(it.fresh((BLOCKS - 2) * BLOCK)))


@pytest.mark.parametrize("prompts", [1, 12])
def test_loads_in_flight(it: Stopped, prompts: int) -> None:
    """Requests with loads that do not end are computed in other blocks, and so are those that come next, up to half of all."""
    asked = [it.fresh() for _ in range(prompts)]
    it.session.resident = {k for tokens in asked for k in keys(tokens)}
    requests = [it.add(tokens) for tokens in asked]
    it.step()
    assert it.session.loads, "want loads in flight"
    it.stop()
    it.answered(*requests)
    assert all(r.num_output_tokens for r in requests)
    for _ in range(5):
        it.answered(it.add(it.fresh()))
    it.answered(it.add(it.fresh((BLOCKS // 2 - 1) * BLOCK - 8)))


def test_pauses_and_resets(it: Stopped) -> None:
    """An engine with nothing but loads that were given up has no work, and can empty its cache."""
    asked = it.fresh()
    it.session.resident = set(keys(asked))
    r = it.add(asked)
    it.step()
    it.stop()
    it.answered(r)
    for _ in range(int((TIMEOUT + 1.0) / STEP)):
        it.step()
    assert not it.core.connector.has_pending_push_work(), "want an engine that may pause"
    free = it.core.free_blocks
    assert free < BLOCKS - 1, "want the blocks of the load held"
    assert it.core.scheduler.reset_prefix_cache(), "want the cache emptied"
    assert it.core.free_blocks == free, "want the blocks of the load held on"
    it.answered(it.add(asked))


def test_aborts(it: Stopped) -> None:
    asked = [it.fresh() for _ in range(8)]
    it.session.resident = {k for tokens in asked for k in keys(tokens)}
    requests = [it.add(tokens) for tokens in asked]
    it.step()
    it.stop()
    for r in requests:
        it.core.abort(r.request_id)
    for _ in range(5):
        it.answered(it.add(it.fresh()))


def test_it_goes_on(it: Stopped) -> None:
    """Nothing is held or refused once the host answers."""
    asked = it.fresh()
    it.session.resident = set(keys(asked))
    r = it.add(asked)
    it.step()
    it.stop()
    it.answered(r, *(it.add(it.fresh()) for _ in range(3)))
    it.session.go_on()
    it.session.answers = True
    for job in it.session.loads:
        job.finish()
    for job in it.session.stores:
        if not job.over:
            job.cancel()
    for _ in range(3):
        it.step()
    assert it.core.free_blocks == BLOCKS - 1, f"{BLOCKS - 1 - it.core.free_blocks} blocks are held, want none"
    loads = len(it.session.loads)
    assert it.core.scheduler.reset_prefix_cache()
    again = it.add(asked)
    it.step()
    assert len(it.session.loads) == loads + 1, "want hits loaded again"
    it.session.loads[-1].finish()
    it.answered(again)
