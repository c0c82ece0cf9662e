"""Moves KV pages of a PyTorch process through a running kvhost, and compares every byte.

    python torch_demo.py /run/kvhost/kvhost.sock --shape llama --operations 1000

The script stores chunks of known bytes from the GPU. Before each load it shuffles the blocks and fills them with poison; after
the load it compares them on the GPU. It exits with 1 if a byte differs or an operation fails.

With ``--order timeline`` no CPU thread waits: the CUDA stream raises a timeline semaphore after it has written the pages,
and waits for another one before it reads loaded pages. ``--order layers`` waits for each layer in turn. ``--damage DIR``
damages a piece file below DIR from time to time: the blocks of its chunk must fail, and no others. ``--faults`` is for a
host with injected faults, where chunks may fail without damage. ``--crash`` kills this process in the middle of a transfer.
``--kill-host PID`` kills the host while the stream waits for it; the stream must go on."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import pathlib
import random
import signal
import threading
import time

import torch

import kvhost
from kvhost import cuda

#: Layers, bytes per page, blocks per chunk.
SHAPES = {"llama": (32, 64 << 10, 16), "mla": (61, 18432, 16), "fp8": (32, 32 << 10, 16), "small": (16, 32 << 10, 16)}
POISON = 0xA5


class Pages:
    """One tensor for each layer, with the pages of all blocks in order, as in engines."""

    def __init__(self, layers: int, page: int, blocks: int) -> None:
        self.page, self.blocks = page, blocks
        self.layers = [torch.empty(blocks * page, dtype=torch.uint8, device="cuda") for _ in range(layers)]
        self.view = [t.view(blocks, page) for t in self.layers]

    def register(self, host: kvhost.Session) -> None:
        where = [cuda.export_ipc(t.data_ptr()) for t in self.layers]
        host.register(0, [w.handle for w in where], [kvhost.Region(w.offset, self.page, self.blocks) for w in where])

    def write(self, ids: torch.Tensor, chunks: torch.Tensor) -> None:
        """Fills the blocks with the content of the chunks. Each chunk takes an equal share of the blocks."""
        for layer, view in enumerate(self.view):
            view[ids] = content(chunks, layer, len(ids), self.page)

    def wrong(self, ids: torch.Tensor, chunks: torch.Tensor, layers: range | None = None) -> torch.Tensor:
        """Counts the wrong bytes of each chunk."""
        bad = torch.zeros(len(chunks), dtype=torch.int64, device="cuda")
        for layer in layers or range(len(self.view)):
            bad += (self.view[layer][ids] != content(chunks, layer, len(ids), self.page)).view(len(chunks), -1).sum(1)
        return bad

    def strange(self, ids: torch.Tensor, chunks: torch.Tensor) -> int:
        """Counts the bytes of failed chunks that are neither right nor poison."""
        bad = torch.zeros((), dtype=torch.int64, device="cuda")
        for layer, view in enumerate(self.view):
            bad += ((view[ids] != content(chunks, layer, len(ids), self.page)) & (view[ids] != POISON)).sum()
        return int(bad)

    def touched(self, ids: torch.Tensor) -> torch.Tensor:
        """Counts the bytes of the blocks that are not poison."""
        bad = torch.zeros((), dtype=torch.int64, device="cuda")
        for view in self.view:
            bad += (view[ids] != POISON).sum()
        return bad


def content(chunks: torch.Tensor, layer: int, blocks: int, page: int) -> torch.Tensor:
    """Returns the content of the chunks in one layer. Each byte depends on its chunk, layer, block and place. ``blocks`` is
    the number of blocks of all chunks."""
    n = torch.arange(blocks // len(chunks) * page // 8, dtype=torch.int64, device="cuda")
    x = (n + chunks[:, None] * 1000003 + layer * 7919 + 1) * -7046029254386353131
    x = x ^ (x >> 29)
    return (x * -4658895280553007687).view(torch.uint8).view(blocks, page)


class Demo:
    """A session, its pages, and counts of the results."""

    def __init__(self, host: kvhost.Session, a: argparse.Namespace) -> None:
        self.host, self.a = host, a
        self.layers, self.page, self.per_chunk = SHAPES[a.shape]
        self.blocks = 2 * a.batch * self.per_chunk
        self.pages = Pages(self.layers, self.page, self.blocks)
        self.pages.register(host)
        self.keys = [hashlib.sha256(b"0").digest()]
        while len(self.keys) < a.chunks:
            self.keys.append(hashlib.sha256(self.keys[-1]).digest())
        self.rng = random.Random(1)
        self.stored: set[int] = set()
        self.seconds = {"store": 0.0, "load": 0.0}
        self.bytes = {"store": 0, "load": 0}
        self.why: dict[str, int] = {}  # failed blocks, by the host's code
        self.failed = self.wrong = self.missed = self.damaged = self.request = self.step = 0
        self.semaphores: cuda.DeviceSemaphores | None = None
        if a.order != "wait":
            self.semaphores = cuda.DeviceSemaphores(4 + self.layers)
            where = self.semaphores.export()
            host.share_semaphores_ipc(where.handle, where.offset, self.semaphores.count)

    def stream(self) -> int:
        return int(torch.cuda.current_stream().cuda_stream)

    def timeline(self, layers: int = 0) -> kvhost.Timeline | None:
        """Returns the timeline of the next job, which starts once the stream has done the work queued so far."""
        if self.semaphores is None:
            torch.cuda.synchronize()
            return None
        self.step += 1
        for i in range(max(1, layers)):
            self.semaphores.store(3 + i, 0)
        self.semaphores.store_on(self.stream(), 0, self.step)
        t = kvhost.Timeline(
            self.semaphores, wait=0, wait_value=self.step, done=1, done_value=1000 * self.step, status=3, layers=layers
        )
        return t

    def deal(self) -> list[list[int]]:
        order = self.rng.sample(range(self.blocks), self.blocks)
        return [order[i * self.per_chunk : (i + 1) * self.per_chunk] for i in range(2 * self.a.batch)]

    def places(self, ids: list[list[int]], batch: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        flat = [b for part in ids[: len(batch)] for b in part]
        return torch.tensor(flat, device="cuda"), torch.tensor(batch, device="cuda")

    def store(self, batch: list[int]) -> None:
        ids = self.deal()
        self.pages.write(*self.places(ids, batch))
        order = self.timeline()
        start = time.perf_counter()
        job = self.host.store(
            [
                kvhost.StoreChunk(self.keys[c], ids[i], parent=self.keys[c - 1] if c else b"", depth=c)
                for i, c in enumerate(batch)
            ],
            request=self.request,
            timeline=order,
        )
        if self.semaphores is not None and order is not None:
            self.semaphores.wait_on(self.stream(), order.done, order.done_value)
            for view in self.pages.view:  # the stream has just passed its wait: the host must have read the pages by now
                view.fill_(POISON)
        result = job.published(120)
        self.seconds["store"] += time.perf_counter() - start
        self.bytes["store"] += result.bytes
        for c, r in zip(batch, result.chunks, strict=True):
            if r.result in (kvhost.Result.STORED, kvhost.Result.RESIDENT):
                self.stored.add(c)
            else:
                self.failed += 1

    def load(self, batch: list[int]) -> None:
        ids = self.deal()
        for view in self.pages.view:
            view.fill_(POISON)
        found = self.host.lookup(self.keys[: batch[-1] + 1], request=self.request, first=batch[0])
        for c in batch[found.hits :]:
            self.stored.discard(c)
            self.missed += 1
        batch = batch[: found.hits]
        if not batch:
            return
        by_layer = self.a.order == "layers"
        order = self.timeline(self.layers if by_layer else 0)
        start = time.perf_counter()
        job = self.host.load(
            found,
            [kvhost.LoadChunk(c, ids[i]) for i, c in enumerate(batch)],
            on_layer=(lambda *_: None) if by_layer else None,
            timeline=order,
        )
        where, chunks = self.places(ids, batch)
        early = torch.zeros(len(batch), dtype=torch.int64, device="cuda")
        if self.semaphores is not None and order is not None:  # the stream itself compares, as soon as it may go on
            for layer in range(self.layers) if by_layer else ():
                self.semaphores.wait_on(self.stream(), order.done, order.done_value - self.layers + layer)
                early += self.pages.wrong(where, chunks, range(layer, layer + 1))
            self.semaphores.wait_on(self.stream(), order.done, order.done_value)
            if not by_layer:
                early += self.pages.wrong(where, chunks)
        loaded = job.wait(120)
        self.seconds["load"] += time.perf_counter() - start
        self.bytes["load"] += loaded.bytes
        bad: dict[int, set[int]] = {}
        for f in loaded.failed:
            bad.setdefault(f.chunk, set()).add(f.block)
            self.why[f.error.code.name] = self.why.get(f.error.code.name, 0) + 1
        rest = torch.tensor([b for part in ids[len(batch) :] for b in part], device="cuda")
        late, touched = self.pages.wrong(where, chunks), self.pages.touched(rest)
        self.wrong += int(touched)
        for i, wrong in enumerate((early + late).tolist()):
            if i not in bad:
                self.wrong += wrong
                continue
            self.stored.discard(batch[i])
            self.damaged += 1
            self.wrong += self.pages.strange(*self.places([ids[i]], [batch[i]])) + (bad[i] != set(ids[i]))
        if order is not None and (2 in order.statuses()) != bool(bad):
            self.wrong += 1

    def damage(self) -> None:
        files = [p for p in pathlib.Path(self.a.damage).rglob("*.kv") if ".kvhost" not in p.parts]
        path = self.rng.choice(files)
        try:
            size, how = path.stat().st_size, self.rng.randrange(4)
            if how == 0:
                path.unlink()
            elif how == 1:
                os.truncate(path, size // 2 & ~4095)
            else:
                with open(path, "r+b") as f:
                    f.seek(self.rng.randrange(size // 2, size - (1 << 16)))
                    byte = f.read(1)
                    f.seek(-1, os.SEEK_CUR)
                    f.write(bytes([byte[0] ^ 0x40]))
        except FileNotFoundError:  # the host was faster: it has already dropped a damaged piece
            pass

    def run(self) -> int:
        done, a = 0, self.a
        while done < a.operations:
            self.request += 1
            missing = [c for c in range(a.chunks) if c not in self.stored]
            if missing:
                batch = missing[: a.batch]
                self.store(batch)
            else:
                first = self.rng.randrange(a.chunks)
                batch = list(range(first, min(first + a.batch, a.chunks)))
                if a.damage and self.rng.random() < 0.2:
                    self.damage()
                if a.crash and done > a.operations // 2:
                    threading.Timer(a.kill_after + self.rng.uniform(0.001, 0.02), os.kill, (os.getpid(), signal.SIGKILL)).start()
                if a.kill_host and done > a.operations // 2:
                    return self.kill(batch)
                self.load(batch)
            done += max(1, len(batch))
            self.host.end_request(self.request)
        return done

    def kill(self, batch: list[int]) -> int:
        """Kills the host while a stream waits for a load. The stream must go on, and find that some chunks were not delivered.

        With the order ``layers`` or ``--kill-after`` the load has begun by then. Otherwise it waits for a semaphore that
        never rises."""
        assert self.semaphores is not None, "--kill-host wants --order timeline or layers"
        ids = self.deal()
        found = self.host.lookup(self.keys[: batch[-1] + 1], request=self.request, first=batch[0])
        by_layer = self.a.order == "layers"
        under_way = by_layer or self.a.kill_after > 0
        held = self.timeline(self.layers if by_layer else 0)
        assert held is not None
        torch.cuda.synchronize()
        if not under_way:
            held = dataclasses.replace(held, wait=2, wait_value=1)
        job = self.host.load(
            found,
            [kvhost.LoadChunk(c, ids[i]) for i, c in enumerate(batch)],
            on_layer=(lambda *_: None) if by_layer else None,
            timeline=held,
        )
        self.semaphores.wait_on(self.stream(), held.done, held.done_value)
        gone = torch.cuda.Event()
        gone.record()
        if by_layer:
            while self.semaphores.load(held.done) < held.done_value - self.layers:
                pass
        else:
            time.sleep(self.a.kill_after or 0.05)
            assert not gone.query(), "the stream did not wait"
        start = time.perf_counter()
        os.kill(self.a.kill_host, signal.SIGKILL)
        torch.cuda.synchronize()
        print(f"host killed: the waiting stream went on after {1e3 * (time.perf_counter() - start):.1f} ms, status {held.statuses()}")
        try:
            job.wait(30)
        except kvhost.HostGoneError:
            raise SystemExit(0 if 2 in held.statuses() and 0 not in held.statuses() else 1) from None
        raise SystemExit(1)


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("socket")
    args.add_argument("--shape", choices=SHAPES, default="llama")
    args.add_argument("--order", choices=["wait", "timeline", "layers"], default="wait")
    args.add_argument("--chunks", type=int, default=64, help="distinct chunks")
    args.add_argument("--operations", type=int, default=256, help="chunks stored and loaded, all in all")
    args.add_argument("--batch", type=int, default=8, help="chunks in one operation")
    args.add_argument("--damage", metavar="DIR", help="flip bytes of piece files below it, truncate them, remove them")
    args.add_argument("--faults", action="store_true", help="the host's calls are being failed: chunks may fail")
    args.add_argument("--crash", action="store_true", help="die in the middle of a load")
    args.add_argument("--kill-host", metavar="PID", type=int, help="kill the host in the middle of a load")
    args.add_argument("--kill-after", metavar="SECONDS", type=float, default=0.0, help="so long after the load was sent; a crash, after its batch began")
    a = args.parse_args()
    layers, page, per_chunk = SHAPES[a.shape]
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    group = kvhost.Group.uniform(0, blocks=per_chunk, layers=layers, parts=1, page_bytes=page)
    namespace = kvhost.Namespace(
        model=f"torch-demo-{a.shape}", dtype="bf16", key_bytes=32, tokens_per_block=16, groups=[group],
        hash_algorithm="sha256", hash_seed=str(os.getpid()),
    )
    with kvhost.Session(
        a.socket, engine=f"torch-{os.getpid()}", namespace=namespace, device_uuid=cuda.device_uuid()
    ) as host:
        d = Demo(host, a)
        done = d.run()
        torch.cuda.synchronize()
        host.unregister(0)

    def rate(what: str) -> float:
        return d.bytes[what] / d.seconds[what] / 1e9 if d.seconds[what] else 0

    print(
        f"{a.shape} {a.order}: {done} chunk operations, {a.chunks} distinct; stored {rate('store'):.1f} GB/s, "
        f"loaded {rate('load'):.1f} GB/s of {d.bytes['load'] >> 20} MiB; missed {d.missed}, failed stores {d.failed}, "
        f"failed loads {d.damaged} (blocks by code {d.why}), bytes that differ {d.wrong}"
    )
    lost = d.missed + d.damaged > 0
    if d.wrong or (d.failed and not a.faults) or (lost and not (a.damage or a.faults)) or (a.damage and not lost):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
