"""What contracts.py is told of the connectors: where they are, which objects of engines they touch, and what they do about
releases that differ."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).resolve().parent
CLIENT = HERE.parents[1] / "kvhost"
EXAMPLES = HERE.parents[4] / "examples"

#: By package: the folders of its connector. A file's name is relative to the first.
SOURCES = {
    "vllm": [CLIENT / "vllm", EXAMPLES / "vllm"],
    "lmcache": [CLIENT / "lmcache", EXAMPLES / "vllm", EXAMPLES / "lmcache"],
    "sglang": [CLIENT / "sglang"],
}
_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_TIERS = "vllm.v1.kv_offload.tiering"
_REQUEST, _LORA = "vllm.v1.request:Request", "vllm.lora.request:LoRARequest"
_JOB, _CONTEXT = f"{_TIERS}.base:TransferJob", "vllm.v1.kv_offload.base:ReqContext"
_MODEL, _CACHE, _PARALLEL = "vllm.config.model:ModelConfig", "vllm.config.cache:CacheConfig", "vllm.config.parallel:ParallelConfig"
_VLLM, _KV = "vllm.config.vllm:VllmConfig", "vllm.v1.kv_cache_interface:KVCacheConfig"
_CONFIGS = {
    "vllm_config": _VLLM, "_vllm_config": _VLLM, "kv_cache_config": _KV, "_kv_cache_config": _KV, "cache_config": _CACHE,
    "parallel_config": _PARALLEL, "scheduler_config": "vllm.config.scheduler:SchedulerConfig",
    "device_config": "vllm.config.device:DeviceConfig", "kv_transfer_config": "vllm.config.kv_transfer:KVTransferConfig",
    "_kv_transfer_config": "vllm.config.kv_transfer:KVTransferConfig", "speculative_config": "vllm.config.speculative:SpeculativeConfig",
    "model_config": _MODEL, "load_config": "vllm.config.load:LoadConfig",
}
_POOL = "vllm.v1.core.block_pool:BlockPool"
_UNIFIED = "sglang.srt.mem_cache.unified_cache.unified_cache_linker"
_DEVICE = "sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler"
_DEVICE_GROUP, _DEVICE_ENTRY = f"{_DEVICE}:DevicePoolGroup", f"{_DEVICE}:DevicePoolEntry"

#: By file, and function where names are of several: which of an engine's classes a variable, or an attribute, is of.
SUBJECTS: dict[str, dict[str, str]] = {
    "vllm/scheduler.py": {
        "request": _REQUEST, "r": _REQUEST, "output": "vllm.v1.core.sched.output:SchedulerOutput",
        "cached": "vllm.v1.core.sched.output:CachedRequestData", "f": "vllm.multimodal.inputs:MultiModalFeatureSpec",
        "mm_position": "vllm.multimodal.inputs:PlaceholderRange", "lora": _LORA,
    },
    "vllm/kvevents.py": {"request": _REQUEST, "lora": _LORA},
    "vllm/hints.py": {"request": _REQUEST, "action": "vllm.v1.kv_hints.protocol:KvHintAction"},
    "vllm/adapters.py": {"lora": _LORA, "request": _LORA, "manager": "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager",
                         "_manager": "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager"},
    "vllm/holds.py": {"_pool": _POOL, "pool": _POOL},
    "vllm/connector.py": {
        **_CONFIGS, "config": _VLLM, "request": _REQUEST, "connector_output": "vllm.v1.outputs:KVConnectorOutput",
        "blocks": "vllm.v1.core.kv_cache_manager:KVCacheBlocks", "parallel": _PARALLEL,
    },
    "vllm/connector.py:_kv_events": {"config": "vllm.config.kv_events:KVEventsConfig"},
    "vllm/model.py": {**_CONFIGS, "model": _MODEL, "cache": _CACHE, "parallel": _PARALLEL, "load": "vllm.config.load:LoadConfig",
                      "group": "vllm.v1.kv_cache_interface:KVCacheGroupSpec"},
    "vllm/tier.py": {
        "job_metadata": _JOB, "job": _JOB, "req_context": _CONTEXT, "spec": "vllm.v1.kv_offload.base:OffloadingSpec",
        "offloading_spec": "vllm.v1.kv_offload.base:OffloadingSpec", "context": "vllm.v1.kv_offload.base:ScheduleEndContext",
    },
    "vllm/tier.py:submit_store": {"context": _CONTEXT},
    "vllm/tierrows.py": {
        **_CONFIGS, "m": _MODEL, "cache": _CACHE, "one": _PARALLEL, "config": "vllm.v1.kv_offload.config:OffloadingConfig",
    },
    "vllm/compat.py": {
        **_CONFIGS, "scheduler": "vllm.v1.core.sched.scheduler:Scheduler", "_scheduler": "vllm.v1.core.sched.scheduler:Scheduler",
        "manager": "vllm.v1.core.kv_cache_manager:KVCacheManager", "request": _REQUEST, "pool": _POOL, "_pool": _POOL,
        "forward_context": "vllm.forward_context:ForwardContext", "spec": "vllm.v1.kv_cache_interface:FullAttentionSpec",
        "policy": "vllm.v1.kv_offload.cpu.policies.base:CachePolicy", "load": _JOB, "job": _JOB, "req_context": _CONTEXT,
        "model": _MODEL, "cache": _CACHE, "t": "vllm.v1.kv_cache_interface:KVCacheTensor",
        "group": "vllm.v1.kv_cache_interface:KVCacheGroupSpec",
    },
    "vllm/compat.py:window": {"spec": "vllm.v1.kv_cache_interface:SlidingWindowSpec"},
    "vllm/compat.py:loaded_adapters": {"manager": "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager"},
    "vllm/compat.py:engine_config": {"cache": _KV, "config": _VLLM},
    "vllm/compat.py:_keep_ended_requests": {"manager": f"{_TIERS}.manager:TieringOffloadingManager",
                                            "self": f"{_TIERS}.manager:TieringOffloadingManager"},
    "vllm/compat.py:_store_what_was_computed": {
        "req": _REQUEST, "self": f"{_V1}.offloading.scheduler:RequestOffloadState",
        "group_config": f"{_V1}.offloading.scheduler:GroupOffloadConfig",
        "config": f"{_V1}.offloading.scheduler:SchedulerOffloadConfig",
    },
    "lmcache/adapter.py": {
        "key": "lmcache.v1.distributed.api:ObjectKey", "memory": "lmcache.v1.memory_management:MemoryObj",
        "layout": "lmcache.v1.distributed.api:MemoryLayoutDesc", "l1_memory_desc": "lmcache.v1.distributed.internal_api:L1MemoryDesc",
        "_l1": "lmcache.v1.distributed.internal_api:L1MemoryDesc", "meta": "lmcache.v1.memory_management:MemoryObjMetadata",
    },
    "lmcache/keys.py": {"key": "lmcache.v1.distributed.api:ObjectKey"},
    "sglang/storage.py": {
        "storage_config": "sglang.srt.mem_cache.hicache_storage:HiCacheStorageConfig",
        "extra_info": "sglang.srt.mem_cache.hicache_storage:HiCacheStorageExtraInfo",
        "transfer": "sglang.srt.mem_cache.hicache_storage:PoolTransfer", "of": "sglang.srt.mem_cache.hicache_storage:PoolTransfer",
    },
    "sglang/linker.py": {
        "params": "sglang.srt.mem_cache.cache_init_params:CacheInitParams", "layer_done_counter": f"{_UNIFIED}:LayerWiseLoadCounter",
        "_pool_group": _DEVICE_GROUP, "e": _DEVICE_ENTRY, "t": "sglang.srt.mem_cache.hicache_storage:PoolTransfer",
        "transfer": "sglang.srt.mem_cache.hicache_storage:PoolTransfer",
    },
    "sglang/batches.py": {"counter": f"{_UNIFIED}:LayerWiseLoadCounter", "_counter": f"{_UNIFIED}:LayerWiseLoadCounter"},
    "sglang/devicepools.py": {
        "params": "sglang.srt.mem_cache.cache_init_params:CacheInitParams", "e": _DEVICE_ENTRY, "entry": _DEVICE_ENTRY,
        "draft": "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool",
    },
    "sglang/hits.py": {"transfer": "sglang.srt.mem_cache.hicache_storage:PoolTransfer"},
    "sglang/identity.py": {"config": "sglang.srt.mem_cache.hicache_storage:HiCacheStorageConfig"},
    "sglang/plugin.py": {"HookRegistry": "sglang.srt.plugins.hook_registry:HookRegistry",
                         "adapter": "sglang.srt.lora.lora_registry:LoRARef", "request": "sglang.srt.managers.schedule_batch:Req"},
}
#: Attributes that are other things' under the same names.
NOT_OF_ENGINES = {
    "vllm/scheduler.py": {"request": {"fresh", "done"}},
    "sglang/storage.py": {"of": {"object_bytes"}}, "vllm/tierrows.py": {"cache": {"blocks_per_chunk"}},
}
#: What connectors do not name, and depend on: by package, names of an engine.
ALSO = {
    "vllm": [
        "vllm.v1.kv_offload.cpu.policies.lru:LRUCachePolicy.insert", "vllm.v1.kv_offload.cpu.policies.arc:ARCCachePolicy.insert",
        "vllm.v1.kv_offload.cpu.manager:CPUOffloadingManager._policy", f"{_TIERS}.manager:TieringOffloadingManager.primary_tier",
        f"{_TIERS}.manager:TieringOffloadingManager.prepare_store", f"{_TIERS}.base:JobMetadata.block_ids",
        *(f"{_TIERS}.base:JobMetadata.{field}" for field in ("job_id", "keys", "req_context")),  # TransferJob's name in 0.26
        f"{_TIERS}.spec:TieringOffloadingSpec._scheduler_mmap", f"{_TIERS}.spec:TieringOffloadingSpec._manager",
        "vllm.v1.kv_offload.cpu.shared_offload_region:SharedOffloadRegion.fd", f"{_POOL}.cached_block_hash_to_block",
        f"{_V1}.offloading.scheduler:RequestOffloadState.storable_chunks",
    ],
    "lmcache": [], "sglang": [  # what the factory calls a linker with, and the tree's wrapper takes of it
        "sglang.srt.mem_cache.unified_cache.linker_factory:create_unified_cache_linker", f"{_UNIFIED}:UnifiedCacheLinkerWrapper()",
        f"{_UNIFIED}:LayerWiseLoadCounter.set_consumer", f"{_UNIFIED}:LayerWiseLoadCounter.wait_until",
        "sglang.srt.mem_cache.unified_cache.linker_config:UnifiedCacheLinkerConfig()",
        "sglang.srt.mem_cache.memory_pool:KVCache.register_layer_transfer_counter",
        "sglang.srt.mem_cache.memory_pool:HybridReqToTokenPool.register_layer_transfer_counter",
    ],
}
#: Where an engine calls a connector, in an order that it depends on: by module, the object of which the calls are.
CALLERS = {
    "vllm": {
        "vllm.v1.worker.kv_connector_model_runner_mixin": "kv_connector", "vllm.v1.worker.gpu.kv_connector": "kv_connector",
        "vllm.v1.core.sched.scheduler": "connector",
    },
    "lmcache": {}, "sglang": {
        "sglang.srt.managers.cache_controller": "storage_backend",
        "sglang.srt.mem_cache.unified_cache.unified_cache_linker": "cache_linker",
    },
}

_BASE, _RUNNER = f"{_V1}.base:KVConnectorBase_V1", "vllm.v1.worker.gpu.kv_connector"
_RUNNER_V1 = "vllm.v1.worker.kv_connector_model_runner_mixin"
_TAGS, _L2 = "lmcache.v1.distributed.api", "lmcache.v1.distributed.l2_adapters.base:L2AdapterInterface"
_UNUSED, _FILTERED = "it is not called by releases that lack it", "what the class has no field for is left out"

#: By name: what the code does about a difference between releases.
HANDLED: dict[str, str] = {
    **dict.fromkeys(
        (f"{_TAGS}:{n}" for n in ("MemoryResidency", "MemoryResidency.LOCAL", "MemoryResidency.REMOTE", "MemorySegment",
                                  "MemorySegment.DRAM", "MemorySegment.STORAGE", "MemoryTags", "MemoryTags()")),
        "imported in get_memory_tags, which 0.5.6 does not call",
    ),
    f"{_L2}.get_memory_tags": _UNUSED,
    f"{_L2}.submit_touch": _UNUSED,
    "vllm.distributed.kv_events:BlockRemoved()": _FILTERED,
    "vllm.distributed.kv_events:BlockStored()": f"{_FILTERED}; compat.describes_events asks for the others",
    **{f"{_BASE}.{n}": _UNUSED for n in (
        "get_transfer_results", "has_pending_block_frees", "requires_kv_delivery", "restore_kv_caches", "unregister_kv_caches",
        "register_cross_layers_kv_cache", "supports_sleep_mode",
    )},
    f"{_V1}.offloading.scheduler:RequestOffloadState.storable_chunks": "compat.mend_offloading wraps 0.26's alone",
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks.get_block_ids": "called without arguments",
    "vllm.v1.core.sched.scheduler:Scheduler._preempt_request": "compat.FailedLoads.preempts asks for its parameters",
    "vllm.v1.kv_cache_interface:FullAttentionSpec.max_tp_shards": "compat.replicated asks whether it is there",
    **{f"vllm.v1.kv_cache_interface:KVCacheTensor.{n}": "compat._places asks for shared_by first"
       for n in ("layer_stride", "layers", "shared_by")},
    **{f"vllm.v1.kv_hints.protocol:KvHintAction.{n}": "a request of 0.26 has no kv_hints"
       for n in ("action_type", "action_version", "payload")},
    "vllm.v1.kv_offload.base:Medium": "KvhostTier.medium asks whether it is there",
    "vllm.v1.kv_offload.base:OffloadingEvent()": _FILTERED,
    **{f"vllm.v1.kv_offload.cpu.policies.{n}.insert": "compat.set_aside asks for its parameters"
       for n in ("arc:ARCCachePolicy", "base:CachePolicy", "lru:LRUCachePolicy")},
    f"{_TIERS}.base:JobResult()": _FILTERED,
    f"{_TIERS}.base:SecondaryTierManager.__init__": "KvhostTier passes on what it is given",
    **{f"{_TIERS}.base:TransferJob.{n}": "0.26's JobMetadata has it, too" for n in ("job_id", "keys", "req_context")},
    **{f"{_TIERS}.manager:TieringOffloadingManager.{n}": "called with the request alone, in 0.26"
       for n in ("on_new_request", "on_request_finished")},
    "vllm.v1.request:Request.async_tokens_to_discard": "compat.FailedLoads.preempt sets it in 0.26 alone",
    "calls of vllm.v1.core.sched.scheduler:__init__": "bind_kv_cache_manager calls bind_gpu_block_pool",
    "calls of vllm.v1.core.sched.scheduler:_connector_finished": "the base's register_finished_partial_tail takes no tail",
    "calls of vllm.v1.core.sched.scheduler:_drain_deferred_loads": "only loads of HiSparse, which is refused, begin later",
    "calls of vllm.v1.core.sched.scheduler:_load_restores_replay_window": "the base names all groups",
    "calls of vllm.v1.core.sched.scheduler:schedule": "the base's answers to the new questions are the connector's",
    f"calls of {_RUNNER}:_start_load_kv": "loads begin with the step, or after it",
    f"calls of {_RUNNER}:finalize_step": "with a drafter, requests end for the host before their last stores, which harms no bytes",
    f"calls of {_RUNNER}:finish_forward": "the base's does nothing",
    f"calls of {_RUNNER}:post_forward": "get_finished and get_transfer_results do the same",
    f"calls of {_RUNNER}:pre_forward": "loads begin with the step, or after it",
    f"calls of {_RUNNER}:reset_capture_state": "the base's does nothing",
    f"calls of {_RUNNER_V1}:_get_kv_connector_output": "get_finished and get_transfer_results do the same",
}
