"""Words that put jobs in order with this process' compute, without a message in between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvhost.arena import Arena
from kvhost.v1 import kvhost_pb2 as pb

#: Values of a status word: as the client sets it, all blocks read or delivered, some not.
OPEN, DONE, FAILED = 0, 1, 2


class Words(Protocol):
    """64-bit words that this process owns and the host sees, too."""

    def load(self, i: int) -> int: ...

    def store(self, i: int, value: int) -> None: ...


class ArenaWords:
    """Words in shared host memory."""

    def __init__(self, arena: Arena, offset: int, count: int) -> None:
        self._view = arena.view[offset : offset + 8 * count].cast("Q")

    def load(self, i: int) -> int:
        return self._view[i]

    def store(self, i: int, value: int) -> None:
        self._view[i] = value

    def close(self) -> None:
        self._view.release()


@dataclass(frozen=True)
class Timeline:
    """Puts one job in order. Two jobs in flight have different done and status words, which the client sets before.

    No copy of the job begins before ``wait_word`` has ``wait_value``. ``done_value`` is in ``done_word`` when no copy can
    touch the blocks any more, however the job ended; of a layer-wise load of n layers, ``done_value - n + i`` is there when
    the i-th has landed. Should the host die, the values are written here."""

    words: Words
    done_word: int
    done_value: int
    wait_word: int = 0
    wait_value: int = 0
    status_word: int = -1
    layers: int = 0

    def message(self) -> pb.Timeline:
        m = pb.Timeline(
            wait_word=self.wait_word, wait_value=self.wait_value, done_word=self.done_word, done_value=self.done_value
        )
        if self.status_word >= 0:
            m.status_word = self.status_word
        return m

    def statuses(self) -> list[int]:
        """The status words: one, or one for each layer."""
        if self.status_word < 0:
            return []
        return [self.words.load(self.status_word + i) for i in range(max(1, self.layers))]

    def abandon(self) -> None:
        """Writes what the host will not: who waits goes on, and finds that the job failed."""
        if self.words.load(self.done_word) >= self.done_value:
            return
        for i, status in enumerate(self.statuses()):
            if status == OPEN:
                self.words.store(self.status_word + i, FAILED)
        self.words.store(self.done_word, self.done_value)
