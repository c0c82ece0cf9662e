"""LoRA adapters by content, in both halves of the vLLM connector."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace as Record
from typing import Any

import pytest
from test_content import adapter
from vllm_doubles import DoubleLink, DoublePool, DoubleSession, request, step

from kvhost.vllm.adapters import Adapters, LoadedAdapters
from kvhost.vllm.groups import GroupPlan
from kvhost.vllm.holds import Holds
from kvhost.vllm.orders import StepOrders, WorkerReport
from kvhost.vllm.scheduler import Scheduler
from kvhost.vllm.settings import Settings
from kvhost.vllm.worker import Worker
from waits import left

BLOCK, CHUNK = 4, 8
FULL = GroupPlan(0, BLOCK, CHUNK)
TOKENS = list(range(100, 132))  # four chunks
TABLE = [list(range(1, 9))]


def lora(path: str, name: str = "name", number: int = 1, **more: Any) -> Any:
    return Record(lora_name=name, lora_int_id=number, lora_path=path, **more)


class Manager:
    """vLLM's manager of adapters, as far as the connector sees it."""

    def __init__(self) -> None:
        self.loaded: dict[int, Any] = {}

    def list_adapters(self) -> set[int]:
        return set(self.loaded)

    def _load_adapter(self, r: Any) -> Any:
        return r

    def load(self, r: Any) -> None:
        self.loaded[r.lora_int_id] = self._load_adapter(r)


class Engine:
    """A scheduler's and a worker's half, and one host."""

    def __init__(self) -> None:
        self.session, self.manager = DoubleSession(), Manager()
        link: Any = DoubleLink(self.session)
        settings = Settings(load_when="always", lookup_wait=10.0)
        holds = Holds(DoublePool(64), [(FULL.block_tokens, 0)], 64, 0, 1)
        self.s = Scheduler(
            settings, link, [FULL], 1, 1, loads=True, step_tokens=64, holds=holds, adapters=Adapters("float32"),
        )
        self.s.reported(WorkerReport(epochs={(0, 0): 0}))
        self.worker = Worker(settings, link, (0, 0), True, LoadedAdapters(self.manager, lambda path: path))

    def step(self, orders: StepOrders) -> list[Any]:
        """What the worker does in a step; returns the requests whose load failed."""
        self.worker.begin(orders)
        self.worker.store(orders, lambda: None)
        self.worker.finished(orders, lambda: lambda: None)
        report = self.worker.report()
        self.worker._work.flush()
        return self.s.reported(report)[0] if report is not None else []

    def compute(self, r: Any, *, found: int = 0, local: int = 0, load: Any = None) -> int:
        """Runs a request's prompt: looks it up, loads what is found, loads the adapter as vLLM would, stores. Returns
        how many chunks were stored."""
        before = len(self.session.stores)
        assert self.s.matched(r, local) == found
        table = TABLE
        self.s.allocated(r, table, found)
        if found:
            self.step(self.s.step(step({})))
            self.session.loads[-1].finish()
            self.step(self.s.step(step({})))
            self.s.allocated(r, table, 0)
        r.num_computed_tokens = local + found
        orders = self.s.step(step({r.request_id: len(TOKENS) - r.num_computed_tokens}))
        if load is not None:
            self.manager.load(load)
        elif r.lora_request is not None and r.lora_request.lora_int_id not in self.manager.loaded:
            self.manager.load(r.lora_request)
        self.step(orders)
        stored = [c.key for s in self.session.stores[before:] for c in s.chunks]
        self.session.resident |= set(stored)
        for s in self.session.stores[before:]:
            s.finish_reading()
            s.publish()
        self.step(self.s.step(step({})))
        self.s.finished(r)
        return len(stored)

    def close(self) -> None:
        self.worker.close()
        self.s.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    e = Engine()
    yield e
    e.close()


_last = iter(range(1, 1 << 30))


def of(adapter: Any, tokens: list[int] = TOKENS) -> Any:
    r = request(f"r{next(_last)}", tokens)
    r.lora_request = adapter
    return r


def test_content_decides_not_name_number_or_path(engine: Engine, tmp_path: Path) -> None:
    one, same, other = (adapter(tmp_path / n, w) for n, w in (("1", b"x"), ("2", b"x"), ("3", b"y")))
    assert engine.compute(of(lora(one))) == 4
    assert engine.compute(of(lora(one)), found=32) == 0
    assert engine.compute(of(lora(same, "another", 2)), found=32) == 0
    assert engine.compute(of(lora(other, "third", 3))) == 4
    assert engine.compute(of(None)) == 4


def test_the_type_and_the_form_of_weights_are_content(tmp_path: Path) -> None:
    path, keys = adapter(tmp_path / "a"), set()
    for dtype, fused in (("float32", False), ("float16", False), ("float16", True)):
        adapters = Adapters(dtype)
        asked = adapters.ask(lora(path, is_3d_lora_weight=fused))
        assert asked.done(left()) and asked.content is not None
        keys.add(asked.content.key)
        adapters.close()
    assert len(keys) == 3


def test_replaced_files_are_not_used_until_the_engine_has_loaded_them(engine: Engine, tmp_path: Path) -> None:
    a = lora(adapter(tmp_path / "a", b"x"))
    assert engine.compute(of(a)) == 4
    adapter(tmp_path / "a", b"yy")
    assert engine.compute(of(a)) == 0  # the engine computes with the old weights
    assert engine.s.counts["adapters_not_known"] == 1
    del engine.manager.loaded[1]
    assert engine.compute(of(a)) == 0  # the scheduler does not know yet that the engine has dropped it
    assert engine.compute(of(a)) == 4
    assert engine.compute(of(a), found=32) == 0


def test_an_adapter_that_the_engine_has_dropped_is_read_again(engine: Engine, tmp_path: Path) -> None:
    a = lora(adapter(tmp_path / "a", b"x"))
    assert engine.compute(of(a)) == 4
    del engine.manager.loaded[1]
    engine.step(engine.s.step(step({})))
    adapter(tmp_path / "a", b"yy")
    assert engine.compute(of(a)) == 4
    assert engine.compute(of(a), found=32) == 0


def test_what_the_engine_loads_decides_not_what_was_read_before(engine: Engine, tmp_path: Path) -> None:
    """The files are replaced between the lookup and the step in which the engine loads them."""
    a, other = lora(adapter(tmp_path / "a", b"x")), lora(adapter(tmp_path / "b", b"yy"))
    assert engine.compute(of(a), load=other) == 0
    assert engine.session.stores == []


def test_files_that_change_while_the_engine_reads_them(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(r: Any) -> Any:
        adapter(tmp_path / "a", b"other")
        return r

    monkeypatch.setattr(engine.manager, "_load_adapter", read)
    engine.worker._adapters = LoadedAdapters(engine.manager, lambda path: path)
    assert engine.compute(of(lora(adapter(tmp_path / "a", b"x")))) == 0
    assert engine.session.stores == []


def test_a_load_is_not_begun_for_other_weights(engine: Engine, tmp_path: Path) -> None:
    a, other = lora(adapter(tmp_path / "a", b"x")), lora(adapter(tmp_path / "b", b"yy"))
    assert engine.compute(of(a)) == 4
    r = of(a)
    assert engine.s.matched(r, 0) == 32
    engine.s.allocated(r, TABLE, 32)
    orders = engine.s.step(step({}))
    engine.manager.load(other)  # in place, by a call of the engine's interface
    assert engine.step(orders) == [r] and engine.session.loads == []


def test_a_load_that_ends_under_other_weights_has_failed(engine: Engine, tmp_path: Path) -> None:
    a, other = lora(adapter(tmp_path / "a", b"x")), lora(adapter(tmp_path / "b", b"yy"))
    assert engine.compute(of(a)) == 4
    r = of(a)
    assert engine.s.matched(r, 0) == 32
    engine.s.allocated(r, TABLE, 32)
    assert engine.step(engine.s.step(step({}))) == []
    engine.manager.load(other)
    engine.session.loads[-1].finish()
    assert engine.step(engine.s.step(step({}))) == [r]
    assert engine.worker.bad_blocks() == set(TABLE[0])
    # It is computed with other weights than its keys are of.
    orders = engine.s.step(step({r.request_id: 32}))
    assert orders.stores == []


def test_blocks_that_other_weights_of_the_name_have_computed(engine: Engine, tmp_path: Path) -> None:
    """vLLM's own cache knows an adapter by its name."""
    first, second = (lora(adapter(tmp_path / n, n.encode()), "name", i) for i, n in enumerate("ab", 1))
    assert engine.compute(of(first)) == 4
    assert engine.compute(of(first, TOKENS[:8] + TOKENS[:24]), local=8, found=0) == 3
    assert engine.compute(of(second), local=16) == 0
    assert engine.compute(of(second)) == 4
    assert engine.compute(of(second), local=16) == 0
    assert engine.compute(of(lora(second.lora_path, "new", 3)), found=32) == 0
    engine.s.new_generation(b"")  # the cache was emptied
    assert engine.compute(of(second), local=16, found=16) == 0


def test_what_cannot_be_read_is_computed_and_named_once(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensorizer = lora(adapter(tmp_path / "a"), "streamed", 2, tensorizer_config_dict={"tensorizer_dir": "s3://x"})
    with caplog.at_level(logging.WARNING, "vllm.kvhost"):
        for _ in range(2):
            assert engine.compute(of(lora(str(tmp_path / "none"), "none"))) == 0
            assert engine.compute(of(tensorizer)) == 0
    assert [r.getMessage().split(":")[1].strip() for r in caplog.records] == [
        "LoRA adapter 'none'", "LoRA adapter 'streamed'",
    ]
    assert engine.s.counts["adapters_not_known"] == 4 and engine.session.stores == []


def test_a_repository_of_the_hub_is_known_while_it_is_loaded(engine: Engine, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "snapshot")
    engine.worker._adapters = LoadedAdapters(engine.manager, lambda path: folder)
    repository = lora("org/adapter")
    assert engine.compute(of(repository)) == 0
    assert engine.compute(of(repository)) == 4
    assert engine.compute(of(repository), found=32) == 0
    r = of(repository)
    assert engine.s.matched(r, 0) == 32
    engine.s.allocated(r, TABLE, 32)
    engine.manager.loaded.clear()  # it would be downloaded again, and the repository may have another revision then
    assert engine.step(engine.s.step(step({}))) == [r]


def test_an_answer_that_comes_late_is_a_miss(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, a = threading.Event(), lora(adapter(tmp_path / "a"))

    def digest(folder: str) -> bytes:
        assert read.wait(left())
        return b"digest"

    monkeypatch.setattr("kvhost.content._digest", digest)
    engine.s._settings = Settings(load_when="always", lookup_wait=0.0, lookup_timeout=0.0)
    assert engine.compute(of(a)) == 0
    engine.s._settings = Settings(load_when="always", lookup_wait=0.0, lookup_timeout=60.0)
    r = of(a)
    assert engine.s.matched(r, 0) is None
    engine.s._settings = Settings(load_when="always", lookup_wait=30.0)
    read.set()
    while (found := engine.s.matched(r, 0)) is None:
        pass
    assert found == 0 and len(engine.session.lookups) == 1


def test_a_failed_load_does_not_bring_back_stores_of_old_weights(engine: Engine) -> None:
    """The engine's weights change while a load is under way, and then it fails."""
    assert engine.compute(of(None)) == 4
    r = of(None)
    assert engine.s.matched(r, 0) == 32
    engine.s.allocated(r, TABLE, 32)
    engine.s.step(step({}))
    engine.s.new_generation(b"new")
    engine.s.reported(WorkerReport(failed={r.request_id: {0: False}}))
    assert engine.s.step(step({r.request_id: 32})).stores == []
