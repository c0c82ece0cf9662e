"""A host that engines start for themselves, if their settings name a root or memory instead of a socket.

All engine processes of a user with the same root share one host. The first that finds none starts it. The host is a
process of its own: it survives a crash of an engine, and ends when it has had no session for ``session.idle_exit``, a
minute unless ``KVHOST_SESSION_IDLE_EXIT`` sets another time. Other ``KVHOST_`` variables are its settings, too."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import subprocess
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvhost.errors import HostGoneError, printable
from kvhost.process import Process
from kvhost.wire import HOST_USER, foreign, unreachable

_START_SECONDS = 60.0
_IDLE = "1m"
_AGAIN_SECONDS = 5.0  # seconds from a failed start to the next attempt
#: Starts a command that logs to $0 and is no child of the engine, since vLLM kills all its descendants at its end.
_ORPHAN = '"$@" >>"$0" 2>&1 & echo $!'


class OwnHost:
    """The host for a root, as ``/mnt/kv=500GiB``, for memory, as ``32GiB``, or for both. Any thread may use it."""

    def __init__(self, root: str = "", memory: str = "", log: logging.Logger = logging.getLogger("kvhost")) -> None:
        """``log`` also gets the host's own log."""
        if not root and not memory:
            raise ValueError("neither a root nor memory")
        self._root, self._memory, self._log = root, memory, log
        path = os.path.realpath(_path(root)) if root else "memory:"
        name = hashlib.blake2b(path.encode(), digest_size=8).hexdigest()
        self._base = _directory() / name
        self._sizes = " and ".join(filter(None, [root, memory and f"{memory} of memory"]))
        self._compared = False
        self._failed, self._why = 0.0, ""
        self._mutex = threading.Lock()

    @property
    def socket(self) -> str:
        return f"{self._base}.sock"

    def ensure(self) -> None:
        """Starts the host unless one answers. Raises HostGoneError if it does not start."""
        if why := foreign(self.socket):
            raise HostGoneError(why)
        if not unreachable(self.socket):
            self._compare()
            return
        with self._mutex:
            if time.monotonic() - self._failed < _AGAIN_SECONDS and self._why:
                raise HostGoneError(self._why)
            with self._starting():
                if not unreachable(self.socket):  # another process has started it
                    self._compare()
                    return
                try:
                    self._start()
                except HostGoneError as e:
                    self._failed, self._why = time.monotonic(), str(e)
                    raise

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """A lock by which one process at a time starts a host. The kernel releases the lock of a process that dies."""
        with open(f"{self._base}.start", "w") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            yield

    def _compare(self) -> None:
        """Logs once if the running host was started with other sizes, which remain in force."""
        if self._compared:
            return
        self._compared = True
        with suppress(OSError):  # an older version has no such file
            if (held := Path(f"{self._base}.sizes").read_text()) != self._sizes:
                self._log.warning(
                    "kvhost: this engine asks for %s, and shares the host of an engine that asked for %s, which holds until that host ends: "
                    "%s after its last engine", self._sizes, held, os.environ.get("KVHOST_SESSION_IDLE_EXIT", _IDLE),
                )

    def _start(self) -> None:
        logged = Path(f"{self._base}.log")
        self._compared = True
        Path(f"{self._base}.sizes").write_text(self._sizes)
        command = [program(), "--root", self._root or f"memory:={self._memory}", "--socket", self.socket]
        env = {"KVHOST_HTTP_LISTEN": "", "KVHOST_SESSION_IDLE_EXIT": _IDLE} | dict(os.environ)
        env.pop("CUDA_VISIBLE_DEVICES", None)  # the host also serves GPUs of other engines
        env.pop(HOST_USER, None)  # a setting of clients
        if self._root and self._memory:
            env["KVHOST_STORE_MEMORY"] = self._memory
        logged.write_bytes(b"")
        with _all_processors():
            pid = int(subprocess.run(
                ["/bin/sh", "-c", _ORPHAN, logged, *command], env=env, start_new_session=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, check=True,
            ).stdout)
        host = Process(pid)
        threading.Thread(target=_follow, args=(logged, host, self._log), name="kvhost-own", daemon=True).start()
        due = time.monotonic() + _START_SECONDS
        while unreachable(self.socket):
            if host.ended() or time.monotonic() > due:
                raise HostGoneError(f"{' '.join(command)} did not start: {_reason(logged)} (all it said: {logged})")
            time.sleep(0.02)
        self._log.warning(
            "kvhost: this engine has started a host of its own, process %d: %s. It ends %s after its last engine, its log is %s. kvhost "
            "status shows what it does, KVHOST_HTTP_LISTEN=127.0.0.1:9476 gives it a page and metrics. To have "
            'it as a service: kvhost --root %s --socket PATH, and {"socket": "PATH"} in the engine\'s settings',
            pid, " ".join(command), env["KVHOST_SESSION_IDLE_EXIT"], logged, command[2],
        )


def _reason(logged: Path) -> str:
    """Returns the last words of a host that does not start: the lines of an error are no entries of its log."""
    lines = logged.read_text(errors="replace").strip().splitlines()
    said = [line.removeprefix("kvhost: ") for line in lines if not line.startswith(("{", "kvhost: see "))]
    return "; ".join(said) or "".join(lines[-1:])


def check_settings(where: str, said: Mapping[str, Any]) -> None:
    """Refuses settings that name both a running host and one that the engine starts."""
    if said.get("socket") and (said.get("root") or said.get("memory")):
        raise ValueError(
            f"{where}.socket: is of a host that runs, root and memory are of one that the engine starts: want one of them"
        )


def program() -> str:
    """Returns the path of kvhost: ``KVHOST_BIN``, the wheel's, or that of ``PATH``."""
    if named := os.environ.get("KVHOST_BIN"):
        return named
    schemes = (sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user"))
    places = [Path(sysconfig.get_path("scripts", scheme), "kvhost") for scheme in schemes]
    found = next((str(p) for p in places if os.access(p, os.X_OK)), None) or shutil.which("kvhost")
    if found is None:
        raise HostGoneError(
            "there is no program kvhost: this package was installed from its sources. The wheel of a release has it; "
            "KVHOST_BIN may name one"
        )
    return found


def _path(root: str) -> str:
    """Returns the path in path=capacity. The path may contain the sign, since a capacity has no slash."""
    path, _, size = root.rpartition("=")
    return root if not path or "/" in size else path


def _directory() -> Path:
    """Returns the directory of a user's sockets, which no other user may write to. If another user has taken its
    name, it is in the home directory."""
    name, why = f"kvhost-{os.geteuid()}", []
    for above in (os.environ.get("XDG_RUNTIME_DIR") or "/tmp", os.path.join(os.path.expanduser("~"), ".cache")):
        path = Path(above, name)
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            found = path.lstat()
        except OSError as e:
            why.append(f"{path}: {e.strerror or e}")
            continue
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            if found.st_mode & 0o077:
                raise ValueError(f"{path}: others may enter it: want mode 0700")
            return path
        why.append(f"{path}: another user has it")
    raise ValueError("; ".join(why) + "; XDG_RUNTIME_DIR may name another place")


@contextmanager
def _all_processors() -> Iterator[None]:
    """Lets the host run on all processors, and not only on those of the engine's thread that starts it."""
    bound = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # the kernel keeps the allowed ones
        yield
    finally:
        os.sched_setaffinity(0, bound)


def _follow(logged: Path, host: Process, log: logging.Logger) -> None:
    """Copies the host's log to the engine's log, until the host ends."""
    with logged.open(errors="replace") as f:
        line, ended = "", False
        while True:
            line += f.readline()
            if line.endswith("\n"):
                _say(line.strip(), log)
                line = ""
            elif ended:
                return
            else:
                ended = host.ended()
                time.sleep(0 if ended else 0.2)


_LEVELS = {"DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARN": logging.WARNING, "ERROR": logging.ERROR}


def _say(line: str, log: logging.Logger) -> None:
    level, text = logging.ERROR, line
    try:
        said = json.loads(line, object_pairs_hook=_first_values)
        level = _LEVELS[said.pop("level")]
        said.pop("time", None)
        text = " ".join([str(said.pop("msg")), *(f"{k}={v}" for k, v in said.items())])
    except (ValueError, KeyError, AttributeError, TypeError):
        pass
    log.log(level, "kvhost: %s", printable(text.removeprefix("kvhost: ")))


def _first_values(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Keeps the first value of a key that occurs twice, which is the line's own."""
    said: dict[str, Any] = {}
    for key, value in pairs:
        said.setdefault(key, value)
    return said
