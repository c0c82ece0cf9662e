"""SGLang's hierarchical cache with kvhost behind it: its own host pools, backend factory, cache controller and failure
injector. Nothing of it needs a GPU; the model that would fill the pools is left out."""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from array import array
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace as Record
from typing import Any
from unittest.mock import MagicMock

import pytest
import vllm_model as model
from needs import needs
from processes import Host, own_host, wait_for

needs("sglang")

import torch  # noqa: E402
from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.lora.lora_manager import LoRAManager  # noqa: E402
from sglang.srt.lora.lora_registry import LoRARef  # noqa: E402
from sglang.srt.managers.cache_controller import (  # noqa: E402
    HiCacheController,
    PrefetchOperation,
    StorageOperation,
)
from sglang.srt.managers.schedule_batch import Req  # noqa: E402
from sglang.srt.managers.scheduler import Scheduler  # noqa: E402
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.buffer_mode.storage_existence_cache import StorageExistenceCache, default_belief_policy  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
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
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.srt.runtime_context import get_context  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from kvhost import content  # noqa: E402
from kvhost.sglang import identity, plugin  # noqa: E402

PAGE, LAYERS, HEADS, DIM, SLOTS = 16, 3, 2, 32, 1024

plugin.register()  # as SGLang's load_plugins does
HookRegistry.apply_hooks()


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test's servers were started with it."""
    restart(monkeypatch)


def restart(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Servers from here on are another process, with SGLang's options."""
    monkeypatch.setattr(plugin, "generation", plugin.Generation())
    monkeypatch.setattr(plugin, "_adapters", {})
    monkeypatch.setattr(get_context(), "_config_bags", None)
    monkeypatch.setattr(get_context(), "_server_args", None)
    if options:
        get_context().set_server_args(ServerArgs(**options))


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
        socket: str = "",
        pool: Any = None,
        *,
        root: str = "",
        in_place: bool = True,
        arena_bytes: int = 4 << 20,
        timeout: float = 30,
        **config: Any,
    ) -> None:
        self.pool = host_pool() if pool is None else pool
        where = {"root": root} if root else {"socket": socket}
        extra = {
            "backend_name": "kvhost", "module_path": "kvhost.sglang", "class_name": "KvhostStorage",
            "interface_v1": int(in_place), "kvhost": {**where, "arena_bytes": arena_bytes, "timeout": timeout},
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

    def found(self, tokens: list[int] | RadixKey) -> list[str]:
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


def test_ranks_start_their_own_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One setting, and no host before: pages are found again after a kill of the host, by the same servers and by others."""
    names = hashes(4)
    with own_host(tmp_path / "kv") as (env, kill_host):
        for name, value in env.items():
            monkeypatch.setenv(name, value)

        def ranks() -> list[Server]:
            return [Server(root=f"{tmp_path}/kv=1GiB", pool=host_pool(allocator="shm"), tp_rank=r, tp_size=2) for r in (0, 1)]

        first, want = ranks(), []
        for s in first:
            want.append(s.fill(4))
            assert s.write(names) == 4 * PAGE
        kill_host()
        wait_for("the loss is seen", lambda: first[0].storage.batch_exists(names) == 0)
        for again in (first, ranks()):
            for s, pages in zip(again, want):
                wait_for("hits", lambda: int(s.storage.batch_exists(names)) == 4)
                assert s.read(names, first=9) == 4 and s.content(4, first=9) == pages
                s.close()
            assert caplog.text.count("has started a host of its own") == 2


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


def test_an_evicted_page_costs_one_computation(host: Host) -> None:
    """In its buffer mode SGLang writes no page that it believes to be stored, until its own lookup of a prompt finds less."""
    s, tokens = Server(host.socket), prompt(6)
    names = list(get_storage_hash_str(tokens, None, page_size=PAGE))
    s.fill(6)
    assert s.write(names) == 6 * PAGE
    beliefs = StorageExistenceCache().pool(PoolName.KV)
    beliefs.add(names)
    host.files()[0].write_bytes(b"")
    s.read(names, first=10)
    found = s.found(tokens)
    assert len(found) < 6 and beliefs.covered(names), "want a page lost that SGLang takes for stored"
    default_belief_policy(PoolHitPolicy.ALL_PAGES).heal_from_query(beliefs, names, names, len(found), evidence=True)
    again = [n for n in names if not beliefs.covered([n])]
    assert again == names[len(found) :], "want all of them written by the request that computes them"
    assert s.write(again, first=len(found), prefix=found) == len(again) * PAGE
    assert s.found(tokens) == names
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


@pytest.mark.parametrize("allocator", ["shm", "default"])
def test_a_store_is_taken_back_from_a_host_that_hangs(host: Host, allocator: str) -> None:
    """Its pages are SGLang's again while the host is stopped, and what the host reads of them later is not found."""
    s = Server(host.socket, host_pool(allocator=allocator))
    known, names = hashes(1), hashes(4)
    s.fill(1)
    assert s.write(known) == PAGE, "want a session with the host"
    s.fill(4)
    host.hang()
    assert s.write(names) == 0, "want no page stored, and an answer"
    assert host.hangs(), "want the answer while the host is stopped"
    assert s.storage.batch_exists(names) == 0 and s.write(names) == 0, "want no call to wait once the host is known to be gone"
    s.fill(4)
    host.resume()
    wait_for("hits", lambda: int(s.storage.batch_exists(known)) == 1)
    assert s.storage.batch_exists(names) == 0, "want nothing found that was taken back"
    s.close()


def test_ranks_share_pages_only_where_they_hold_the_same(host: Host, caplog: pytest.LogCaptureFixture) -> None:
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
    assert "failed" not in caplog.text, "pages are missed for another reason than their names"


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
    assert not s.storage.exists(name) and s.storage.get(name, target) is None
    s.close()


def radix_hashes(key: RadixKey) -> list[str]:
    """Under what SGLang's radix cache has a prompt's pages stored."""
    params = CacheInitParams(
        disable=False, req_to_token_pool=None, page_size=PAGE, tree_components=(ComponentType.FULL,),
        token_to_kv_pool_allocator=Record(device="cpu", get_kvcache=lambda: None), tree_core_backend="python",
    )  # fmt: skip
    cache = UnifiedRadixCache(params)
    cache.enable_storage = True
    cache.insert(InsertParams(key=key, value=torch.arange(len(key))))
    node = cache.match_prefix(MatchPrefixParams(key=key)).last_device_node
    return list(cache.tree_core.get_hash_values(node))


def test_tenants_with_other_salts_have_pages_of_their_own(host: Host) -> None:
    tokens, s = array("q", prompt(4)), Server(host.socket)
    for i, salt in enumerate([None, "a", "b"]):
        key = RadixKey(tokens, None, cache_salt=salt)
        assert s.found(key) == []
        s.fill(4, first=4 * i)
        assert s.write(radix_hashes(key), first=4 * i) == 4 * PAGE
        assert s.found(key) == radix_hashes(key)
    s.close()


def test_clear_hides_what_was_stored(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt(3)
    names = list(get_storage_hash_str(tokens, None, page_size=PAGE))
    cleared = Server(host.socket)
    restart(monkeypatch)
    other = Server(host.socket)
    old = cleared.fill(3)
    assert cleared.write(names) == 3 * PAGE and other.found(tokens) == names
    cleared.storage.clear()
    assert cleared.found(tokens) == [] and cleared.read(names, first=9) == 0
    assert other.found(tokens) == names
    new = cleared.fill(3)
    assert cleared.write(names) == 3 * PAGE and cleared.found(tokens) == names
    assert cleared.read(names, first=9) == 3 and cleared.content(3, first=9) == new
    assert other.read(names, first=9) == 3 and other.content(3, first=9) == old
    cleared.storage.clear()
    assert cleared.found(tokens) == []
    cleared.close()
    other.close()


def test_a_generation_is_of_one_server_and_of_all_its_ranks() -> None:
    code = "from kvhost.sglang.plugin import generation as g; g.next('clear'); print(g.name.hex())"
    server = f'"{sys.executable}" -c "{code}"; "{sys.executable}" -c "{code}"; true'
    ends = [subprocess.run(["sh", "-c", server], capture_output=True, text=True) for _ in range(2)]
    said = [e.stdout.split() for e in ends]
    assert [len(names) for names in said] == [2, 2], [e.stderr for e in ends]
    assert said[0][0] == said[0][1] != said[1][0] == said[1][1]


class Weights:
    """SGLang's own updates of weights and its flush, of a model that is not there."""

    def __init__(self) -> None:
        self.scheduler = MagicMock()
        self.scheduler.is_fully_idle.return_value = True
        self.updater: Any = object.__new__(SchedulerWeightUpdaterManager)
        runner = Record(weight_updater=MagicMock())
        runner.weight_updater.update_weights_from_disk.return_value = (True, "updated")
        self.updater.tp_worker = Record(weight_update_runners=lambda: [("target", runner)])
        self.updater.draft_worker = self.updater.metrics_collector = self.updater._session = None
        self.updater.flush_cache = self.flush
        self.updater.scheduler = MagicMock()

    def flush(self, empty_cache: bool = True) -> bool:
        return bool(Scheduler.flush_cache(self.scheduler, empty_cache))

    def update(self, *, idle: bool = True, flush: bool = True) -> bool:
        self.scheduler.is_fully_idle.return_value = idle
        request = Record(
            model_path="p", load_format=None, recapture_cuda_graph=False, weight_version=None, flush_cache=flush,
            torch_empty_cache=False,
        )  # fmt: skip
        done = bool(self.updater.update_weights_from_disk(request).success)
        self.scheduler.is_fully_idle.return_value = True
        return done


@pytest.mark.parametrize("way", ["flushed", "flushed later", "not flushed when busy"])
def test_new_weights_hide_what_the_old_ones_computed(host: Host, way: str) -> None:
    tokens, s, weights = prompt(3), Server(host.socket), Weights()
    names = list(get_storage_hash_str(tokens, None, page_size=PAGE))
    s.fill(3)
    assert s.write(names) == 3 * PAGE and s.found(tokens) == names
    assert weights.flush() and s.found(tokens) == names  # the weights are the same
    busy = way == "not flushed when busy"
    assert weights.update(idle=not busy, flush=way != "flushed later") != busy
    if way != "flushed":
        # SGLang still has pages of the old weights, which look like those of the new.
        assert s.found(tokens) == [] and s.read(names, first=9) == 0 and s.write(names) == 0
        assert weights.flush()
    assert s.found(tokens) == [] and s.read(names, first=9) == 0
    new = s.fill(3)
    assert s.write(names) == 3 * PAGE and s.found(tokens) == names
    assert s.read(names, first=9) == 3 and s.content(3, first=9) == new
    s.close()


class Adapters:
    """SGLang's own manager of adapters, of a model that is not there, and its requests."""

    def __init__(self) -> None:
        m = self.manager = object.__new__(LoRAManager)
        m.loras, m.configs, m.lora_refs, m.num_pinned_loras = {}, {}, {}, 0
        m.base_hf_config = Record(vocab_size=model.VOCAB, num_hidden_layers=3)
        m.load_config, m.lora_backend, m.base_model, m.speculative_algorithm = LoadConfig(), None, None, None
        m.validate_new_adapter = lambda config, ref: None
        m.create_lora_update_result = lambda success, error_message="": Record(success=success, error=error_message)

    def load(self, name: str, path: Path, static: bool = True) -> str:
        number: str = LoRARef.deterministic_id(name, str(path)) if static else LoRARef().lora_id
        result = self.manager._load_lora_adapter(LoRARef(number, name, str(path), False))
        assert result.success, result.error
        return number

    def key(self, tokens: list[int], number: str, extra: str | None = None) -> RadixKey:
        request = Req("r", "", array("q", tokens), SamplingParams(), lora_id=number, extra_key=extra)
        return RadixKey(array("q", tokens), request.extra_key, cache_salt=request.cache_salt)


def test_a_lora_adapter_is_known_by_its_content(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(2):
        model.write_lora(tmp_path / f"content{i}", model.config(3), seed=20 + i)
    adapter, tokens, options = tmp_path / "adapter", prompt(3), {"model_path": "org/model", "load_format": "dummy"}
    shutil.copytree(tmp_path / "content0", adapter)
    restart(monkeypatch, **options)
    s, first = Server(host.socket), Adapters()
    number = first.load("name", adapter)
    key = first.key(tokens, number)
    s.fill(3)
    assert s.write(radix_hashes(key)) == 3 * PAGE and s.found(key) == radix_hashes(key)
    assert s.found(tokens) == [] and s.found(first.key(tokens, number, "class")) == []

    restart(monkeypatch, **options)
    assert s.found(Adapters().key(tokens, number)) == []  # an adapter that nothing is known of
    second = Adapters()
    assert s.found(second.key(tokens, second.load("another", tmp_path / "content0", static=False))) == radix_hashes(key)
    for file in (tmp_path / "content1").iterdir():
        shutil.copy(file, adapter)
    assert second.load("name", adapter) == number
    assert s.found(second.key(tokens, number)) == []
    s.close()


def test_an_adapter_that_changes_while_it_is_loaded_is_of_one_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tokens, load = tmp_path / "adapter", prompt(1), LoRAManager.load_lora_weights
    model.write_lora(path, model.config(3), seed=20)

    def changing(manager: Any, ref: Any) -> None:
        load(manager, ref)
        shutil.copy(path / "adapter_config.json", path / "new")
        (path / "new").replace(path / "adapter_config.json")

    monkeypatch.setattr(LoRAManager, "load_lora_weights", changing)
    keys = set()
    for server in (b"one", b"another"):
        restart(monkeypatch, model_path="org/model")
        monkeypatch.setattr(plugin, "_server", lambda server=server: server)
        adapters = Adapters()
        keys.add(adapters.key(tokens, adapters.load("name", path)).extra_key)
    assert len(keys) == 2


def test_a_model_is_known_by_its_weights(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "process_start", lambda: time.time() + 60)
    for seed in (1, 2):
        model.write(tmp_path / f"seed{seed}", model.config(1), seed)
    shutil.copytree(tmp_path / "seed1", tmp_path / "model")

    def server(path: Path, **options: Any) -> Server:
        restart(monkeypatch, model_path=str(path), **options)
        return Server(host.socket)

    names = hashes(2)
    s = server(tmp_path / "model")
    s.fill(2)
    assert s.write(names) == 2 * PAGE
    s.close()
    for file in (tmp_path / "seed2").iterdir():
        shutil.copy(file, tmp_path / "model")
    for path, other, found in (
        ("model", {}, 0), ("seed1", {}, 2), ("seed1", {"quantization": "fp8"}, 0),
        ("seed1", {"load_format": "dummy"}, 0),
    ):  # fmt: skip
        s = server(tmp_path / path, **other)
        assert s.storage.batch_exists(names) == found, (path, other)
        s.close()
    monkeypatch.setattr(content, "process_start", lambda: time.time() - 60)
    with pytest.raises(ValueError, match="changed after this process had started.*: start SGLang again"):
        server(tmp_path / "model")


def write(path: Path, content: str) -> str:
    path.write_text(content)
    return str(path)


#: What decides a page's bytes, as SGLang's options, or what is done to the model's folder and the environment before.
DECIDES: dict[str, tuple[Any, ...]] = {
    "weights": ({}, lambda f: {"model_path": str(f / "seed2")}),
    "configuration": ({}, lambda f: write(f / "seed1" / "config.json", "{}") and {}),
    "processor of pictures": ({}, lambda f: write(f / "seed1" / "preprocessor_config.json", "{}") and {}),
    "overrides": ({}, {"json_model_override_args": '{"rope_theta": 5}'}),
    "quantization": ({}, {"quantization": "fp8"}),
    "data type": ({}, {"dtype": "float16"}),
    "type of the cache": ({}, {"kv_cache_dtype": "fp8_e4m3"}),
    "scales of the cache": ({}, lambda f: {"quantization_param_path": write(f / "scales.json", "1")}),
    "their values": tuple(
        lambda f, text=text: {"quantization_param_path": write(f / "scales.json", text)} for text in ("1", "2")
    ),
    "options of pictures": ({}, {"mm_process_config": {"image": {"max_pixels": 100}}}),
    "implementation": ({}, {"model_impl": "transformers"}),
    "numbers of the environment": ({}, {"SGLANG_INT4_WEIGHT": "1"}),
    "draft model": ({}, lambda f: {"speculative_draft_model_path": str(f / "seed2")}),
    "its weights": tuple(
        lambda f, name=name: {"speculative_draft_model_path": str(f / name)} for name in ("seed2", "seed3")
    ),
    "its cache": tuple(
        lambda f, kind=kind: {"speculative_draft_model_path": str(f / "seed2"), "speculative_draft_kv_cache_dtype": kind}
        for kind in ("auto", "fp8_e4m3")
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DECIDES)
def test_what_decides_pages_decides_the_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(content, "process_start", lambda: time.time() + 60)
    for seed in (1, 2, 3):
        model.write(tmp_path / f"seed{seed}", model.config(1), seed)

    def known(change: Any) -> Any:
        options = change(tmp_path) if callable(change) else change
        with monkeypatch.context() as m:
            for name in [n for n in options if n.isupper()]:
                m.setenv(name, options[name])
            restart(monkeypatch, model_path=str(tmp_path / "seed1"))
            bags = [get_context().config_bag(name) for name in ("model", "mm", "spec")]
            for name in [n for n in options if not n.isupper()]:
                (of,) = [bag for bag in bags if name in bag]
                of._set(name, options[name])
            return identity.model()

    before, after = DECIDES[what]
    old = known(before)
    assert known(before) == old
    assert known(after) != old, f"another {what} has the same namespace"


def test_the_plugin_is_registered_and_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (name, target), = project["entry-points"]["sglang.srt.plugins"].items()
    assert EntryPoint(name, target, "sglang.srt.plugins").load() is plugin.register
    monkeypatch.setattr(HookRegistry, "_patched", set())
    for change in (lambda: None, lambda: monkeypatch.delattr(HookRegistry, "_patched")):  # a release that keeps them elsewhere
        change()
        with pytest.raises(ValueError, match="no hooks at .*flush_cache.*install kvhost's package"):
            Server("/none")


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
