"""KvhostConnector: vLLM's connector interface, passed on to the scheduler's and the worker's half."""

from __future__ import annotations

import logging
import os
import time
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
from vllm.platforms import current_platform

from kvhost.adopted import separate_allocations
from kvhost.errors import KvhostError, Refused
from kvhost.events import EventStream, Position
from kvhost.forks import Origin
from kvhost.link import Link
from kvhost.memory import share
from kvhost.session import Session
from kvhost.shape import Namespace
from kvhost.vllm import compat, model, register
from kvhost.vllm.adapters import Adapters
from kvhost.vllm.groups import GroupPlan
from kvhost.vllm.holds import Holds
from kvhost.vllm.identity import Named, adapters
from kvhost.vllm.layers import DeviceGates, Gates, HostGates, StepLayers
from kvhost.vllm.orders import Registration, StepOrders, WorkerReport, node
from kvhost.vllm.rates import LastLife
from kvhost.vllm.regions import GroupRegions
from kvhost.vllm.scheduler import GRAPH_BYTES, Scheduler
from kvhost.vllm.settings import Settings
from kvhost.vllm.stats import KvhostPromMetrics, KvhostStats
from kvhost.vllm.worker import Finished, Worker, open_session

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
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

register()

#: Seconds that a starting engine waits for the host before it begins without it.
_FIRST_CONNECT = 3.0


class KvhostConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps an engine's KV cache in kvhost."""

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a dropped store only costs a later hit

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Whether the memory of an engine that can sleep can be shared. On a GPU such memory comes from an allocator
        of vLLM, and CUDA IPC cannot export it. From 0.33 on vLLM calls this before it starts."""
        return bool(current_platform.is_cpu())

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Returns a layout that keeps the bytes of a unit together if engines of different sizes share chunks, so
        that whole blocks are copied. In an engine with another layout kvhost copies token by token."""
        transfer = vllm_config.kv_transfer_config
        if transfer is None or not transfer.kv_connector_extra_config.get("share"):
            return None
        return compat.heads_together(vllm_config)

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = Settings.parse(self._kv_transfer_config.kv_connector_extra_config)
        self._engine = str(self._kv_transfer_config.engine_id)
        self._origin = Origin()
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        self._link: Link | None = None
        self._registration: Registration | None = None  # the worker's registration, until it has been reported
        self._first = WorkerReport()  # merged reports of the workers, until all have reported
        self._wait_until = 0.0  # end of the requests' wait for the workers' reports
        self._out = False  # a worker has refused, or the reports did not come in time
        self._other = False  # compat does not know this vLLM's scheduler
        self._unseen = 0  # steps from before the reports whose output has not come
        self._generation = b""
        self._failed = compat.FailedLoads(len(kv_cache_config.kv_cache_groups))
        self._block_pool: BlockPool | None = None
        self._clearings = compat.Clearings()
        self._idle = StepOrders()
        self._asleep = False
        self._release: Callable[[], None] = lambda: None  # releases the memory that the host has mapped
        self._export: Callable[[], None] = lambda: None
        self._on_gpu = False
        if role == KVConnectorRole.WORKER and vllm_config.device_config.device_type == "cpu":
            separate_allocations(True)  # the KV cache is allocated next: see HostMemory

    def _open(self, epoch: int, namespace: Namespace, rank: tuple[int, int], role: str, device: str = "") -> Session:
        stage, n = rank
        local = self._vllm_config.parallel_config.tensor_parallel_size
        if self._settings.own is not None:
            self._settings.own.ensure()
        return Session(
            self._settings.path, f"{self._engine}/{stage}/{epoch}", namespace, role=role, rank=n, local_ranks=local,
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
        except Exception as e:  # compat does not know this vLLM
            log.debug("kvhost: what this vLLM has otherwise", exc_info=True)
            self._refuse(f"this vLLM is not as 0.26 to 0.33 are: {type(e).__name__}: {e}")
        finally:
            if self._vllm_config.device_config.device_type == "cpu":
                separate_allocations(False)

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: type) -> None:
        self._refuse("the cache is one tensor for all layers")  # the connector never asks for it: see prefer_cross_layer_blocks

    def _refuse(self, why: str) -> None:
        log.error("kvhost: NOT OFFLOADING: %s. The engine runs without kvhost", why)
        self._registration = Registration(refusal=why)

    def _register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        config, cache = self._vllm_config, self._kv_cache_config
        plans = model.plan_groups(config, cache, self._settings)
        tensors = {n: t for n in model.layers(cache) if (t := kv_caches.get(n)) is not None}
        shared = model.shared_sizes(config, cache, self._settings)
        groups = model.group_regions(cache, plans, tensors, shared)
        memory = share([*tensors.values()], [p for g in groups for p in g.pages])
        self._on_gpu = bool(memory.device_uuid)
        rank = compat.ranks()
        named = Named(
            model.namespace(config, cache, self._settings, groups, tensors, rank[0]), config, self._registered, self._refuse,
        )

        def register(session: Session) -> None:
            for g in groups:
                memory.register(session, g.plan.id, g.pages)
            if not session.share_withdrawals():
                log.warning("kvhost: the host is older than this package: while it is stopped, requests may wait for blocks "
                            "that it has not read")
            if layers is not None:
                layers.share(session)

        def open(epoch: int) -> list[Session]:
            namespace = named()
            return open_session(lambda: self._open(epoch, namespace, rank, "worker", memory.device_uuid), register)

        def release() -> None:
            for s in self._link.sessions() if self._link else []:
                for g in groups:
                    s.unregister(g.plan.id)

        layers = self._step_layers(groups)
        self._release, self._export = release, memory.export
        self._link = Link(f"worker {rank[0]}.{rank[1]}", self._settings.path, open, leads=False, log=log)
        self._worker = Worker(
            self._settings, self._link, rank, stores=model.stores(config, cache, self._settings, rank[1]),
            adapters=compat.loaded_adapters(config), layers=layers,
        )
        self._link.start(_FIRST_CONNECT)
        log.info("kvhost: %d groups, %d planes, %.2f MiB per chunk of %d tokens and rank", len(groups),
                 sum(len(g.planes) for g in groups), sum(g.chunk_bytes for g in groups) / (1 << 20),
                 plans[0].chunk_tokens)
        if shared:
            log.info("kvhost: %d KV heads in %d units: engines of %s ranks share what is stored", shared.heads, shared.units,
                     ", ".join(map(str, shared.sharing)))

    def _registered(self, namespace: Namespace) -> None:
        """Runs on the link's thread."""
        self._registration = Registration(namespace)

    def _step_layers(self, groups: Sequence[GroupRegions]) -> StepLayers | None:
        if not self._may_load_in_step:
            return None
        gates: Gates = HostGates(self._settings.step_timeout)
        if self._on_gpu:
            import torch

            gates = DeviceGates(lambda: int(torch.cuda.current_stream().cuda_stream))
        return StepLayers(gates, groups[0].positions)

    @property
    def _may_load_in_step(self) -> bool:
        """Whether loads may run inside a step. Both halves of the connector must get the same answer."""
        config = self._vllm_config
        return (
            self._settings.load_in != "beside"
            and len(self._kv_cache_config.kv_cache_groups) == 1
            and config.parallel_config.pipeline_parallel_size == 1
            and config.speculative_config is None  # the draft's layers run after the step's output is made
        )

    def _step(self) -> StepOrders:
        """Returns the step's orders; None while the engine warms up without metadata."""
        if not self.has_connector_metadata():
            return self._idle
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepOrders)
        return metadata

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.begin(self._step(), compat.waits_for_layers(forward_context))

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        pass  # not called when CUDA graphs replay: see wait_for_save

    def wait_for_save(self) -> None:
        if self._worker is not None and (orders := self._step()).stores:
            self._worker.store(orders, self._written())

    def _written(self) -> Callable[[], None]:
        """Returns a function that waits until the kernels queued so far have written the cache."""
        if not self._on_gpu:
            return lambda: None
        import torch

        event = torch.cuda.Event(blocking=True)
        event.record()
        written: Callable[[], None] = event.synchronize
        return written

    def _finish(self) -> Finished:
        return self._worker.finished(self._step(), self._written) if self._worker is not None else Finished(set(), set(), set())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._finish().received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        if compat.TransferResults is None:
            return super().get_transfer_results(finished_req_ids)
        done = self._finish()
        return compat.TransferResults(
            finished_recving=done.received, failed_recving=self._failed.requests(done.failed, done.abandoned)
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._failed.blocks(self._worker.bad_blocks()) if self._worker is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self._worker.report() if self._worker is not None else None
        if self._registration is not None:
            report = report or WorkerReport()
            report.registered[compat.ranks()] = self._registration
            self._registration = None
        return report

    def unregister_kv_caches(self) -> None:
        if self._worker is None or self._asleep:
            return
        assert self._link is not None
        self._asleep = True
        answers = self._worker.drain()
        try:
            if answers:
                self._release()
        except (KvhostError, TimeoutError) as e:
            log.warning("kvhost: the host has not given the KV cache's memory back before the engine sleeps: %s", e)
            answers = False
        self._link.pause(5.0 if answers else 0.0)

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
        if not self._origin.here:
            return  # a forked child of the engine's process is ending
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = None

    # ---- scheduler ---------------------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._block_pool = gpu_block_pool
        self._clearings.watch(gpu_block_pool)
        self._failed.find_scheduler()
        policy = self._kv_transfer_config.kv_load_failure_policy
        if not self._failed.recomputes(policy):
            log.warning('kvhost: the engine ends a request whose load fails. To have it computed instead, add '
                        '"kv_load_failure_policy":"recompute" to the outermost object of --kv-transfer-config')

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        pass  # this connector's workers report by build_connector_worker_meta; MultiConnector passes one child's stats to all

    def _started(self, workers: Mapping[tuple[int, int], Registration]) -> bool:
        try:
            return self._start(workers)
        except Exception:
            log.exception("kvhost: NOT OFFLOADING: this vLLM's scheduler is not that of 0.26 to 0.33. The engine runs without "
                          "kvhost")
            self._out = self._other = True
            return False

    def _start(self, workers: Mapping[tuple[int, int], Registration]) -> bool:
        """Starts the scheduler's half once every worker has reported. Returns whether it runs."""
        parallel = self._vllm_config.parallel_config
        ranks, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        here, away = node(), "on another node, and the scheduler asks only the host of its own"
        refused = {rank: why for rank, w in workers.items() if (why := w.refusal or (away if w.node != here else ""))}
        if refused and not self._out:
            log.error("kvhost: NOT OFFLOADING: %s", refused)
            self._out = True
        if refused or len(workers) != ranks * stages:
            return False
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
        if not compat.holds_blocks(self._block_pool):  # the engine binds the pool before its first step
            self._out = self._other = True
            return False
        assert self._block_pool is not None
        loads = self._failed.recoverable
        if not loads:
            log.error("kvhost: NOT LOADING: this vLLM has no way to start a request over when its load has failed")
        speculative = self._vllm_config.speculative_config
        lookahead = int(getattr(speculative, "num_speculative_tokens", 0) or 0) + 1 if speculative else 0
        step_tokens = self._vllm_config.scheduler_config.max_num_batched_tokens
        pool_groups = model.pool_groups(self._vllm_config, self._kv_cache_config)
        holds = Holds(self._block_pool, pool_groups, step_tokens, lookahead, ranks * stages)
        link = Link("scheduler", self._settings.path, open, leads=True, log=log)
        self._scheduler = Scheduler(
            self._settings, link, plans, ranks, stages, loads=loads,
            step_tokens=step_tokens, holds=holds,
            events=self._kv_events(plans, link, stages),
            adapters=Adapters(adapters(lora)) if (lora := self._vllm_config.lora_config) else None,
            in_step=loads and self._may_load_in_step and self._failed.preempts,
            last_life=LastLife(self._settings.path, spaces, step_tokens, self._vllm_config.model_config.enforce_eager),
            longest=int(self._vllm_config.model_config.max_model_len),
            graph_tokens=self._graph_tokens(plans[0].chunk_tokens, spaces[0]),
        )
        compat.reset_past_holds(self._block_pool, holds.let_go)
        if self._generation:
            self._scheduler.new_generation(self._generation)
        link.start(0)
        return True

    def _graph_tokens(self, chunk_tokens: int, space: Namespace | None) -> int:
        if space is None or not compat.decodes_in_a_graph(self._vllm_config):
            return 0
        return GRAPH_BYTES * chunk_tokens // space.chunk_bytes

    def _awaits_workers(self) -> bool:
        """Whether requests should wait for the scheduler's half. The workers report with the first step's output, and
        the engine makes that step while its first requests wait."""
        now = time.monotonic()
        self._wait_until = self._wait_until or now + self._settings.lookup_timeout
        if not self._out and now >= self._wait_until:
            self._out = True
            log.error("kvhost: NOT OFFLOADING: after %.3g s only workers %s have reported; will begin when all have",
                      self._settings.lookup_timeout, sorted(self._first.registered))
        return not self._out

    def _kv_events(self, plans: Sequence[GroupPlan], link: Link, stages: int) -> KVEvents | None:
        """Returns the translator of the host's events into the engine's; None if the engine publishes no events."""
        config = self._vllm_config.kv_events_config
        if config is None or not config.enable_kv_cache_events:
            return None
        if not compat.describes_events():
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
            cleared=self._clearings.happened, kinds=compat.kinds(self._kv_cache_config),
        )

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._scheduler.take_events() if self._scheduler is not None else ()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return None if self._awaits_workers() else 0, False
        n = self._scheduler.matched(request, num_computed_tokens)
        return n, bool(n) and not self._scheduler.loads_in_step(request)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._scheduler is None:
            self._unseen += 1
            return StepOrders()
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        assert report is None or isinstance(report, WorkerReport)
        if self._scheduler is None:
            if report is None or self._other or not self._started(self._first.aggregate(report).registered):
                return
            report = self._first
        assert self._scheduler is not None
        if report is not None:
            self._failed.restart(*self._scheduler.reported(report))
            self._failed.preempt(report.broken, self._scheduler.broken(report))
        received = self._scheduler.received(report, connector_output.finished_recving or set())
        connector_output.finished_recving = received or None

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finished(request) if self._scheduler is not None else None

    def on_new_request(self, request: Request) -> None:
        if self._scheduler is not None:
            self._scheduler.new_request(request)

    def has_pending_push_work(self) -> bool:
        """Whether the engine must go on with its steps although no request needs one."""
        return self._scheduler is not None and self._scheduler.pending

    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.frees_soon

    def get_kv_connector_stats(self) -> KvhostStats | None:
        """Returns the counters. vLLM calls this once for each step's output, which tells the scheduler's half that
        an output has come."""
        if self._unseen:
            self._unseen -= 1
        elif self._scheduler is not None:
            self._scheduler.output()
        if self._scheduler is None:
            return None
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
        """Hides all stored chunks from this engine, after a change of its weights."""
        self._generation = os.urandom(16)
        if self._scheduler is not None:
            self._scheduler.new_generation(self._generation)
        return True
