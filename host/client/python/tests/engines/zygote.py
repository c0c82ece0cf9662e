"""A process that has imported an engine once, and forks for each one that tests start. A fork is there at once, where an
interpreter of its own spends ten seconds and more of a processor on imports.

  zygote.py SOCKET MODULE...    imports the modules, and forks for each order that comes over the socket

It ends with its standard input, and with it the forks and what they have left behind. A fork's end is told to whoever has
ordered it."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: what forks leave behind is counted with them
MODULES = ("vllm_preload",)
_MOST = 1 << 17  # bytes of a message


class Fork:
    """A Python program in a fork of the zygote, as much like ``subprocess.Popen`` as tests need. It leads a session."""

    def __init__(self, command: Sequence[str | os.PathLike[str]], log: Path, env: dict[str, str]) -> None:
        """``command`` is a script and its arguments."""
        self.args = [os.fspath(c) for c in command]
        self.returncode: int | None = None
        self._order = _connect(os.environ.get("KVHOST_ZYGOTE") or start())
        self._order.send(json.dumps([self.args, os.fspath(log), env, os.getcwd()]).encode())
        self.pid = int(self._order.recv(_MOST))

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        if (code := self._ended(timeout)) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._order], [], [], timeout)[0]:
            self.returncode = int(self._order.recv(_MOST) or signal.SIGKILL)  # nothing: the zygote has ended
            self._order.close()
        return self.returncode


def _connect(path: str) -> socket.socket:
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.connect(path)
    return s


_own: list[tuple[str, subprocess.Popen[bytes]]] = []  # this process's zygote and its socket


def start(modules: Sequence[str] = MODULES) -> str:
    """Starts this process's own zygote, unless it has one. Returns its socket when it has imported the modules."""
    if _own:
        return _own[0][0]
    from vllm_engine import environment

    path = os.path.join(tempfile.mkdtemp(prefix="kvhost-zygote-", dir="/tmp"), "s")  # a socket's path is short
    process = subprocess.Popen(
        [sys.executable, __file__, path, *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(HERE)
    )
    assert process.stdout is not None
    if b"ready\n" not in iter(process.stdout.readline, b""):
        raise RuntimeError(f"the zygote ended with {process.wait()}: see what it wrote to standard error")
    _own.append((path, process))
    return path


@atexit.register
def end() -> None:
    """Ends this process's own zygote."""
    while _own:
        path, process = _own.pop()
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        shutil.rmtree(os.path.dirname(path))


def serve(path: str) -> tuple[list[str], str, dict[str, str], str]:
    """Returns in each fork, with its order."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(16)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever has started it ends it
    running: dict[int, socket.socket] = {}
    print("ready", flush=True)
    while True:
        ready: list[Any] = select.select([0, listener, woken], [], [])[0]
        if 0 in ready and not os.read(0, 4096):
            _kill_all()
            os._exit(0)
        if woken in ready:
            os.read(woken, 4096)
            _reap(running)
        if listener not in ready:
            continue
        order, _ = listener.accept()
        told: tuple[list[str], str, dict[str, str], str] = json.loads(order.recv(_MOST))
        if pid := os.fork():
            running[pid] = order
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, interrupted)
        os.setsid()
        order.send(str(os.getpid()).encode())
        for s in (listener, order, *running.values()):
            s.close()
        os.close(woken)
        os.close(wake)
        return told


def _kill_all() -> None:
    """The forks, and what they leave behind, which comes to this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    tracker = str(resource_tracker._resource_tracker._pid)  # type: ignore[attr-defined]  # which unlinks what they had, and ends
    while pids := [pid for pid in children.read_text().split() if pid != tracker]:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        os.waitpid(-1, 0)


def _reap(running: dict[int, socket.socket]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        if (order := running.pop(pid, None)) is not None:
            with suppress(BrokenPipeError), order:
                order.send(str(os.waitstatus_to_exitcode(status)).encode())


def run(command: list[str], log: str, env: dict[str, str], folder: str) -> None:
    """Runs a script in this process, as if it were its own."""
    for name, flags in ((os.devnull, os.O_RDONLY), (log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)):
        fd = os.open(name, flags, 0o644)
        for to in (0,) if name == os.devnull else (1, 2):
            os.dup2(fd, to)
        os.close(fd)
    os.chdir(folder)
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    more = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p and p not in known]
    sys.path[1:1] = more
    importlib.invalidate_caches()
    os.environ.clear()
    os.environ.update(env)
    sys.argv = command
    sys.path[0] = os.path.dirname(command[0])
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    resource_tracker.ensure_running()  # for all forks: one of their own is killed with them, and leaves their shared memory
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    gc.collect()
    gc.freeze()
    run(*serve(sys.argv[1]))
