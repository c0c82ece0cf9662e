"""Timeline semaphores, which order jobs with this process's compute without messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvhost.arena import Arena
from kvhost.v1 import kvhost_pb2 as pb

#: Values of a status semaphore: initial, all blocks read or delivered, some blocks failed.
OPEN, DONE, FAILED = 0, 1, 2


class Semaphores(Protocol):
    """Timeline semaphores: 64-bit counters in memory that this process owns and shares with the host."""

    def load(self, i: int) -> int: ...

    def store(self, i: int, value: int) -> None: ...


class ArenaSemaphores:
    """Semaphores in shared host memory."""

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
    """Orders one job by semaphores, named by index. Two jobs in flight need different ``done`` and ``status`` semaphores;
    the client resets the status semaphores before it starts the job.

    No copy of the job starts before semaphore ``wait`` reaches ``wait_value``. Semaphore ``done`` reaches
    ``done_value`` when no copy can touch the blocks any more, for every end of the job. A layer-wise load of n layers
    sets ``done_value - n + i`` when layer i has landed. If the host dies, this package writes the values."""

    semaphores: Semaphores
    done: int
    done_value: int
    wait: int = 0
    wait_value: int = 0
    status: int = -1
    layers: int = 0

    def message(self) -> pb.Timeline:
        m = pb.Timeline(
            wait=self.wait, wait_value=self.wait_value, done=self.done, done_value=self.done_value
        )
        if self.status >= 0:
            m.status = self.status
        return m

    def statuses(self) -> list[int]:
        """Returns the status semaphores: one, or one for each layer."""
        if self.status < 0:
            return []
        return [self.semaphores.load(self.status + i) for i in range(max(1, self.layers))]

    def abandon(self) -> None:
        """Writes the values in place of a host that is gone, so that waiters wake up and see that the job failed."""
        if self.semaphores.load(self.done) >= self.done_value:
            return
        for i, status in enumerate(self.statuses()):
            if status == OPEN:
                self.semaphores.store(self.status + i, FAILED)
        self.semaphores.store(self.done, self.done_value)
