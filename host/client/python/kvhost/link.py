"""Sessions that are opened in the background, and opened again after the host was gone."""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

from kvhost.errors import HostError, KvhostError, Refused
from kvhost.forks import Origin
from kvhost.session import Session

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0


class Opener(Protocol):
    """Opens the sessions of an epoch: all of them, or none and an exception. :class:`Refused` ends all attempts."""

    def __call__(self, epoch: int) -> list[Session]: ...


class Link:
    """Sessions that live and end together.

    An epoch is the number of one host's life, as the engine's scheduler saw it. It is part of the engine id. The host
    counts leases per engine id, so a lease of an earlier epoch cannot be mistaken for one of this epoch."""

    def __init__(
        self, name: str, socket: str, open: Opener, *, leads: bool, log: logging.Logger = logging.getLogger("kvhost")
    ) -> None:
        """A link that ``leads`` begins a new epoch whenever it loses its sessions; others :meth:`follow`. ``log`` is
        the engine's logger."""
        self._log = log
        self._name, self._socket, self._open, self._leads = name, socket, open, leads
        self._origin = Origin()
        self._wake = threading.Condition()
        self._sessions: list[Session] = []
        self._epoch = 0  # the wanted epoch
        self._opened = -1  # the epoch of the sessions; -1 while there are none
        self._paused = False
        self._patience = 5.0  # seconds that the host has to end a session
        self._closed = False
        self._tried = False
        self._said = ""  # the last logged failure
        self._thread = threading.Thread(target=self._run, name=f"kvhost-link-{name}", daemon=True)

    def start(self, wait: float) -> bool:
        """Begins to connect, and returns whether it has connected within ``wait`` seconds."""
        self._thread.start()
        with self._wake:
            return self._wake.wait_for(lambda: self._opened >= 0, wait)

    @property
    def epoch(self) -> int:
        """The epoch of the sessions, -1 while there are none."""
        opened = self._opened
        return opened if self._alive() else -1

    @property
    def starting(self) -> bool:
        """Whether the first attempt to connect is still running."""
        return not self._tried

    @property
    def wanted(self) -> int:
        return self._epoch

    def sessions(self, epoch: int | None = None) -> list[Session]:
        """Returns the sessions if they are up and belong to the epoch; otherwise none."""
        with self._wake:
            return self._sessions if self._alive() and epoch in (None, self._opened) else []

    def _alive(self) -> bool:
        sessions = self._sessions
        return bool(sessions) and not any(s.ended.is_set() for s in sessions)

    def _look(self) -> None:
        """Makes the link's thread check whether the sessions are alive."""
        with self._wake:
            self._wake.notify_all()

    def follow(self, epoch: int) -> None:
        """Replaces the sessions by those of another epoch."""
        if epoch != self._epoch:
            with self._wake:
                self._epoch = epoch
                self._wake.notify_all()

    def pause(self, wait: float = 5.0) -> None:
        """Closes the sessions until :meth:`resume`, and returns when they are closed. The host has the given seconds
        to end each."""
        with self._wake:
            self._paused, self._patience = True, wait
            self._wake.notify_all()
            self._wake.wait_for(lambda: not self._sessions)

    def resume(self, wait: float) -> bool:
        with self._wake:
            self._paused, self._patience = False, 5.0
            self._wake.notify_all()
            return self._wake.wait_for(lambda: self._opened >= 0, wait)

    def close(self) -> None:
        if not self._origin.here:
            return
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._thread.join(10)

    def _run(self) -> None:
        pause, due = _FIRST_PAUSE, 0.0
        while True:
            with self._wake:
                wanted = not self._closed and not self._paused
                if self._sessions and (not wanted or not self._alive() or self._opened != self._epoch):
                    ended = self._sessions
                elif self._closed:
                    return
                elif not wanted or self._sessions:
                    self._wake.wait()
                    continue
                else:
                    ended = []
            if ended:
                self._end(ended)
                due = 0.0
                continue
            if time.monotonic() < due:
                time.sleep(min(0.05, max(0.0, due - time.monotonic())))
                continue
            connected = self._connect()
            self._tried = True
            if connected:
                pause = _FIRST_PAUSE
            else:
                due = time.monotonic() + pause
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _end(self, ended: list[Session]) -> None:
        lost = any(s.ended.is_set() for s in ended)
        for s in ended:
            # Jobs may be running, and the host uses their blocks until it has ended the session. An engine that ends or
            # sleeps cannot wait for a hanging host, and does not use the memory any more.
            s.end()
            while not (self._leads or self._closed or self._paused or s.ended.wait(0.1)):
                pass
            s.close(self._patience)
        with self._wake:
            self._sessions, self._opened = [], -1
            if lost:
                self._log.warning("kvhost %s: session with %s lost; computing without it, will reconnect",
                                  self._name, self._socket)
                if self._leads:
                    self._epoch += 1
            self._wake.notify_all()

    def _connect(self) -> bool:
        epoch = self._epoch
        try:
            sessions = self._open(epoch)
        except Refused:
            self._closed = True
            return False
        except (KvhostError, TimeoutError, OSError) as e:
            why = str(e)
            if why != self._said:
                self._said = why
                level = logging.ERROR if isinstance(e, HostError) else logging.WARNING
                self._log.log(level, "kvhost %s: cannot connect to %s: %s; will retry", self._name, self._socket, why)
            return False
        with self._wake:
            self._sessions, self._opened = sessions, epoch
            self._wake.notify_all()
        for session in sessions:
            session.when_ended(self._look)
        self._said = ""
        self._log.info("kvhost %s: connected to %s, version %s, namespace %s", self._name, self._socket,
                       sessions[0].version, " ".join(s.namespace_digest.hex() for s in sessions))
        return True
