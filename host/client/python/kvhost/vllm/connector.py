"""KvhostConnector: vLLM's connector interface, passed on to the scheduler's and the worker's half."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvhost.adopted import separate_allocations
from kvhost.events import EventStream, Position
from kvhost.session import Session
from kvhost.shape import Namespace
from kvhost.vllm import compat, model, regions
from kvhost.vllm.groups import GroupPlan
from kvhost.vllm.link import Link
from kvhost.vllm.orders import Handshake, StepOrders, WorkerReport
from kvhost.vllm.scheduler import Scheduler
from kvhost.vllm.settings import Refused, Settings
from kvhost.vllm.stats import KvhostPromMetrics, KvhostStats
from kvhost.vllm.worker import Finished, Worker, open_session

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvhost.vllm.kvevents import KVEvents

log = logging.getLogger("vllm.kvhost")

#: How long a starting engine waits for the host before it begins without it.
_FIRST_CONNECT = 3.0


class KvhostConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps an engine's KV cache in kvhost."""

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a dropped store costs a later hit, nothing else

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = Settings.parse(self._kv_transfer_config.kv_connector_extra_config)
        self._engine = str(self._kv_transfer_config.engine_id)
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        self._link: Link | None = None
        self._handshake: Handshake | None = None
        self._recovery = compat.HybridRecovery()
        self._clearings = compat.Clearings()
        self._idle = StepOrders()
        self._asleep = False
        self._release: Callable[[], None] = lambda: None  # the memory that the host has mapped
        self._export: Callable[[], None] = lambda: None
        self._on_gpu = False
        if role == KVConnectorRole.WORKER and vllm_config.device_config.device_type == "cpu":
            separate_allocations(True)  # the KV cache is allocated next: see HostMemory
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            log.warning('kvhost: kv_load_failure_policy is %r: a load that fails ends its request; want "recompute"',
                        self._kv_transfer_config.kv_load_failure_policy)

    def _open(self, epoch: int, namespace: Namespace, rank: tuple[int, int], role: str, device: str = "") -> Session:
        stage, n = rank
        local = self._vllm_config.parallel_config.tensor_parallel_size
        return Session(
            self._settings.socket, f"{self._engine}/{stage}/{epoch}", namespace, role=role, rank=n, local_ranks=local,
            tenant=self._settings.tenant, device_uuid=device, timeout=10.0,
        )

    # ---- worker ------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        try:
            self._register(kv_caches)
        except Refused as e:
            self._refuse(str(e))
        except (OSError, ImportError) as e:
            self._refuse(f"sharing the KV cache's memory: {e}")
        finally:
            if self._vllm_config.device_config.device_type == "cpu":
                separate_allocations(False)

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: type) -> None:
        self._refuse("the cache is one tensor for all layers")  # never asked for: see prefer_cross_layer_blocks

    def _refuse(self, why: str) -> None:
        log.error("kvhost: NOT OFFLOADING: %s. The engine runs without kvhost", why)
        self._handshake = Handshake(refusal=why)

    def _register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        config, cache = self._vllm_config, self._kv_cache_config
        plans = model.plan_groups(config, cache, self._settings)
        tensors = {n: t for g in cache.kv_cache_groups for n in g.layer_names if (t := kv_caches.get(n)) is not None}
        groups = model.group_regions(cache, plans, tensors)
        memory = regions.share(tensors, groups)
        self._on_gpu = bool(memory.device_uuid)
        rank = compat.ranks()
        namespace = model.namespace(config, cache, self._settings, groups, tensors, rank[0])

        def register(session: Session) -> None:
            for g in groups:
                memory.register(session, g)

        def open(epoch: int) -> list[Session]:
            return open_session(lambda: self._open(epoch, namespace, rank, "worker", memory.device_uuid), register)

        def release() -> None:
            for s in self._link.sessions() if self._link else []:
                for g in groups:
                    s.unregister(g.plan.id)

        self._release, self._export = release, memory.export
        self._link = Link(f"worker {rank[0]}.{rank[1]}", self._settings.socket, open, leads=False)
        self._worker = Worker(
            self._settings, self._link, rank, cache.num_blocks, stores=not (namespace.replicated and rank[1])
        )
        self._link.start(_FIRST_CONNECT)
        self._handshake = Handshake(namespace=namespace, epoch=self._link.epoch)
        log.info("kvhost: %d groups, %d planes, %.2f MiB per chunk of %d tokens and rank", len(groups),
                 sum(len(g.planes) for g in groups), sum(g.chunk_bytes for g in groups) / (1 << 20),
                 plans[0].chunk_tokens)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._handshake

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._worker is not None:
            assert isinstance(kv_connector_metadata, StepOrders)
            self._worker.before_step(kv_connector_metadata)

    def _step(self) -> StepOrders:
        """The step's orders; none while the engine warms up without metadata."""
        if not self.has_connector_metadata():
            return self._idle
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepOrders)
        return metadata

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.begin_loads(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # loads are asynchronous: a request runs when all its layers are there

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        pass  # not called when CUDA graphs replay: see wait_for_save

    def wait_for_save(self) -> None:
        if self._worker is not None and (orders := self._step()).stores:
            self._worker.store(orders, self._written())

    def _written(self) -> Callable[[], None]:
        """What returns once the kernels queued so far have written the cache."""
        if not self._on_gpu:
            return lambda: None
        import torch

        event = torch.cuda.Event(blocking=True)
        event.record()
        written: Callable[[], None] = event.synchronize
        return written

    def _finish(self) -> Finished:
        return self._worker.finished(self._step()) if self._worker is not None else Finished(set(), set(), set())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        done = self._finish()
        return done.sent or None, done.received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        done = self._finish()
        return compat.TransferResults(
            finished_sending=done.sent, finished_recving=done.received, failed_recving=done.failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        if self._worker is None:
            return set()
        bad = self._worker.bad_blocks()
        return bad if len(self._kv_cache_config.kv_cache_groups) == 1 else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.report() if self._worker is not None else None

    def unregister_kv_caches(self) -> None:
        if self._worker is None or self._asleep:
            return
        assert self._link is not None
        self._asleep = True
        self._worker.drain()
        self._release()
        self._link.pause()

    def restore_kv_caches(self) -> None:
        if self._asleep:
            assert self._link is not None
            self._asleep = False
            try:
                self._export()
            except Refused as e:
                log.error("kvhost: NOT OFFLOADING after the wake-up: %s", e)
                return
            self._link.resume(_FIRST_CONNECT)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = None

    # ---- scheduler ---------------------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._recovery.find_scheduler()
        self._clearings.watch(gpu_block_pool)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): m for rank, m in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        workers: dict[tuple[int, int], Handshake] = {}
        for rank, m in metadata.items():
            assert isinstance(m, Handshake)
            workers[rank] = m
        parallel = self._vllm_config.parallel_config
        ranks, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        refused = {rank: w.refusal for rank, w in workers.items() if w.refusal}
        if refused or len(workers) != ranks * stages:
            log.error("kvhost: NOT OFFLOADING: %s", refused or f"{len(workers)} of {ranks * stages} workers answered")
            return
        spaces = [workers[stage, 0].namespace for stage in range(stages)]

        def open(epoch: int) -> list[Session]:
            opened: list[Session] = []
            try:
                for stage, space in enumerate(spaces):
                    assert space is not None
                    opened.append(self._open(epoch, space, (stage, 0), "scheduler"))
            except BaseException:
                for s in opened:
                    s.close()
                raise
            return opened

        plans = model.plan_groups(self._vllm_config, self._kv_cache_config, self._settings)
        loads = len(plans) == 1 or self._recovery.possible
        if not loads:
            log.error("kvhost: NOT LOADING: this vLLM cannot recover a failed load of several KV cache groups")
        link = Link("scheduler", self._settings.socket, open, leads=True)
        self._scheduler = Scheduler(
            self._settings, link, plans, ranks, stages, loads=loads,
            step_tokens=self._vllm_config.scheduler_config.max_num_batched_tokens,
            events=self._kv_events(plans, link, stages),
        )
        self._scheduler.handshake({rank: w.epoch for rank, w in workers.items()})
        link.start(_FIRST_CONNECT)

    def _kv_events(self, plans: Sequence[GroupPlan], link: Link, stages: int) -> KVEvents | None:
        """What turns the host's events into the engine's, if the engine publishes events."""
        config = self._vllm_config.kv_events_config
        if config is None or not config.enable_kv_cache_events:
            return None
        from kvhost.vllm.kvevents import KVEvents  # needs more of vLLM than the rest

        hash_tokens = compat.hash_tokens(self._vllm_config, self._kv_cache_config)
        if not self._clearings.noticed:
            log.error("kvhost: this vLLM does not show when it empties its prefix cache. Routers forget then what the host "
                      "has, until it is stored anew")

        def open(stage: int, after: Position | None) -> EventStream | None:
            sessions = link.sessions()
            return sessions[stage].events(after) if sessions else None

        return KVEvents(
            plans, hash_tokens, self._settings.events_medium, stages, open, alive=lambda: link.epoch >= 0,
            cleared=self._clearings.happened,
        )

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._scheduler.take_events() if self._scheduler is not None else ()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        n = self._scheduler.matched(request, num_computed_tokens)
        return n, bool(n)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler.step(scheduler_output) if self._scheduler is not None else StepOrders()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler is None:
            return
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            failed = self._scheduler.reported(report)
            if failed and len(self._kv_cache_config.kv_cache_groups) > 1:
                self._recovery.restart(failed)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return (self._scheduler.finished(request) if self._scheduler is not None else False), None

    def get_kv_connector_stats(self) -> KvhostStats | None:
        """Also the scheduler's sign that a step's output has come: it is asked once for each."""
        if self._scheduler is None:
            return None
        self._scheduler.output()
        counts, self._scheduler.counts = self._scheduler.counts, {}
        return KvhostStats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvhostStats | None:
        return KvhostStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvhostPromMetrics | None:
        return KvhostPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def reset_cache(self) -> bool | None:
        """The engine's weights have changed: nothing that was stored before may be found again by this engine."""
        if self._scheduler is not None:
            self._scheduler.new_generation(os.urandom(16))
        return True
