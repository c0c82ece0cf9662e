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

#: Loads inside steps that a GPU worker can have at once, those included that a host has not answered.
_SLOTS = 64
_LOOK_SECONDS = 0.02  # between two looks whether the host that a layer comes from still answers


class Gate(Protocol):
    """The layers of one load. A position counts layers in the order in which the load delivers them."""

    timeline: Timeline | None  # for the load's job
    on_layer: Callable[[int, list[int]], None] | None  # likewise
    missed: bool  # compute went on without a layer: the load counts as failed, however it ends

    def over(self) -> None:
        """The load is over. On the receiving thread."""

    def wait(self, position: int, stopped: Callable[[], bool]) -> None:
        """Compute that follows waits until the layer has landed, or the load is over or given up, or the host is ``stopped``."""

    def give_up(self) -> None:
        """No compute waits any more."""

    def close(self, job: LoadJob) -> None:
        """The load is over, and its result was taken."""


class Gates(Protocol):
    """Makes the gates of one worker. Its methods run on the engine's thread."""

    def share(self, session: Session) -> None:
        """Call for each session before its first load. On any thread."""

    def gate(self, layers: int) -> Gate | None:
        """A gate for a load of so many layers; None where too many loads are not answered."""


class HostGate:
    """On a processor."""

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
        """``timeout``: seconds that a gate holds the engine's thread."""
        self._timeout = timeout

    def share(self, session: Session) -> None:
        pass

    def gate(self, layers: int) -> Gate | None:
        return HostGate(self._timeout)


class DeviceGate:
    """On a GPU. The stream sees the semaphores, so that the host sends no message for a layer: a receiving thread that takes
    the interpreter's lock for each of them holds up the engine's thread, which launches the layer's kernels."""

    on_layer = None
    missed = False  # the stream waits for as long as it takes, or until the load is given up

    def __init__(self, gates: DeviceGates, slot: int, timeline: Timeline) -> None:
        self._gates, self._slot = gates, slot
        self.timeline: Timeline | None = timeline
        self._first = timeline.done_value - timeline.layers

    def over(self) -> None:
        pass  # the stream sees the semaphore

    def wait(self, position: int, stopped: Callable[[], bool]) -> None:
        self._gates.wait_on_stream(self._slot, self._first + position)

    def give_up(self) -> None:
        assert self.timeline is not None
        self.timeline.abandon()

    def close(self, job: LoadJob) -> None:
        if job.answered:  # a host that died, or hangs, may yet write the semaphore: a lower value than the next load's
            self._gates.take_back(self._slot)


class DeviceGates:
    """A slot is a semaphore that rises from load to load. Semaphore 0 is the compute stream's: no copy of a load starts
    before the kernels that were queued ahead of it are done, since they may still use its blocks."""

    def __init__(self, stream: Callable[[], int]) -> None:
        """``stream`` gives the CUDA stream that computes."""
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
    """What the attention of the step that runs waits for."""

    def __init__(self, gates: Gates, positions: Mapping[str, int]) -> None:
        """``positions`` of the engine's layers in the order in which loads deliver them."""
        self._gates, self._positions = gates, positions
        self._all = set(positions.values())
        self._open: list[Gate] = []
        self._asked: set[int] = set()

    def share(self, session: Session) -> None:
        self._gates.share(session)

    def gate(self) -> Gate | None:
        return self._gates.gate(len(self._all))

    def add(self, gate: Gate) -> None:
        """The load has begun: the step waits for it."""
        self._open.append(gate)

    def wait(self, layer: str, stopped: Callable[[], bool]) -> None:
        """Call before a layer's attention. ``stopped`` says whether the host's process is."""
        if self._open and (position := self._positions.get(layer)) is not None:
            self._asked.add(position)
            for gate in self._open:
                gate.wait(position, stopped)

    def wait_for_all(self, stopped: Callable[[], bool]) -> None:
        """For a step that runs as one graph: no layer of it calls :meth:`wait`."""
        if self._open:
            self._asked |= self._all
            for gate in self._open:
                gate.wait(len(self._all) - 1, stopped)

    def end(self) -> bool:
        """The step is queued, or done. Whether it has waited for every layer of its loads."""
        whole = not self._open or self._asked == self._all
        self._open, self._asked = [], set()
        return whole
