"""A host with two levels: what a lookup asks for is loaded from memory, and what a client stores although it is on the disk."""

from __future__ import annotations

import hashlib
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Iterator

import kvhost
import pytest
from waits import left, until

PAGE, PLACES, STORED, ASKED = 64 << 10, 8, 40, 4


@pytest.fixture
def socket() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as d:  # a socket's path is short
        config = pathlib.Path(d, "c.toml")
        config.write_text(
            f'''
socket = "{d}/s"
http.listen = ""
log.level = "warn"
[[root]]
path = "memory:"
capacity = "16MiB"
write = "through"
[[root]]
path = "{d}/kv"
capacity = "64MiB"
level = 1
'''
        )
        env = {k: v for k, v in os.environ.items() if not k.startswith("KVHOST_")}
        host = subprocess.Popen(
            [os.environ["KVHOST_BIN"], "-c", str(config)], stderr=subprocess.PIPE, text=True, env=env
        )
        try:
            until("the host serves", lambda: os.path.exists(f"{d}/s") or host.poll() is not None)
            assert host.poll() is None, host.stderr.read() if host.stderr else ""
            yield f"{d}/s"
        finally:
            host.terminate()
            host.wait(left())


def page(n: int, plane: int) -> bytes:
    """What chunk n holds: it differs from word to word."""
    block = b"".join(hashlib.sha256(f"{n} {plane} {i}".encode()).digest() for i in range(8))
    return block * (PAGE // len(block))


@pytest.mark.parametrize("stored", [False, True], ids=["by a lookup", "by a store"])
def test_what_is_far_comes_near(socket: str, stored: bool) -> None:
    group = kvhost.Group.uniform(0, blocks=1, layers=8, parts=1, page_bytes=PAGE)
    ns = kvhost.Namespace(model="m", dtype="bf16", key_bytes=32, tokens_per_block=16, groups=[group])
    keys = [hashlib.sha256(str(n).encode()).digest() for n in range(STORED)]
    planes = range(8)
    with kvhost.Arena(8 * PLACES * PAGE) as arena, kvhost.Session(socket, "e", ns) as s:
        assert s.levels == 2
        s.register(0, arena, [kvhost.Region(p * PLACES * PAGE, PAGE, PLACES) for p in planes])

        def at(plane: int, block: int) -> memoryview:
            return arena.view[(plane * PLACES + block) * PAGE :][:PAGE]

        def count(name: str) -> int:
            return int(s.status().counters[name])

        def store(n: int) -> None:
            for p in planes:
                at(p, 0)[:] = page(n, p)
            parent = keys[n - 1] if n else b""
            (r,) = s.store([kvhost.StoreChunk(keys[n], [0], parent, n)]).published(left()).chunks
            assert r.result == kvhost.Result.STORED, r

        for n in range(STORED):
            store(n)
            # A chunk goes around memory while the copies of those before it are behind.
            until(f"chunk {n} is copied", lambda n=n: count("level1_through") == n + 1)

        before = count("level1_loaded_bytes")
        hit = s.lookup(keys[:ASKED], prefetch=not stored)
        (level,) = hit.levels
        assert (hit.hits, level.level, level.chunks, level.bytes) == (ASKED, 1, ASKED, ASKED * 8 * PAGE)
        if stored:
            for n in range(ASKED):
                store(n)
            again = s.lookup(keys[:ASKED])
            assert [(at.level, at.chunks) for at in again.levels] == [(0, ASKED)]
            again.release()
        else:
            until("the copies are made", lambda: count("level0_prefetch") == ASKED)
        for p in planes:
            for b in range(ASKED):
                at(p, b)[:] = b"\xee" * PAGE
        done = s.load(hit, [kvhost.LoadChunk(i, [i]) for i in range(ASKED)]).wait(left())
        assert not done.failed
        assert all(bytes(at(p, i)) == page(i, p) for p in planes for i in range(ASKED))
        assert count("level1_loaded_bytes") == before and count("level0_prefetch_used") == (0 if stored else ASKED)
