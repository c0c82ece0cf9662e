"""Sessions with a host that comes and goes."""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvhost.arena import Arena
from kvhost.errors import Code, HostError, HostGoneError, HostStoppedError, VersionError
from kvhost.forks import Origin
from kvhost.objects.inplace import HostProcess, NotShared, Place
from kvhost.objects.kind import Kind
from kvhost.objects.options import Options
from kvhost.objects.space import Space
from kvhost.session import Session
from kvhost.shape import Region

log = logging.getLogger("kvhost")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_ALIGN = 4096


def stride(kind: Kind) -> int:
    """Returns the bytes that an object takes in an arena: its pages, one after the other, and the rest to ``_ALIGN``."""
    return -(-kind.object_bytes // _ALIGN) * _ALIGN


def offsets(kind: Kind) -> list[int]:
    """Returns the offsets of an object's pages in its block of an arena."""
    return [0, *itertools.accumulate(kind.pages[:-1])]


class TakenBack(HostStoppedError):
    """A store was withdrawn: the caller may use its memory again, although the host was lost during the store."""


@dataclass
class _Open:
    session: Session
    users: int = 0


class Connection:
    """The sessions with one run of the host, one for each kind of object, and the arena that they share.

    The loss of one session ends all, and the arena with them, since a copy of a running job may still touch it."""

    def __init__(self, options: Options, engine: str) -> None:
        self._options = options
        # Unique to this connection: processes of two containers may have the same number.
        self._engine = f"{engine}-{os.getpid()}-{os.urandom(4).hex()}"
        self.arena = Arena(options.arena_bytes)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.arena.view))
        self.space = Space(options.arena_bytes)
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[Kind, Place | None], _Open] = OrderedDict()  # least recently used first
        self._process: HostProcess | None = None
        self._opened = 0
        self._lost = False
        self._wait = 5.0  # seconds that the host has to end a session

    @contextmanager
    def session(self, kind: Kind, place: Place | None) -> Iterator[Session]:
        """Returns the session for objects of a kind, in the arena or in place. It is opened at its first use, and
        stays open while it is used."""
        key = (kind, place)
        with self._lock:
            if self._lost:
                raise HostGoneError(f"{self._options.socket}: the session is over")
            opened = self._open.get(key)
            if opened is None:
                opened = self._open[key] = _Open(self._hello(kind, place))
            self._open.move_to_end(key)
            opened.users += 1
            idle = self._idle()
        for session in idle:
            session.close()
        try:
            yield opened.session
        finally:
            with self._lock:
                opened.users -= 1
                rest = self._unused()
            for session in rest:
                session.close(self._wait)

    def _hello(self, kind: Kind, place: Place | None) -> Session:
        if self._options.own is not None:
            self._options.own.ensure()
        if place is not None and self._process is None:
            self._process = HostProcess(self._options.socket)
        self._opened += 1
        session = Session(
            self._options.socket,
            f"{self._engine}-{self._opened}",
            kind.namespace(),
            tenant=kind.tenant,
            timeout=self._options.timeout,
            unsealed_memory=place is not None,
        )
        try:
            session.share_withdrawals()
            step = stride(kind)
            if place is not None:
                _share(session, place)
            elif step <= self.arena.size:
                blocks = self.arena.size // step
                session.register(0, self.arena, [Region(offset, step, blocks) for offset in offsets(kind)])
        except BaseException as e:
            session.close(0.0 if isinstance(e, HostStoppedError) else 5.0)
            raise
        return session

    def _idle(self) -> list[Session]:
        """Removes idle sessions beyond the limit."""
        surplus = len(self._open) - self._options.sessions
        keys = [key for key, o in self._open.items() if o.users == 0][: max(0, surplus)]
        return [self._open.pop(key).session for key in keys]

    def _unused(self) -> list[Session]:
        """Removes unused sessions after the loss of the connection, and the arena with the last of them."""
        if not self._lost:
            return []
        keys = [key for key, o in self._open.items() if o.users == 0]
        unused = [self._open.pop(key).session for key in keys]
        if not self._open:
            self.arena.close()
            self._process = None
        return unused

    def fence(self, place: Place) -> None:
        """Waits, after the loss of a session, until the host cannot touch objects in place any more. Call it inside
        :meth:`session`."""
        self.close()
        assert self._process is not None  # set while a session is in use
        self._process.wait_unmapped(place.mapping)

    def sessions(self) -> int:
        return len(self._open)

    def close(self, wait: float = 5.0) -> None:
        """Ends the sessions; the host has ``wait`` seconds for each. Sessions in use end with their last user, and
        so does the arena."""
        with self._lock:
            self._lost, self._wait = True, min(wait, self._wait)
            running = [o.session for o in self._open.values() if o.users]
            rest = self._unused()
        for session in [*running, *rest]:
            session.close(self._wait)


def _share(session: Session, place: Place) -> None:
    try:
        session.register(0, place.mapping.memory, place.regions())
    except HostError as e:
        if e.code in (Code.INVALID, Code.LIMIT):
            raise NotShared(str(e)) from e
        raise


class Connector:
    """The connection to a host that comes and goes. While it is gone, calls fail at once, and attempts to connect
    follow after growing pauses."""

    def __init__(self, options: Options, engine: str, clock: Callable[[], float] = time.monotonic) -> None:
        """``engine`` is the program's name."""
        self.socket, self.timeout, self.prefetch = options.socket, options.timeout, options.prefetch
        self._options, self._engine, self._clock = options, engine, clock
        self._origin = Origin()
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._proven = False  # the present connection has had a session
        self._pause, self._next = 0.0, 0.0
        self._away: VersionError | None = None  # the last attempt found a host of another version; None: it did not
        self._closed = False
        self._fences = 0
        self._places: dict[Kind, Place] = {}
        self.losses = 0
        #: Called when a call begins to wait for an abandoned host. All other calls fail at once until that wait has
        #: ended.
        self.on_fence: list[Callable[[], None]] = []

    def put(self, kind: Kind, place: Place) -> None:
        """Sets the place of objects of a kind in shared memory, so that they need not pass through the arena."""
        self._places[kind] = place

    def place(self, kind: Kind, pages: Sequence[Sequence[int]] = ()) -> tuple[Place | None, list[int]]:
        """Returns the place and the blocks of objects if the host can reach all of them; otherwise None."""
        place = self._places.get(kind)
        if place is None:
            return None, []
        blocks = [place.block(p) for p in pages]
        known = [b for b in blocks if b is not None]
        return (place, known) if len(known) == len(blocks) else (None, [])

    @contextmanager
    def session(self, kind: Kind, place: Place | None, *, copies: bool = False) -> Iterator[tuple[Connection, Session]]:
        """A context with a session for objects of a kind. Without a host it raises :class:`HostGoneError`. A host
        that goes away inside is abandoned by all calls. With ``copies``, for objects in place, it ends only when
        no copy is running any more."""
        self._origin.check()
        connection = self._current()
        try:
            with connection.session(kind, place) as session:
                self._prove(connection)
                try:
                    yield connection, session
                except (HostGoneError, TimeoutError) as e:
                    if copies and place is not None and not isinstance(e, TakenBack):
                        self._fence(connection, place, e)
                    raise
        except (HostGoneError, TimeoutError) as e:
            self._lose(connection, e)
            if isinstance(e, VersionError):
                raise
            raise HostGoneError(str(e)) from e

    def displace(self, kind: Kind, why: Exception) -> None:
        """Makes objects of a kind pass through the arena from now on."""
        if self._places.pop(kind, None) is not None:
            log.warning("host %s: %s's memory cannot be shared, objects are copied: %s", self.socket, kind.engine, why)

    def _fence(self, connection: Connection, place: Place, why: Exception) -> None:
        """Waits for the end of abandoned copies. No new connection is made before, since its sessions would map the
        memory again."""
        with self._lock:
            self._fences += 1
        try:
            self._lose(connection, why)
            for call in self.on_fence:
                call()
            connection.fence(place)
        finally:
            with self._lock:
                self._fences -= 1

    @property
    def fenced(self) -> bool:
        return self._fences > 0

    @property
    def connected(self) -> bool:
        return self._connection is not None and self._proven

    @property
    def gone(self) -> bool:
        """Whether the last attempt failed; False before the first one."""
        return self._connection is None and self._pause > 0

    def sessions(self) -> int:
        connection = self._connection
        return connection.sessions() if connection else 0

    def close(self) -> None:
        if not self._origin.here:
            return
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _current(self) -> Connection:
        with self._lock:
            if self._closed:
                raise HostGoneError("closed here")
            if self._connection is None:
                if self._fences or self._clock() < self._next:
                    raise self._away or HostGoneError(f"{self.socket}: no host answers")
                self._connection = Connection(self._options, self._engine)
                self._proven = False
            return self._connection

    def _prove(self, connection: Connection) -> None:
        with self._lock:
            if connection is not self._connection or self._proven:
                return
            self._proven, self._pause = True, 0.0
        log.info("host %s: connected", self.socket)

    def _lose(self, connection: Connection, why: Exception) -> None:
        with self._lock:
            if connection is not self._connection:
                return  # another thread has already abandoned the host
            self._connection = None
            self._away = why if isinstance(why, VersionError) else None
            self.losses += self._proven
            first = self._pause == 0
            self._pause = min(max(_FIRST_PAUSE, 2 * self._pause), _LONGEST_PAUSE)
            self._next = self._clock() + self._pause
        if first:
            state = "of another version" if isinstance(why, VersionError) else "gone"
            log.warning("host %s: %s, every lookup misses until it is back: %s", self.socket, state, why)
        connection.close(0.0 if isinstance(why, HostStoppedError) else 5.0)
