"""What kvhost does inside vLLM beside its public interface, where that is other than it is known: it says "no", and so in the log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace as Record
from typing import Any

import pytest
from features import OLD
from needs import needs

needs("vllm")

from kvhost.errors import Refused  # noqa: E402
from kvhost.vllm import compat  # noqa: E402

KEYS = [bytes([n]) * 32 + bytes(4) for n in range(3)]


@pytest.fixture(autouse=True)
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """The lines of the log, each of which comes once in a process."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    compat._said.clear()
    yield lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    compat._said.clear()


class Policy:
    """A CPU tier's, of which every call may fail that comes after so many."""

    def __init__(self, fails: str = "", after: int = 0) -> None:
        self.chunks = {key: Record(is_ready=False, row=n) for n, key in enumerate(KEYS)}
        self._fails, self._left = fails, after

    def __str__(self) -> str:
        return f"{type(self).__name__} {self._fails} {self._left}"

    def _call(self, name: str) -> None:
        if name == self._fails:
            self._left -= 1
            if self._left == -1:
                raise RuntimeError(f"{name} fails")

    def get(self, key: Any) -> Any:
        return self.chunks.get(key)

    def insert(self, key: Any, chunk: Any) -> None:
        self._call("insert")
        self.chunks[key] = chunk

    def remove(self, key: Any) -> None:
        self._call("remove")
        del self.chunks[key]


class Ranking(Policy):
    """vLLM 0.33's."""

    def insert(self, key: Any, chunk: Any, req_context: Any) -> None:  # type: ignore[override]
        assert req_context.req_id == "a"
        super().insert(key, chunk)


class Unknown(Policy):
    def insert(self, key: Any, chunk: Any, size: int) -> None:  # type: ignore[override]
        super().insert(key, chunk)


class Nameless(Policy):
    get = None  # type: ignore[assignment]


class Fixed:
    """A load whose keys are fixed."""

    job_id, keys, req_context = 7, tuple(KEYS[:2]), Record(req_id="a")
    __slots__ = ()


def set_aside(policy: Any, load: Any) -> bool:
    return compat.set_aside(Record(_manager=Record(primary_tier=Record(_policy=policy))), load)


@pytest.mark.parametrize("policy", [Policy(), Ranking()], ids=lambda p: type(p).__name__)
def test_rows_are_set_aside(policy: Policy, said: Callable[[], list[str]]) -> None:
    load = Record(job_id=7, keys=KEYS[:2], req_context=Record(req_id="a"))
    assert set_aside(policy, load) and not said()
    assert [policy.chunks[k].row for k in load.keys] == [0, 1], "want the rows under the load's new keys"
    assert KEYS[0] not in policy.chunks and KEYS[1] not in policy.chunks and policy.chunks[KEYS[2]].row == 2


@pytest.mark.parametrize(
    ("policy", "load"),
    [
        (None, None), (Record(), None), (Nameless(), None), (Unknown(), None), (Policy(), Fixed()),
        *((Policy(name, n), None) for name in ("insert", "remove") for n in (0, 1)),
    ],
    ids=str,
)
def test_rows_stay_where_a_policy_is_not_known(policy: Any, load: Any, said: Callable[[], list[str]]) -> None:
    load = load or Record(job_id=7, keys=KEYS[:2], req_context=Record(req_id="a"))
    assert not set_aside(policy, load), "want the answer no"
    if type(policy) is not Policy:
        assert not set_aside(policy, load), "want the same answer again"
    assert len(said()) == 1 and "cache policy of the CPU tier" in said()[0]
    assert [*load.keys] == KEYS[:2], f"want the load's keys as they were, got {load.keys}"
    if isinstance(policy, Policy):
        rows = {key: chunk.row for key, chunk in policy.chunks.items()}
        assert rows == {key: n for n, key in enumerate(KEYS)}, f"want each row under its key, got {rows}"


def test_rows_of_a_job(said: Callable[[], list[str]]) -> None:
    assert compat.rows(Record(keys=KEYS, chunk_ids=[4, 5, 6])) == compat.rows(Record(keys=KEYS, block_ids=[4, 5, 6])) == [4, 5, 6]
    for other in (Record(keys=KEYS), Record(keys=KEYS, chunk_ids=[4]), Record(keys=KEYS, chunk_ids=[(4, 5)] * 3)):
        assert compat.rows(other) is None
    assert len(said()) == 1 and "job of a tier" in said()[0]
    assert compat.positions(Record()) == compat.positions(Record(_offload_key_positions=[1])) == {}


def scheduler(**other: Any) -> Any:
    """A scheduler's inside as far as it is used, and what is other than in vLLM."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    manager = Record(**{name: getattr(KVCacheManager, name).__get__(Record()) for name in ("get_block_ids", "evict_blocks")})
    parts = {
        "failed_recving_kv_req_ids": set(), "running": [], "prev_step_scheduled_req_ids": set(), "kv_cache_manager": manager,
        "_preempt_request": Scheduler._preempt_request.__get__(Record()),
    }
    return Record(**(parts | other))


OTHERS: list[dict[str, Any]] = [
    {"running": {}}, {"prev_step_scheduled_req_ids": []}, {"kv_cache_manager": Record()}, {"kv_cache_manager": None},
    {"_preempt_request": None}, {"_preempt_request": lambda request: None}, {"_preempt_request": lambda request, timestamp, why: None},
    {"kv_cache_manager": Record(get_block_ids=lambda request_id, group: None, evict_blocks=lambda block_ids: None)},
]


def test_loads_inside_steps_need_a_scheduler_that_is_known(said: Callable[[], list[str]]) -> None:
    failed = compat.FailedLoads(1)
    assert not failed.preempts, "want no load inside a step without a scheduler"
    failed._scheduler = scheduler()
    assert failed.preempts and not said(), "want loads inside steps of this vLLM"
    for other in OTHERS:
        failed._scheduler = scheduler(**other)
        assert not failed.preempts, f"want no load inside a step where the scheduler has {other}"
    assert len(said()) == 1 and "no load runs inside a step" in said()[0]


def test_other_transfer_results(monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]) -> None:
    assert (compat._transfer_results() is None) == OLD and not said()
    for other in (lambda finished_recving: None, lambda finished_sending, finished_recving, failed_recving, blocks: None):
        monkeypatch.setattr(compat.base, "KVConnectorTransferResults", other, raising=False)
        assert compat._transfer_results() is None
    assert len(said()) == 1


def test_what_else_is_looked_at(monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]) -> None:
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.block_pool import BlockPool

    pool = Record(num_gpu_blocks=1, blocks=[], **{name: getattr(BlockPool, name) for name in ("get_num_free_blocks", "touch", "free_blocks")})
    assert compat.holds_blocks(pool) and compat.describes_events() and not said()
    assert not compat.holds_blocks(Record()) and not compat.holds_blocks(None)
    monkeypatch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", lambda request: None)
    assert not compat.describes_events()
    monkeypatch.delattr(kv_cache_utils, "generate_block_hash_extra_keys")
    assert not compat.describes_events()
    assert compat.waits_for_layers(Record(attn_metadata={})) is False, "want one wait for a whole load"
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.cpu_attn", None)
    with pytest.raises(Refused):  # else pages of other layouts have one name
        compat.host_attention_isa(Record())
    config = Record(lora_config=Record())
    self = Record(lora_manager=Record(list_adapters=set))  # a caller with another manager
    assert compat.loaded_adapters(config) is None and self
    assert [line.partition("'s ")[2].partition(" is not")[0] for line in said()] == ["block pool", "form of KV events", "lora_manager"]


def test_the_engine_goes_on_without_a_tier_that_cannot_be_made(said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    from kvhost.vllm import tier as module

    def other(*_: Any) -> Any:
        raise AttributeError("no such thing")

    monkeypatch.setattr(compat, "engine_config", lambda: (Record(), Record()))
    monkeypatch.setattr(module.tierrows, "groups", other)
    view = memoryview(bytearray(64)).cast("B", (4, 16))
    tier = module.KvhostTier(Record(config=None, kv_events_config=Record(enable_kv_cache_events=False)), view, "kvhost", socket="/nowhere")
    assert len(said()) == 1 and "NOT OFFLOADING" in said()[0]
    context = Record(req_id="a", kv_transfer_params=None)
    job = Record(job_id=1, keys=KEYS, req_context=context)  # whose rows are not known
    tier.submit_load(job)
    (done,) = tier.get_finished_jobs()
    assert not done.success, "want a load without rows to fail"
    tier.shutdown()


def test_takes() -> None:
    def f(a: int, b: int = 0, *rest: int, **more: int) -> None:
        pass

    assert compat._takes(f, "a") and compat._takes(f, "a", "b")
    assert not compat._takes(f) and not compat._takes(f, "a", "c") and not compat._takes(None, "a")
