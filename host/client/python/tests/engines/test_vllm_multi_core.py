"""vLLM's own scheduler and MultiConnector with kvhost and another connector: what becomes of requests and blocks."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace as Record
from typing import Any

import pytest
from features import OLD
from needs import needs

needs("vllm")

import vllm_core  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402
from vllm.v1.worker import kv_connector_model_runner_mixin as runner  # noqa: E402
from vllm_core import BLOCK, CHUNK, Core, keys  # noqa: E402
from vllm_other import Other, Plan  # noqa: E402

from kvhost import Code  # noqa: E402
from kvhost.adopted import separate_allocations  # noqa: E402
from kvhost.vllm import KvhostConnector, compat  # noqa: E402
from kvhost.vllm.orders import Registration, WorkerReport  # noqa: E402

PROMPT = list(range(100, 100 + 4 * CHUNK + 5))
BOTH = pytest.mark.parametrize("first", [True, False], ids=["kvhost first", "kvhost last"])
OTHER = {"kv_connector": "Other", "kv_connector_module_path": "vllm_other", "kv_role": "kv_both"}


class MultiCore(Core):
    """A core with kvhost and another connector. What its worker answers goes through vLLM's model runner."""

    def __init__(
        self, folder: Path, monkeypatch: Any, *, first: bool = True, other: dict[str, Any] = OTHER,
        plan: Plan | None = None, refusal: str | None = None, **options: Any,
    ) -> None:
        """With a ``refusal``, which may be empty, kvhost's worker reports in the first step and not before."""
        self.plan = Other.plan = plan or Plan()
        self._refusal = refusal
        self._steps = other is OTHER
        monkeypatch.setattr(vllm_core, "KVTransferConfig", lambda **ours: both(ours, other, first))
        monkeypatch.setattr(compat, "ranks", lambda: (0, 0))
        super().__init__(folder, monkeypatch, **options)

    def _make_worker_side(self, config: Any, cache: Any) -> Any:
        return super()._make_worker_side(config, cache) if self._steps else None

    def _worker_side(self, connector: Any) -> Any:
        half = ours(connector)
        half._worker = None if self._refusal else self.worker
        if self._refusal is not None:
            half._registration = Registration(self.space, self._refusal)
        return connector

    def _ours(self) -> Any:
        return ours(self.scheduler.connector)

    def _report(self, report: WorkerReport) -> None:
        self.space = report.registered[0, 0].namespace
        if self._refusal is None:
            super()._report(report)


def both(ours: dict[str, Any], other: dict[str, Any], first: bool) -> KVTransferConfig:
    ours = {name: value for name, value in ours.items() if name != "kv_load_failure_policy"}
    return KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": [ours, other] if first else [other, ours]},
    )


def ours(multi: Any) -> Any:
    (found,) = (c for c in multi._connectors if isinstance(c, KvhostConnector))
    return found


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., MultiCore]]:
    made: list[MultiCore] = []

    def core(**options: Any) -> MultiCore:
        made.append(MultiCore(tmp_path, monkeypatch, **options))
        return made[-1]

    yield core
    for c in made:
        c.close()


def publish_all(core: Core) -> None:
    for job in core.session.stores:
        if not job.over:
            job.finish_reading()
            job.publish()
            core.session.resident |= {c.key for c in job.chunks}


def stored(core: Core) -> list[bytes]:
    return [c.key for job in core.session.stores for c in job.chunks]


@BOTH
def test_the_first_request_hits(make: Callable[..., MultiCore], first: bool) -> None:
    """It waits for the workers' report, which comes with the output of a step that computes nothing."""
    core = make(first=first, refusal="")
    core.session.resident = set(keys(PROMPT))
    a = core.add("a", PROMPT)
    assert core.step() == {} and not core.session.lookups
    assert core.step() == {} and a.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    core.session.loads[0].finish()
    assert core.run(a) == [5, 1]
    publish_all(core)
    core.check_idle()


def test_nothing_is_promised_before_every_worker_has_reported(make: Callable[..., MultiCore]) -> None:
    core = make(refusal="")
    core.connector._vllm_config.parallel_config.tensor_parallel_size = 2
    core.session.resident = set(keys(PROMPT))
    a = core.add("a", PROMPT)
    for _ in range(3):
        assert core.step() == {} and a.status == RequestStatus.WAITING and not core.session.lookups
    second = WorkerReport(registered={(0, 1): Registration(core.space)}, epochs={(0, 1): 0})
    core.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=second))
    assert core.step() == {} and a.status == RequestStatus.WAITING_FOR_REMOTE_KVS


def test_a_worker_on_another_node_is_refused(make: Callable[..., MultiCore], caplog: pytest.LogCaptureFixture) -> None:
    """Whatever has put it there: its node's host has its part of each chunk, and the scheduler asks another one."""
    core = make(refusal="")
    core.connector._vllm_config.parallel_config.tensor_parallel_size = 2
    core.session.resident = set(keys(PROMPT))
    second = WorkerReport(registered={(0, 1): Registration(core.space, node="another boot")}, epochs={(0, 1): 0})
    core.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=second))
    assert core.run(core.add("a", PROMPT)) == [len(PROMPT), 1] and not core.session.lookups
    assert "NOT OFFLOADING: {(0, 1): 'on another node" in caplog.text


def test_a_request_waits_no_longer_than_lookup_timeout_for_the_workers(make: Callable[..., MultiCore]) -> None:
    core = make(refusal="", lookup_timeout=0.0)
    core.session.resident = set(keys(PROMPT))
    a = core.add("a", PROMPT)
    assert core.run(a) == [len(PROMPT), 1] and not core.session.lookups
    assert core.scheduler.reset_prefix_cache()
    b = core.add("b", PROMPT)
    core.step()
    core.session.loads[0].finish()
    assert core.run(b) == [5, 1]
    publish_all(core)
    core.check_idle()


def test_no_request_waits_once_a_worker_has_refused(make: Callable[..., MultiCore]) -> None:
    core = make(refusal="its cache is odd")
    core.session.resident = set(keys(PROMPT))
    a = core.add("a", PROMPT)
    assert core.step() == {} and core.step() == {"a": len(PROMPT)}
    assert core.run(a) == [1] and not core.session.lookups


def test_new_weights_before_the_first_step(make: Callable[..., MultiCore]) -> None:
    core = make(refusal="")
    core.session.resident = set(keys(PROMPT))
    assert core.scheduler.reset_prefix_cache(reset_connector=True)
    a = core.add("a", PROMPT)
    assert core.run(a) == [len(PROMPT), 1] and not core.session.loads
    assert not core.session.resident & set(stored(core))
    publish_all(core)
    core.check_idle()


def test_outputs_belong_to_their_steps(make: Callable[..., MultiCore]) -> None:
    """With asynchronous scheduling there are two steps before the first output."""
    core = make(refusal="")
    core.add("a", PROMPT)
    steps = [core.scheduler.schedule(), core.scheduler.schedule()]
    for scheduled in steps:
        core.output(scheduled)
    third = core.scheduler.schedule()
    waiting = core.connector._scheduler._choice.steps
    assert len(waiting) == 1
    core.output(third)
    assert not waiting


@BOTH
def test_another_connectors_handshake(
    make: Callable[..., MultiCore], monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """MultiConnector hands the first handshake that a child has to all children, here of two pipeline stages."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    core = make(first=first, other=nixl)
    handshake = {(stage, 0): NixlHandshakePayload("hash", b"") for stage in range(2)}
    core.scheduler.connector.set_xfer_handshake_metadata_pp_aware(handshake)
    core.scheduler.connector.shutdown()


@BOTH
@pytest.mark.parametrize("earlier", ["kvhost", "the other"])
def test_blocks_are_freed_when_both_have_read_them(make: Callable[..., MultiCore], first: bool, earlier: str) -> None:
    core = make(first=first, plan=Plan(keeps=True))
    before = core.free_blocks
    a = core.add("a", PROMPT, answer=1)
    core.step()
    assert a.is_finished()
    kept, chunks = -(-len(PROMPT) // BLOCK), len(PROMPT) // CHUNK * CHUNK // BLOCK
    for reads in sorted(["kvhost", "the other"], key=lambda name: name != earlier):
        core.step()
        assert core.free_blocks == before - kept, f"want {kept} blocks kept until {reads} has read them"
        if reads == "kvhost":
            publish_all(core)
        else:
            core.plan.sent = {"a"}
            kept = chunks  # kvhost holds the blocks of chunks, the other kept the request's
    core.check_idle()


@BOTH
def test_another_connector_loads_and_kvhost_stores_it(make: Callable[..., MultiCore], first: bool) -> None:
    core = make(first=first, plan=Plan(tokens=2 * CHUNK, asynchronous=True))
    a = core.add("a", PROMPT)
    assert core.step() == {} and a.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert core.step() == {} and not stored(core)
    core.plan.received = {"a"}
    assert core.run(a) == [len(PROMPT) - 2 * CHUNK, 1]
    assert stored(core) == keys(PROMPT)
    publish_all(core)
    core.check_idle()


@BOTH
def test_the_first_that_has_tokens_loads(make: Callable[..., MultiCore], first: bool) -> None:
    core = make(first=first, plan=Plan(tokens=3 * CHUNK, asynchronous=True))
    core.session.resident = set(keys(PROMPT)[:2])
    a = core.add("a", PROMPT)
    core.step()
    if first:
        core.session.loads[0].finish()
        assert core.run(a) == [len(PROMPT) - 2 * CHUNK, 1] and not core.plan.blocks
    else:
        assert not core.session.loads and core.session.released == [1]
        core.plan.received = {"a"}
        assert core.run(a) == [len(PROMPT) - 3 * CHUNK, 1]
    assert stored(core) == keys(PROMPT)[2:]
    publish_all(core)
    core.check_idle()


@BOTH
def test_another_connectors_load_fails(make: Callable[..., MultiCore], first: bool) -> None:
    core = make(first=first, plan=Plan(tokens=3 * CHUNK, asynchronous=True))
    a = core.add("a", PROMPT)
    core.step()
    core.plan.bad, core.plan.received = {core.plan.blocks["a"][CHUNK // BLOCK]}, {"a"}
    assert core.run(a) == [len(PROMPT) - CHUNK, 1]
    assert stored(core) == keys(PROMPT)
    publish_all(core)
    core.check_idle()


@BOTH
def test_another_connectors_load_fails_in_the_step(make: Callable[..., MultiCore], first: bool) -> None:
    """Neither what it loaded is stored nor what was computed with it, by this request or one that shares its blocks."""
    core = make(first=first, plan=Plan(tokens=3 * CHUNK))
    core.plan.bad = {CHUNK // BLOCK + 1}  # the blocks of an empty pool are given out in order, from 1
    requests = [core.add(name, PROMPT) for name in "ab"]
    assert core.step() == {"a": len(PROMPT) - 3 * CHUNK, "b": 5}
    assert core.plan.blocks["a"][CHUNK // BLOCK] == CHUNK // BLOCK + 1 and core.invalid
    assert not stored(core)
    assert core.run(requests[0]) == [len(PROMPT) - CHUNK, 1]
    core.step()  # with the orders of those that have ended
    assert set(stored(core)) == set(keys(PROMPT))
    publish_all(core)
    core.check_idle()


@BOTH
def test_another_connector_loads_in_the_step(make: Callable[..., MultiCore], first: bool) -> None:
    core = make(first=first, plan=Plan(tokens=3 * CHUNK))
    a = core.add("a", PROMPT)
    assert core.step() == {"a": len(PROMPT) - 3 * CHUNK} and not stored(core)
    assert core.run(a) == [1]
    assert stored(core) == keys(PROMPT)
    publish_all(core)
    core.check_idle()


@BOTH
@pytest.mark.parametrize("window", [0, 40])
def test_a_failed_load_is_computed(make: Callable[..., MultiCore], first: bool, window: int) -> None:
    core = make(first=first, window=window)
    core.session.resident = set(keys(PROMPT))
    a = core.add("a", PROMPT)
    core.step()
    for load in core.session.loads:
        load.finish([(1, Code.IO)])
    assert core.run(a)[0] > CHUNK
    publish_all(core)
    core.check_idle()


@BOTH
def test_another_connector_ends_no_load_of_kvhost(make: Callable[..., MultiCore], first: bool) -> None:
    """It reports a request as received that it did not load."""
    core = make(first=first)
    core.session.resident = set(keys(PROMPT))
    a = core.add("a", PROMPT)
    core.step()
    core.plan.received = {"a"}
    for _ in range(3):
        assert core.step() == {} and a.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    core.session.loads[0].finish()
    assert core.run(a) == [5, 1]
    publish_all(core)
    core.check_idle()


def test_two_connectors_count_in_the_same_series() -> None:
    """vLLM makes the series of each class of connector once. Other wrappers make them once for each connector, and all of their
    process' connectors are in Prometheus' one registry."""
    from prometheus_client import REGISTRY
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm

    from kvhost.vllm import stats

    child = {"kv_connector": "KvhostConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"socket": "/nowhere"}}
    labels = {"model_name": "m", "engine": "0"}
    kinds = {kind: kind for kind in (KVConnectorProm._gauge_cls, KVConnectorProm._counter_cls, KVConnectorProm._histogram_cls)}
    config = Record(kv_transfer_config=both(child, child, True))
    made = [MultiConnector.build_prom_metrics(config, kinds, [*labels], {0: [*labels.values()]})]
    made += [KvhostConnector.build_prom_metrics(config, kinds, [*labels], {0: [*labels.values()]}) for _ in range(2)]
    made[0].observe({"KvhostConnector": {"lookups": 1, "load_seconds": [0.5]}} if not OLD else {
        "KvhostConnector": {"data": {"lookups": 1, "load_seconds": [0.5]}}})
    for m in made[1:]:
        m.observe({"lookups": 2, "load_seconds": [0.5]})
    assert REGISTRY.get_sample_value("vllm:kvhost_lookups_total", labels) == 5
    assert REGISTRY.get_sample_value("vllm:kvhost_load_seconds_count", labels) == 3
    for series in {id(s): s for m in made[1:] for s in (*m._counters.values(), *m._histograms.values())}.values():
        REGISTRY.unregister(series)  # as vLLM does before it makes them again
    again = KvhostConnector.build_prom_metrics(config, kinds, [*labels], {0: [*labels.values()]})
    again.observe({"lookups": 4})
    assert REGISTRY.get_sample_value("vllm:kvhost_lookups_total", labels) == 4
    with pytest.raises(ValueError, match="Duplicated"):  # of a series that is not kvhost's
        stats._series(KVConnectorProm._gauge_cls, "vllm:kvhost_lookups", documentation="", labelnames=[])
