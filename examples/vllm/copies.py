"""Measures the copies between GPU and page-locked memory of vLLM's OffloadingConnector and of LMCache, with the pages of kvhost
bench.

    python copies.py --engine offloading --pages llama,mla,fp8
    python copies.py --engine lmcache --pages llama,mla,fp8

The pages are shuffled over the GPU's blocks. In each round, prompts of 64 chunks are stored and then loaded into other
blocks, and every byte is compared. The first round does not count. The times are of calls to the connector's worker:
``submit_store`` and ``submit_load`` of the offloading worker (blocks of 16 tokens, or of 256 with ``--tokens 256``),
``batched_from_gpu`` and ``batched_to_gpu`` of LMCache, with memory of its allocator. Neither computes checksums."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable

import torch

#: Layers, heads (0 for MLA), width, type.
SHAPES = {
    "llama": (32, 8, 128, torch.bfloat16),
    "mla": (61, 0, 576, torch.bfloat16),
    "fp8": (32, 8, 128, torch.float8_e4m3fn),
}
TOKENS, PER_CHUNK, PROMPT = 16, 16, 64


def importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


class Offloading:
    """vLLM's worker of CPU offloading."""

    package = "vllm"

    def __init__(self, layers: list[torch.Tensor], blocks: int, a: argparse.Namespace) -> None:
        from vllm.v1.kv_offload.base import (
            CanonicalKVCacheRef,
            CanonicalKVCaches,
            CanonicalKVCacheTensor,
            GPULoadStoreSpec,
        )
        from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
        from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

        self.gpu, self.cpu, self.together = GPULoadStoreSpec, CPULoadStoreSpec, a.tokens // TOKENS
        page = layers[0][0].numel() * layers[0].element_size()
        flat = [t.view(torch.int8).view(len(t), page) for t in layers]
        caches = CanonicalKVCaches(
            tensors=[CanonicalKVCacheTensor(t, page) for t in flat],
            group_data_refs=[[CanonicalKVCacheRef(i, page) for i in range(len(flat))]],
        )
        self.worker = CPUOffloadingWorker(caches, self.together, blocks // self.together)
        self.job = 0

    def specs(self, prompts: list[list[int]]) -> list[tuple[object, object]]:
        out, at = [], 0
        for ids in prompts:
            n = len(ids) // self.together
            out.append((self.gpu(ids, [len(ids)], [0]), self.cpu(list(range(at, at + n)))))
            at += n
        return out

    def store(self, prompts: list[list[int]]) -> None:
        first = self.job
        for gpu, cpu in self.specs(prompts):
            self.job += 1
            self.worker.submit_store(self.job, gpu, cpu)
        self.worker.wait(set(range(first + 1, self.job + 1)))
        self.worker.get_finished()

    def load(self, prompts: list[list[int]]) -> None:
        first = self.job
        for gpu, cpu in self.specs(prompts):
            self.job += 1
            self.worker.submit_load(self.job, cpu, gpu)
        self.worker.wait(set(range(first + 1, self.job + 1)))
        self.worker.get_finished()

    def close(self) -> None:
        self.worker.shutdown()


class LMCache:
    """LMCache's connector to vLLM's pages, and its page-locked memory."""

    package = "lmcache"

    def __init__(self, layers: list[torch.Tensor], blocks: int, a: argparse.Namespace) -> None:
        native = ("lmcache.c_ops", "lmcache.cuda_ops")  # the name depends on the version; without the module LMCache copies with torch, ten times slower
        if not any(importable(name) for name in native):
            raise SystemExit("LMCache's CUDA kernels do not load: its wheel is of another PyTorch")
        from lmcache.utils import EngineType
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.metadata import LMCacheMetadata

        places = ("lmcache.inprocess.v1.gpu_connector", "lmcache.v1.gpu_connector")  # from 0.5.7 on; before it
        make = next(importlib.import_module(name) for name in places if importable(name)).CreateGPUConnector

        mla = layers[0].dim() == 3
        tokens = TOKENS * PER_CHUNK
        width, heads = layers[0].shape[-1], 1 if mla else layers[0].shape[-2]
        meta = LMCacheMetadata(
            "bench", 1, 1, 0, 0, layers[0].dtype, (len(layers), 1 if mla else 2, tokens, heads, width), use_mla=mla,
            role="worker", chunk_size=tokens,
        )  # fmt: skip
        config = LMCacheEngineConfig.from_defaults(chunk_size=tokens)
        self.connector = make(config, meta, EngineType.VLLM)
        n = blocks // PER_CHUNK
        size = layers[0].nbytes // len(layers[0]) * PER_CHUNK * len(layers)
        self.allocator = MixedMemoryAllocator(n * size + (64 << 20))
        form = MemoryFormat.KV_MLA_FMT if mla else MemoryFormat.KV_2LTD
        shape = self.connector.get_shape(tokens)
        self.chunks = [self.allocator.allocate(shape, layers[0].dtype, form) for _ in range(n)]
        self.layers = layers

    def move(self, prompts: list[list[int]], how: Callable[..., None]) -> None:
        at = 0
        for ids in prompts:
            n = len(ids) // PER_CHUNK
            starts = [i * PER_CHUNK * TOKENS for i in range(n)]
            ends = [s + PER_CHUNK * TOKENS for s in starts]
            blocks = torch.tensor(ids, device="cuda")
            slots = (blocks[:, None] * TOKENS + torch.arange(TOKENS, device="cuda")).flatten()
            how(self.chunks[at : at + n], starts, ends, kvcaches=self.layers, slot_mapping=slots)
            at += n
        torch.cuda.synchronize()

    def store(self, prompts: list[list[int]]) -> None:
        self.move(prompts, self.connector.batched_from_gpu)

    def load(self, prompts: list[list[int]]) -> None:
        self.move(prompts, self.connector.batched_to_gpu)

    def close(self) -> None:
        for c in self.chunks:
            c.ref_count_down()
        self.allocator.close()


def measure(name: str, a: argparse.Namespace) -> dict[str, object]:
    count, heads, width, dtype = SHAPES[name]
    blocks = a.chunks * PER_CHUNK
    shape = (2 * blocks, TOKENS, width) if heads == 0 else (2 * blocks, 2, TOKENS, heads, width)
    layers = [torch.empty(shape, dtype=dtype, device="cuda") for _ in range(count)]
    page = layers[0][0].numel() * layers[0].element_size()
    raw = [t.view(torch.uint8).view(len(t), page) for t in layers]
    gb = blocks * count * page / 1e9
    engine = (Offloading if a.engine == "offloading" else LMCache)(layers, blocks, a)
    rates: dict[str, list[float]] = {"store": [], "load": []}
    for turn in range(a.rounds + 1):
        for t in raw:
            t.random_(0, 256)
        order = torch.randperm(2 * blocks).tolist()
        source, target = order[:blocks], order[blocks:]
        for what, ids in (("store", source), ("load", target)):
            if what == "load":
                for t in raw:
                    t[torch.tensor(target, device="cuda")] = 0xA5
            prompts = [ids[i : i + PROMPT * PER_CHUNK] for i in range(0, blocks, PROMPT * PER_CHUNK)]
            torch.cuda.synchronize()
            start = time.perf_counter()
            getattr(engine, what)(prompts)
            took = time.perf_counter() - start
            if turn:
                rates[what].append(gb / took)
        s, t = torch.tensor(source, device="cuda"), torch.tensor(target, device="cuda")
        assert all(torch.equal(x[s], x[t]) for x in raw), "wrong bytes were loaded"
    engine.close()
    version = importlib.metadata.version(engine.package)
    row: dict[str, object] = {"engine": f"{a.engine} {version}", "pages": name, "tokens": a.tokens, "chunks": a.chunks}
    for what, list_ in rates.items():
        row[what] = [round(f(list_), 1) for f in (min, statistics.median, max)]
    return row


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--engine", choices=["offloading", "lmcache"], required=True)
    args.add_argument("--pages", default="llama,mla,fp8")
    args.add_argument("--chunks", type=int, default=96, help="of 256 tokens")
    args.add_argument("--rounds", type=int, default=5, help="rounds that count")
    args.add_argument("--tokens", type=int, default=TOKENS, help="tokens of an offloaded block; LMCache has chunks of 256")
    a = args.parse_args()
    for name in a.pages.split(","):
        print(json.dumps(measure(name, a)), flush=True)


if __name__ == "__main__":
    main()
