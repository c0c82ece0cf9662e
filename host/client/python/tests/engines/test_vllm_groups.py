"""KV cache groups that vLLM from 0.32 on treats in ways of their own: which are offloaded, with which blocks, and what
becomes of requests of such models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace as Record
from typing import Any

import pytest
from needs import needs

needs("vllm")

import torch  # noqa: E402
from test_vllm_core import PROMPT, publish_all  # noqa: E402
from vllm.config import ParallelConfig  # noqa: E402
from vllm.v1 import kv_cache_interface as vllm_specs  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm_core import BLOCK, Core, keys  # noqa: E402

from kvhost.errors import Refused  # noqa: E402
from kvhost.vllm import model  # noqa: E402
from kvhost.vllm.groups import GroupPlan  # noqa: E402
from kvhost.vllm.settings import Settings  # noqa: E402

pytestmark = pytest.mark.skipif(
    not hasattr(vllm_specs, "CircularBufferSpec"), reason="this vLLM finds the blocks of all groups by their tokens"
)

COMMON: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}


def group(name: str, spec: Any, **more: Any) -> KVCacheGroupSpec:
    return KVCacheGroupSpec([name], spec, **more)


def full(**more: Any) -> KVCacheGroupSpec:
    return group("full", FullAttentionSpec(**COMMON, **more))


def scratch(block: int = 24) -> KVCacheGroupSpec:
    """One block per request, a ring of the keys that are still to be compressed."""
    return group("scratch", vllm_specs.CircularBufferSpec(**{**COMMON, "block_size": block}))


def replayed(window: int = 40) -> KVCacheGroupSpec:
    """A window that the engine computes anew after a hit."""
    return group("replayed", SlidingWindowMLASpec(**COMMON, sliding_window=window, bounded_replay=True))


def plan(*groups: KVCacheGroupSpec, context: int = 1) -> list[GroupPlan]:
    parallel = ParallelConfig(tensor_parallel_size=4, decode_context_parallel_size=context)
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=list(groups))
    config = Record(parallel_config=parallel, model_config=None, device_config=Record(device_type="cuda"))
    return model.plan_groups(config, cache, Settings(chunk_tokens=64))


def test_only_what_the_engine_finds_again_is_offloaded() -> None:
    assert plan(full(), scratch()) == [GroupPlan(0, BLOCK, 64)]
    assert plan(scratch(), full()) == [GroupPlan(1, BLOCK, 64)]
    assert plan(replayed(), group("latent", MLAAttentionSpec(**COMMON))) == [GroupPlan(1, BLOCK, 64)]
    copy = full()
    copy.enable_kv_transfer = False  # the engine fills it from another group after a load
    assert plan(copy, full()) == [GroupPlan(1, BLOCK, 64)]
    both = vllm_specs.UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"a": replayed().kv_cache_spec})
    assert plan(full(), group("a", both)) == [GroupPlan(0, BLOCK, 64)]


@pytest.mark.parametrize(
    "groups,why",
    [
        (lambda: [scratch()], "the model has no KV cache whose blocks the engine finds again by their tokens"),
        (list, "the model has no KV cache whose blocks the engine finds again by their tokens"),
        (lambda: [full(), group("host", full().kv_cache_spec, host_resident=True)], "group 1 lies in host memory"),
    ],
)
def test_what_is_refused(groups: Callable[[], list[KVCacheGroupSpec]], why: str) -> None:
    with pytest.raises(Refused, match=why):
        plan(*groups())


def test_a_group_that_context_parallelism_leaves_alone_keeps_its_block() -> None:
    """A draft model's layers: each rank has all their tokens, so a block of theirs holds fewer than the model's."""
    draft = group("draft", FullAttentionSpec(**COMMON, dcp_sharded=False))
    assert plan(full(), draft, context=4) == [GroupPlan(0, 4 * BLOCK, 64), GroupPlan(1, BLOCK, 64)]


def test_a_window_that_keeps_more_than_it_attends_to() -> None:
    window = group("window", SlidingWindowSpec(**COMMON, sliding_window=40, extra_retained_tokens=3))
    assert plan(window) == [GroupPlan(0, BLOCK, 64, window=43)]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Core]]:
    made: list[Core] = []

    def core(**options: Any) -> Core:
        made.append(Core(tmp_path, monkeypatch, **options))
        return made[-1]

    yield core
    for c in made:
        c.close()


def test_scratch_is_neither_stored_nor_loaded(make: Callable[..., Core]) -> None:
    core = make(groups=[scratch()])
    a = core.add("a", PROMPT)
    core.run(a)
    assert [[c.key for c in s.chunks] for s in core.session.stores] == [keys(PROMPT)]
    publish_all(core)
    core.check_idle()
    assert core.scheduler.reset_prefix_cache()
    b = core.add("b", PROMPT)
    core.step()
    (load,) = core.session.loads
    assert [c.index for c in load.chunks] == [0, 1, 2, 3]
    load.finish()
    assert core.run(b) == [5, 1]
    publish_all(core)
    core.check_idle()


def test_a_window_that_is_computed_anew_is_not_loaded(make: Callable[..., Core]) -> None:
    core = make(groups=[replayed()])
    core.session.resident = set(keys(PROMPT))
    a = core.add("a", PROMPT)
    core.step()
    (load,) = core.session.loads
    load.finish()
    assert core.run(a) == [5 + 40, 1]  # the engine's replay: the last 40 tokens of the hit
    publish_all(core)
    core.check_idle()


def test_a_block_that_becomes_scratch_is_not_read_any_more(make: Callable[..., Core]) -> None:
    """All groups share the pool: a preempted request's blocks may become scratch while the host still reads them."""
    core = make(groups=[scratch()], blocks=22, unread_blocks=1.0)
    requests = [core.add(str(i), range(1000 * i, 1000 * i + len(PROMPT)), answer=60) for i in range(2)]
    held: dict[str, list[int]] = {}
    steps = taken = 0
    while not all(r.is_finished() for r in requests):
        assert steps < 400, "want both requests to end within 400 steps"
        steps += 1
        core.step()
        unread = {b for job in core.session.stores if not job.was_read for c in job.chunks for b in c.blocks}
        for r in requests:
            blocks = core.scheduler.kv_cache_manager.get_block_ids(r.request_id)[1]
            if blocks and blocks != held.get(r.request_id):
                assert not unread & set(blocks), "scratch in a block that the host may still read"
                taken += 1
            held[r.request_id] = blocks
        if steps % 8 == 0:
            publish_all(core)
        for load in core.session.loads:
            if not load.over:
                load.finish()
    core.step()  # sends what the last request left to store
    publish_all(core)
    assert taken > len(requests), "no request was preempted"
    core.check_idle()
