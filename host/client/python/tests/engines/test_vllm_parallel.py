"""What the ranks of a parallel engine hold, by the kind of attention: each rank gets its own bytes back from a real
host, and bytes that all ranks hold are stored once."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import needs
from processes import Host

needs("vllm")

import torch  # noqa: E402
from test_vllm_memory import BLOCKS, LAYOUTS, SIZE, TOKENS, Layout, Rig, mla, names  # noqa: E402
from vllm.config import ParallelConfig  # noqa: E402
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec  # noqa: E402

from kvhost.vllm import compat, connector  # noqa: E402
from kvhost.vllm.orders import ChunkOrder, GroupLoad, LoadOrder, StepOrders  # noqa: E402

LATENT = 576  # numbers per token of a layer's latent cache


@dataclasses.dataclass
class Row:
    """An engine: its attention ("full", "window", "MLA"), its parallel sizes, and what follows from them."""

    attention: str
    heads: list[list[int]]  # the KV heads that each rank of a stage holds; of a latent cache [0]
    sharers: int = 1  # ranks among which the tokens are spread
    interleave: int = 1  # so many tokens lie on one of them before the next one's begin
    once: bool = False  # one rank stores for all

    @property
    def storing(self) -> list[int]:
        return [0] if self.once else list(range(self.ranks))

    @property
    def ranks(self) -> int:
        return len(self.heads)

    @property
    def parallel(self) -> dict[str, int]:
        return {
            "tensor_parallel_size": self.ranks, "decode_context_parallel_size": self.sharers,
            "cp_kv_cache_interleave_size": self.interleave,
        }

    def tokens(self, rank: int, blocks: int) -> list[int]:
        """The tokens that lie in a rank's first blocks, as the engine itself counts them."""
        chunk = blocks * TOKENS * self.sharers
        held = get_dcp_local_seq_lens(torch.arange(chunk + 1), self.sharers, rank % self.sharers, self.interleave)
        return [t for t in range(chunk) if held[t + 1] > held[t]]

    def layout(self) -> Layout:
        if self.attention == "MLA":
            return Layout(mla(LATENT, torch.float32), lambda: {n: torch.empty(BLOCKS, TOKENS, LATENT) for n in names()})
        heads = len(self.heads[0])
        common: dict[str, Any] = {
            "block_size": TOKENS, "num_kv_heads": heads, "head_size": SIZE, "dtype": torch.float32,
        }
        full, window = FullAttentionSpec(**common), SlidingWindowSpec(sliding_window=40, **common)
        spec = window if self.attention == "window" else full
        return Layout(spec, lambda: {n: torch.empty(BLOCKS, heads, TOKENS, 2 * SIZE) for n in names()})

    def compute(self, rig: Rig, rank: int, blocks: list[int]) -> None:
        """Writes into a rank's blocks what its attention would: numbers of their layer, head and token alone."""
        for layer, tensor in enumerate(rig.tensors.values()):
            for at, token in enumerate(self.tokens(rank, len(blocks))):
                for i, head in enumerate(self.heads[rank]):
                    where = tensor[blocks[at // TOKENS], ..., at % TOKENS, :]
                    (where if self.attention == "MLA" else where[i]).fill_(10000 * layer + 1000 * head + token)


ROWS = {
    "MHA or GQA": Row("full", [[0, 1], [2, 3]]),
    "fewer KV heads than ranks": Row("full", [[0], [0], [1], [1]]),
    "one KV head": Row("full", [[0], [0]]),
    "one KV head, DCP": Row("full", [[0], [0]], sharers=2),
    "fewer KV heads than ranks, DCP": Row("full", [[0], [0], [1], [1]], sharers=2, interleave=TOKENS),
    "sliding window": Row("window", [[0, 1], [2, 3]]),
    "MLA": Row("MLA", [[0], [0]], once=True),
    "MLA, DCP": Row("MLA", [[0], [0]], sharers=2),
    "MLA, DCP, whole blocks": Row("MLA", [[0], [0]], sharers=2, interleave=TOKENS),
    "MLA, DCP over half of the ranks": Row("MLA", [[0]] * 4, sharers=2, interleave=4),
    "MLA, DCP over all ranks": Row("MLA", [[0]] * 4, sharers=4),
}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    h = Host(tmp_path_factory.mktemp("parallel"))
    h.start()
    yield h
    h.kill()


@pytest.fixture
def make(tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def rig(layout: Layout, name: str, rank: tuple[int, int] = (0, 0), **parallel: Any) -> Rig:
        monkeypatch.setattr(compat, "ranks", lambda: rank)
        made.append(Rig(tmp_path, host, layout, name, parallel))
        return made[-1]

    yield rig
    for r in made:
        r.connector.shutdown()


@pytest.mark.parametrize("name", ROWS)
def test_each_rank_gets_its_own_bytes(make: Callable[..., Rig], name: str) -> None:
    row, key = ROWS[name], os.urandom(32)
    rigs = [make(row.layout(), name, (0, r), **row.parallel) for r in range(row.ranks)]
    assert [r.refusal for r in rigs] == [""] * row.ranks
    assert len({str(r.namespace.message()) for r in rigs}) == 1, "the ranks' namespaces differ"
    blocks = [3, 7][: rigs[0].namespace.groups[0].blocks]
    for rank, rig in enumerate(rigs):
        rig.clear(list(range(BLOCKS)))
        row.compute(rig, rank, blocks)
    want = [[page for b in blocks for page in rig.block(b)] for rig in rigs]
    storing = [r for r, rig in enumerate(rigs) if rig.connector._worker._stores_here]  # type: ignore[union-attr]
    with rigs[0].connector._open(0, rigs[0].namespace, (0, 0), "scheduler") as session:
        for rank in storing:
            assert session.lookup([key], readers=(1 << row.ranks) - 1).hits == 0, "a hit without all ranks' pieces"
            rigs[rank].store(key, blocks)
        found = session.lookup([key], readers=(1 << row.ranks) - 1)
        assert found.hits == 1
        to = [12, 5][: len(blocks)]
        for rank, rig in enumerate(rigs):
            rig.clear(blocks)
            load = LoadOrder(rig.order(), "r", 0, 1, [GroupLoad(0, [found.lease], [ChunkOrder(0, to, key)])])
            rig._step(StepOrders(loads=[load]), lambda sent, received: bool(received))
            assert rig.connector.get_block_ids_with_load_errors() == set()
            got = [page for b in to for page in rig.block(b)]
            assert got == want[rank], f"rank {rank} got other bytes than it had computed"
    assert storing == row.storing


def test_what_differs_has_a_namespace_of_its_own(make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with the same spec and other sizes never share a chunk, nor do stages; the ranks of DP and EP do."""
    monkeypatch.setattr(connector, "_FIRST_CONNECT", 0.0)

    def text(row: Row, rank: tuple[int, int] = (0, 0), **more: Any) -> str:
        rig = make(row.layout(), "apart", rank, **row.parallel | more)
        assert not rig.refusal
        return str(rig.namespace.message())

    texts = {name: text(row) for name, row in ROWS.items()}
    assert len(set(texts.values())) == len(ROWS)
    row = ROWS["MLA"]
    stages = {text(row, (stage, 0), pipeline_parallel_size=2) for stage in range(2)}
    assert len(stages | {texts["MLA"]}) == 3
    assert text(row, data_parallel_size=4, enable_expert_parallel=True) == texts["MLA"]


def test_every_dimension_is_told_or_refused(make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """A dimension that this vLLM has and the connector does not know is refused by its name."""
    monkeypatch.setattr(connector, "_FIRST_CONNECT", 0.0)
    plain = str(make(LAYOUTS["NHD"], "dimensions").namespace.message())
    sizes = [n for n in vars(ParallelConfig()) if n.endswith("_parallel_size")]
    assert {"prefill_context_parallel_size", "decode_context_parallel_size", "data_parallel_size"} <= set(sizes)
    found = {}
    for size in sizes:
        rig = make(LAYOUTS["NHD"], "dimensions", **{size: 2})
        told = rig.namespace is not None and str(rig.namespace.message()) != plain
        found[size] = "told" if told else rig.refusal or "the same bytes"
    assert found.pop("data_parallel_size") == "the same bytes"
    assert found.pop("prefill_context_parallel_size") == "prefill_context_parallel_size is 2, want 1"
    assert found == dict.fromkeys(found, "told")


def test_a_dimension_of_a_later_release_is_refused(make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParallelConfig, "hidden_parallel_size", 1, raising=False)
    assert make(LAYOUTS["NHD"], "later", hidden_parallel_size=2).refusal == "hidden_parallel_size is 2, want 1"
