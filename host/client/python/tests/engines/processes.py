"""Processes that tests of engines start, kill and start again."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path


def wait_for(what: str, true: Callable[[], bool], timeout: float = 60.0) -> None:
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end, f"{what}: not within {timeout} s"
        time.sleep(0.02)


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
        assert self._running is not None
        os.killpg(self._running.pid, sig)

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class Host(Process):
    """kvhost with one root. KVHOST_BIN names the program."""

    def __init__(self, directory: Path, capacity: str = "1GiB") -> None:
        self.root, self.socket = directory / "kv", str(directory / "s")
        program = os.environ.get("KVHOST_BIN") or shutil.which("kvhost")
        assert program, "KVHOST_BIN names no kvhost, and PATH has none"
        super().__init__(
            [program, "--root", f"{self.root}={capacity}", "--socket", self.socket, "--http-listen", ""],
            directory / "kvhost.log",
            {name: value for name, value in os.environ.items() if not name.startswith("KVHOST_")},
        )

    def start(self) -> None:
        super().start()
        wait_for("kvhost's socket", lambda: os.path.exists(self.socket) or self._ended())

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def hang(self) -> None:
        """Stops the process where it is, until :meth:`go_on`."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def files(self) -> list[Path]:
        """The files of pieces, largest first."""
        files = [p for p in self.root.rglob("*") if p.is_file() and p.stat().st_size > 4096]
        return sorted(files, key=lambda p: -p.stat().st_size)

    def _ended(self) -> bool:
        assert self.alive(), self.output()
        return False


class LMCacheServer(Process):
    """LMCache's MP server with kvhost as its L2."""

    def __init__(
        self, directory: Path, socket: str, ports: tuple[int, int, int], *, shm_name: str = "", **params: object
    ) -> None:
        self.rpc, self.http = f"grpc://localhost:{ports[0]}", f"http://localhost:{ports[1]}"
        adapter = {
            "type": "plugin", "module_path": "kvhost.lmcache", "class_name": "KvhostL2Adapter",
            "adapter_params": {"socket": socket, **params},
        }  # fmt: skip
        super().__init__(
            [
                lmcache(), "server", "--transport", "grpc", "--supported-transfer-mode", "engine_driven",
                "--port", str(ports[0]), "--http-port", str(ports[1]), "--prometheus-port", str(ports[2]),
                "--l1-size-gb", "0.25", "--no-l1-use-lazy", "--eviction-policy", "LRU",
                "--shm-name", shm_name, "--l2-adapter", json.dumps(adapter),
            ],  # fmt: skip
            directory / "lmcache.log",
            lmcache_env(),
        )

    def start(self) -> None:
        super().start()
        wait_for("LMCache's server", self._healthy, 120)

    def get(self, path: str) -> str:
        return self._ask(urllib.request.Request(self.http + path))

    def delete(self, path: str, body: object) -> str:
        headers = {"Content-Type": "application/json"}
        return self._ask(urllib.request.Request(self.http + path, json.dumps(body).encode(), headers, method="DELETE"))

    def _ask(self, request: urllib.request.Request) -> str:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return str(reply.read().decode())

    def _healthy(self) -> bool:
        assert self.alive(), self.output()
        try:
            self.get("/healthcheck")
        except OSError:
            return False
        return True

    def bench(self, requests: int = 2) -> dict[str, str]:
        """Runs LMCache's own bench against the server. Returns each request's checksum after its retrieve, and what its
        lookups said, by the names that the bench gives them."""
        command = [
            lmcache(), "bench", "server", "--mode", "cpu", "--transfer-mode", "engine_driven", "--rpc-url", self.rpc,
            "--url", self.http, "--start", "0", "--end", str(requests), "--interval", "0.01", "--num-blocks", "128",
            "--kvcache-shape-spec", "(2,128,16,8,128):float16:4",
        ]  # fmt: skip
        done = subprocess.run(command, env=lmcache_env(), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        said = {m[1]: m[2] for m in re.finditer(r"\[(seq \d+/\w+)\] LOOKUP: (\d+/\d+) chunks hit", done.stdout)}
        checksums = re.finditer(r"\[(seq \d+/\w+)\] CHECKSUM: ([0-9a-f]{16}) ", done.stdout)
        said |= {m[1] + " digest": m[2] for m in checksums}
        assert "Checksum FAIL:" in done.stdout and re.search(r"Checksum FAIL: +0$", done.stdout, re.M), done.stdout
        return said


def lmcache() -> str:
    return str(Path(sys.executable).parent / "lmcache")


def lmcache_env() -> dict[str, str]:
    return {**os.environ, "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}
