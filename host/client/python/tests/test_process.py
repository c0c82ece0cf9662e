"""The end of a process, as a client of a host sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
from kvhost.process import Process
from waits import left, until

#: Its first thread ends; another one ends the process when it is told to.
_LINGERS = """
import ctypes, os, sys, threading
def last():
    sys.stdin.buffer.read(1)
    os._exit(0)
threading.Thread(target=last).start()
os.write(1, b"x")
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_that_has_begun_to_end_is_waited_for() -> None:
    p = subprocess.Popen([sys.executable, "-c", _LINGERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert p.stdin and p.stdout
    try:
        p.stdout.read(1)
        process = Process(p.pid)
        until("its first thread has ended", process._ends)
        assert not process.ended()
        done = threading.Event()
        waits = threading.Thread(target=lambda: (process.await_end(left()), done.set()))
        waits.start()
        assert not done.wait(0.1)
        p.stdin.write(b"x")
        p.stdin.flush()
        assert done.wait(left()) and process.ended()
        waits.join()
    finally:
        p.kill()
        p.wait(left())


def test_a_process_that_goes_on_is_not_waited_for() -> None:
    Process(os.getpid()).await_end(1e6)
    assert not Process(os.getpid()).ended()


@pytest.mark.parametrize("pid", [0, 1 << 22])
def test_a_process_that_cannot_be_seen_has_ended(pid: int) -> None:
    assert Process(pid).ended()


def test_a_stopped_process_is_ended() -> None:
    p = subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"])
    try:
        os.waitid(os.P_PID, p.pid, os.WSTOPPED)
        process = Process(p.pid)
        assert not process.ended()
        process.kill()
        assert p.wait(left()) == -signal.SIGKILL and process.ended()
        process.kill()  # whatever has its number now is left alone
    finally:
        p.kill()
        p.wait(left())
