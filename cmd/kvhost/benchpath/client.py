"""Stores and loads chunks through kvhost's Python client, as kvhost bench --through python tells it on standard input.

Each line of input is an order in JSON, and each is answered by a line of JSON: {"seconds": ...} or {"error": ...}.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

try:
    import kvhost
except ImportError as e:
    print(json.dumps({"error": f"{sys.executable} has no kvhost ({e}): install host/client/python there"}), flush=True)
    sys.exit(1)


class Bench:
    def __init__(self, a: dict[str, Any]) -> None:
        planes = [kvhost.Plane(p["Layer"], p["Part"], p["PageBytes"]) for p in a["planes"]]
        group = kvhost.Group(0, a["blocks_per_chunk"], planes)
        namespace = kvhost.Namespace(model="bench", dtype=a["dtype"], key_bytes=32, tokens_per_block=16, groups=[group])
        self.host = kvhost.Session(a["socket"], engine="bench", namespace=namespace, device_uuid=a["device"], timeout=120)
        regions = [kvhost.Region(o, p.page_bytes, a["blocks"]) for o, p in zip(a["offsets"], planes, strict=True)]
        if a["device"]:
            self.host.register_ipc(0, [bytes.fromhex(h) for h in a["handles"]], regions)
        else:
            self.host.register(0, kvhost.SharedMemory(3), regions)
        self.request = 0

    def store(self, prompts: list[list[dict[str, Any]]]) -> dict[str, Any]:
        keys = [[(bytes.fromhex(c["key"]), bytes.fromhex(c["parent"])) for c in p] for p in prompts]
        start = time.perf_counter()
        jobs = []
        for prompt, names in zip(prompts, keys, strict=True):
            self.request += 1
            chunks = [
                kvhost.StoreChunk(key, c["blocks"], parent=parent, depth=c["depth"])
                for c, (key, parent) in zip(prompt, names, strict=True)
            ]
            jobs.append(self.host.store(chunks, request=self.request))
        for job in jobs:
            for c in job.published(120).chunks:
                if c.result != kvhost.Result.STORED:
                    raise RuntimeError(f"a chunk was not stored: {c}")
        return {"seconds": time.perf_counter() - start}

    def load(self, prompts: list[list[dict[str, Any]]], by_layer: bool) -> dict[str, Any]:
        keys = [[bytes.fromhex(c["key"]) for c in p] for p in prompts]
        start = time.perf_counter()
        jobs, landed = [], [0.0] * len(prompts)

        def see(i: int) -> Any:
            def layer(*_: Any) -> None:
                landed[i] = landed[i] or time.perf_counter() - start

            return layer if by_layer else None

        for i, (prompt, names) in enumerate(zip(prompts, keys, strict=True)):
            self.request += 1
            found = self.host.lookup(names, request=self.request)
            if found.hits != len(prompt):
                raise RuntimeError(f"{found.hits} of {len(prompt)} chunks are there")
            chunks = [kvhost.LoadChunk(k, c["blocks"]) for k, c in enumerate(prompt)]
            jobs.append(self.host.load(found, chunks, on_layer=see(i)))
        for job in jobs:
            result = job.wait(120)
            if result.failed:
                raise RuntimeError(f"a block failed: {result.failed[0]}")
        return {"seconds": time.perf_counter() - start, "first": max(landed)}

    def forget(self, keys: list[str]) -> dict[str, Any]:
        results = self.host.discard([bytes.fromhex(k) for k in keys])
        if any(r != kvhost.DiscardResult.REMOVED for r in results):
            raise RuntimeError(f"chunks were not removed: {results}")
        return {}


def main() -> None:
    bench: Bench | None = None
    for line in sys.stdin:
        order = json.loads(line)
        what = order.pop("do")
        try:
            if bench is None:
                bench, answer = Bench(order), {}
            else:
                answer = getattr(bench, what)(**order)
        except Exception as e:
            answer = {"error": f"{type(e).__name__}: {e}"}
        print(json.dumps(answer), flush=True)
    if bench is not None:
        bench.host.close()


main()
