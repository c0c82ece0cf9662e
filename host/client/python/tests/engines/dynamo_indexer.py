"""Dynamo's standalone indexer: a router's view of what engines' caches hold."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import DEADLINE, Process, wait_for

MODEL = "m"


@dataclass(frozen=True)
class Tiers:
    """How many leading tokens of a prompt a worker has: in the GPU, and with what follows on disk."""

    gpu: int = 0
    disk: int = 0


class Indexer(Process):
    """KVHOST_DYNAMO names the Python that has the indexer. It listens on all interfaces: no option limits that."""

    def __init__(self, log: Path, block_tokens: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._block_tokens = block_tokens
        super().__init__(
            [os.environ["KVHOST_DYNAMO"], "-m", "dynamo.indexer", "--port", str(self._port)], log,
            os.environ | {"DYN_LOG": "info", "DYN_KV_INDEXER_TEST_ENDPOINTS": "1"},
        )
        self.start()
        wait_for("the indexer answers", self._answers)

    def _answers(self) -> bool:
        assert self.alive(), self.output()
        try:
            return bool(self._call("GET", "/workers") == [])
        except ConnectionError:
            return False

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=DEADLINE)
        try:
            connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            said = answer.read()
        finally:
            connection.close()
        assert answer.status < 300, f"{path}: {answer.status} {said!r}"
        return json.loads(said)

    def register(self, worker: int, events: str, replay: str) -> None:
        self._call("POST", "/register", {
            "instance_id": worker, "endpoint": events, "replay_endpoint": replay, "model_name": MODEL,
            "block_size": self._block_tokens,
        })

    def unregister(self, worker: int) -> None:
        self._call("POST", "/unregister", {"instance_id": worker, "model_name": MODEL})

    def pause(self, worker: int) -> None:
        """The worker's batches are lost until :meth:`listen`."""
        self._call("POST", "/test/pause_listener", {"instance_id": worker})

    def listen(self, worker: int) -> None:
        self._call("POST", "/test/resume_listener", {"instance_id": worker})

    def tiers(self, worker: int, tokens: Sequence[int]) -> Tiers:
        answer = self._call("POST", "/query", {"token_ids": list(tokens), "model_name": MODEL})
        found = answer["instances"].get(str(worker))
        return Tiers(found["gpu"], found["disk"]) if found else Tiers()
