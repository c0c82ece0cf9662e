"""KV tensors as vLLM's backends lay them out, through the worker's connector and a real host: what is loaded is what was
stored, whatever the layout, and a sleeping engine's memory is its own."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import vllm_model as model
from needs import has_fp8, needs, needs_fp8
from processes import DEADLINE, Host, wait_for

needs("vllm")

import torch  # noqa: E402
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, VllmConfig  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MLAAttentionSpec,
)

import kvhost  # noqa: E402
from kvhost.vllm import compat, connector  # noqa: E402
from kvhost.vllm import model as vllm_side  # noqa: E402
from kvhost.vllm.connector import KvhostConnector  # noqa: E402
from kvhost.vllm.orders import ChunkOrder, GroupLoad, LoadOrder, StepOrders, StoreOrder  # noqa: E402
from kvhost.vllm.settings import Settings  # noqa: E402

BLOCKS, HEADS, TOKENS, SIZE, LAYERS = 24, 4, 16, 32, 3  # of the cache, of a block, of a head
CHUNK = 2 * TOKENS


@dataclasses.dataclass
class Layout:
    """How a backend lays a layer's cache out."""

    spec: Any
    tensors: Callable[[], dict[str, torch.Tensor]]
    dim: int = 0  # which dimension counts blocks
    cache_dtype: str = "auto"


def names() -> list[str]:
    return [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]


def separate(shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype) -> Callable[[], dict[str, torch.Tensor]]:
    """A tensor per layer; ``order`` is that of the dimensions in memory, outermost first."""
    back = [order.index(i) for i in range(len(order))]
    return lambda: {n: torch.empty([shape[i] for i in order], dtype=dtype).permute(back) for n in names()}


def block_outermost() -> dict[str, torch.Tensor]:
    """One tensor for all layers: a block's bytes of all layers lie together."""
    whole = torch.empty(BLOCKS, LAYERS, HEADS, TOKENS, 2 * SIZE, dtype=torch.float32)
    return {n: whole[:, i] for i, n in enumerate(names())}


def full(dtype: torch.dtype, **more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=SIZE, dtype=dtype, **more)


#: From 0.32 on a spec says how many bytes a token has in a head, scales included, and how many ranks differ.
SAYS = {"state_content_bytes", "max_tp_shards"} <= {f.name for f in dataclasses.fields(MLAAttentionSpec)}


def mla(size: int, dtype: torch.dtype, token_bytes: int = 0, **more: Any) -> MLAAttentionSpec:
    if SAYS:
        more |= {"max_tp_shards": 1, "state_content_bytes": token_bytes or None}
    return MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=size, dtype=dtype, **more)


SIDE = (BLOCKS, HEADS, TOKENS, 2 * SIZE)  # K and V side by side
PLANES = (2, BLOCKS, TOKENS, HEADS, SIZE)
F32, BF16, U8 = torch.float32, torch.bfloat16, torch.uint8
LAYOUTS = {
    "NHD": Layout(full(F32), separate(SIDE, (0, 2, 1, 3), F32)),
    "HND": Layout(full(F32), separate(SIDE, (0, 1, 2, 3), F32)),
    "separate K and V, NHD": Layout(full(F32), separate(PLANES, (0, 1, 2, 3, 4), F32), dim=1),
    "separate K and V, HND": Layout(full(F32), separate(PLANES, (0, 1, 3, 2, 4), F32), dim=1),
    "blocks before K and V": Layout(full(BF16), separate((BLOCKS, 2, TOKENS, HEADS, SIZE), (0, 1, 3, 2, 4), BF16)),
    "heads outermost": Layout(full(F32), separate(SIDE, (1, 0, 2, 3), F32)),
    "block outermost": Layout(full(F32), block_outermost),
    "fp8": Layout(full(U8), separate((2, *SIDE), (0, 1, 3, 2, 4), U8), dim=1, cache_dtype="fp8"),
    "fp8 typed": Layout(full(torch.float8_e4m3fn), separate(SIDE, (0, 2, 1, 3), torch.float8_e4m3fn), cache_dtype="fp8"),
    "MLA": Layout(mla(576, BF16), separate((BLOCKS, TOKENS, 576), (0, 1, 2), BF16)),
    "MLA, fp8": Layout(mla(576, U8), separate((BLOCKS, TOKENS, 576), (0, 1, 2), U8), cache_dtype="fp8"),
    "MLA, fp8_ds_mla": Layout(
        mla(576, U8, 656, cache_dtype_str="fp8_ds_mla"), separate((BLOCKS, TOKENS, 656), (0, 1, 2), U8),
        cache_dtype="fp8_ds_mla",
    ),
}  # fmt: skip
# K and V of the plain fp8 layout: half as many blocks' bytes each.
LAYOUTS["fp8"].tensors = separate((2, BLOCKS, HEADS, TOKENS, SIZE), (0, 1, 3, 2, 4), U8)
PER_HEAD = KVQuantMode.FP8_PER_TOKEN_HEAD
if SAYS:
    LAYOUTS["fp8 with scales"] = Layout(
        full(U8, kv_quant_mode=PER_HEAD, state_content_bytes=2 * SIZE + 8),
        separate((BLOCKS, HEADS, TOKENS, 2 * SIZE + 8), (0, 1, 2, 3), U8), cache_dtype="fp8_per_token_head",
    )  # fmt: skip


def llama_config(folder: Path, transfer: dict[str, Any], extra: dict[str, Any], parallel: dict[str, int]) -> VllmConfig:
    """Of an engine for processors, with a Llama that has no weights. ``parallel`` are sizes of dimensions, as vLLM names them."""
    path = folder / "model"
    if not path.exists():
        path.mkdir()
        (path / "config.json").write_text(json.dumps(model.config(LAYERS)))
    config = VllmConfig(
        model_config=ModelConfig(model=str(path), skip_tokenizer_init=True, dtype="float32", max_model_len=2048),
        cache_config=CacheConfig(block_size=TOKENS), device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(**transfer, kv_role="kv_both", kv_connector_extra_config=extra),
    )
    for dimension, size in parallel.items():
        assert hasattr(config.parallel_config, dimension)
        setattr(config.parallel_config, dimension, size)  # a VllmConfig checks them against the model, a Llama
    return config


class Rig:
    """One worker's connector with a layout's tensors, and a scheduler's session beside it."""

    def __init__(
        self, folder: Path, host: Host, layout: Layout, name: str, parallel: dict[str, int] | None = None, **options: Any
    ) -> None:
        """``parallel`` are sizes of the engine's parallel dimensions, as vLLM names them, ``options`` more of the connector's."""
        self.layout = layout
        transfer = {
            "kv_connector": "KvhostConnector", "kv_connector_module_path": "kvhost.vllm", "kv_load_failure_policy": "recompute",
            "engine_id": name,
        }
        extra = {"socket": host.socket, "chunk_tokens": CHUNK, "extra": {"test": name}, **options}
        config = llama_config(folder, transfer, extra, parallel or {})
        cast(Any, config.cache_config).cache_dtype = layout.cache_dtype
        groups = [KVCacheGroupSpec(names(), layout.spec)]
        cache = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        self.connector = KvhostConnector(config, KVConnectorRole.WORKER, cache)
        self.tensors = layout.tensors()
        for t in self.tensors.values():
            t.untyped_storage().copy_(torch.randint(0, 255, (t.untyped_storage().nbytes(),), dtype=U8).untyped_storage())
        self.connector.register_kv_caches(self.tensors)
        registered: dict[Any, Any] = {}

        def reported() -> bool:
            report: Any = self.connector.build_connector_worker_meta()
            registered.update(report.registered if report is not None else {})
            return bool(registered)

        wait_for("the worker knows what its weights are, and reports", reported)
        ((_, registration),) = registered.items()
        self.refusal, self.namespace = registration.refusal, registration.namespace
        self.socket, self.engine = host.socket, f"{name}/0/0"
        self._orders = 0

    def block(self, b: int) -> list[bytes]:
        """A block's bytes in all layers, as attention would read them."""
        return [
            t.select(self.layout.dim, b).contiguous().view(U8).numpy().tobytes() for t in self.tensors.values()
        ]

    def clear(self, blocks: list[int]) -> None:
        for t in self.tensors.values():
            for b in blocks:
                t.select(self.layout.dim, b).view(U8).fill_(0)

    def _step(self, orders: StepOrders, done: Callable[[set[str], set[str]], bool]) -> None:
        c = self.connector
        c.bind_connector_metadata(orders)
        c.start_load_kv(cast(Any, None))
        c.wait_for_save()
        due = time.monotonic() + DEADLINE
        sent: set[str] = set()
        received: set[str] = set()
        while not done(sent, received):
            assert time.monotonic() < due
            out = c.get_finished(set())
            sent, received = sent | (out[0] or set()), received | (out[1] or set())
            c.bind_connector_metadata(StepOrders())

    def order(self) -> int:
        """The number of the next order."""
        self._orders += 1
        return self._orders

    def store(self, key: bytes, blocks: list[int]) -> None:
        order = StoreOrder(self.order(), "r", 1, [(0, [ChunkOrder(0, blocks, key)])])
        stored: list[bytes] = []

        def over(sent: set[str], received: set[str]) -> bool:
            report: Any = self.connector.build_connector_worker_meta()
            stored.extend(report.stored if report else ())
            return bool(stored)

        self._step(StepOrders(stores=[order]), over)

    def lookup(self, session: kvhost.Session, key: bytes) -> kvhost.Lookup:
        return session.lookup([key], readers=1)

    def load(self, session: kvhost.Session, key: bytes, blocks: list[int]) -> set[int]:
        """The blocks that failed."""
        lease = self.lookup(session, key).lease
        order = LoadOrder(self.order(), "r", 0, CHUNK, [GroupLoad(0, [lease], [ChunkOrder(0, blocks, key)])])
        self._step(StepOrders(loads=[order]), lambda sent, received: bool(received))
        return self.connector.get_block_ids_with_load_errors()

    def scheduler(self) -> kvhost.Session:
        return kvhost.Session(self.socket, self.engine, self.namespace, role="scheduler")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    h = Host(tmp_path_factory.mktemp("memory"))
    h.start()
    yield h
    h.kill()


@pytest.fixture
def make(tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    monkeypatch.setattr(compat, "ranks", lambda: (0, 0))
    made: list[Rig] = []

    def rig(layout: Layout, name: str, **options: Any) -> Rig:
        made.append(Rig(tmp_path, host, layout, name, **options))
        return made[-1]

    yield rig
    for r in made:
        r.connector.shutdown()


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(make: Callable[..., Rig], name: str) -> None:
    if "fp8" in name:
        needs_fp8()
    rig = make(LAYOUTS[name], "layout " + name)
    assert not rig.refusal
    key = os.urandom(32)
    want = rig.block(3) + rig.block(7)
    others = [rig.block(b) for b in (0, 2, 4, 6, 11, 13, 14, BLOCKS - 1)]
    with rig.scheduler() as session:
        rig.store(key, [3, 7])
        rig.clear([3, 7])
        assert rig.load(session, key, [12, 5]) == set()
    assert rig.block(12) + rig.block(5) == want
    assert not any(any(page) for page in rig.block(3) + rig.block(7))
    assert [rig.block(b) for b in (0, 2, 4, 6, 11, 13, 14, BLOCKS - 1)] == others


def test_layouts_do_not_share_chunks(make: Callable[..., Rig]) -> None:
    """Each has a namespace of its own, with dtype and layout."""
    texts = {}
    for name, layout in LAYOUTS.items():
        if "fp8" in name and not has_fp8():
            continue
        rig = make(layout, "apart")
        texts[name] = str(rig.namespace.message())
        assert rig.namespace.replicated == name.startswith("MLA")
        assert rig.namespace.dtype.startswith(layout.cache_dtype)
        rig.connector.shutdown()
    assert len(set(texts.values())) == len(texts) - 1
    assert texts["block outermost"] == texts["HND"]  # a page has the same bytes, wherever it lies


def test_replicated_bytes_are_stored_by_one_rank(make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "ranks", lambda: (0, 1))
    monkeypatch.setattr(connector, "_FIRST_CONNECT", 0.0)
    stores = {}
    for name in ("MLA", "NHD"):
        rig = make(LAYOUTS[name], "second rank " + name)
        assert rig.connector._worker is not None
        stores[name] = rig.connector._worker._stores_here
    assert stores == {"MLA": False, "NHD": True}


@pytest.mark.skipif(SAYS, reason="the scales of this vLLM are in the cache's pages: see the layout of fp8 with scales")
def test_scales_beside_the_cache_are_refused(make: Callable[..., Rig]) -> None:
    """Scales per token and head are in tensors that the connector does not get."""
    spec = full(U8, kv_quant_mode=PER_HEAD)
    rig = make(Layout(spec, LAYOUTS["fp8"].tensors, dim=1, cache_dtype="fp8_per_token_head"), "scales")
    assert "no dimension counts 24 blocks of" in rig.refusal and names()[0] in rig.refusal


def test_sleep_is_promised_where_memory_can_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33 asks before it starts; on a GPU the memory of an engine that can sleep is not exported."""
    assert KvhostConnector.supports_sleep_mode(None), "want sleep on a processor"  # type: ignore[arg-type]
    monkeypatch.setattr(connector, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    assert not KvhostConnector.supports_sleep_mode(None), "want no sleep on a GPU"  # type: ignore[arg-type]


def test_a_sleeping_engine_has_its_memory_for_itself(make: Callable[..., Rig]) -> None:
    """Levels 1 and 2 are the same here: the cache is given back, and comes again with other contents."""
    rig = make(LAYOUTS["HND"], "sleep")
    key = os.urandom(32)
    want = rig.block(3) + rig.block(7)
    with rig.scheduler() as session:
        mapped = session.status().arena_bytes
        assert mapped >= sum(t.untyped_storage().nbytes() for t in rig.tensors.values())
        rig.store(key, [3, 7])
        rig.connector.unregister_kv_caches()
        rig.connector.unregister_kv_caches()
        assert session.status().arena_bytes < mapped
        rig.clear(list(range(BLOCKS)))
        lease = rig.lookup(session, key).lease
        asleep = LoadOrder(rig.order(), "r", 0, CHUNK, [GroupLoad(0, [lease], [ChunkOrder(0, [1, 2], key)])])
        rig._step(StepOrders(loads=[asleep]), lambda sent, received: bool(received))
        assert rig.connector.get_block_ids_with_load_errors() == {1, 2}  # nothing is loaded meanwhile
        rig.connector.restore_kv_caches()
        rig.connector.restore_kv_caches()
        assert session.status().arena_bytes == mapped
        assert rig.load(session, key, [1, 2]) == set()
    assert rig.block(1) + rig.block(2) == want


def test_an_engine_that_sleeps_in_mid_load(make: Callable[..., Rig], host: Host) -> None:
    rig = make(LAYOUTS["HND"], "sleep in mid load")
    key = os.urandom(32)
    want = rig.block(3) + rig.block(7)
    with rig.scheduler() as session:
        rig.store(key, [3, 7])
        lease = rig.lookup(session, key).lease
        order = LoadOrder(rig.order(), "r", 0, CHUNK, [GroupLoad(0, [lease], [ChunkOrder(0, [1, 2], key)])])
        rig.connector.bind_connector_metadata(StepOrders(loads=[order]))
        rig.connector.start_load_kv(cast(Any, None))
        rig.connector.unregister_kv_caches()
        rig.clear(list(range(BLOCKS)))
        assert not any(any(page) for b in range(BLOCKS) for page in rig.block(b))
        sent, received = rig.connector.get_finished(set())
        assert received == {"r"}  # loaded before it slept, or not at all
        rig.connector.get_block_ids_with_load_errors()
        rig.connector.restore_kv_caches()
        assert rig.load(session, key, [1, 2]) == set()
    assert rig.block(1) + rig.block(2) == want


def test_the_settings_are_those_of_the_plan() -> None:
    """A context parallel block covers as many tokens as there are ranks times the block's."""
    groups = [KVCacheGroupSpec(names(), LAYOUTS["MLA"].spec)]
    cache = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
    config = VllmConfig(device_config=DeviceConfig("cpu"))
    (plan,) = vllm_side.plan_groups(config, cache, Settings(chunk_tokens=100))
    assert (plan.block_tokens, plan.chunk_tokens, plan.blocks, plan.window) == (TOKENS, 112, 7, 0)
    config.parallel_config.decode_context_parallel_size = 4
    (plan,) = vllm_side.plan_groups(config, cache, Settings(chunk_tokens=100))
    assert (plan.block_tokens, plan.chunk_tokens, plan.blocks) == (4 * TOKENS, 128, 2)
