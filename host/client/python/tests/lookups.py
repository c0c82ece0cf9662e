"""How long lookups take, as BenchmarkLookupAmongMany of host/internal/server tells on standard input: through the client, and the same
messages through bare gRPC, in turns."""

from __future__ import annotations

import json
import queue
import sys
import time
from collections.abc import Callable
from typing import Any

import grpc
import kvhost
from kvhost.v1 import kvhost_pb2 as pb

ROUNDS = 40


class Bare:
    """Messages that were made before are sent as they are, and answers are not parsed."""

    def __init__(self, socket: str, namespace: kvhost.Namespace) -> None:
        self.out: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.id = 0
        channel = grpc.insecure_channel("unix:" + socket)
        self.answers = channel.stream_stream("/kvhost.v1.EngineService/Session")(iter(self.out.get, b""))
        self.ask(hello=pb.Hello(protocol=1, engine="bare", role="worker", local_ranks=1, namespace=namespace.message()))

    def message(self, **body: Any) -> bytes:
        self.id += 1
        return pb.SessionRequest(id=self.id, **body).SerializeToString()

    def ask(self, **body: Any) -> Any:
        self.out.put(self.message(**body))
        return pb.SessionResponse.FromString(next(self.answers))

    def lookup(self, keys: bytes) -> tuple[float, Any]:
        message = self.message(lookup=pb.Lookup(keys=keys))
        start = time.perf_counter()
        self.out.put(message)
        answer = next(self.answers)
        return time.perf_counter() - start, pb.SessionResponse.FromString(answer).lookup


def told(name: str, took: list[float]) -> None:
    took.sort()
    print(f"{name}: p50 {took[len(took) // 2] * 1e6:.0f} us, p99 {took[len(took) * 99 // 100] * 1e6:.0f} us of {len(took)}")


def main() -> None:
    orders = json.load(sys.stdin)
    lists = [[bytes.fromhex(k) for k in names] for names in orders["lists"]]
    groups = [kvhost.Group.uniform(0, 2, 2, 2, 4096), kvhost.Group(5, 2, kvhost.Group.uniform(5, 2, 2, 2, 4096).planes, True)]
    namespace = kvhost.Namespace("test", "bf16", 32, 16, groups, engine="test", hash_algorithm="sha256")
    client = kvhost.Session(orders["socket"], engine="python", namespace=namespace)
    bare = Bare(orders["socket"], namespace)

    def through_client(keys: list[bytes]) -> float:
        start = time.perf_counter()
        found = client.lookup(keys)
        took = time.perf_counter() - start
        assert found.hits == len(keys), found
        found.release()
        return took

    def through_bare(keys: list[bytes]) -> float:
        took, found = bare.lookup(b"".join(keys))
        assert found.hits == len(keys), found
        bare.ask(release=pb.Release(lease=found.lease))
        return took

    ways: list[tuple[str, Callable[[list[bytes]], float], list[float]]] = [
        ("client", through_client, []),
        ("bare gRPC", through_bare, []),
    ]
    for n in range(ROUNDS):
        for name, way, took in ways:
            list_took = [way(keys) for keys in lists]
            if n > 0:  # the first round warms up
                took.extend(list_took)
    for name, _, took in ways:
        told(name, took)


main()
