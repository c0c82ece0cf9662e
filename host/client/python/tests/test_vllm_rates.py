"""Whether the vLLM connector loads or computes, over simulated sequences of requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvhost.vllm.rates import LastLife, LoadOrCompute, Part, PrefillRate, StepTimes

CHUNK = 256
US = 1e-6
MEMORY, DISK = 4.6 * US, 77 * US  # seconds per token of a load; as measured with 128 KiB per token
PROMPT = 16384


@dataclass
class Engine:
    """An engine and a host whose prompts all hit. A step takes ``least`` seconds, or longer with many tokens."""

    compute: float = 30 * US  # seconds per token
    load: float = MEMORY
    least: float = 0.012
    knows: bool = True  # whether the host tells how long a load takes
    step_tokens: int = 8192
    last: LastLife | None = None

    def __post_init__(self) -> None:
        self.now = 1000.0
        self.choice = LoadOrCompute(self.step_tokens, CHUNK, clock=lambda: self.now, last=self.last)

    def step(self, tokens: int, seconds: float = 0.0) -> None:
        took = seconds or max(self.least, tokens * self.compute)
        self.now += took
        self.choice.compute.step(tokens, took)

    def request(self, prompt: int = PROMPT, answer: int = 8) -> int:
        """Serves a prompt of which all whole chunks hit; how many tokens were loaded."""
        hit = prompt // CHUNK * CHUNK
        n = self.choice.choose([Part(hit, hit * self.load if self.knows else 0.0)])
        assert 0 <= n <= hit and n % CHUNK == 0
        if n:
            self.now += n * self.load
            self.choice.load.add(n, n * self.load)
        left = max(1, prompt - n)
        while left:
            tokens = min(left, self.step_tokens)
            self.step(tokens)
            left -= tokens
        for _ in range(answer):
            self.step(1)
        return n

    def seconds(self, prompt: int = PROMPT) -> float:
        began = self.now
        self.request(prompt)
        return self.now - began


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT + 17, PROMPT + 255])
def test_memory_after_a_restart(prompt: int, knows: bool) -> None:
    """The first hit gives up a chunk at most, and no later one anything."""
    engine = Engine(knows=knows)
    assert engine.request(prompt) >= PROMPT - CHUNK
    assert [engine.request(prompt) for _ in range(200)] == [PROMPT] * 200


def test_short_hits_in_memory() -> None:
    engine = Engine()
    assert [engine.request(700) for _ in range(50)] == [512] * 50


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT + 1, PROMPT + 200, 3000, 512])
def test_a_slow_disk_after_a_restart_where_everything_hits(prompt: int) -> None:
    """The rule that this one replaced loaded every time, because it never saw a prompt computed."""
    engine = Engine(load=DISK)
    loaded = [engine.request(prompt, answer=64) for _ in range(20)]
    assert not any(loaded[3:]), loaded
    best = prompt * engine.compute
    assert engine.seconds(prompt) < 1.2 * best + 9 * engine.least


@pytest.mark.parametrize("load", [14 * US, 25 * US, 35 * US, 60 * US])
def test_a_disk_of_about_the_same_speed(load: float) -> None:
    """Within a few requests the better one is taken, and it is still taken an hour later."""
    engine = Engine(load=load)
    for _ in range(4):
        engine.request()
        engine.now += 6
    for _ in range(3):
        took = [engine.seconds() - 8 * engine.least for _ in range(10)]
        assert sorted(took)[5] < 1.1 * PROMPT * min(load, engine.compute)
        engine.now += 1200


def test_the_cost_of_measuring_is_bounded_on_a_slow_engine() -> None:
    """40 ms for a token, in steps of 256: computing a whole hit would take ten minutes."""
    engine = Engine(compute=0.04, least=0.05, step_tokens=256)
    assert sum(PROMPT - engine.request(answer=64) for _ in range(50)) <= 2 * CHUNK


def test_a_disk_that_becomes_faster_is_found_out() -> None:
    engine = Engine(load=DISK, knows=False)
    for _ in range(10):
        engine.request()
    assert engine.request() == 0
    engine.load = 8 * US
    engine.now += 31
    assert engine.request() == 1024  # to see how fast loads are now
    for _ in range(20):
        engine.now += 31
        engine.request()
    assert engine.request() == PROMPT


def test_a_root_that_seemed_slow_is_tried_again_though_others_are_loaded_from() -> None:
    """The host's estimate of a root changes only when something is loaded from it."""
    engine = Engine()
    for _ in range(3):
        engine.step(2048)
    seemed = DISK
    for _ in range(40):
        engine.now += 1
        assert engine.choice.choose([Part(PROMPT, PROMPT * MEMORY)]) == PROMPT, "a hit in the other root is loaded"
        if engine.choice.choose([Part(PROMPT, PROMPT * seemed)]):
            seemed = MEMORY
    assert engine.choice.choose([Part(PROMPT, PROMPT * seemed)]) == PROMPT, "want the root tried within 40 s"


def test_a_disk_that_becomes_slower_is_left() -> None:
    engine = Engine(load=8 * US)
    assert [engine.request() for _ in range(5)][1:] == [PROMPT] * 4
    engine.load = DISK
    engine.now += 600
    assert not any([engine.request() for _ in range(8)][4:])


@pytest.mark.parametrize("compute", [10 * US, 200 * US])
def test_an_engine_that_changes_its_speed(compute: float) -> None:
    """At 50 us a token from disk, an engine that takes 10 should compute, and one that takes 200 load."""
    engine = Engine(load=50 * US)
    for _ in range(10):
        engine.request()
    engine.compute = compute
    for _ in range(12):
        engine.now += 60
        engine.request()
    assert engine.request() == (0 if compute < engine.load else PROMPT)


def test_one_slow_step_decides_nothing_for_long() -> None:
    """The first step after a start compiles kernels."""
    engine = Engine(load=DISK)
    engine.step(2048, seconds=3.0)
    assert not any([engine.request(answer=64) for _ in range(10)][4:])


def test_many_requests_at_once_give_up_one_full_step() -> None:
    engine = Engine(load=35 * US)
    engine.step(1)
    hit = [Part(PROMPT, PROMPT * engine.load)]
    assert [engine.choice.choose(hit) for _ in range(5)] == [PROMPT - 1024, *[PROMPT] * 4]


def parts(*loads: tuple[int, float]) -> list[Part]:
    """Cumulated from (chunks, seconds) of each part."""
    chunks = [sum(n for n, _ in loads[: i + 1]) for i in range(len(loads))]
    seconds = [sum(s for _, s in loads[: i + 1]) for i in range(len(loads))]
    return [Part(n * CHUNK, s) for n, s in zip(chunks, seconds, strict=True)]


@pytest.mark.parametrize(
    "hit,want",
    [
        (parts((32, 0.04), (32, 0.6)), 32),  # half in memory, the rest on a slow disk
        (parts((32, 0.3), (32, 0.04)), 64),  # the whole still takes less than computing
        (parts((8, 0.6), (8, 0.04)), 0),
        (parts((16, 0.02), (16, 0.2), (16, 0.01)), 48),
        (parts((64, 0.04)), 64),
        (parts((64, 4.0)), 0),
    ],
)
def test_only_the_part_that_pays(hit: Sequence[Part], want: int) -> None:
    engine = Engine()
    for _ in range(3):
        engine.step(2048)  # 30 us a token: 7.7 ms a chunk
    assert engine.choice.choose(hit) == want * CHUNK


def test_bounds() -> None:
    engine = Engine()
    rate = engine.choice.compute

    def bounds() -> tuple[float, ...]:
        return tuple(each / US for each in rate.bounds())

    assert bounds() == (0, math.inf)
    rate.step(1, 0.01024)
    assert bounds() == pytest.approx((10, 10240))
    rate.step(256, 0.0128)
    assert bounds() == pytest.approx((10, 50))
    rate.step(0, 1.0)
    rate.step(2048, 0.08192)
    assert bounds() == pytest.approx((10, 40))  # one full step may have been a slow one
    rate.step(2048, 0.04096)
    rate.step(2048, 0.04915)
    assert bounds() == pytest.approx((24, 24), rel=1e-3)
    engine.now += 301
    assert bounds() == pytest.approx((12, 48), rel=1e-3)


@pytest.mark.parametrize("prompt", [PROMPT, 3000, 1024, 512])
def test_no_first_hit_is_slower_than_computing(prompt: int, tmp_path: Path) -> None:
    """The rate of the last life decides from the first hit on, of a slow disk as of memory."""
    last = LastLife(str(tmp_path / "s"), "model")
    before = Engine(last=last)
    for _ in range(3):
        before.step(8192)
    assert last.read() == pytest.approx(30 * US)
    assert Engine(load=DISK, last=last).request(prompt) == 0
    assert Engine(load=30 * US, last=last).request(prompt) == 0  # as soon computed
    assert Engine(load=MEMORY, last=last).request(prompt) == prompt // CHUNK * CHUNK


def test_the_last_life_is_another_engines(tmp_path: Path) -> None:
    last = LastLife(str(tmp_path / "s"), "model", 8192)
    last.write(30 * US)
    assert LastLife(str(tmp_path / "s"), "model", 2048).read() == 0
    (path,) = tmp_path.iterdir()
    for text in ("", "nan", "-1", "5", "x" * 100):
        path.write_text(text)
        assert last.read() == 0, text
    LastLife(str(tmp_path / "none" / "s")).write(1e-5)  # there is no place for it
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_measured_rate_takes_the_last_lifes_place(tmp_path: Path) -> None:
    last = LastLife(str(tmp_path / "s"))
    last.write(100 * US)
    engine = Engine(load=DISK, last=last)
    assert engine.request() == PROMPT  # which it took for faster
    for _ in range(3):
        engine.step(8192)
    assert engine.request() == 0
    engine.now += 61
    engine.step(8192)
    assert last.read() == pytest.approx(30 * US)


class Pipeline:
    """An engine that schedules a step while the one before it runs, and cannot read an output while it launches a step."""

    LAUNCH, EACH, LEAST = 0.025, 27 * US, 0.007

    def __init__(self) -> None:
        self.now, self.free = 1000.0, 0.0
        self.rate = PrefillRate(1024, clock=lambda: self.now)
        self.steps = StepTimes(self.rate)
        self.ends: list[float] = []

    def schedule(self, tokens: int, loads: float = 0.0) -> None:
        self.steps.scheduled(tokens, loads > 0, self.now)
        took = max(self.LEAST, tokens * self.EACH) + loads if tokens else 0.0
        self.free = max(self.free, self.now) + took
        self.ends.append(self.free if tokens else self.now)
        self.now += self.LAUNCH if tokens >= 256 else 0.001 if tokens else 0.0
        if len(self.ends) == 2:
            self.output()

    def output(self) -> None:
        self.now = max(self.now, self.ends.pop(0))
        self.steps.output(self.now)

    def idle(self) -> None:
        while self.ends:
            self.output()
        self.now += 1.0


@pytest.mark.parametrize(
    "prompts",
    [
        pytest.param([[0, 1024]] * 5, id="a step without tokens before each"),
        pytest.param([[24, 24, 1024, 24, 24]] * 5, id="among decodes"),
        pytest.param([[1024] * 12], id="one after another"),
        pytest.param([[24, 8192, 1024, 24]] * 5, id="long and short"),
        pytest.param([[24, 700, 24, 700, 1024, 700]] * 9, id="steps that are not full between"),
        pytest.param([[-8192, 1024, 1024, 1024, 24]] * 5, id="after loads"),
    ],
)
def test_steps_that_overlap(prompts: list[list[int]]) -> None:
    """A negative number of tokens is of a step that loads."""
    p = Pipeline()
    for steps in prompts:
        for tokens in steps:
            p.schedule(abs(tokens), 0.1 if tokens < 0 else 0.0)
        p.idle()
    low, high = p.rate.bounds()
    assert p.EACH * 0.99 <= low <= high <= p.EACH * 1.4, f"{low / US:.1f} to {high / US:.1f}, true: {p.EACH / US:.1f}"
