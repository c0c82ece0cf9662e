"""Engines of several tensor-parallel sizes share what they store, through the workers' connectors and a real host."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import needs
from processes import Host

needs("vllm")

import torch  # noqa: E402
from test_vllm_memory import BLOCKS, CHUNK, SIZE, TOKENS, Layout, Rig, mla, names  # noqa: E402
from vllm.config import ModelConfig  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402

from kvhost.vllm import compat, connector, identity  # noqa: E402
from kvhost.vllm.orders import ChunkOrder, GroupLoad, LoadOrder, StepOrders  # noqa: E402
from kvhost.vllm.sizes import Sizes  # noqa: E402

LATENT = 96  # numbers of a token in a layer's latent cache
SIZES = (1, 2, 4)


class Sharded:
    """An engine: the connectors of its ranks, and what each holds of a model with so many KV heads (0: latents)."""

    def __init__(
        self, make: Callable[..., Rig], name: str, heads: int, ranks: int, tokens_first: bool, size: int = SIZE,
        dtype: torch.dtype = torch.float32, stage: int = -1,
    ) -> None:
        """``stage`` is one of two pipeline stages; without it the engine has one."""
        self.heads, self.ranks, self.stage = heads, ranks, max(stage, 0)
        local = max(1, heads // ranks)
        self.first = [r * heads // ranks for r in range(ranks)]
        spec: Any = mla(LATENT, torch.float32)
        shape: tuple[int, ...] = (BLOCKS, TOKENS, LATENT)
        if heads:
            spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=local, head_size=size, dtype=dtype)
            shape = (BLOCKS, local, TOKENS, 2 * size)
            if tokens_first:
                shape = (BLOCKS, TOKENS, local, 2 * size)

        def tensors() -> dict[str, torch.Tensor]:
            made = {n: torch.empty(shape, dtype=dtype) for n in names()}
            return {n: t.transpose(1, 2) for n, t in made.items()} if heads and tokens_first else made

        sizes = {"tensor_parallel_size": ranks, "pipeline_parallel_size": 2 if stage >= 0 else 1}
        self.rigs = [make(Layout(spec, tensors), f"{name}, {ranks} ranks", (self.stage, r), **sizes) for r in range(ranks)]
        self.refusals = [r.refusal for r in self.rigs]

    def write(self, blocks: list[int]) -> None:
        """What attention would: numbers of their layer, head and token alone."""
        for rank, rig in enumerate(self.rigs):
            for layer, t in enumerate(rig.tensors.values()):
                for at, block in enumerate(blocks):
                    t[block] = self.computed(rank, layer, at, t[block].shape)

    def computed(self, rank: int, layer: int, block: int, shape: torch.Size) -> torch.Tensor:
        token = torch.arange(block * TOKENS, (block + 1) * TOKENS)[:, None]
        numbers = torch.arange(shape[-1])[None, :] / 1024
        if not self.heads:
            return (10000 * layer + token + numbers).float()
        head = torch.arange(self.first[rank], self.first[rank] + shape[0])[:, None, None]
        return (10000 * layer + 1000 * head + (token + numbers)[None]).float()

    def store(self, key: bytes, blocks: list[int]) -> None:
        self.write(blocks)
        for rig in self.rigs:
            if rig.connector._worker._stores_here:  # type: ignore[union-attr]
                rig.store(key, blocks)

    def hits(self, key: bytes) -> int:
        first = self.rigs[0]
        with first.connector._open(0, first.namespace, (self.stage, 0), "scheduler") as session:
            return session.lookup([key], readers=(1 << self.ranks) - 1).hits

    def load(self, key: bytes, blocks: list[int]) -> None:
        """Every block but these keeps its poison."""
        first = self.rigs[0]
        with first.connector._open(0, first.namespace, (self.stage, 0), "scheduler") as session:
            found = session.lookup([key], readers=(1 << self.ranks) - 1)
            assert found.hits == 1, "another size's chunk is no hit"
            for rank, rig in enumerate(self.rigs):
                for t in rig.tensors.values():
                    t.fill_(-1)
                load = LoadOrder(rig.order(), "r", 0, 1, [GroupLoad(0, [found.lease] * (self.stage + 1), [ChunkOrder(0, blocks, key)])])
                rig._step(StepOrders(loads=[load]), lambda sent, received: bool(received))
                assert rig.connector.get_block_ids_with_load_errors() == set()
                for layer, t in enumerate(rig.tensors.values()):
                    for at, block in enumerate(blocks):
                        assert torch.equal(t[block], self.computed(rank, layer, at, t[block].shape)), f"rank {rank}, layer {layer}"
                    others = [b for b in range(BLOCKS) if b not in blocks]
                    assert (t[others] == -1).all(), "a load wrote to other blocks"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    h = Host(tmp_path_factory.mktemp("sizes"))
    h.start()
    yield h
    h.kill()


@pytest.fixture
def make(tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def rig(layout: Layout, name: str, rank: tuple[int, int] = (0, 0), **parallel: Any) -> Rig:
        monkeypatch.setattr(compat, "ranks", lambda: rank)
        made.append(Rig(tmp_path, host, layout, name, parallel, share="sizes", extra={}))
        return made[-1]

    yield rig
    for r in made:
        r.connector.shutdown()


@pytest.mark.parametrize("heads", [8, 4, 2, 1, 0])
def test_sizes_share(make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, heads: int) -> None:
    """As many heads as ranks, more, fewer, one, and latents: what one size stores all others load, whatever the order of tokens and
    heads in their pages."""
    monkeypatch.setattr(ModelConfig, "get_total_num_kv_heads", lambda self: heads)
    engines = [Sharded(make, f"{heads} heads", heads, ranks, tokens_first=bool(i % 2)) for i, ranks in enumerate(SIZES)]
    for e in engines:
        assert e.refusals == [""] * e.ranks
    assert len({e.rigs[0].namespace.message().units for e in engines}) == 1
    rng = random.Random(heads)
    for one, other in itertools.product(engines, engines):
        key = os.urandom(32)
        one.store(key, rng.sample(range(1, BLOCKS), CHUNK // TOKENS))
        other.load(key, rng.sample(range(1, BLOCKS), CHUNK // TOKENS))


def test_another_model_is_no_hit(make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "_FIRST_CONNECT", 0.0)
    texts = []
    for heads in (8, 4, 0):
        monkeypatch.setattr(ModelConfig, "get_total_num_kv_heads", lambda self, heads=heads: heads)
        texts.append(str(Sharded(make, "models", heads, 1, tokens_first=False).rigs[0].namespace.message()))
    assert len(set(texts)) == len(texts)


def test_another_dtype_head_size_or_rope_is_no_hit(make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelConfig, "get_total_num_kv_heads", lambda self: 4)
    key = os.urandom(32)
    Sharded(make, "stores", 4, 1, tokens_first=False).store(key, list(range(1, 1 + CHUNK // TOKENS)))
    assert Sharded(make, "same", 4, 2, tokens_first=False).hits(key) == 1
    assert Sharded(make, "head size", 4, 2, tokens_first=False, size=2 * SIZE).hits(key) == 0
    # as many bytes to a head
    assert Sharded(make, "dtype", 4, 2, tokens_first=False, size=2 * SIZE, dtype=torch.float16).hits(key) == 0
    same = identity.hf_config
    monkeypatch.setattr(identity, "hf_config", lambda model: {**same(model), "rope_theta": 12345.0})
    assert Sharded(make, "rope", 4, 2, tokens_first=False).hits(key) == 0


def test_ranks_of_one_stage_share(make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stage has other layers, and an engine without stages more."""
    monkeypatch.setattr(ModelConfig, "get_total_num_kv_heads", lambda self: 4)
    key, blocks = os.urandom(32), list(range(1, 1 + CHUNK // TOKENS))
    Sharded(make, "stores", 4, 1, tokens_first=False, stage=1).store(key, blocks)
    Sharded(make, "same", 4, 2, tokens_first=False, stage=1).load(key, blocks)
    for stage in (-1, 0):
        assert Sharded(make, f"stage {stage}", 4, 2, tokens_first=False, stage=stage).hits(key) == 0


def test_sizes_that_do_not_fit_are_refused(make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "_FIRST_CONNECT", 0.0)
    monkeypatch.setattr(ModelConfig, "get_total_num_kv_heads", lambda self: 6)
    assert "6 KV heads in 2 units cannot be divided among 3 ranks" in Sharded(make, "six", 6, 3, tokens_first=False).refusals[0]
    rig = make(Layout(mla(LATENT, torch.float32), lambda: {n: torch.empty(BLOCKS, TOKENS, LATENT) for n in names()}), "spread",
               tensor_parallel_size=2, decode_context_parallel_size=2)
    assert "decode context parallelism" in rig.refusal


def test_units_are_the_same_for_all_sizes() -> None:
    for heads in (1, 2, 4, 8, 10, 16, 24, 32, 40):
        found = {n: Sizes(heads, n, True) for n in (1, 2, 4, 8, 16, 32) if n in Sizes(heads, 1, True).sharing}
        for ranks, s in found.items():
            held = {(r * s.units // ranks + i) for r in range(ranks) for i in range(s.rank_units)}
            assert held == set(range(s.units)), f"{heads} heads, {ranks} ranks"
            assert sum(s.stores(r) for r in range(ranks)) * s.rank_units == s.units, "a unit is stored by none or by several ranks"
