"""Moves KV pages of a PyTorch process through a running kvhost, and compares every byte.

    python torch_demo.py /run/kvhost/kvhost.sock --shape llama --memory ipc --operations 1000

Chunks with known bytes are stored from the GPU, blocks are shuffled and poisoned before each load, and each load is
compared on the GPU. Exits with 1 if any byte differs or any operation fails.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import time

import torch

import kvhost
from kvhost import cuda

#: layers, bytes per page, blocks per chunk
SHAPES = {"llama": (32, 64 << 10, 16), "mla": (61, 18432, 16)}
POISON = 0xA5


class Pages:
    """One tensor per layer, pages of blocks one after the other, as engines keep them."""

    def __init__(self, memory: str, layers: int, page: int, blocks: int) -> None:
        self.page, self.blocks = page, blocks
        if memory == "ipc":
            self.layers = [torch.empty(blocks * page, dtype=torch.uint8, device="cuda") for _ in range(layers)]
        else:
            self.vmm = cuda.VmmMemory(layers * blocks * page, segment_bytes=20 << 20)
            flat = torch.as_tensor(self.vmm, device="cuda")
            self.layers = [flat[i * blocks * page : (i + 1) * blocks * page] for i in range(layers)]
        self.view = [t.view(blocks, page) for t in self.layers]

    def register(self, host: kvhost.Session, memory: str) -> None:
        if memory == "ipc":
            where = [cuda.export_ipc(t.data_ptr()) for t in self.layers]
            host.register_ipc(0, [w.handle for w in where], [kvhost.Region(w.offset, self.page, self.blocks) for w in where])
        else:
            plane = self.blocks * self.page
            host.register_vmm(
                0, self.vmm.segments, [kvhost.Region(i * plane, self.page, self.blocks) for i in range(len(self.layers))]
            )

    def write(self, ids: torch.Tensor, chunk: int) -> None:
        for layer, view in enumerate(self.view):
            view[ids] = content(chunk, layer, len(ids), self.page)

    def wrong(self, ids: torch.Tensor, chunk: int) -> torch.Tensor:
        bad = torch.zeros((), dtype=torch.int64, device="cuda")
        for layer, view in enumerate(self.view):
            bad += (view[ids] != content(chunk, layer, len(ids), self.page)).sum()
        return bad


def content(chunk: int, layer: int, blocks: int, page: int) -> torch.Tensor:
    """Bytes that depend on chunk, layer, block and place."""
    n = torch.arange(blocks * page // 8, dtype=torch.int64, device="cuda")
    x = (n + chunk * 1000003 + layer * 7919 + 1) * -7046029254386353131
    x = x ^ (x >> 29)
    return (x * -4658895280553007687).view(torch.uint8).view(blocks, page)


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("socket")
    args.add_argument("--shape", choices=SHAPES, default="llama")
    args.add_argument("--memory", choices=["ipc", "vmm"], default="ipc")
    args.add_argument("--chunks", type=int, default=64, help="distinct chunks")
    args.add_argument("--operations", type=int, default=256, help="chunks stored and loaded, all in all")
    args.add_argument("--batch", type=int, default=8, help="chunks in one operation")
    a = args.parse_args()
    layers, page, per_chunk = SHAPES[a.shape]
    torch.cuda.init()
    torch.zeros(1, device="cuda")

    group = kvhost.Group.uniform(0, blocks=per_chunk, layers=layers, parts=1, page_bytes=page)
    namespace = kvhost.Namespace(
        model=f"torch-demo-{a.shape}", dtype="bf16", key_bytes=32, tokens_per_block=16, groups=[group],
        hash_algorithm="sha256", hash_seed=str(os.getpid()),
    )
    blocks = 2 * a.batch * per_chunk
    pages = Pages(a.memory, layers, page, blocks)
    keys = [hashlib.sha256(b"0").digest()]
    while len(keys) < a.chunks:
        keys.append(hashlib.sha256(keys[-1]).digest())

    rng = random.Random(1)
    failed = wrong = moved = missed = 0
    with kvhost.Session(
        a.socket, engine=f"torch-{os.getpid()}", namespace=namespace, device_uuid=cuda.device_uuid()
    ) as host:
        pages.register(host, a.memory)
        stored: set[int] = set()
        seconds = {"store": 0.0, "load": 0.0}
        done, request = 0, 0
        while done < a.operations:
            request += 1
            order = rng.sample(range(blocks), blocks)
            ids = [order[i * per_chunk : (i + 1) * per_chunk] for i in range(a.batch)]
            first = len(stored)
            if first < a.chunks:
                batch = list(range(first, min(first + a.batch, a.chunks)))
                for i, c in enumerate(batch):
                    pages.write(torch.tensor(ids[i], device="cuda"), c)
                torch.cuda.synchronize()
                start = time.perf_counter()
                result = host.store(
                    [kvhost.StoreChunk(keys[c], ids[i], parent=keys[c - 1] if c else b"", depth=c) for i, c in enumerate(batch)],
                    request=request,
                ).published(120)
                seconds["store"] += time.perf_counter() - start
                failed += sum(r.result != kvhost.Result.STORED for r in result.chunks)
                stored.update(batch)
            else:
                first = rng.randrange(a.chunks)
                batch = list(range(first, min(first + a.batch, a.chunks)))
                for view in pages.view:
                    view.fill_(POISON)
                torch.cuda.synchronize()
                found = host.lookup(keys[: batch[-1] + 1], request=request, first=first)
                missed += len(batch) - found.hits
                batch = batch[: found.hits]
                start = time.perf_counter()
                loaded = host.load(found, [kvhost.LoadChunk(c, ids[i]) for i, c in enumerate(batch)]).wait(120)
                seconds["load"] += time.perf_counter() - start
                failed += len(loaded.failed)
                for i, c in enumerate(batch):
                    wrong += int(pages.wrong(torch.tensor(ids[i], device="cuda"), c))
                rest = torch.tensor(order[len(batch) * per_chunk :], device="cuda")
                for view in pages.view:
                    wrong += int((view[rest] != POISON).sum())
                moved += loaded.bytes
            done += max(1, len(batch))
            host.end_request(request)
        host.unregister(0)
    size = a.chunks * layers * page * per_chunk
    print(
        f"{a.shape} {a.memory}: {done} chunk operations, {a.chunks} distinct; stored {size / seconds['store'] / 1e9:.1f} GB/s, "
        f"loaded {moved / seconds['load'] / 1e9 if seconds['load'] else 0:.1f} GB/s of {moved >> 20} MiB; "
        f"missed {missed}, failed {failed}, bytes that differ {wrong}"
    )
    if failed or wrong or missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
