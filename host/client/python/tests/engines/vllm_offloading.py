"""vLLM's own offloading to host memory on a machine without a GPU: all of it is vLLM's but the copies, which its CUDA
kernels would make."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class Copies(OffloadingWorker):
    """Copies blocks at once, and reports them as done when it is asked next."""

    def __init__(self, caches: Any, chunks: int) -> None:
        self._caches = caches
        self._kept = [torch.zeros(chunks, *t.tensor.shape[1:], dtype=t.tensor.dtype) for t in caches.tensors]
        self._done: list[TransferResult] = []

    def _copy(self, job: int, cache: Any, kept: Any, *, store: bool) -> bool:
        at = 0
        for group, size in enumerate(cache.group_sizes):
            for ref in self._caches.group_data_refs[group]:
                ours, theirs = self._caches.tensors[ref.tensor_idx].tensor, self._kept[ref.tensor_idx]
                for i in range(at, at + size):
                    block, chunk = ours[int(cache.block_ids[i])], theirs[int(kept.block_ids[i])]
                    chunk.copy_(block) if store else block.copy_(chunk)
            at += size
        self._done.append(TransferResult(job, True))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Collection[int]) -> None:
        pass


class HostMemorySpec(CPUOffloadingSpec):
    _copies: Copies | None = None

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._copies is None:
            chunks = self.num_chunks if hasattr(self, "num_chunks") else self.num_blocks  # 0.32, 0.26
            self._copies = Copies(kv_caches, chunks)
        return self._copies
