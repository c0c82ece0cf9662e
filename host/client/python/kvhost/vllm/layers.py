"""Loads inside a step: each layer's attention waits for its own pages while later layers arrive.

On a GPU the compute stream waits for timeline semaphores, so that the engine's thread queues the whole step at once. On a
processor the engine's thread waits for the host's LoadLayer messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from kvhost.cuda import DeviceSemaphores
from kvhost.semaphores import Timeline
from kvhost.session import LoadJob, Session

#: The most loads inside steps of a GPU worker at once, unanswered ones included.
_SLOTS = 64
_LOOK_SECONDS = 0.02  # seconds between two checks that the host still answers while a layer is awaited


class Gate(Protocol):
    """The layers of one load. A position counts layers in the order in which the load delivers them."""

    timeline: Timeline | None  # timeline of the load's job
    on_layer: Callable[[int, list[int]], None] | None  # callback of the load's job
    missed: bool  # compute went on without a layer, so the load counts as failed

    def over(self) -> None:
        """Records the end of the load. Runs on the receiving thread."""

    def wait(self, position: int, stopped: Callable[[], bool]) -> None:
        """Makes later computation wait until the layer has landed, the load is over or abandoned, or the host is
        ``stopped``."""

    def give_up(self) -> None:
        """Ends all waits of computation."""

    def close(self, job: LoadJob) -> None:
        """Frees the gate, after the load's result was taken."""


class Gates(Protocol):
    """The maker of one worker's gates. Its methods run on the engine's thread."""

    def share(self, session: Session) -> None:
        """Prepares a session. Call it for each session before its first load, on any thread."""

    def gate(self, layers: int) -> Gate | None:
        """Returns a gate for a load of the given layers; None if too many loads are unanswered."""


class HostGate:
    """The gate of a load to host memory. The engine's thread waits for the host's messages."""

    timeline = None
    missed = False

    def __init__(self, timeout: float) -> None:
        self._due = time.monotonic() + timeout
        self._changed = threading.Condition()
        self._landed = 0
        self._over = False
        self.on_layer: Callable[[int, list[int]], None] | None = self._land

    def _land(self, layer: int, failed: list[int]) -> None:
        with self._changed:
            self._landed += 1
            self._changed.notify_all()

    def over(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait(self, position: int, stopped: Callable[[], bool]) -> None:
        while not self._there(position):
            if time.monotonic() > self._due or stopped():
                self.missed = True
                return

    def _there(self, position: int) -> bool:
        with self._changed:
            left = min(_LOOK_SECONDS, max(0.0, self._due - time.monotonic()))
            return self._changed.wait_for(lambda: self._over or self._landed > position, left)

    def give_up(self) -> None:
        self.over()

    def close(self, job: LoadJob) -> None:
        pass


class HostGates:
    def __init__(self, timeout: float) -> None:
        """``timeout`` is the most seconds that a gate blocks the engine's thread."""
        self._timeout = timeout

    def share(self, session: Session) -> None:
        pass

    def gate(self, layers: int) -> Gate | None:
        return HostGate(self._timeout)


class DeviceGate:
    """The gate of a load to a GPU. The stream waits for semaphores, and the host sends no message for a layer. A
    receiving thread would take the interpreter's lock for each message, and so delay the engine's thread, which
    launches the layer's kernels."""

    on_layer = None
    missed = False  # the stream waits until the layer has landed or the load is abandoned

    def __init__(self, gates: DeviceGates, slot: int, timeline: Timeline) -> None:
        self._gates, self._slot = gates, slot
        self.timeline: Timeline | None = timeline
        self._first = timeline.done_value - timeline.layers

    def over(self) -> None:
        pass  # the stream waits for the semaphore

    def wait(self, position: int, stopped: Callable[[], bool]) -> None:
        self._gates.wait_on_stream(self._slot, self._first + position)

    def give_up(self) -> None:
        assert self.timeline is not None
        self.timeline.abandon()

    def close(self, job: LoadJob) -> None:
        if job.answered:  # a host that died or hangs may still write a lower value than the next load's to the semaphore
            self._gates.take_back(self._slot)


class DeviceGates:
    """Gates in the GPU's memory. Each slot is a semaphore that rises with each load. Semaphore 0 belongs to the
    compute stream: the copies of a load wait until the kernels queued before it are done, since they may still use
    its blocks."""

    def __init__(self, stream: Callable[[], int]) -> None:
        """``stream`` returns the CUDA stream that computes."""
        self._stream = stream
        self._semaphores = DeviceSemaphores(1 + _SLOTS)
        self._where = self._semaphores.export()
        self._queued = 0
        self._values = [0] * (1 + _SLOTS)
        self._free = list(range(_SLOTS, 0, -1))

    def share(self, session: Session) -> None:
        session.share_semaphores_ipc(self._where.handle, self._where.offset, 1 + _SLOTS)

    def gate(self, layers: int) -> Gate | None:
        if not self._free:
            return None
        slot = self._free.pop()
        self._values[slot] += layers + 1
        self._queued += 1
        self._semaphores.store_on(self._stream(), 0, self._queued)
        timeline = Timeline(self._semaphores, slot, self._values[slot], wait=0, wait_value=self._queued, layers=layers)
        return DeviceGate(self, slot, timeline)

    def wait_on_stream(self, slot: int, value: int) -> None:
        self._semaphores.wait_on(self._stream(), slot, value)

    def take_back(self, slot: int) -> None:
        self._free.append(slot)


class StepLayers:
    """The loads that the attention of the running step waits for."""

    def __init__(self, gates: Gates, positions: Mapping[str, int]) -> None:
        """``positions`` are the positions of the engine's layers in the order of a load."""
        self._gates, self._positions = gates, positions
        self._all = set(positions.values())
        self._open: list[Gate] = []
        self._asked: set[int] = set()

    def share(self, session: Session) -> None:
        self._gates.share(session)

    def gate(self) -> Gate | None:
        return self._gates.gate(len(self._all))

    def add(self, gate: Gate) -> None:
        """Adds a load that has begun: the step waits for it."""
        self._open.append(gate)

    def wait(self, layer: str, stopped: Callable[[], bool]) -> None:
        """Waits for a layer. Call it before the layer's attention. ``stopped`` tells whether the host's process is
        stopped."""
        if self._open and (position := self._positions.get(layer)) is not None:
            self._asked.add(position)
            for gate in self._open:
                gate.wait(position, stopped)

    def wait_for_all(self, stopped: Callable[[], bool]) -> None:
        """Waits for all layers, for a step that runs as one graph without calls of :meth:`wait`."""
        if self._open:
            self._asked |= self._all
            for gate in self._open:
                gate.wait(len(self._all) - 1, stopped)

    def end(self) -> bool:
        """Ends a step that is queued or done. Returns whether it has waited for every layer of its loads."""
        whole = not self._open or self._asked == self._all
        self._open, self._asked = [], set()
        return whole
