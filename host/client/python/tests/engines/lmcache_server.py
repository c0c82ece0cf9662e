"""LMCache's MP server, which tests start, ask and stop."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

from processes import DEADLINE, Process, wait_for


class LMCacheServer(Process):
    """LMCache's MP server with kvhost as its L2."""

    def __init__(
        self, directory: Path, ports: tuple[int, int, int], *, shm_name: str = "", **params: object
    ) -> None:
        self.rpc, self.http = f"grpc://localhost:{ports[0]}", f"http://localhost:{ports[1]}"
        adapter = {
            "type": "plugin", "module_path": "kvhost.lmcache", "class_name": "KvhostL2Adapter",
            "adapter_params": params,
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
        wait_for("LMCache's server", self._healthy)

    def get(self, path: str) -> str:
        return self._ask(urllib.request.Request(self.http + path))

    def delete(self, path: str, body: object) -> str:
        headers = {"Content-Type": "application/json"}
        return self._ask(urllib.request.Request(self.http + path, json.dumps(body).encode(), headers, method="DELETE"))

    def _ask(self, request: urllib.request.Request) -> str:
        with urllib.request.urlopen(request, timeout=DEADLINE) as reply:
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
        done = subprocess.run(command, env=lmcache_env(), capture_output=True, text=True, timeout=DEADLINE)
        assert done.returncode == 0, done.stdout + done.stderr
        said = {m[1]: m[2] for m in re.finditer(r"\[(seq \d+/\w+)\] LOOKUP: (\d+/\d+) chunks hit", done.stdout)}
        checksums = re.finditer(r"\[(seq \d+/\w+)\] CHECKSUM: ([0-9a-f]{16}) ", done.stdout)
        said |= {m[1] + " digest": m[2] for m in checksums}
        assert "Checksum FAIL:" in done.stdout and re.search(r"Checksum FAIL: +0$", done.stdout, re.M), done.stdout
        return said


def free_ports() -> tuple[int, int, int]:
    found = []
    for _ in range(3):
        s = socket.socket()
        s.bind(("localhost", 0))
        found.append(s)
    ports = [int(s.getsockname()[1]) for s in found]
    for s in found:
        s.close()
    return ports[0], ports[1], ports[2]


def lmcache() -> str:
    return str(Path(sys.executable).parent / "lmcache")


def lmcache_env() -> dict[str, str]:
    return {**os.environ, "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}
