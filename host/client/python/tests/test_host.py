"""Against a real host: set KVHOST_SOCKET to its socket. Without it nothing is collected here."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import mmap
import multiprocessing.shared_memory
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import kvhost
import pytest
from forked import in_child
from kvhost.session import LoadJob
from waits import left

PAGE, BLOCKS, LAYERS, PLACES = 4096, 2, 3, 64
GROUPS = [
    kvhost.Group.uniform(0, blocks=BLOCKS, layers=LAYERS, parts=2, page_bytes=PAGE),
    kvhost.Group(7, BLOCKS, kvhost.Group.uniform(7, BLOCKS, 1, 1, PAGE).planes, membership=True),
]
PLANE = PLACES * PAGE


def namespace(**changes: object) -> kvhost.Namespace:
    fields: dict[str, object] = {
        "model": "pytest", "dtype": "bf16", "key_bytes": 32, "tokens_per_block": 16, "groups": GROUPS,
    }
    return kvhost.Namespace(**{**fields, **changes})  # type: ignore[arg-type]


def key(seed: bytes, n: int) -> bytes:
    return hashlib.sha256(seed + n.to_bytes(4, "little")).digest()


class Peer:
    """A session with an arena registered for both groups."""

    def __init__(self, path: str, engine: str, **options: object) -> None:
        ns = options.pop("namespace", namespace())
        self.session = kvhost.Session(path, engine, ns, **options)  # type: ignore[arg-type]
        self.arena = kvhost.Arena(PLANE * (2 * LAYERS + 1))
        regions = [kvhost.Region(i * PLANE, PAGE, PLACES) for i in range(2 * LAYERS + 1)]
        self.session.register(0, self.arena, regions[:-1])
        self.session.register(7, self.arena, regions[-1:])

    def pages(self, blocks: range) -> list[memoryview]:
        return [self.arena.view[p * PLANE + b * PAGE :][:PAGE] for p in range(2 * LAYERS) for b in blocks]

    def fill(self, blocks: range) -> list[bytes]:
        content = [os.urandom(PAGE) for _ in self.pages(blocks)]
        for page, b in zip(self.pages(blocks), content, strict=True):
            page[:] = b
        return content

    def read(self, blocks: range) -> list[bytes]:
        return [bytes(p) for p in self.pages(blocks)]

    def close(self) -> None:
        self.session.close()
        self.arena.close()


@pytest.fixture
def path() -> str:
    return os.environ["KVHOST_SOCKET"]


@pytest.fixture
def seed() -> bytes:
    return os.urandom(16)


@pytest.fixture
def peer(path: str, seed: bytes) -> Iterator[Peer]:
    p = Peer(path, "pytest-" + seed.hex())
    yield p
    p.close()


def test_what_is_stored_is_loaded(peer: Peer, seed: bytes) -> None:
    s, n = peer.session, 4
    keys = [key(seed, i) for i in range(n)]
    assert s.lookup(keys).hits == 0
    content = [peer.fill(range(i * BLOCKS, (i + 1) * BLOCKS)) for i in range(n)]
    job = s.store(
        [
            kvhost.StoreChunk(keys[i], range(i * BLOCKS, (i + 1) * BLOCKS), parent=keys[i - 1] if i else b"", depth=i)
            for i in range(n)
        ]
    )
    job.read(left())
    result = job.published(left())
    assert [c.result for c in result.chunks] == [kvhost.Result.STORED] * n
    assert result.bytes == n * BLOCKS * LAYERS * 2 * PAGE

    found = s.lookup([*keys, key(seed, 99)], request=5)
    assert found.hits == n and found.has(n - 1) and not found.has(n)
    assert found.bytes == n * BLOCKS * LAYERS * 2 * PAGE
    layers: list[int] = []
    to = [range((20 + i) * BLOCKS, (21 + i) * BLOCKS) for i in range(n)]
    wanted = [kvhost.LoadChunk(i, to[i]) for i in range(n)]
    loaded = s.load(found, wanted, on_layer=lambda layer, _: layers.append(layer)).wait(left())
    assert loaded.failed == [] and loaded.bytes == result.bytes
    assert layers == list(range(LAYERS))
    assert [peer.read(r) for r in to] == content
    after = s.lookup(keys).load_seconds
    assert after is not None and 0 < after < 60

    again = s.load(found, [kvhost.LoadChunk(0, to[0])]).wait(left())  # the lease is used up
    assert [(f.block, f.error.code) for f in again.failed] == [(b, kvhost.Code.LEASE_OVER) for b in to[0]]
    found.release()
    s.end_request(5, kvhost.Hints(kvhost.EndReason.TOOL_CALL, tokens_in=64, tokens_out=9, priority=-1, return_seconds=2.5))
    assert [c.result for c in s.store([kvhost.StoreChunk(keys[0], to[0])]).published(left()).chunks] == [kvhost.Result.RESIDENT]


def test_jobs_can_be_awaited(peer: Peer, seed: bytes) -> None:
    s, there = peer.session, peer.fill(range(0, 4))

    async def both() -> kvhost.LoadResult:
        chunks = [kvhost.StoreChunk(key(seed, n), [2 * n, 2 * n + 1], key(seed, 0) if n else None, n) for n in range(2)]
        stored = await s.store(chunks)
        assert [c.result for c in stored.chunks] == [kvhost.Result.STORED] * 2
        hit = s.lookup([key(seed, n) for n in range(2)])
        assert repr(hit).startswith("<Lookup: 2 hits, ")
        job = s.load(hit, [kvhost.LoadChunk(n, [4 + 2 * n, 5 + 2 * n]) for n in range(2)])
        first = await job
        assert first == await job  # again, when it is over
        with pytest.raises(kvhost.LeaseOverError):
            late = await s.load(hit, [kvhost.LoadChunk(0, [4, 5])])
            raise late.failed[0].error
        return first

    done = asyncio.run(both())
    assert not done.failed
    assert peer.read(range(4, 8)) == there


def test_what_is_no_memory_is_refused(peer: Peer) -> None:
    with pytest.raises(TypeError, match="bytearray"):
        peer.session.register(0, bytearray(8), [])  # type: ignore[arg-type]
    assert "kvhost" in repr(peer.session)


def test_adopted_memory(path: str, seed: bytes) -> None:
    size = GROUPS[1].blocks * 4 * PAGE
    raw = (ctypes.c_ubyte * size).from_buffer(mmap.mmap(-1, size))  # nothing else is on these pages
    raw[:] = list(os.urandom(size))
    address, before = ctypes.addressof(raw), bytes(raw)
    memory = kvhost.AdoptedMemory([(address, size)])
    assert bytes(raw) == before and os.pread(memory.fd, size, memory.offset(address)) == before
    with pytest.raises(ValueError):
        memory.offset(0)
    with kvhost.Session(path, "adopted-" + seed.hex(), namespace()) as s:
        s.register(7, memory, [kvhost.Region(memory.offset(address), PAGE, size // PAGE)])
        s.store([kvhost.StoreChunk(key(seed, 0), [0, 1])], group=7).published(left())
        pending = s.start_lookup([key(seed, 0)], group=7, readers=1)
        assert pending.done(left()) and pending.result().hits == 1
        lease = s.leased(pending.result().lease)
        assert s.load(lease, [kvhost.LoadChunk(0, [5, 6])]).wait(left()).failed == []
    assert s.ended.is_set()
    assert bytes(raw) == before[: 5 * PAGE] + before[: 2 * PAGE] + before[7 * PAGE :]
    memory.close()


def test_events(peer: Peer, seed: bytes) -> None:
    s = peer.session
    first, second = key(seed, 0), key(seed, 1)
    s.store([kvhost.StoreChunk(first, [0, 1])]).published(left())
    stream = s.events()
    known: set[bytes] = set()
    after = None
    for batch in stream:
        known |= {e.key for e in batch.events if e.stored}
        after = batch.after
        if batch.snapshot_end:
            break
    stream.close()
    assert first in known and after is not None
    s.store([kvhost.StoreChunk(second, [2, 3], parent=first, depth=1)]).published(left())
    resumed = s.events(after)
    batch = next(iter(resumed))
    assert not batch.snapshot and [(e.key, e.parent) for e in batch.events] == [(second, first)]
    resumed.close()


def test_events_of_a_closed_session(path: str, seed: bytes) -> None:
    s = kvhost.Session(path, "closed-" + seed.hex(), namespace())
    s.close()
    with pytest.raises(kvhost.HostGoneError):
        next(iter(s.events()))


def test_discard(path: str, peer: Peer, seed: bytes) -> None:
    s, k = peer.session, [key(seed, i) for i in range(3)]
    s.store([kvhost.StoreChunk(k[i], [2 * i, 2 * i + 1]) for i in range(2)]).published(left())
    lease = s.lookup(k[:1])
    in_use, removed, absent = kvhost.DiscardResult.IN_USE, kvhost.DiscardResult.REMOVED, kvhost.DiscardResult.ABSENT
    assert s.discard([k[1], k[0], k[2]]) == [removed, in_use, absent]
    lease.release()
    other = Peer(path, "pytest-tenant-" + seed.hex(), tenant=5)
    assert other.session.discard(k[:1]) == [kvhost.DiscardResult.OTHER_TENANT]
    other.close()
    assert s.discard(k[:1]) == [removed] and s.lookup(k).hits == 0
    with pytest.raises(kvhost.HostError) as e:
        s.discard([])
    assert (e.value.code, e.value.field) == (kvhost.Code.INVALID, "keys")
    with pytest.raises(ValueError, match="32 bytes"):
        s.discard([b"short"])


def test_shared_memory_that_shrinks(path: str, seed: bytes) -> None:
    size = GROUPS[1].blocks * 4 * PAGE
    pool = multiprocessing.shared_memory.SharedMemory(create=True, size=size)
    try:
        memory = kvhost.SharedMemory.named(pool.name)
        region = kvhost.Region(0, PAGE, size // PAGE)
        with kvhost.Session(path, "sealed-" + seed.hex(), namespace()) as s:
            with pytest.raises(kvhost.HostError):
                s.register(7, memory, [region])
        with kvhost.Session(path, "shared-" + seed.hex(), namespace(), unsealed_memory=True) as s:
            s.register(7, memory, [region])
            os.pwrite(memory.fd, os.urandom(2 * PAGE), 0)
            chunk = kvhost.StoreChunk(key(seed, 0), [0, 1])
            assert s.store([chunk], group=7).published(left()).chunks[0].result == kvhost.Result.STORED
            os.ftruncate(memory.fd, 0)
            late = kvhost.StoreChunk(key(seed, 1), [0, 1])
            assert s.store([late], group=7).published(left()).chunks[0].result == kvhost.Result.FAILED
            found = s.lookup([key(seed, 0)], group=7)
            failed = s.load(found, [kvhost.LoadChunk(0, [2, 3])]).wait(left()).failed
            assert [(f.block, f.error.code) for f in failed] == [(b, kvhost.Code.INVALID) for b in (2, 3)]
            os.posix_fallocate(memory.fd, 0, size)  # with pages: the host takes none of a file
            again = s.lookup([key(seed, 0)], group=7)
            assert s.load(again, [kvhost.LoadChunk(0, [2, 3])]).wait(left()).failed == []
        memory.close()
    finally:
        pool.close()
        pool.unlink()


def test_membership_and_holes(peer: Peer, seed: bytes) -> None:
    s = peer.session
    for i in (1, 4):
        s.store([kvhost.StoreChunk(key(seed, i), [0, 1])], group=7).published(left())
    found = s.lookup([key(seed, i) for i in range(10)], group=7)
    assert found.hits == 2 and [i for i in range(10) if found.has(i)] == [1, 4]
    loaded = s.load(found, [kvhost.LoadChunk(4, [8, kvhost.NOT_WANTED])]).wait(left())
    assert loaded.failed == []


def test_two_ranks(path: str, seed: bytes) -> None:
    peers = [
        Peer(path, "two-" + seed.hex(), rank=r, local_ranks=2, namespace=namespace(tensor_parallel=2)) for r in range(2)
    ]
    k = key(seed, 0)
    for r, p in enumerate(peers):
        p.fill(range(2))
        assert p.session.store([kvhost.StoreChunk(k, range(2))]).published(left()).chunks[0].result == kvhost.Result.STORED
        assert [q.session.lookup([k]).hits for q in peers] == [r, r]
    for p in peers:
        before = p.read(range(2))
        assert p.session.load(p.session.lookup([k]), [kvhost.LoadChunk(0, range(6, 8))]).wait(left()).failed == []
        assert p.read(range(6, 8)) == before
        p.close()


def test_wrong_input_names_its_field(path: str, peer: Peer, seed: bytes) -> None:
    s = peer.session
    with pytest.raises(kvhost.HostError, match="model.*other.*pytest") as e:
        kvhost.Session(path, "pytest-" + seed.hex(), namespace(model="other"))
    assert e.value.code == kvhost.Code.DISAGREEMENT
    with pytest.raises(ValueError):
        s.lookup([b"short"])
    with pytest.raises(kvhost.HostError) as e:
        s.lookup([], group=3)
    assert (e.value.code, e.value.field) == (kvhost.Code.UNKNOWN, "group")
    with pytest.raises(kvhost.HostError) as e:
        s.store([kvhost.StoreChunk(key(seed, 0), [0, PLACES])]).published(left())
    assert (e.value.code, e.value.field) == (kvhost.Code.INVALID, "chunks[0].blocks")
    with pytest.raises(kvhost.HostError) as e:
        s.register(0, peer.arena, [kvhost.Region(0, PAGE, PLACES)] * (2 * LAYERS))
    assert e.value.code == kvhost.Code.BUSY
    s.ping()


def test_session_end(path: str, peer: Peer) -> None:
    s = peer.session
    s.await_copies()
    s.unregister(7)
    assert s.status().sessions >= 1
    s.close()
    with pytest.raises(kvhost.HostGoneError):
        s.ping()
    with pytest.raises(kvhost.HostGoneError):
        kvhost.Session(path + ".nobody", "e", namespace())


def test_words_put_jobs_in_order(peer: Peer, seed: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    s = peer.session
    arena = kvhost.Arena(4096)
    semaphores = s.share_semaphores(arena, 0, 16)
    first, second = key(seed, 0), key(seed, 1)
    peer.fill(range(0, BLOCKS))
    late = kvhost.Timeline(semaphores, done=1, done_value=5, wait=0, wait_value=1, status=2)
    job = s.store([kvhost.StoreChunk(first, range(0, BLOCKS))], timeline=late)
    s.ping()
    assert semaphores.load(1) == 0
    content = peer.fill(range(0, BLOCKS))  # what is stored, since the semaphore comes after it
    semaphores.store(0, 1)
    assert [c.result for c in job.published(left()).chunks] == [kvhost.Result.STORED]
    assert semaphores.load(1) == 5 and late.statuses() == [1]

    by_layer = kvhost.Timeline(semaphores, done=3, done_value=10, status=4, layers=LAYERS)
    found = s.lookup([first])
    answers = []
    take = LoadJob._call
    monkeypatch.setattr(LoadJob, "_call", lambda job, m: answers.append(m.WhichOneof("body")) or take(job, m))
    s.load(found, [kvhost.LoadChunk(0, range(2, 4))], timeline=by_layer).wait(left())
    assert semaphores.load(3) == 10 and by_layer.statuses() == [1] * LAYERS
    assert answers == ["load_done"]  # and no message for a layer
    assert peer.read(range(2, 4)) == content

    never = kvhost.Timeline(semaphores, done=8, done_value=1, wait=0, wait_value=99, status=9)
    waits = s.store([kvhost.StoreChunk(second, range(0, BLOCKS))], timeline=never)
    s.close()  # as if the host had died
    with pytest.raises(kvhost.HostGoneError):
        waits.read(left())
    assert semaphores.load(8) == 1 and never.statuses() == [2]
    semaphores.close()
    arena.close()


def test_a_session_does_not_pass_a_fork(peer: Peer, seed: bytes) -> None:
    """A child's calls end at once, and the parent's session goes on."""
    s, k = peer.session, key(seed, 0)
    want = peer.fill(range(BLOCKS))
    stored = s.store([kvhost.StoreChunk(k, range(BLOCKS))], request=1)
    stored.published(left())
    hit, asked = s.lookup([k]), s.start_lookup([k])
    running = s.store([kvhost.StoreChunk(key(seed, 1), range(BLOCKS))], request=1)
    events = s.events()
    calls: dict[str, Callable[[], object]] = {
        "lookup": lambda: s.lookup([k]), "start_lookup": lambda: s.start_lookup([k]), "result": lambda: asked.result(),
        "store": lambda: s.store([kvhost.StoreChunk(k, range(BLOCKS))]), "load": lambda: s.load(hit, []),
        "published": lambda: running.published(), "read": lambda: running.read(), "cancel": lambda: running.cancel(),
        "release": lambda: hit.release(wait=False), "discard": lambda: s.discard([k]), "ping": s.ping, "status": s.status,
        "start_ping": s.start_ping, "end_request": lambda: s.end_request(1, wait=False), "await_copies": s.await_copies,
        "register": lambda: s.register(0, peer.arena, []), "unregister": lambda: s.unregister(0), "events": s.events,
        "next event": lambda: next(iter(events)), "awaited": lambda: asyncio.run(_published(running)),
    }
    for name, call in calls.items():
        said = in_child(call)
        assert said.startswith("HostGoneError: the session is of process"), f"{name} in a child: {said}"
    for name, call in {"close": s.close, "the events' close": events.close}.items():
        assert in_child(call) == "returned None", f"{name} in a child"
    events.close()
    running.published(left())
    peer.fill(range(BLOCKS))
    assert not s.load(s.lookup([k]), [kvhost.LoadChunk(0, range(BLOCKS))]).wait(left()).failed
    assert peer.read(range(BLOCKS)) == want, "the parent's session goes on"


async def _published(job: kvhost.StoreJob) -> object:
    return await job


def test_a_child_that_leaves_a_session_by_its_end(path: str, seed: bytes) -> None:
    code = f"""if True:
        import os, sys
        sys.path[:0] = {[os.path.dirname(__file__)]!r}
        import kvhost
        from test_host import namespace
        with kvhost.Session({path!r}, "fork-{seed.hex()}", namespace()) as s:
            if (child := os.fork()) == 0:
                sys.exit(3)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            s.ping()
        """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert (done.stdout, done.returncode) == ("3\n", 0), done.stderr


def test_a_child_has_a_session_of_its_own(path: str, seed: bytes) -> None:
    """In a process whose other threads call gRPC at that moment, gRPC itself does not outlive a fork."""
    code = f"""if True:
        import os, sys
        sys.path[:0] = {[os.path.dirname(__file__)]!r}
        import kvhost
        from test_host import namespace
        with kvhost.Session({path!r}, "parent-{seed.hex()}", namespace()) as s:
            if (child := os.fork()) == 0:
                with kvhost.Session({path!r}, "child-{seed.hex()}", namespace()) as own:
                    own.ping()
                os._exit(7)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            s.ping()
        """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert (done.stdout, done.returncode) == ("7\n", 0), done.stderr


def test_answers_wait_for_the_end_of_the_host(path: str, seed: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a job holds is given back when nothing of the host's can write to it any more."""
    said: list[str] = []
    with kvhost.Session(path, "ends-" + seed.hex(), namespace()) as s:
        monkeypatch.setattr(s._stream.host, "await_end", lambda seconds: said.append("the process has ended"))
        s._stream._calls[1 << 40] = lambda m: said.append(type(m).__name__) or True
        s._stream._responses.cancel()  # the connection breaks
        assert s._stream.ended.wait(left())
    assert said == ["the process has ended", "HostGoneError"]


def test_ends_after_the_end_of_the_session(path: str, seed: bytes) -> None:
    """What ends with a session cannot fail to end afterwards, unless the caller waits for the answer."""
    with kvhost.Session(path, "over-" + seed.hex(), namespace()) as s:
        hit = s.lookup([])
        hit.lease = 1
        job = LoadJob(s, None)
        job.id = 1
        s._stream._responses.cancel()  # the connection breaks
        assert s._stream.ended.wait(left())
        for end in (hit.release, job.cancel, lambda wait: s.end_request(1, wait=wait)):
            end(wait=False)
            with pytest.raises(kvhost.HostGoneError):
                end(wait=True)
