"""vLLM's own scheduler with the connector's two halves, and a double of the host. No model runs: every prompt's next
token is 7. What the worker's half answers reaches the scheduler through the code of vLLM's model runner."""

from __future__ import annotations

import inspect
import json
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import vllm_model as model
from processes import DEADLINE
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import kv_connector_model_runner_mixin as runner

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vllm_doubles import DoubleLink, DoubleSession  # noqa: E402

from kvhost.adopted import separate_allocations  # noqa: E402
from kvhost.keys import KeyChain  # noqa: E402
from kvhost.shape import Namespace  # noqa: E402
from kvhost.vllm import connector  # noqa: E402
from kvhost.vllm.layers import HostGates, StepLayers  # noqa: E402
from kvhost.vllm.orders import Registration, WorkerReport  # noqa: E402
from kvhost.vllm.settings import Settings  # noqa: E402
from kvhost.vllm.worker import Worker  # noqa: E402

BLOCK, CHUNK = 16, 32


class Link(DoubleLink):
    """What the connector gets for its link to the host."""

    def start(self, wait: float) -> bool:
        return True


class Core:
    """One engine core: steps of the scheduler, and what a worker would do in each."""

    kind: type[Scheduler] = Scheduler

    def __init__(
        self, folder: Path, monkeypatch: Any, *, blocks: int = 64, step_tokens: int = 256, window: int = 0,
        policy: str = "fcfs", groups: Sequence[KVCacheGroupSpec] = (), on_failure: str = "recompute", **extra: Any,
    ) -> None:
        """``window`` adds a second KV cache group whose layers attend to so many tokens, ``groups`` are more of them.
        ``policy`` is the scheduler's, ``on_failure`` what the engine does about loads that fail."""
        self.window = window
        self.session = self._session()
        self.link = link = Link(self.session)
        monkeypatch.setattr(connector, "Link", lambda *args, **options: link)
        settings: dict[str, Any] = {
            "chunk_tokens": CHUNK, "load_when": "always", "load_in": "beside", "lookup_wait": 0.0, "step_timeout": 0.05, **extra
        }
        config = self._config(folder, blocks, step_tokens, policy, settings, on_failure)
        options: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
        specs = [KVCacheGroupSpec(["full"], FullAttentionSpec(**options))]
        if window:
            specs.append(KVCacheGroupSpec(["window"], SlidingWindowSpec(**options, sliding_window=window)))
        cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[*specs, *groups])
        block, hashed = resolve_kv_cache_block_sizes(cache, config)
        self.scheduler = self.kind(
            config, cache, StructuredOutputManager(config), block_size=block, hash_block_size=hashed, log_stats=True
        )
        self.connector = self._ours()
        space = Namespace(model="m", dtype="f", key_bytes=32, tokens_per_block=BLOCK, groups=[])
        self._report(WorkerReport(registered={(0, 0): Registration(space)}, epochs={(0, 0): 0}))
        self.worker = Worker(
            Settings(**settings), link, (0, 0), stores=True,  # type: ignore[arg-type]
            layers=StepLayers(HostGates(settings["step_timeout"]), {"full": 0}),
        )
        self._runner = self._make_worker_side(config, cache)
        monkeypatch.setattr(runner, "get_kv_transfer_group", lambda: self._runner)
        monkeypatch.setattr(runner, "get_forward_context", lambda: None)
        self.invalid: set[int] = set()  # blocks that were reported as not loaded
        self._free = self.free_blocks
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hashed, sha256)

    def _session(self) -> DoubleSession:
        session = DoubleSession()
        if self.window:
            session.membership = {1}
        return session

    def new_host(self) -> None:
        """A host in place of one that died: both halves open sessions with it, in a new epoch."""
        self.session = self._session()
        self.link.up = [self.session]
        self.link.wanted += 1
        self.link.epoch = self.link.wanted

    @staticmethod
    def _config(
        folder: Path, blocks: int, step_tokens: int, policy: str, settings: dict[str, Any], on_failure: Any
    ) -> VllmConfig:
        path = folder / "model"
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(model.config(1)))
        transfer = KVTransferConfig(
            kv_connector="KvhostConnector", kv_connector_module_path="kvhost.vllm", kv_role="kv_both",
            kv_load_failure_policy=on_failure, kv_connector_extra_config=settings,
        )
        config = VllmConfig(
            model_config=ModelConfig(model=str(path), skip_tokenizer_init=True, dtype="float32", max_model_len=2048),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=step_tokens, max_model_len=2048, is_encoder_decoder=False,
                async_scheduling=False, policy=policy,
            ),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            kv_transfer_config=transfer, device_config=DeviceConfig("cpu"),
        )
        config.cache_config.num_gpu_blocks = blocks
        return config

    def _ours(self) -> Any:
        """The scheduler's half of the connector."""
        return self.scheduler.connector

    def _make_worker_side(self, config: VllmConfig, cache: KVCacheConfig) -> Any:
        side = self._worker_side(type(self.scheduler.connector)(config, KVConnectorRole.WORKER, cache))
        separate_allocations(False)
        return side

    def _worker_side(self, connector: Any) -> Any:
        """Makes the worker's half of the connector that of this core."""
        connector._worker = self.worker
        return connector

    def _report(self, report: WorkerReport) -> None:
        """What the worker reports with the output of an engine's first step."""
        self.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(self, id: str, tokens: Sequence[int], answer: int = 2, priority: int = 0) -> Request:
        params = SamplingParams(max_tokens=answer, ignore_eos=True)
        params.update_from_generation_config({}, 2)
        request = Request(id, list(tokens), params, None, block_hasher=self._hasher, priority=priority)
        self.scheduler.add_request(request)
        return request

    def abort(self, id: str) -> None:
        self.scheduler.finish_requests(id, RequestStatus.FINISHED_ABORTED)

    def step(self, writes: Callable[[dict[int, str]], None] = lambda blocks: None) -> dict[str, int]:
        """Schedules, "computes", and takes the output; how many tokens of each request were computed. ``writes`` is
        called with the blocks that are computed, and the request of each, at the time when the model would run."""
        return self.output(self.scheduler.schedule(), writes)

    def output(self, scheduled: Any, writes: Callable[[dict[int, str]], None] = lambda blocks: None) -> dict[str, int]:
        """Computes what was scheduled."""
        report: KVConnectorOutput
        self.computing = dict(scheduled.num_scheduled_tokens)
        with self._runs(scheduled) as report:
            writes(self._written(scheduled.num_scheduled_tokens))
        self.invalid |= report.invalid_block_ids
        ids = list(scheduled.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={i: n for n, i in enumerate(ids)}, sampled_token_ids=[self._sampled(i) for i in ids],
            kv_connector_output=report,
        )
        self.scheduler.update_from_output(scheduled, output)
        self._send()
        return dict(scheduled.num_scheduled_tokens)

    def _sampled(self, id: str) -> list[int]:
        request = self.scheduler.requests.get(id)  # None: it was aborted while the step ran
        return [7] if request is not None and request.num_computed_tokens >= request.num_tokens else []

    @staticmethod
    def _runs(scheduled: Any) -> Any:
        """What the model runs in, as vLLM's runner calls it with and without tokens to compute."""
        in_context = runner.KVConnectorModelRunnerMixin._get_kv_connector_output
        if "wait_for_save" in inspect.signature(in_context).parameters:
            return in_context(scheduled, wait_for_save=scheduled.total_num_scheduled_tokens > 0)
        return in_context(scheduled)

    def _written(self, scheduled: dict[str, int]) -> dict[int, str]:
        written: dict[int, str] = {}
        for id, n in scheduled.items():
            if id not in self.scheduler.requests:
                continue
            end = self.scheduler.requests[id].num_computed_tokens
            for blocks in self.scheduler.kv_cache_manager.get_block_ids(id):
                written |= dict.fromkeys(blocks[(end - n) // BLOCK : -(-end // BLOCK)], id)
        return written

    def _send(self) -> None:
        """Returns when the worker's sending thread has done what it was given."""
        done = threading.Event()
        self.worker._work.put(done.set)
        assert done.wait(DEADLINE)

    def run(self, request: Request, steps: int = 50) -> list[int]:
        """Steps until a request is finished; how many of its tokens each step computed that computed any."""
        computed = []
        for _ in range(steps):
            computed.append(self.step().get(request.request_id, 0))
            if request.is_finished():
                return [n for n in computed if n]
        raise AssertionError(f"{request.request_id} is {request.status.name} after {steps} steps")

    def check_idle(self) -> None:
        """Nothing is left of any request, in the scheduler and in the connector, and all blocks are free."""
        for _ in range(3):
            self.step()
        assert not self.scheduler.requests and not self.scheduler.waiting and not self.scheduler.running
        half = self.connector._scheduler
        left = {name: getattr(half, name) for name in ("_requests", "_live", "pending")} | {"held": half._holds.waiting}
        assert not any(left.values()), f"want nothing left of any request, got {left}"
        assert not self.worker._loads and all(s.read for s in self.worker._stores.values())
        assert self.free_blocks == self._free

    def close(self) -> None:
        self.worker.close()
        self.connector.shutdown()


class Ahead(Core):
    """Each step is scheduled before the output of the one before it is there, as vLLM has it on GPUs. A token is its step's
    number."""

    kind = AsyncScheduler

    def __init__(self, *args: Any, **options: Any) -> None:
        self._steps: list[tuple[Any, set[str]]] = []  # without output, and the requests whose next token they compute
        self._ends: set[str] = set()
        self._number = 0
        super().__init__(*args, **options)

    def step(self, writes: Callable[[dict[int, str]], None] = lambda blocks: None) -> dict[str, int]:
        scheduled = self.scheduler.schedule()
        ends = {i for i in scheduled.num_scheduled_tokens if not self.scheduler.requests[i].is_prefill_chunk}
        self._steps.append((scheduled, ends))
        if len(self._steps) < 2:
            return {}
        scheduled, self._ends = self._steps.pop(0)
        self._number += 1
        return self.output(scheduled, writes)

    def _sampled(self, id: str) -> list[int]:
        return [self._number] if id in self._ends else []


def keys(tokens: Sequence[int]) -> list[bytes]:
    return KeyChain(CHUNK).extend(tokens)
