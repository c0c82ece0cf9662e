"""The free bytes of an arena."""

from __future__ import annotations

import threading
from collections.abc import Sequence


class Space:
    """Allocates blocks of an arena. A block of ``stride`` bytes is at a multiple of its stride, so that objects of
    different sizes share one arena."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)]  # sorted, no two adjacent
        self._changed = threading.Condition()

    def take(self, stride: int, most: int, timeout: float) -> list[int]:
        """Waits for a free block, takes at least one and at most ``most``, and returns their numbers, in strides. No
        thread may wait here while it holds blocks."""
        if stride > self.size:
            raise ValueError(f"an object needs {stride} bytes, the arena has {self.size}: raise arena_bytes")
        with self._changed:
            blocks = self._changed.wait_for(lambda: self._cut(stride, most), timeout)
        if not blocks:
            raise TimeoutError(f"no {stride} bytes of the arena became free within {timeout} s")
        return blocks

    def give(self, stride: int, blocks: Sequence[int]) -> None:
        """Gives blocks back."""
        with self._changed:
            free = sorted([*self._free, *((b * stride, (b + 1) * stride) for b in blocks)])
            joined = [free[0]]
            for start, end in free[1:]:
                if start == joined[-1][1]:
                    joined[-1] = (joined[-1][0], end)
                else:
                    joined.append((start, end))
            self._free = joined
            self._changed.notify_all()

    def free_bytes(self) -> int:
        with self._changed:
            return sum(end - start for start, end in self._free)

    def _cut(self, stride: int, most: int) -> list[int]:
        blocks: list[int] = []
        rest: list[tuple[int, int]] = []
        for start, end in self._free:
            first = -(-start // stride)
            n = min(most - len(blocks), end // stride - first)
            if n <= 0:
                rest.append((start, end))
                continue
            blocks.extend(range(first, first + n))
            rest.extend(r for r in ((start, first * stride), ((first + n) * stride, end)) if r[0] < r[1])
        self._free = rest
        return blocks
