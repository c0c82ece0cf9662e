"""Whether loading beats computing: measured rates of both."""

from __future__ import annotations

import time
from collections.abc import Callable

_WEIGHT = 0.3  # of a new measurement


class Rate:
    """A moving average of seconds per unit."""

    def __init__(self) -> None:
        self.seconds = 0.0  # per unit; 0 until measured

    def add(self, units: float, seconds: float) -> None:
        if units <= 0 or seconds <= 0:
            return
        each = seconds / units
        self.seconds = each if not self.seconds else self.seconds + _WEIGHT * (each - self.seconds)


class LoadOrCompute:
    """Chooses between loading tokens and computing them.

    Until both rates are known, and once in a while after loads were turned down, it loads: only a load tells how fast
    loads are."""

    #: Steps with fewer tokens say nothing about prefill: a decode step takes as long for one token as for some.
    MIN_STEP_TOKENS = 128
    RETRY_SECONDS = 30.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.compute = Rate()  # per token
        self.load = Rate()  # per token
        self._clock = clock
        self._tried = clock()

    def step(self, tokens: int, seconds: float) -> None:
        """A step computed so many tokens."""
        if tokens >= self.MIN_STEP_TOKENS:
            self.compute.add(tokens, seconds)

    def loaded(self, tokens: int, seconds: float) -> None:
        self.load.add(tokens, seconds)

    def prefers_load(self, tokens: int, expected_seconds: float = 0.0) -> bool:
        """Whether to load so many tokens; ``expected_seconds`` is the host's own estimate, 0 for none."""
        now = self._clock()
        seconds = expected_seconds or self.load.seconds * tokens
        if seconds and self.compute.seconds and seconds > self.compute.seconds * tokens:
            if now - self._tried < self.RETRY_SECONDS:
                return False
        self._tried = now
        return True
