"""The choice between loading and computing the parts of a hit, from measured rates of both.

README.md states the rule. The time to compute a token is kept beyond the engine's life, for the same model and
settings. The host measures the time of loads anew."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Clock = Callable[[], float]


class Rate:
    """A moving average of seconds per unit."""

    WEIGHT = 0.3  # weight of a new measurement

    def __init__(self) -> None:
        self.seconds = 0.0  # seconds per unit; 0 until measured

    def add(self, units: float, seconds: float) -> None:
        if units <= 0 or seconds <= 0:
            return
        each = seconds / units
        self.seconds = each if not self.seconds else self.seconds + self.WEIGHT * (each - self.seconds)


class Least:
    """The least of recent values. Values older than two spans of time drop out when a new one is added."""

    SPAN = 60.0

    def __init__(self, none: float) -> None:
        self._none = none
        self._before = self._now = math.inf
        self._began = -math.inf

    def add(self, value: float, now: float) -> None:
        if now - self._began >= self.SPAN:
            self._before = self._now if now - self._began < 2 * self.SPAN else math.inf
            self._now, self._began = math.inf, now
        self._now = min(self._now, value)

    @property
    def value(self) -> float:
        least = min(self._before, self._now)
        return self._none if least == math.inf else least


class LastLife:
    """The seconds per token of an engine's last life, in a file next to the host's socket, since other machines have
    other rates. Without a readable file the engine begins without a rate."""

    def __init__(self, socket: str, *engine: object) -> None:
        """``engine`` is the text of all settings that the rate depends on."""
        self._path = f"{socket}.rate-{hashlib.sha256(repr(engine).encode()).hexdigest()[:16]}"

    def read(self) -> float:
        """Returns the rate; 0 if it is not known."""
        with contextlib.suppress(OSError, ValueError), open(self._path) as f:
            seconds = float(f.read(64))
            return seconds if 0 < seconds < 1 else 0.0
        return 0.0

    def write(self, seconds: float) -> None:
        with contextlib.suppress(OSError):
            new = f"{self._path}.{os.getpid()}"
            with open(new, "w") as f:
                f.write(f"{seconds!r}\n")
            os.replace(new, self._path)


class PrefillRate:
    """Bounds of the seconds that the engine takes to compute one token of a long prompt.

    Long prompts are computed in full steps, and a step of ``full`` tokens or more shows the rate. A shorter step
    takes nearly as long as a full one. So its seconds per token are an upper bound. It takes less time in all
    than a full step. So its time divided by ``full`` is a lower bound."""

    #: Seconds after which a measured rate only serves as a bound.
    FRESH_SECONDS = 300.0
    #: The least number of full steps: fewer may all be slow, since the first steps after a start compile kernels.
    ENOUGH = 3
    KEEP_SECONDS = 60.0  # seconds between writes for the next life

    def __init__(self, full: int, clock: Clock = time.monotonic, last: LastLife | None = None) -> None:
        self.full = full
        self._clock = clock
        self._last = last
        self._recalled = last.read() if last else 0.0
        self._kept = -math.inf
        self._measured: deque[float] = deque(maxlen=9)
        self._when = -math.inf
        self._short = Least(none=math.inf)  # seconds per token of short steps
        self._step = Least(none=0.0)  # seconds of any step

    def step(self, tokens: int, seconds: float, least: float | None = None, each: float | None = None) -> None:
        """Records a step. It took at most ``seconds`` and at least ``least``, and ``each`` per token; by default ``seconds``
        is exact."""
        if tokens <= 0 or seconds <= 0:
            return
        now = self._clock()
        self._step.add(seconds if least is None else least, now)
        if tokens < self.full:
            self._short.add(seconds / tokens, now)
            return
        self._measured.append(seconds / tokens if each is None else each)
        self._when = now
        if self._last and len(self._measured) >= self.ENOUGH and now - self._kept >= self.KEEP_SECONDS:
            self._kept = now
            self._last.write(statistics.median(self._measured))

    def bounds(self) -> tuple[float, float]:
        """Returns the lower and the upper bound of the rate. They are equal if it was measured recently."""
        low, high = self._step.value / self.full, self._short.value
        if len(self._measured) < self.ENOUGH:
            if self._recalled:
                rate = min(max(low, self._recalled), high)
                return rate, rate
            return low, min(high, *self._measured, math.inf)
        rate = min(statistics.median(self._measured), high)
        if self._clock() - self._when < self.FRESH_SECONDS:
            return rate, rate
        return max(low, rate / 2), min(high, rate * 2)


class StepTimes:
    """Times of the engine's steps, from the scheduler's view: steps are scheduled, and have output, in order.

    An engine may schedule a step while the one before it runs. Then it reads the output before only after it has launched
    the step, which can take longer than the rest of the step before. So the time between two outputs may be much too short.
    Full steps that overlap are measured together, from the schedule of the first one."""

    def __init__(self, rate: PrefillRate) -> None:
        self._rate = rate
        self._running: deque[tuple[float, int, bool]] = deque()  # of each step without output: time, tokens, loads
        self._ended = -math.inf  # time of the last output of a step that computed tokens
        self._follows = False  # whether a step that overlaps with the last one is measured together with it
        self._began, self._tokens = 0.0, 0  # of the steps that are measured together

    def __len__(self) -> int:
        """The number of steps without output."""
        return len(self._running)

    def scheduled(self, tokens: int, loads: bool, now: float) -> None:
        """Records a scheduled step. Its time shows no rate if it ``loads``."""
        self._running.append((now, tokens, loads))

    def output(self, now: float) -> None:
        """Records the output of the oldest step."""
        if not self._running:
            return
        began, tokens, loads = self._running.popleft()
        if not tokens:
            return  # its output may be read long after the launch of the next step
        before, self._ended = self._ended, now
        if loads:
            self._began, self._tokens, self._follows = now, 0, True
            return
        if not (began < before and self._follows):
            self._began, self._tokens = began, 0
        self._tokens += tokens
        self._follows = tokens >= self._rate.full
        self._rate.step(tokens, now - began, now - max(began, before), (now - self._began) / self._tokens)


@dataclass(frozen=True)
class Part:
    """A leading part of a hit: its tokens, and the host's estimate of its load in seconds; 0: unknown."""

    tokens: int
    seconds: float


class LoadOrCompute:
    """Chooses the leading part of a hit that saves most time."""

    FULL_TOKENS = 1024  # tokens of a step that keeps a GPU busy
    RETRY_SECONDS = 30.0
    TRIAL_SECONDS = 5.0

    def __init__(
        self, step_tokens: int, chunk_tokens: int, clock: Clock = time.monotonic, last: LastLife | None = None
    ) -> None:
        """``step_tokens`` is the most tokens that the engine computes in a step."""
        self._clock = clock
        self._chunk = chunk_tokens
        self.compute = PrefillRate(min(self.FULL_TOKENS, step_tokens), clock, last)
        self.steps = StepTimes(self.compute)
        self.load = Rate()  # seconds per token of loads
        self._retried = clock()  # time of the last trial of a load that seemed too slow
        self._began = False  # whether a chunk was left to be computed before any step was seen
        self._trial = -math.inf  # time at which a full step was last left to be computed

    def choose(self, parts: Sequence[Part]) -> int:
        """Returns the number of tokens of a hit to load. ``parts`` ascend, and the last one is the whole hit."""
        now, whole = self._clock(), parts[-1].tokens
        if not parts[-1].seconds:
            parts = [Part(whole, self.load.seconds * whole)]
        n = self._measured_choice(parts, now) if parts[-1].seconds else whole
        if n < whole and now - self._retried >= self.RETRY_SECONDS and now - self._trial >= self.TRIAL_SECONDS:
            self._retried = now  # regardless of other loads since, which may have come from another root
            n = max(n, min(whole, self._chunks(self.compute.full)))  # loads may have become faster
        return n

    def _measured_choice(self, parts: Sequence[Part], now: float) -> int:
        whole = parts[-1].tokens
        low, high = self.compute.bounds()
        least, most = _best(parts, low), _best(parts, high)
        if least == most:
            return least
        # The hit's end is left to be computed to measure the rate: first a chunk, then a full step.
        if not low:
            left = 0 if self._began or whole < 4 * self._chunk else self._chunk
            self._began = True
        elif now - self._trial < self.TRIAL_SECONDS:
            left = 0
        else:
            left = self._chunks(self.compute.full)
            self._trial = now
        return max(0, min(most, whole - left))

    def _chunks(self, tokens: int) -> int:
        return -(-tokens // self._chunk) * self._chunk


#: A part whose load takes nearly as long as computing it is computed, since neither rate is known exactly.
TIE = 1.05


def _best(parts: Sequence[Part], each: float) -> int:
    """Returns the tokens of the part that saves most time, given the seconds to compute a token; 0 if no part saves
    time."""
    if each == math.inf:
        return parts[-1].tokens
    best = max(parts, key=lambda p: p.tokens * each - p.seconds)
    return best.tokens if best.tokens * each > TIE * best.seconds else 0
