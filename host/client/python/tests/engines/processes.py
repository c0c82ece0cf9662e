"""Processes that tests of engines start, kill and start again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvhost.errors import HostGoneError
from kvhost.wire import Stream


DEADLINE = 600.0  # seconds: what has not come by then is stuck, and not slow


def wait_for(what: str, true: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < end, f"{what}: not within {DEADLINE} s"
        time.sleep(0.02)


def stopped(pid: int) -> bool:
    """Whether all threads of a process are stopped, whatever has stopped them."""
    try:
        threads = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # one has ended just now
        return False
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in threads)


class Process:
    """A command whose output is in a file."""

    def __init__(self, command: Sequence[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.command, self.log, self.env = list(command), log, env
        self._running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert self._running is None
        with self.log.open("ab") as log:
            self._running = subprocess.Popen(self.command, stdout=log, stderr=log, env=self.env, start_new_session=True)

    def alive(self) -> bool:
        return self._running is not None and self._running.poll() is None

    def pid(self) -> int:
        assert self._running is not None
        return self._running.pid

    def stop(self, sig: int = signal.SIGTERM) -> None:
        """Ends the process and what it started."""
        if self._running is None:
            return
        if self.alive():
            os.killpg(self._running.pid, sig)
            try:
                self._running.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self._running.pid, signal.SIGKILL)
                self._running.wait()
        self._running = None

    def _signal(self, sig: int) -> None:
        os.killpg(self.pid(), sig)

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class Host(Process):
    """kvhost with one root. KVHOST_BIN names the program."""

    def __init__(self, directory: Path, capacity: str = "1GiB", *flags: str) -> None:
        self.root, self.socket = directory / "kv", str(directory / "s")
        program = os.environ.get("KVHOST_BIN") or shutil.which("kvhost")
        assert program, "KVHOST_BIN names no kvhost, and PATH has none"
        super().__init__(
            [program, "--root", f"{self.root}={capacity}", "--socket", self.socket, "--http-listen", "", *flags],
            directory / "kvhost.log",
            # The root alone, without memory before it: tests damage its files.
            {name: value for name, value in os.environ.items() if not name.startswith("KVHOST_")} | {"KVHOST_STORE_MEMORY": "0"},
        )

    def start(self) -> None:
        super().start()
        wait_for("kvhost's socket", lambda: os.path.exists(self.socket) or self._ended())

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def hang(self) -> None:
        """Stops the process where it is, until :meth:`resume`. A signal is under way for milliseconds on a busy machine."""
        self._signal(signal.SIGSTOP)
        wait_for("all threads of kvhost are stopped", self.hangs)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def hangs(self) -> bool:
        return stopped(self.pid())

    def idle(self) -> bool:
        """Whether no job runs: what engines have stored is published."""
        stream = Stream(self.socket)
        try:
            return bool(stream.status(10).jobs == 0)
        except HostGoneError:  # it is still starting: the socket of its last run is there
            return False
        finally:
            stream.close()

    def files(self, least: int = 4097) -> list[Path]:
        """The files of pieces, largest first. The host's own files have fewer bytes than pieces of a model."""
        sizes: dict[Path, int] = {}
        for folder, _, names in os.walk(self.root):  # which goes on where the host has removed a folder
            for path in (Path(folder, name) for name in names):
                with suppress(FileNotFoundError):
                    sizes[path] = path.stat().st_size
        return sorted((p for p, size in sizes.items() if size >= least), key=lambda p: -sizes[p])

    def _ended(self) -> bool:
        assert self.alive(), self.output()
        return False


@contextmanager
def own_host(root: Path) -> Iterator[tuple[dict[str, str], Callable[[], None]]]:
    """The environment of engines that start a host for a root themselves, and what kills it."""
    run = Path("/tmp", f"kvhost-engine-{os.getpid()}")  # a socket's path is short
    run.mkdir()

    def kill() -> None:
        os.kill(int((root / ".kvhost" / "lock").read_text().split()[0]), signal.SIGKILL)

    try:
        yield {"XDG_RUNTIME_DIR": str(run), "KVHOST_STORE_MEMORY": "0", "KVHOST_SOCKET": "/nowhere"}, kill
    finally:
        with suppress(OSError):
            kill()
        shutil.rmtree(run)
