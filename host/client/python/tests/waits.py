"""Tests wait for an event until shortly before the run's own deadline, which the suite sets: what is only slow fails nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

DEADLINE = time.monotonic() + 0.95 * float(os.environ.get("KVHOST_TEST_TIMEOUT", "1800"))


def left() -> float:
    """The seconds that a call may wait."""
    return max(0.0, DEADLINE - time.monotonic())


def until(what: str, done: Callable[[], object], state: Callable[[], object] = lambda: "") -> None:
    """Waits for what has no event of its own. What fails says what was there instead."""
    while not done():
        assert left() > 0, f"never: {what} {state()}"
        time.sleep(0.002)
