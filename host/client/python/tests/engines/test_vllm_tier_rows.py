"""Caches that no kernel for processors fills, made by the test: a real host and vLLM's own offloading give each worker what it
had, though every row was poisoned meanwhile."""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import needs
from processes import Host, wait_for

needs("vllm")

import torch  # noqa: E402
import vllm_offloading  # noqa: E402
from test_vllm_memory import HEADS, PER_HEAD, SAYS, SIZE, TOKENS, U8, llama_config, mla  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MambaSpec  # noqa: E402
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult, ReqContext, ScheduleEndContext, make_offload_key  # noqa: E402

from kvhost.vllm import tierrows  # noqa: E402

LAYERS = 2  # of each group


def full(**more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**{"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": SIZE, "dtype": torch.bfloat16, **more})


def scales() -> FullAttentionSpec:
    """Scales are in the pages, behind what they scale."""
    content = {"state_content_bytes": 2 * SIZE + 8} if SAYS else {}
    return full(dtype=U8, kv_quant_mode=PER_HEAD, **content)


def state(page: int) -> MambaSpec:
    """As many bytes as a page has, of which the state uses fewer."""
    return MambaSpec(
        block_size=TOKENS, shapes=((3, 40), (4, 16, 8)), dtypes=(torch.bfloat16, torch.float32), page_size_padded=page,
        mamba_cache_mode="align",
    )


#: By name: the groups' specs, and the sizes of the engine's parallel dimensions.
CASES: dict[str, tuple[list[Any], dict[str, int]]] = {
    "DCP": ([full(num_kv_heads=1)], {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}),
    "MLA, DCP": ([mla(576, torch.bfloat16)], {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}),
    "scales per head": ([scales()], {}),
    "scales per head, TP": ([scales()], {"tensor_parallel_size": 2}),
    "states": ([full(), state(full().page_size_bytes), state(full().page_size_bytes)], {}),
    "states, TP": ([full(), state(full().page_size_bytes)], {"tensor_parallel_size": 2}),
}


class Life:
    """An engine's scheduler and workers, as far as they offload."""

    def __init__(self, folder: Path, host: Host, case: str) -> None:
        specs, parallel = CASES[case]
        tier = {"type": "kvhost", "socket": host.socket, "lookup_timeout": 60.0, "extra": {"test": case}}
        extra = {"spec_name": "TiersSpec", "spec_module_path": "vllm_offloading", "cpu_bytes_to_use": 4 << 20, "secondary_tiers": [tier]}
        vllm_config = llama_config(folder, {"kv_connector": "OffloadingConnector", "engine_id": uuid.uuid4().hex}, extra, parallel)
        vllm_config.parallel_config.world_size = world = parallel.get("tensor_parallel_size", 1)
        vllm_config.parallel_config.distributed_executor_backend = "mp"
        if hasattr(vllm_config.cache_config, "get_resolved_kv_cache_layout"):
            vllm_config.cache_config.kv_cache_layout = "LBNHC"
        groups = [KVCacheGroupSpec([f"g{g}.{i}" for i in range(LAYERS)], spec) for g, spec in enumerate(specs)]
        kv_cache_config = get_kv_cache_config_from_groups(vllm_config, groups, 1 << 20)
        config = build_offloading_config(vllm_config, kv_cache_config)
        self.spec = vllm_offloading.TiersSpec(config)
        self.manager = self.spec.get_manager()  # the tier finds the configuration in this frame
        self.groups = tierrows.groups(config, kv_cache_config)
        self.blocks, self.tensors, self.workers = kv_cache_config.num_blocks, [], []
        for rank in range(world):
            views, layers = tensors(kv_cache_config)
            of_rank = vllm_offloading.TiersSpec(dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, rank=rank)))
            worker: Any = OffloadingConnectorWorker(of_rank, *([vllm_config] if SAYS else []), kv_cache_config)
            worker.register_kv_caches(layers)
            self.tensors.append(views)
            self.workers.append(worker.worker)
        self._jobs = 0

    def page(self, rank: int, group: int, block: int) -> list[torch.Tensor]:
        return [self.tensors[rank][f"g{group}.{i}"][block] for i in range(LAYERS)]

    def move(self, store: bool, keys: list[bytes], blocks: list[list[int]], context: Any) -> None:
        """A step: chunk by chunk of each group to the rows, or from them."""
        manager = self.manager
        there = manager.prepare_store(keys, context).store_spec if store else manager.prepare_load(keys, context)
        here = GPULoadStoreSpec([b for g in blocks for b in g], [len(g) for g in blocks], [0] * len(blocks))
        for worker in self.workers:
            self._jobs += 1
            assert worker.submit_store(self._jobs, here, there) if store else worker.submit_load(self._jobs, there, here)
        (manager.complete_store if store else manager.complete_load)(keys, context)

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(*([] for _ in ScheduleEndContext._fields)))

    def close(self) -> None:
        self.manager.shutdown()


def tensors(cache: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Each layer's pages, as bytes, and as vLLM's offloading gets them."""
    views, layers = {}, {}
    specs = {layer: g.kv_cache_spec for g in cache.kv_cache_groups for layer in g.layer_names}
    whole: Any = None
    for t in cache.kv_cache_tensors:
        if whole is None or not SAYS:
            whole = torch.randint(0, 255, (t.size,), dtype=U8).view(torch.int8)
        for i, layer in enumerate(t.layers if SAYS else t.shared_by):
            page, at = specs[layer].page_size_bytes, t.offset + i * t.layer_stride if SAYS else 0
            views[layer] = whole.as_strided((cache.num_blocks, page), (t.block_stride if SAYS else page, 1), at)
            layers[layer] = views[layer]
            if SAYS:
                from vllm.v1.kv_cache_interface import compute_layer_kv_cache_shape_bytes

                shape = compute_layer_kv_cache_shape_bytes(specs[layer], cache.num_blocks)
                layers[layer] = views[layer][:, : torch.Size(shape[1:]).numel()].unflatten(1, shape[1:])
            elif isinstance(specs[layer], MambaSpec):
                layers[layer] = [views[layer]]
    return views, layers


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    h = Host(tmp_path_factory.mktemp("rows"))
    h.start()
    yield h
    h.kill()


@pytest.fixture
def make(tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Life]]:
    monkeypatch.setenv("PROBE_DIR", str(tmp_path))
    made: list[Life] = []

    def life(case: str) -> Life:
        made.append(Life(tmp_path, host, case))
        return made[-1]

    yield life
    for m in made:
        m.close()


@pytest.mark.parametrize("case", CASES)
def test_each_worker_gets_its_own_bytes(make: Callable[..., Life], host: Host, case: str) -> None:
    groups = len(CASES[case][0])
    keys: list[Any] = [make_offload_key(os.urandom(32), g) for g in range(groups) for _ in range(2)]
    first = make(case)
    stored = [[1 + 2 * g, 2 + 2 * g] for g in range(groups)]
    want = {
        (rank, g, i): [p.clone() for p in first.page(rank, g, block)]
        for rank in range(len(first.workers)) for g in range(groups) for i, block in enumerate(stored[g])
    }
    context = ReqContext("a")
    first.manager.on_new_request(context)
    first.move(True, keys, stored, context)
    first.step()
    wait_for("the host has all", lambda: host.idle() and len(pieces(host, keys)) == len(keys))

    second = make(case)
    context = ReqContext("b")
    second.manager.on_new_request(context)

    def found() -> bool:
        answers = [second.manager.lookup(k, context) for k in keys]
        assert LookupResult.MISS not in answers, f"want hits, got {answers}"
        second.step()
        return set(answers) == {LookupResult.HIT}

    wait_for("all is in rows", found)
    to = [[20 + 2 * g, 11 + 2 * g] for g in range(groups)]
    second.move(False, keys, to, context)
    for (rank, g, i), pages in want.items():
        used = unpadded(CASES[case][0][g])
        for layer, (page, got) in enumerate(zip(pages, second.page(rank, g, to[g][i]), strict=True)):
            assert torch.equal(page[:used], got[:used]), f"rank {rank}, group {g}, chunk {i}, layer {layer}: other bytes than were stored"
    for g in second.groups:
        size = unpadded(CASES[case][0][g.id]) * LAYERS * len(second.workers)
        assert sum(n for _, n in g.runs) == size, f"chunks of group {g.id} have {sum(n for _, n in g.runs)} bytes, want {size}"


def unpadded(spec: Any) -> int:
    return int((dataclasses.replace(spec, page_size_padded=None) if isinstance(spec, MambaSpec) else spec).page_size_bytes)


def pieces(host: Host, keys: list[bytes]) -> list[Path]:
    return [p for p in host.root.rglob("*.kv") if any(k[:32].hex() in p.name for k in keys)]
