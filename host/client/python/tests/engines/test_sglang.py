"""SGLang's hierarchical cache with kvhost behind it: its own host pools, backend factory, cache controller and failure
injector. Nothing of it needs a GPU; the model that would fill the pools is left out."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import needs
from processes import Host, wait_for

needs("sglang")

import torch  # noqa: E402
from sglang.srt.managers.cache_controller import (  # noqa: E402
    HiCacheController,
    PrefetchOperation,
    StorageOperation,
)
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    HiCacheStorageFailureInjector,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402

PAGE, LAYERS, HEADS, DIM, SLOTS = 16, 3, 2, 32, 1024


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    h = Host(tmp_path)
    h.start()
    yield h
    h.stop()


@pytest.fixture
def compressing(tmp_path: Path) -> Iterator[Host]:
    h = Host(tmp_path, "1GiB", "--store-compression", "huffman")
    h.start()
    yield h
    h.stop()


def host_pool(layout: str = "page_first", allocator: str = "default", layers: int = LAYERS) -> Any:
    """SGLang's host pool of a device pool that nobody uses."""
    k, v = ([torch.zeros(PAGE, HEADS, DIM, dtype=torch.bfloat16) for _ in range(layers)] for _ in "kv")
    pointers = [torch.tensor([t.data_ptr() for t in b], dtype=torch.uint64) for b in (k, v)]
    buffers = KVBuffers(
        k=tuple(k), v=tuple(v), k_data_ptrs=pointers[0], v_data_ptrs=pointers[1], layout=KVBufferLayout.NHD
    )
    info = MHABufferInfo(
        buffers=buffers, page_size=PAGE, head_num=HEADS, head_dim=DIM, v_head_dim=DIM, dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )  # fmt: skip
    return MHATokenToKVPoolHost(
        info, 1.0, 0, PAGE, layout, pin_memory=False, allocator_type=allocator, device_capacity_tokens=PAGE,
        start_layer=0, end_layer=layers, host_token_capacity=SLOTS,
    )  # fmt: skip


class Server:
    """One rank of a server: SGLang's controller, without the threads and the device, over the backend that its factory
    makes of the flags."""

    def __init__(
        self,
        socket: str,
        pool: Any = None,
        *,
        in_place: bool = True,
        arena_bytes: int = 4 << 20,
        timeout: float = 30,
        **config: Any,
    ) -> None:
        self.pool = host_pool() if pool is None else pool
        extra = {
            "backend_name": "kvhost", "module_path": "kvhost.sglang", "class_name": "KvhostStorage",
            "interface_v1": int(in_place), "kvhost": {"socket": socket, "arena_bytes": arena_bytes, "timeout": timeout},
        }  # fmt: skip
        fields = {
            "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
            "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True,
            "model_name": "org/model", "extra_config": extra, **config,
        }  # fmt: skip
        self.storage = StorageBackendFactory.create_backend("dynamic", HiCacheStorageConfig(**fields), self.pool)
        self.storage.register_mem_pool_host(self.pool)
        self.storage.on_host_pools_registered()
        c = self.controller = object.__new__(HiCacheController)
        c.storage_backend, c.storage_host_pool, c.mem_pool_host, c.page_size = self.storage, self.pool, self.pool, PAGE
        c.prefetch_sync_queue = queue.Queue()
        c.page_get_func = c._page_get_zero_copy if in_place else c._generic_page_get
        c.page_set_func = c._page_set_zero_copy if in_place else c._generic_page_set

    def slots(self, pages: int, first: int = 0) -> torch.Tensor:
        return torch.arange(first * PAGE, (first + pages) * PAGE)

    def fill(self, pages: int, first: int = 0) -> list[bytes]:
        """Random pages."""
        for i in range(first, first + pages):
            flat = self.pool.get_dummy_flat_data_page()
            self.pool.set_from_flat_data_page(i * PAGE, torch.randn(flat.numel()).to(flat.dtype))
        return self.content(pages, first)

    def content(self, pages: int, first: int = 0) -> list[bytes]:
        flat = [self.pool.get_data_page(i * PAGE, flat=True) for i in range(first, first + pages)]
        return [bytes(p.contiguous().view(torch.uint8).numpy()) for p in flat]

    def write(self, hashes: list[str], first: int = 0, prefix: list[str] | None = None) -> int:
        """Backs pages up; returns how many tokens SGLang takes for stored."""
        operation = StorageOperation(self.slots(len(hashes), first), [], hash_value=hashes, prefix_keys=prefix)
        self.controller._page_backup(operation)
        return int(operation.completed_tokens)

    def found(self, tokens: list[int]) -> list[str]:
        """The hashes of the pages of a prompt that are there."""
        operation = PrefetchOperation("r", tokens, None, None)
        return list(self.controller._storage_hit_query(operation)[0])

    def read(self, hashes: list[str], first: int = 0) -> int:
        """Prefetches pages; returns how many SGLang takes for loaded."""
        operation = PrefetchOperation("r", [], None, None)
        operation.hash_value, operation.host_indices = hashes, self.slots(len(hashes), first)
        return int(self.controller._page_transfer(operation))

    def close(self) -> None:
        self.storage.close()


def hashes(n: int) -> list[str]:
    return [os.urandom(32).hex() for _ in range(n)]


def prompt(pages: int) -> list[int]:
    return [int.from_bytes(os.urandom(2), "big") for _ in range(pages * PAGE)]


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("allocator", ["default", "shm"])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_a_prompt_outlives_both_servers(host: Host, layout: str, allocator: str, in_place: bool) -> None:
    tokens = prompt(9)
    names = list(get_storage_hash_str(tokens, None, page_size=PAGE))
    # A pool in shared memory needs no arena: this one has no room for a page.
    arena_bytes = 4096 if allocator == "shm" and in_place else 4 << 20
    first = Server(host.socket, host_pool(layout, allocator), in_place=in_place, arena_bytes=arena_bytes)
    assert first.found(tokens) == []
    want = first.fill(7)
    assert first.write(names[:4]) == 4 * PAGE
    assert first.write(names[4:7], first=4, prefix=names[:4]) == 3 * PAGE
    assert first.found(tokens) == names[:7]
    first.close()
    host.stop()
    host.start()
    second = Server(host.socket, host_pool(layout, allocator), in_place=in_place, arena_bytes=arena_bytes)
    wait_for("what the host's scan finds", lambda: second.found(tokens) == names[:7])
    second.fill(7, first=20)
    assert second.read(names[:7], first=20) == 7
    assert second.content(7, first=20) == want
    assert second.read(names[5:9], first=40) == 2  # SGLang stops at the first that is missing
    assert second.content(2, first=40) == want[5:7]
    second.close()


def test_bf16_is_compressed_as_such(compressing: Host) -> None:
    host = compressing
    server = Server(host.socket, host_pool(layers=64))
    pages = server.fill(8)
    hashes = [str(n) for n in range(8)]
    assert server.write(hashes) == 8 * PAGE
    wait_for("the stores", host.idle)
    raw = sum(map(len, pages))
    assert 0 < sum(p.stat().st_size for p in host.files()) < raw / 1.3
    server.storage.close()


def test_each_page_has_its_own_verdict(host: Host) -> None:
    s = Server(host.socket)
    names, want = hashes(6), s.fill(6)
    assert s.storage.batch_set_v1(names, s.slots(6)) == [True] * 6
    damaged = host.files()[0]
    with damaged.open("r+b") as f:
        f.seek(-64, os.SEEK_END)
        was = f.read(64)
        f.seek(-64, os.SEEK_END)
        f.write(bytes(255 - b for b in was))
    s.fill(7, first=10)
    asked = [*names[:3], hashes(1)[0], *names[3:]]
    ok = s.storage.batch_get_v1(asked, s.slots(7, first=10))
    assert ok[3] is False and ok.count(True) == 5
    got = s.content(7, first=10)
    assert all(got[i] == want[names.index(name)] for i, name in enumerate(asked) if ok[i])
    lost = next(i for i, name in enumerate(names) if not ok[asked.index(name)])
    assert s.storage.batch_exists(names) == lost
    assert s.storage.batch_set_v1(names, s.slots(6)) == [True] * 6
    assert s.storage.batch_exists(names) == 6
    s.close()


def test_a_host_that_dies_costs_hits_only(host: Host) -> None:
    s = Server(host.socket)
    names, want = hashes(3), s.fill(3)
    assert s.write(names) == 3 * PAGE
    assert s.storage.batch_exists(names) == 3
    host.kill()
    assert s.read(names, first=9) == 0
    assert s.storage.batch_exists(names) == 0
    assert s.write(hashes(3)) == 0
    assert s.storage.get_status()["gone"] is True
    host.start()
    wait_for("hits", lambda: int(s.storage.batch_exists(names)) == 3)
    assert s.read(names, first=9) == 3 and s.content(3, first=9) == want
    s.close()


def test_a_host_that_hangs_has_the_pool_until_it_answers(host: Host) -> None:
    """Pages in place are not SGLang's again while the host may still write to them."""
    s = Server(host.socket, host_pool(allocator="shm"), timeout=0.5)
    names, want = hashes(4), s.fill(4)
    assert s.write(names) == 4 * PAGE
    host.hang()
    loaded: list[int] = []
    load = threading.Thread(target=lambda: loaded.append(s.read(names, first=9)))
    load.start()
    load.join(3)
    assert load.is_alive()
    host.resume()
    load.join(60)
    assert loaded == [0]
    wait_for("hits", lambda: int(s.storage.batch_exists(names)) == 4)
    assert s.read(names, first=9) == 4 and s.content(4, first=9) == want
    s.close()


def test_ranks_share_pages_only_where_they_hold_the_same(host: Host) -> None:
    names = hashes(2)
    for mla in (False, True):
        ranks = [Server(host.socket, tp_rank=r, tp_size=2, is_mla_model=mla, model_name=f"m{mla}") for r in (0, 1)]
        ranks[0].fill(2)
        assert ranks[0].write(names) == 2 * PAGE
        assert ranks[1].storage.batch_exists(names) == (2 if mla else 0)
        for r in ranks:
            r.close()
    for other in (
        {"pp_size": 2, "pp_rank": 1, "model_name": "mTrue", "is_mla_model": True},
        {"attn_cp_size": 2, "attn_cp_rank": 1, "model_name": "mTrue", "is_mla_model": True},
        {"model_name": "mFalse", "tp_size": 4},
        {"model_name": "another"},
    ):
        s = Server(host.socket, **other)
        assert s.storage.batch_exists(names) == 0, other
        s.close()


def test_several_pools(host: Host) -> None:
    s = Server(host.socket)
    side = host_pool(layers=1)
    s.storage.register_mem_host_pool_v2(side, PoolName.SWA)
    names = hashes(5)
    s.fill(5)
    assert s.write(names) == 5 * PAGE

    def transfer(keys: list[str], first: int, policy: Any) -> PoolTransfer:
        return PoolTransfer(PoolName.SWA, host_indices=s.slots(len(keys), first), keys=keys, hit_policy=policy)

    for i in range(5):
        side.set_from_flat_data_page(i * PAGE, torch.full_like(side.get_dummy_flat_data_page(), float(i)))
    there = [names[0], names[2], names[3]]
    extra = HiCacheStorageExtraInfo(prefix_keys=[])
    written = s.storage.batch_set_v2([transfer(there, 0, PoolHitPolicy.ALL_PAGES)], extra)
    assert written == {PoolName.SWA: [True] * 3}
    every = s.storage.batch_exists_v2(names, [transfer(names, 0, PoolHitPolicy.ALL_PAGES)])
    assert (every.kv_hit_pages, every.restorable_prefix_pages) == (1, [1])
    assert every.extra_pool_hit_pages == {PoolName.KV: 5, PoolName.SWA: 1}
    last = s.storage.batch_exists_v2(names, [transfer(names[:2], 0, PoolHitPolicy.TRAILING_PAGES)])
    assert (last.kv_hit_pages, last.restorable_prefix_pages) == (4, [1, 4])
    with pytest.raises(ValueError, match="not supported"):
        s.storage.batch_exists_v2(names, [transfer(names, 0, PoolHitPolicy.BLOCK_GROUPS)])
    read = s.storage.batch_get_v2([transfer([names[3], names[1], names[2]], 20, PoolHitPolicy.ALL_PAGES)])
    assert read == {PoolName.SWA: [True, False, True]}
    assert [float(side.get_data_page((20 + i) * PAGE)[0]) for i in (0, 2)] == [2.0, 1.0]
    unknown = PoolTransfer(PoolName.MAMBA, host_indices=s.slots(1), keys=names[:1])
    assert s.storage.batch_get_v2([unknown]) == {PoolName.MAMBA: [False]}
    assert s.storage.batch_get_v2([PoolTransfer(PoolName.SWA, keys=names[:1])]) == {PoolName.SWA: [False]}
    s.close()


def test_tensors_one_by_one(host: Host) -> None:
    s = Server(host.socket, in_place=False)
    (name, other), page = hashes(2), torch.randn(s.pool.get_dummy_flat_data_page().numel()).to(torch.bfloat16)
    assert not s.storage.exists(name) and s.storage.get(name, torch.zeros_like(page)) is None
    assert s.storage.set(name, page) and s.storage.exists(name)
    target = torch.zeros_like(page)
    assert s.storage.get(name, target) is target and torch.equal(target, page)
    got = s.storage.batch_get([other, name], [torch.zeros_like(page), torch.zeros_like(page)])
    assert got[0] is None and torch.equal(got[1], page)
    assert s.storage.get(name) is None and not s.storage.set(other)
    assert not s.storage.set(other, page[:-1])  # none of the pool's pages
    s.storage.clear()
    assert s.storage.exists(name)
    s.close()


def test_under_sglangs_failure_injector(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang takes for loaded is right, whatever else fails."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.002")
    s = Server(host.socket)
    assert isinstance(s.storage, HiCacheStorageFailureInjector)
    stored: dict[str, bytes] = {}
    outcomes = set()
    for _ in range(40):
        names, want = hashes(4), s.fill(4)
        if s.write(names) == 4 * PAGE:
            stored.update(zip(names, want))
        asked = list(stored)[-6:]
        s.fill(6, first=30)
        n = s.read(asked, first=30)
        assert s.content(n, first=30) == [stored[name] for name in asked[:n]]
        outcomes.add(n == len(asked) > 0)
    assert outcomes == {True, False} and len(stored) > 40
    s.close()


@pytest.mark.parametrize(
    "config, error",
    [
        ({"extra_config": {"kvhost": {"sockte": "/s"}}}, "extra_config.kvhost.sockte: unknown"),
        ({"extra_config": {"kvhost": {"tenant": -1}}}, "extra_config.kvhost.tenant"),
        ({"should_split_heads": True}, "tp_lcm_size"),
    ],
)
def test_wrong_configuration_is_named(config: dict[str, Any], error: str) -> None:
    names = {"backend_name": "kvhost", "module_path": "kvhost.sglang", "class_name": "KvhostStorage"}
    config["extra_config"] = {**names, **config.get("extra_config", {})}
    with pytest.raises(ValueError, match=error):
        Server("/none", **config)


def test_a_layout_without_buffers_is_refused_by_name() -> None:
    pool = host_pool()
    pool.layout = "page_unified"
    with pytest.raises(ValueError, match="'page_unified' has no page buffers"):
        Server("/none", pool)
