"""The connector under test, with a probe in the worker: it notes the bytes of every chunk that is computed or loaded,
and can stop the host at the moment a load begins.

PROBE_DIR names a folder that all engines of a test share. Its files ``computed`` and ``loaded`` get lines "group key
digest", ``preempted`` gets the ids of requests that lost their blocks, ``namespace`` the pickled namespace. A file ``stop``
holds the process id of a host to stop when the next load begins. PROBE_GONE_SECONDS replaces ``KVEvents.GONE_SECONDS``."""

from __future__ import annotations

import hashlib
import os
import pathlib
import pickle
import signal
from collections.abc import Callable
from typing import Any

from kvhost.session import NOT_WANTED
from kvhost.vllm.connector import KvhostConnector
from kvhost.vllm.orders import ChunkOrder, LoadOrder, StepOrders
from kvhost.vllm.worker import Worker

DIR = pathlib.Path(os.environ["PROBE_DIR"])


class ProbeConnector(KvhostConnector):
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        assert self._worker is not None and self._registration is not None, "the connector refused this model"
        (DIR / "namespace").write_bytes(pickle.dumps(self._registration.namespace))
        groups = [[kv_caches[n] for n in g.layer_names] for g in self._kv_cache_config.kv_cache_groups]
        _probe(self._worker, groups)

    def _kv_events(self, *args: Any) -> Any:
        events = super()._kv_events(*args)
        if events is not None:
            events.GONE_SECONDS = float(os.environ.get("PROBE_GONE_SECONDS", events.GONE_SECONDS))
        return events

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        for request in scheduler_output.preempted_req_ids or ():
            with (DIR / "preempted").open("a") as f:
                f.write(f"{request}\n")
        return super().build_connector_meta(scheduler_output)


class Sleeper:
    """Of vLLM's worker: on a processor it keeps the KV of an engine that sleeps."""

    def spoil_kv(self: Any) -> None:
        import torch

        for cache in self.model_runner.kv_caches:
            cache.untyped_storage().copy_(torch.full((cache.untyped_storage().nbytes(),), 0x5A, dtype=torch.uint8).untyped_storage())


def _digest(tensors: list[Any], blocks: list[int]) -> str:
    import torch

    h = hashlib.sha256()
    for t in tensors:
        for b in blocks:
            h.update(t[b].contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return h.hexdigest()


def _note(name: str, group: int, key: bytes, digest: str) -> None:
    with (DIR / name).open("a") as f:
        f.write(f"{group} {key.hex()} {digest}\n")


def _probe(worker: Worker, groups: list[list[Any]]) -> None:
    store, begin, settle = worker.store, worker._begin, worker._settle_load

    def probed_store(orders: StepOrders, ready: Callable[[], None]) -> None:
        for order in orders.stores:
            for group, chunks in order.chunks:
                for c in chunks:
                    _note("computed", group, c.key, _digest(groups[group], c.blocks))
        store(orders, ready)

    def probed_begin(order: LoadOrder) -> Any:
        stop = DIR / "stop"
        if stop.exists():
            os.kill(int(stop.read_text()), signal.SIGSTOP)
            stop.unlink()
        return begin(order)

    def whole(chunk: ChunkOrder) -> bool:
        return NOT_WANTED not in chunk.blocks

    def probed_settle(request: str, load: Any, *waited: bool) -> bool:
        good = settle(request, load, *waited)
        failed = worker._report.failed.get(request, {})
        for g in load.order.groups:
            # Of a hit up to the prompt's end, the step that the load is in computes the last tokens again.
            again = load.order.in_step and load.order.tokens % 8 != 0
            for c in g.chunks[:-1] if again else g.chunks:
                if c.index not in failed and whole(c):
                    _note("loaded", g.group, c.key, _digest(groups[g.group], c.blocks))
        return good

    worker.store = probed_store  # type: ignore[method-assign]
    worker._begin = probed_begin  # type: ignore[method-assign]
    worker._settle_load = probed_settle  # type: ignore[method-assign]
