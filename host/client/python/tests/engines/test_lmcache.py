"""LMCache with kvhost as its L2: its own classes, its own server and its own benches, all unmodified."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace as Record
from typing import Any

import pytest
from lmcache_server import LMCacheServer, free_ports, lmcache, lmcache_env
from needs import needs
from processes import DEADLINE, Host, own_host, wait_for

needs("lmcache")

import torch  # noqa: E402
from lmcache.v1.distributed import api  # noqa: E402
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey  # noqa: E402
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2AdapterListener  # noqa: E402
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface  # noqa: E402
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class  # noqa: E402
from lmcache.v1.distributed.l2_adapters import create_l2_adapter  # noqa: E402
from lmcache.v1.memory_management import MemoryFormat, MemoryObj, MemoryObjMetadata, TensorMemoryObj  # noqa: E402
from lmcache.v1.platform import consume_fd  # noqa: E402

from kvhost.lmcache import KvhostL2Adapter, KvhostL2AdapterConfig  # noqa: E402

SMALL, LARGE = 64 << 10, 3 << 20


class Adapter:
    """The adapter as LMCache makes and uses it, one task at a time."""

    def __init__(self, socket: str, **params: object) -> None:
        config = get_l2_adapter_config_class("plugin").from_dict(
            {
                "module_path": "kvhost.lmcache", "class_name": "KvhostL2Adapter",
                "adapter_params": {"socket": socket, "arena_bytes": 16 << 20, **params},
            }
        )  # fmt: skip
        self.raw: L2AdapterInterface = create_l2_adapter(config)
        self.raw.set_backend_identity("plugin")
        self.heard = Listener()
        self.raw.register_listener(self.heard)

    def store(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> Any:
        task = self.raw.submit_store_task(keys, objects)
        _await(self.raw.get_store_event_fd())
        done = self.raw.pop_completed_store_tasks()
        assert list(done) == [task] and self.raw.pop_completed_store_tasks() == {}
        return done[task]

    def lookup(self, keys: list[ObjectKey], sizes: dict[int, int] | None = None) -> list[int]:
        layouts = {g: MemoryLayoutDesc([torch.Size([n // 2])], [torch.bfloat16]) for g, n in (sizes or {}).items()}
        task = self.raw.submit_lookup_and_lock_task(keys, layouts)
        _await(self.raw.get_lookup_and_lock_event_fd())
        bits = self.raw.query_lookup_and_lock_result(task)
        assert bits is not None and len(bits) == len(keys)
        assert self.raw.query_lookup_and_lock_result(task) is None
        return [int(i) for i in bits.get_indices_list()]

    def load(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> list[int]:
        task = self.raw.submit_load_task(keys, objects)
        _await(self.raw.get_load_event_fd())
        bits = self.raw.query_load_result(task)
        assert bits is not None and self.raw.query_load_result(task) is None
        return [int(i) for i in bits.get_indices_list()]


class Listener(L2AdapterListener):
    def __init__(self) -> None:
        self.stored: list[tuple[ObjectKey, int]] = []
        self.accessed: list[ObjectKey] = []
        self.deleted: list[ObjectKey] = []

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.stored += zip(keys, sizes, strict=True)

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        self.deleted += keys


def _await(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(1000 * DEADLINE), "the adapter did not signal"
    consume_fd(fd)


def key(n: int, group: int = 0, **fields: Any) -> ObjectKey:
    rank = fields.pop("kv_rank", ObjectKey.ComputeKVRank(1, 0, 1, 0))
    return ObjectKey(n.to_bytes(32, "big"), "org/model", rank, group, **fields)


def objects(count: int, size: int, content: bool = True) -> list[MemoryObj]:
    made: list[MemoryObj] = []
    for _ in range(count):
        made.append(tensor(torch.randint(0, 256, (size,), dtype=torch.uint8) if content else torch.zeros(size, dtype=torch.uint8)))
    return made


def tensor(raw: torch.Tensor) -> MemoryObj:
    size = raw.numel()
    meta = MemoryObjMetadata(
        shape=torch.Size([size]), dtype=torch.uint8, address=0, phy_size=size, ref_count=1, fmt=MemoryFormat.BINARY
    )
    return TensorMemoryObj(raw_data=raw, metadata=meta, parent_allocator=None)


def content(objs: list[MemoryObj]) -> list[bytes]:
    return [bytes(o.byte_array) for o in objs]


def test_sizes_groups_ranks_and_salts(host: Host) -> None:
    a = Adapter(host.socket, tenants={"team": 7})
    ranks = [ObjectKey.ComputeKVRank(2, r, 2, r) for r in (0, 1)]
    small = [key(n, kv_rank=r) for r in ranks for n in range(3)]
    large = [key(n, 1, kv_rank=ranks[0]) for n in range(2)]
    salted = [key(0, kv_rank=ranks[0], cache_salt=s) for s in ("team", "other")]
    keys = small + large + salted
    objs = objects(6, SMALL) + objects(2, LARGE) + objects(2, SMALL)
    result = a.store(keys, objs)
    assert result.is_successful() and result.bytes_transferred() == 8 * SMALL + 2 * LARGE
    assert a.store(keys, objs).bytes_transferred() == 0  # there already
    assert sorted(size for _, size in a.heard.stored) == [SMALL] * 8 + [LARGE] * 2
    assert a.raw.get_usage().total_bytes_used == 8 * SMALL + 2 * LARGE
    assert dict(a.raw.get_usage().bytes_by_cache_salt) == {"": 6 * SMALL + 2 * LARGE, "team": SMALL, "other": SMALL}

    absent = [key(0, kv_rank=ranks[0], cache_salt="third"), key(9, kv_rank=ranks[1]), key(0, 1, kv_rank=ranks[1])]
    asked = [absent[0], *keys, *absent[1:]]
    assert a.lookup(asked) == list(range(1, 1 + len(keys)))
    to = objects(6, SMALL, False) + objects(2, LARGE, False) + objects(2, SMALL, False)
    assert a.load(keys, to) == list(range(len(keys)))
    assert content(to) == content(objs)
    a.raw.submit_unlock(keys)
    assert a.heard.accessed == keys
    assert a.raw.report_status()["locks"] == 0
    a.raw.close()


def test_another_server_finds_what_one_has_stored(host: Host) -> None:
    a = Adapter(host.socket)
    keys, objs = [key(n) for n in range(4)], objects(4, SMALL)
    assert a.store(keys, objs).is_successful()
    a.raw.close()
    host.stop()
    host.start()
    b = Adapter(host.socket)
    wait_for("what the host's scan finds", lambda: b.lookup([*keys, key(7)], {0: SMALL}) == [0, 1, 2, 3])
    assert b.lookup(keys, {0: 2 * SMALL}) == []  # another layout's objects are other objects
    to = objects(4, SMALL, False)
    b.raw.submit_unlock(keys[2:])
    assert b.load(keys[:2], to[:2]) == [0, 1]
    b.raw.submit_unlock(keys[:2])
    assert b.load(keys[2:], to[2:]) == [0, 1]  # not locked any more, there all the same
    assert content(to) == content(objs)
    names = [e.key.chunk_hash_hex for e in b.raw.list_l2_keys("org/model", page_size=3).entries]
    page = b.raw.list_l2_keys("org/model", page_size=3, cursor=b.raw.list_l2_keys(page_size=3).next_page_token)
    assert names + [e.key.chunk_hash_hex for e in page.entries] == [k.chunk_hash.hex() for k in keys]
    assert page.next_page_token is None and b.raw.list_l2_keys("another").entries == ()
    b.raw.close()


def test_bf16_is_compressed_as_such(compressing: Host) -> None:
    host = compressing
    a = Adapter(host.socket)
    made: list[MemoryObj] = []
    values = torch.randn(4, LARGE // 2).to(torch.bfloat16)
    for row in values:
        meta = MemoryObjMetadata(
            shape=row.shape, dtype=torch.bfloat16, address=0, phy_size=LARGE, ref_count=1, fmt=MemoryFormat.KV_2LTD,
            shapes=[row.shape], dtypes=[torch.bfloat16],
        )  # fmt: skip
        made.append(TensorMemoryObj(raw_data=row.view(torch.uint8), metadata=meta, parent_allocator=None))
    opaque = objects(4, LARGE)
    for o, row in zip(opaque, values, strict=True):
        o.raw_data.copy_(row.view(torch.uint8))  # the same values, of which nobody says what they are
    taken = []
    for group, objs in enumerate((made, opaque)):
        before = sum(p.stat().st_size for p in host.files())
        keys = [key(n, group) for n in range(4)]
        assert a.store(keys, objs).is_successful()
        taken.append(sum(p.stat().st_size for p in host.files()) - before)
        to = objects(4, LARGE, False)
        assert a.lookup(keys, {group: LARGE}) == [0, 1, 2, 3]  # they stay one kind, whatever the layouts say
        assert a.load(keys, to) == [0, 1, 2, 3]
        assert content(to) == content(made)
    assert taken[0] < 4 * LARGE / 1.35 and taken[0] * 1.1 < taken[1] < 4 * LARGE
    a.raw.close()


def test_a_damaged_file_costs_its_object_only(host: Host) -> None:
    a = Adapter(host.socket)
    keys, objs = [key(n) for n in range(3)], objects(3, LARGE)
    a.store(keys, objs)
    damaged = host.files()[0]
    with damaged.open("r+b") as f:
        f.seek(damaged.stat().st_size // 2)
        was = f.read(64)
        f.seek(-64, os.SEEK_CUR)
        f.write(bytes(255 - b for b in was))
    assert a.lookup(keys) == [0, 1, 2]
    to = objects(3, LARGE, False)
    good = a.load(keys, to)
    assert len(good) == 2
    assert [content(to)[i] for i in good] == [content(objs)[i] for i in good]
    assert a.lookup(keys) == good
    (lost,) = set(range(3)) - set(good)
    assert a.heard.deleted == [keys[lost]]
    assert len(a.raw.list_l2_keys().entries) == 2
    assert a.raw.get_usage().total_bytes_used == 2 * LARGE
    assert a.store([keys[lost]], [objs[lost]]).is_successful()
    assert a.load([keys[lost]], to[:1]) == [0] and content(to)[0] == content(objs)[lost]
    a.raw.close()


def test_a_host_that_dies_costs_hits_only(host: Host) -> None:
    a = Adapter(host.socket)
    keys, objs = [key(n) for n in range(4)], objects(4, SMALL)
    assert a.store(keys, objs).is_successful()
    assert a.lookup(keys) == [0, 1, 2, 3]
    host.kill()
    to = objects(4, SMALL, False)
    assert a.load(keys, to) == []
    a.raw.submit_unlock(keys)
    assert a.lookup(keys) == []
    assert not a.store(keys, objs).is_successful()
    assert a.raw.report_status()["is_healthy"] is False
    assert a.heard.deleted == []  # missed, not gone: nobody has said so
    host.start()
    wait_for("hits", lambda: a.lookup(keys) == [0, 1, 2, 3])
    assert a.load(keys, to) == [0, 1, 2, 3] and content(to) == content(objs)
    status = a.raw.report_status()
    assert (status["is_healthy"], status["connected"], status["losses"]) == (True, True, 1)
    a.raw.close()


def test_loads_in_the_queue_fail_while_one_waits_for_a_stopped_host(host: Host) -> None:
    """The memory of a load that has begun is the host's until it goes on. The others have not begun."""
    shared = SharedMemory(create=True, size=4 * SMALL)
    memory = torch.frombuffer(shared.buf, dtype=torch.uint8)
    config = KvhostL2AdapterConfig.from_dict({"socket": host.socket, "threads": 1})
    a = KvhostL2Adapter(config, L1MemoryDesc(memory.data_ptr(), 4 * SMALL, 4096))
    keys, objs = [key(n) for n in range(4)], [tensor(memory[n * SMALL : (n + 1) * SMALL]) for n in range(4)]
    a.submit_store_task(keys, objs)
    _await(a.get_store_event_fd())
    a.submit_lookup_and_lock_task(keys, {})
    _await(a.get_lookup_and_lock_event_fd())
    host.hang()
    waits, *others = [a.submit_load_task([k], [o]) for k, o in zip(keys, objs, strict=True)]
    answered: set[int] = set()
    while answered != set(others):
        _await(a.get_load_event_fd())
        answered |= {task for task in others if (bits := a.query_load_result(task)) is not None and not bits.popcount()}
    others.append(a.submit_load_task(keys[:1], objs[:1]))
    _await(a.get_load_event_fd())
    assert a.query_load_result(others[-1]) is not None, "want a load that comes later to fail, too"
    assert host.hangs() and a.query_load_result(waits) is None, "want the one load to wait, and the others answered"
    host.resume()
    _await(a.get_load_event_fd())
    assert a.query_load_result(waits) is not None
    a.close()
    del memory, objs
    shared.close()
    shared.unlink()


def test_deleted_objects_are_gone(host: Host) -> None:
    a = Adapter(host.socket, tenants={"team": 7})
    keys = [key(n) for n in range(3)] + [key(9, 1), key(1, cache_salt="team")]
    objs = objects(3, SMALL) + objects(1, LARGE) + objects(1, SMALL)
    a.store(keys, objs)
    assert a.lookup(keys[:1]) == [0]
    a.raw.delete([*keys[:2], keys[3], keys[4], key(5), key(5, 2)])
    assert a.heard.deleted == [keys[1], keys[3], keys[4]]  # the first one is locked
    assert [e.key.to_object_key() for e in a.raw.list_l2_keys().entries] == [keys[0], keys[2]]
    assert a.raw.get_usage().total_bytes_used == 2 * SMALL
    assert a.lookup(keys) == [0, 2]
    a.raw.submit_unlock(keys[:1])
    a.raw.submit_unlock([keys[0], keys[2]])
    a.raw.delete(keys[:1])
    assert a.lookup(keys) == [2] and a.load([keys[2]], objects(1, SMALL, False)) == [0]
    assert a.store(keys, objs).is_successful()
    host.kill()
    a.raw.delete(keys)  # LMCache's eviction would not survive an error
    assert len(a.heard.deleted) == 4
    a.raw.close()


def test_policies_hear_of_what_l1_has(tmp_path: Path) -> None:
    host = Host(tmp_path, "16MiB", "--policy", "lru.wasm")
    host.start()
    try:
        a = Adapter(host.socket)
        keys = [key(n) for n in range(6)]
        for k in keys[:4]:
            assert a.store([k], objects(1, LARGE)).is_successful()
        a.raw.submit_touch([keys[0], key(9)])
        wait_for("the host has heard of it", lambda: a.raw._toucher.submit(lambda: True).result())
        for k in keys[4:]:
            assert a.store([k], objects(1, LARGE)).is_successful()
        there = a.lookup(keys)
        assert 0 in there and 1 not in there, f"{there} are there, want the used one and not the next oldest"
        assert a.heard.accessed == [keys[0], key(9)]
        host.kill()
        a.raw.submit_touch(keys)  # which nothing waits for
        a.raw.close()
    finally:
        host.stop()


@pytest.mark.parametrize(
    ("params", "want"),
    [
        ({}, ("storage", "local")), ({"shared": True}, ("storage", "remote")), ({"socket": "", "root": "/nowhere"}, ("storage", "local")),
        ({"socket": "", "root": "s3://bucket/kv"}, ("storage", "remote")), ({"socket": "", "memory": "1GiB"}, ("dram", "local")),
    ],
)
def test_where_objects_are(params: dict[str, Any], want: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words of LMCache 0.5.7."""
    if not hasattr(api, "MemoryTags"):
        for name, values in (("MemorySegment", ("DRAM", "STORAGE")), ("MemoryResidency", ("LOCAL", "REMOTE"))):
            monkeypatch.setattr(api, name, Record(**{v: Record(value=v.lower()) for v in values}), raising=False)
        monkeypatch.setattr(api, "MemoryTags", lambda segment, residency: Record(segment=segment, residency=residency), raising=False)
    said = {name: value for name, value in {"socket": "/nowhere", **params}.items() if value != ""}
    adapter = KvhostL2Adapter(KvhostL2AdapterConfig.from_dict(said))
    tags = adapter.get_memory_tags()
    assert (tags.segment.value, tags.residency.value) == want
    adapter.close()


def test_a_server_starts_before_its_host(tmp_path: Path) -> None:
    h = Host(tmp_path)
    a = Adapter(h.socket)
    keys, objs = [key(0)], objects(1, SMALL)
    assert a.lookup(keys, {0: SMALL}) == [] and not a.store(keys, objs).is_successful()
    h.start()
    wait_for("a store", lambda: bool(a.store(keys, objs).is_successful()))
    a.raw.close()
    h.stop()


@pytest.mark.parametrize(
    "params, error",
    [
        ({"sockte": "/s"}, "adapter_params.sockte: unknown"),
        ({"socket": ""}, "adapter_params.socket"),
        ({"arena_bytes": "1GiB"}, "adapter_params.arena_bytes"),
        ({"timeout": 0}, "adapter_params.timeout"),
        ({"tenants": {"a": -1}}, "adapter_params.tenants"),
    ],
)
def test_wrong_parameters_are_named(params: dict[str, object], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Adapter(**{"socket": "/none", **params})  # type: ignore[arg-type]


def plugin(host: Host) -> str:
    return json.dumps({
        "type": "plugin", "module_path": "kvhost.lmcache", "class_name": "KvhostL2Adapter",
        "adapter_params": {"socket": host.socket},
    })


def test_basic_check(host: Host) -> None:
    command = [
        sys.executable, "-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter", "--l2-adapter", plugin(host),
        "--num-keys", "7", "--kv-dtype", "bfloat16",
    ]  # fmt: skip
    done = subprocess.run(command, env=lmcache_env(), capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"Validation.*: (\d)/7", done.stdout) == ["7"] * 4, done.stdout


def test_bench_l2(host: Host) -> None:
    command = [
        lmcache(), "bench", "l2", "--l2-adapter", plugin(host), "--no-skip-verify", "--num-keys", "8", "--in-flight", "4",
        "--data-size-kb", "1024", "--rounds", "3", "--lookup-max-hit-rate", "0.5",
    ]  # fmt: skip
    done = subprocess.run(command, env=lmcache_env(), capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 32 keys data verified OK" in done.stdout
    found = re.findall(r"\[(Store|Load)\] Round \d: .*(?:success_keys|loaded)=(\d+)/32", done.stdout)
    assert found == [("Store", "32")] * 4 + [("Load", "32")] * 4, done.stdout


@pytest.mark.parametrize("shared", [False, True], ids=["copied", "in place"])
def test_chunks_outlive_lmcache(host: Host, tmp_path: Path, shared: bool) -> None:
    """With an L1 in shared memory no chunk goes through the arena: it has no room for one."""
    ports = free_ports()
    options: dict[str, Any] = {"shm_name": f"kvhost-test-{ports[0]}", "arena_bytes": 4096} if shared else {}
    server = LMCacheServer(tmp_path, ports, socket=host.socket, **options)
    server.start()
    try:
        _outlive(host, server, both=not shared)
        assert f'"l1_is_shared":{str(shared).lower()}' in server.get("/status")
    finally:
        server.stop()


def test_a_server_starts_its_own_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One setting, and no host before: chunks are found again after a kill of LMCache and of its host."""
    with own_host(tmp_path / "kv") as (env, kill_host):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        server = LMCacheServer(tmp_path, free_ports(), root=f"{tmp_path}/kv=1GiB")
        digests = []
        for life, found in enumerate(("0/2", "2/2")):
            server.start()
            try:
                said = server.bench()
                digests.append({name: value for name, value in said.items() if name.endswith("warm digest")})
                assert {said[f"seq {i}/cold"] for i in (0, 1)} == {found}, f"life {life}"
                assert server.output().count("has started a host of its own") == life + 1
                wait_for("the chunks are in the host", lambda: len(_listed(server)) == 4)
            finally:
                server.stop(signal.SIGKILL)
            kill_host()
        assert len(digests[0]) == 2 and digests[0] == digests[1]


def _listed(server: LMCacheServer, most: int = 500) -> list[Any]:
    entries: list[Any] = json.loads(server.get(f"/cache/objects?page_size={most}"))["entries"]
    return entries


def _delete(host: Host, server: LMCacheServer) -> None:
    """Deletes all that LMCache lists, page by page."""
    pieces = host.files()
    while entries := _listed(server, 3):
        reply = json.loads(server.delete("/cache/objects", {"tier": "all", "keys": [e["key"] for e in entries]}))
        assert reply["ok"] and reply["skipped"] == 0
    assert len(host.files()) <= len(pieces) - 4


def _outlive(host: Host, server: LMCacheServer, both: bool) -> None:
    cold = server.bench()
    assert {cold[f"seq {i}/cold"] for i in (0, 1)} == {"0/2"}
    digests = {name: value for name, value in cold.items() if name.endswith("warm digest")}
    assert len(set(digests.values())) == 2
    wait_for("the chunks are in the host", lambda: len(_listed(server)) == 4)  # LMCache stores them behind the bench

    def again(what: str, lookups: set[str]) -> None:
        said = server.bench()
        assert {said[f"seq {i}/cold"] for i in (0, 1)} == lookups, what
        assert {name: said[name] for name in digests} == digests, what

    server.stop()
    server.start()
    again("after LMCache's restart", {"2/2"})
    if not both:
        _delete(host, server)
        assert {server.bench(1)["seq 0/cold"]} == {"0/2"}
        return

    server.stop()
    host.stop()
    host.start()
    server.start()
    again("after both restarts", {"2/2"})

    host.kill()
    again("without a host, computed", {"0/2"})
    assert '"gone":true' in server.get("/status")

    server.stop()
    host.start()
    server.start()
    again("after the host was killed", {"2/2"})
    assert '"connected":true' in server.get("/status")
