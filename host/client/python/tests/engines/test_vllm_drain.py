"""Schedules of vLLM's own scheduler with the connector: every one of them drains, and reads the KV of its own tokens alone.

A schedule is a pool of blocks, a mix of requests, and a host that answers lookups and ends loads and stores late or never,
dies and comes back, or is stopped. All follows from a seed. Time is the schedule's own: a step takes a hundredth of a second. While
the host may touch a block, the engine must not give it to anything else, and no request waits for a host that is stopped longer than
``lookup_timeout`` and a second."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from needs import needs

needs("vllm")

from vllm.v1.request import Request  # noqa: E402
from vllm_core import BLOCK, CHUNK, Core  # noqa: E402
from vllm_doubles import Clock, DoubleSession, Load, Pending, Store  # noqa: E402

from kvhost import Code, Result  # noqa: E402
from kvhost.session import NOT_WANTED  # noqa: E402
from kvhost.vllm import lookups, scheduler, worker  # noqa: E402

#: How many schedules, and the first one's seed. A failure names its seed.
SCHEDULES = int(os.environ.get("DRAIN_SCHEDULES", "400"))
FIRST = int(os.environ.get("DRAIN_SEED", "1"))

STEP = 0.01  # seconds
MOST_STEPS = 6000


class Memory:
    """What the blocks hold, and the host: for each block the tokens up to its end, whose KV it has. ``None`` is garbage."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.blocks: dict[int, int | None] = {}
        self.host: dict[bytes, list[int | None]] = {}  # by key: a chunk's blocks

    def read(self, job: Store) -> None:
        for c in job.chunks:
            self.host[c.key] = [self.blocks.get(b) for b in c.blocks]

    def load(self, load: Load, keys: Sequence[bytes], bad: Collection[int]) -> None:
        for at, c in enumerate(load.chunks):
            for b, held in zip(c.blocks, self.host[keys[c.index]], strict=True):
                if b != NOT_WANTED:
                    self.blocks[b] = None if at in bad else held

    def compute(self, scheduled: dict[str, int]) -> list[tuple[str, int]]:
        """A step computes so many tokens of each request, with the KV of all before them. The requests that lack some of
        it, and their first block that does."""
        wrong = []
        for id, n in scheduled.items():
            request = self.core.scheduler.requests[id]
            (table,) = self.core.scheduler.kv_cache_manager.get_block_ids(id)
            end, tokens, good = request.num_computed_tokens, list(request.all_token_ids), True
            begin = end - n
            for i in range(-(-end // BLOCK)):
                until = min((i + 1) * BLOCK, end)
                if i * BLOCK < begin:
                    there = self.blocks.get(table[i])
                    has = there in (_kv(tokens[: min(until, begin)]), _kv(tokens[: (i + 1) * BLOCK]))
                    if good and not has:
                        wrong.append((id, table[i]))
                    good = good and has
                if until > begin:
                    self.blocks[table[i]] = _kv(tokens[:until]) if good else None
        return wrong


def _kv(tokens: Sequence[int]) -> int:
    return hash(tuple(tokens))


class Schedule:
    """One schedule, from its seed."""

    def __init__(self, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng = rng = random.Random(seed)
        self.clock = Clock()
        for module in (scheduler, lookups, worker):
            monkeypatch.setattr(module, "time", self.clock)
        self.blocks = rng.randrange(14, 80)
        self.lookup_timeout = rng.choice([0.05, 1.0])
        self.core = Core(
            folder, monkeypatch, blocks=self.blocks, step_tokens=rng.choice([32, 96, 256]),
            window=rng.choice([0, 0, 0, 40]), policy=rng.choice(["fcfs", "fcfs", "priority"]),
            lookup_timeout=self.lookup_timeout, load_timeout=rng.choice([0.2, 2.0]),
            read_timeout=rng.choice([0.2, 2.0]),
            unread_blocks=rng.choice([0.1, 0.25, 1.0]), load_in=rng.choice(["beside", "auto", "step"]), step_timeout=0.001,
        )
        monkeypatch.setattr(worker, "_CANCEL_SECONDS_IN_STEP", 0.001)
        self.inside: list[Load] = []  # the loads inside the step that runs
        self.memory = None if self.core.window else Memory(self.core)
        self.begun: set[int] = set()  # loads that the host knows
        monkeypatch.setattr(self.core.worker, "_wait_for_a_job", lambda seconds: None)
        self.answers = rng.choice([1.0, 0.5, 0.1])  # how likely a lookup is answered in a step
        self.loads = rng.choice([1.0, 0.3, 0.05, 0.0])  # and a load ends; 0: never
        self.reads = rng.choice([1.0, 0.3, 0.05, 0.0])  # and a store is read
        self.fails = rng.choice([0.0, 0.1, 0.5])  # how likely a chunk of a load fails
        self.older = rng.random() < 0.2  # it is of a release that knows no withdrawals
        self.idle = 0  # steps in a row that computed nothing while it was
        self.deaths = rng.choice([0.0, 0.0, 0.01])
        self.aborts_in_step = rng.choice([0.0, 0.0, 0.05])
        self.freezes = rng.choice([0.0, 0.0, 0.01, 0.05])
        self.thaws = rng.choice([0.005, 0.001])
        self.requests: list[Request] = []
        self.down = 0  # steps until a host is there again
        self._session(self.core.session)

    def _session(self, session: DoubleSession) -> None:
        session.answers = False
        session.in_step = self._load_in_step
        if self.older:
            session._withdrawals = None

    @property
    def session(self) -> DoubleSession:
        return self.core.session

    @property
    def frozen(self) -> bool:
        """Whether the host's process is stopped."""
        return self.session.frozen()

    def run(self) -> None:
        rng = self.rng
        most = (self.blocks - 1) // (2 if self.core.window else 1) // rng.choice([1, 1, 3]) * BLOCK
        alone = rng.random() < 0.3  # each comes when those before it are over
        heads = [[rng.randrange(1000) for _ in range(most)] for _ in range(rng.randrange(1, 8))]
        for i in range(rng.randrange(1, 40)):
            answer = rng.choice([1, 1, rng.randrange(1, max(2, min(60, most // 2)))])
            length = rng.randrange(1, most - answer)
            shared = rng.randrange(length + 1)
            prompt = rng.choice(heads)[:shared] + [rng.randrange(1000) for _ in range(length - shared)]
            self.requests.append(self.core.add(str(i), prompt, answer, priority=rng.randrange(3)))
            for _ in range(rng.choice([0, 0, 1, 5])):
                self.step(0.01)
            if alone:
                self.drain()
        self.drain()
        self.end()

    def drain(self) -> None:
        for _ in range(MOST_STEPS):
            if all(r.is_finished() for r in self.requests):
                return
            self.step(0.001)
        raise AssertionError(f"{self.told()} after {MOST_STEPS} steps without drain")

    def step(self, aborts: float) -> None:
        if self.rng.random() < aborts:
            self.core.abort(self.rng.choice(self.requests).request_id)
        self.inside = []
        computed = self.core.step(self.check)
        for load in self.session.loads:
            self._begin(load)
        self.clock.now += STEP
        self.idle = self.idle + 1 if self.frozen and not computed and self.owed else 0
        assert self.idle * STEP <= self.lookup_timeout + 1.0, f"{self.told()} for {self.idle * STEP:.2f} s of a stopped host"
        self.host()

    @property
    def owed(self) -> bool:
        """Whether an answer is due without the host: its loads leave the blocks of each request."""
        live = [r for r in self.requests if not r.is_finished()]
        holds = self.core.connector._scheduler._holds
        most = max((holds.needs(r.num_prompt_tokens + r.max_tokens) for r in live), default=0)
        loads = {b for load in self.session.loads if not load.over for c in load.chunks for b in c.blocks}
        return bool(live) and not self.older and most + len(loads) <= holds.size

    def check(self, written: dict[int, str]) -> None:
        """``written`` are the blocks that this step's computation writes, and the request of each."""
        for job in self.session.stores:
            if not job.was_read:
                self._apart(job, written)
        for load in self.session.loads:
            if not (load.over or load in self.inside):  # whether a step may use what its load left is known at its end
                self._apart(load, written)

        if self.memory is not None:
            filled = {b for load in self.inside for c in load.chunks for b in c.blocks}
            wrong = [w for w in self.memory.compute(self.core.computing) if w[1] not in filled]
            assert not wrong, f"requests read blocks that hold other KV, or none: {wrong}"
        if self.aborts_in_step and self.rng.random() < self.aborts_in_step and self.core.computing:
            self.core.abort(self.rng.choice(list(self.core.computing)))

    def _begin(self, load: Load) -> None:
        """From now on the blocks hold nothing that counts, until the load has ended well."""
        if id(load) not in self.begun:
            self.begun.add(id(load))
            self._fill(load, range(len(load.chunks)))

    def _fill(self, load: Load, bad: Collection[int]) -> None:
        if self.memory is not None:
            leased = {p._answer.lookup.lease: p.keys for p in self.session.lookups if p.done()}
            self.memory.load(load, leased[load.lease], bad)

    def _apart(self, job: Store | Load, written: dict[int, str]) -> None:
        touched = {b for c in job.chunks for b in c.blocks} & written.keys()
        assert not touched, f"the step of {[written[b] for b in touched]} writes blocks {touched} of {job}"

    def host(self) -> None:
        rng = self.rng
        if self.down:
            self.down -= 1
            if not self.down:
                self.core.new_host()
                self._session(self.session)
            return
        if rng.random() < self.deaths:
            self.session.frozen = lambda: False
            self.session.die()
            self.core.link.epoch = -1
            self.down = rng.randrange(1, 50)
            return
        if rng.random() < self.freezes:
            self.session.frozen = lambda: True
        elif self.frozen and rng.random() < self.thaws:
            self.thaw()
        if self.frozen:
            return
        self._answer(self.answers)
        for job in list(self.session.stores):
            if not job.over and rng.random() < self.reads:
                self._store(job)
        for load in list(self.session.loads):
            if not load.over and rng.random() < self.loads:
                self._load(load)
        if rng.random() < 0.02:
            self.session.resident = {k for k in self.session.resident if rng.random() < 0.8}

    def thaw(self) -> None:
        self.session.go_on()
        for job in [*self.session.stores, *self.session.loads]:
            if job.cancelled and not job.over:
                job.cancel()

    def _answer(self, likely: float) -> None:
        waiting: list[Pending] = [p for p in self.session.lookups if not p.done()]
        for p in waiting:
            if self.rng.random() < likely:
                p.reply()

    def _store(self, job: Store) -> None:
        if job.withdrawn:
            job.publish(Result.FAILED)
            return
        if self.memory is not None and not job.was_read:
            self.memory.read(job)
        job.finish_reading()
        if self.rng.random() < 0.8:
            job.publish()
            self.session.resident |= {c.key for c in job.chunks}

    def _load(self, load: Load) -> None:
        codes = [Code.DAMAGED, Code.LEASE_OVER, Code.IO]
        bad = [i for i in range(len(load.chunks)) if self.rng.random() < self.fails]
        self._fill(load, bad)
        load.finish([(i, self.rng.choice(codes)) for i in bad])

    def _load_in_step(self, load: Load) -> None:
        self.inside.append(load)
        self._begin(load)
        if not self.frozen and self.rng.random() < max(0.5, self.loads):
            self._load(load)

    def end(self) -> None:
        """The host does what it was asked to do; then nothing is left of any request."""
        if self.down:
            self.core.new_host()
            self._session(self.session)
        self.thaw()
        for _ in range(5):
            self._answer(1.0)
            for job in self.session.stores:
                if not job.over:
                    self._store(job)
                    if not job.over:
                        job.publish()
            for load in self.session.loads:
                if not load.over:
                    self._fill(load, ())
                    load.finish()
            self.core.step(self.check)
        self.core.check_idle()

    def told(self) -> str:
        states = [f"{r.request_id} {r.status.name}" for r in self.requests if not r.is_finished()]
        return f"{self.blocks} blocks, {self.core.free_blocks} free, {len(states)} requests: {', '.join(states[:8])}"

    def close(self) -> None:
        self.core.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def test_every_schedule_drains(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[str] = []
    for seed in range(FIRST, FIRST + SCHEDULES):
        with monkeypatch.context() as patches:
            schedule = Schedule(seed, folder, patches)
            try:
                schedule.run()
            except AssertionError as e:
                failed.append(f"DRAIN_SEED={seed}: {e}")
            finally:
                schedule.close()
        if len(failed) > 20:
            break
    assert not failed, f"want every schedule to drain, got {len(failed)} that do not: " + "\n".join(failed)
