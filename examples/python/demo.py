"""Stores chunks in a running kvhost, loads them into other blocks, and compares every byte.

    python demo.py /run/kvhost/kvhost.sock
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time

import kvhost

PAGE, BLOCKS, LAYERS, CHUNKS = 64 << 10, 4, 4, 16
GROUP = kvhost.Group.uniform(0, blocks=BLOCKS, layers=LAYERS, parts=2, page_bytes=PAGE)
NAMESPACE = kvhost.Namespace(
    model="demo", dtype="bf16", key_bytes=32, tokens_per_block=16, groups=[GROUP], hash_algorithm="sha256"
)


def chain(seed: bytes, n: int) -> list[bytes]:
    """Returns the keys of a prompt's chunks. Each key is a hash of the key before it."""
    keys = [hashlib.sha256(seed).digest()]
    while len(keys) < n:
        keys.append(hashlib.sha256(keys[-1]).digest())
    return keys


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("socket", nargs="?", default=os.environ.get("KVHOST_SOCKET", "/run/kvhost/kvhost.sock"))
    path = args.parse_args().socket

    places = 2 * CHUNKS * BLOCKS  # one half to store from, the other to load to
    plane_bytes = places * PAGE
    with (
        kvhost.Arena(plane_bytes * len(GROUP.planes)) as arena,
        kvhost.Session(path, engine=f"demo-{os.getpid()}", namespace=NAMESPACE) as host,
    ):
        print(f"kvhost {host.version} on {path}")
        host.register(0, arena, [kvhost.Region(i * plane_bytes, PAGE, places) for i in range(len(GROUP.planes))])

        def pages(chunk: int, place: int) -> list[memoryview]:
            """Returns the pages that a chunk is stored from (place 0) or loaded to (place 1)."""
            first = (place * CHUNKS + chunk) * BLOCKS
            return [
                arena.view[p * plane_bytes + b * PAGE :][:PAGE]
                for p in range(len(GROUP.planes))
                for b in range(first, first + BLOCKS)
            ]

        def blocks(chunk: int, place: int) -> range:
            return range((place * CHUNKS + chunk) * BLOCKS, (place * CHUNKS + chunk + 1) * BLOCKS)

        keys = chain(os.urandom(16), CHUNKS)
        for c in range(CHUNKS):
            for page in pages(c, 0):
                page[:] = os.urandom(PAGE)

        start = time.perf_counter()
        job = host.store(
            [
                kvhost.StoreChunk(keys[c], blocks(c, 0), parent=keys[c - 1] if c else b"", depth=c)
                for c in range(CHUNKS)
            ],
            request=1,
        )
        stored = job.published(60)
        seconds = time.perf_counter() - start
        bad = [(c, r.result.name, r.error) for c, r in enumerate(stored.chunks) if r.result != kvhost.Result.STORED]
        print(f"stored {stored.bytes >> 20} MiB in {seconds:.3f} s; not stored: {bad or 'none'}")

        found = host.lookup(keys, request=1)
        print(f"lookup: {found.hits} of {CHUNKS} chunks")
        start = time.perf_counter()
        loaded = host.load(found, [kvhost.LoadChunk(c, blocks(c, 1)) for c in range(found.hits)]).wait(60)
        seconds = time.perf_counter() - start
        wrong = sum(
            bytes(a) != bytes(b) for c in range(found.hits) for a, b in zip(pages(c, 0), pages(c, 1), strict=True)
        )
        print(f"loaded {loaded.bytes >> 20} MiB in {seconds:.3f} s; failed blocks: {len(loaded.failed)}")
        host.end_request(1)
        print(f"pages that differ: {wrong}")
        if wrong or loaded.failed or found.hits != CHUNKS:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
