"""vLLM's own offloading on a machine without a GPU: all of it is vLLM's but the copies, which its CUDA kernels would
make."""

from __future__ import annotations

import json
import os
import pathlib
import signal
from collections.abc import Collection
from typing import Any

import torch
from processes import stopped, wait_for
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

import kvhost.vllm
from kvhost.vllm import compat
from kvhost.vllm.tier import KvhostTier

kvhost.vllm.register()  # its tier; vLLM calls this itself where the package is installed

_POISON = 0x5A
_submit_load = KvhostTier.submit_load


def _submit(self: KvhostTier, job_metadata: Any) -> None:
    """Stops the host whose process's number is in the file ``stop`` of PROBE_DIR, and then sends it the load."""
    stop = pathlib.Path(os.environ["PROBE_DIR"], "stop")
    if stop.exists():
        pid = int(stop.read_text())
        os.kill(pid, signal.SIGSTOP)
        wait_for("kvhost is stopped", lambda: stopped(pid))
        stop.unlink()
    _submit_load(self, job_metadata)


KvhostTier.submit_load = _submit  # type: ignore[method-assign]


class Copies(OffloadingWorker):
    """Copies blocks at once, and reports them as done when it is asked next."""

    def __init__(self, caches: Any, kept: list[torch.Tensor], blocks: int, canonical: bool = False) -> None:
        """``kept`` has a row of bytes for each chunk of so many ``blocks``, for each of the caches' tensors. In ``canonical`` rows all
        workers' bytes lie as in those of one."""
        self._canonical = canonical
        self._caches, self._kept, self._blocks = caches, kept, blocks
        self._done: list[TransferResult] = []

    def _copy(self, job: int, cache: Any, kept: Any, *, store: bool) -> bool:
        at = chunks = 0
        for group, size in enumerate(cache.group_sizes):
            skipped = cache.block_indices[group] % self._blocks if size else 0
            for ref in self._caches.group_data_refs[group]:
                tensor = self._caches.tensors[ref.tensor_idx]
                for i in range(size):
                    chunk, part = divmod(skipped + i, self._blocks)
                    page = tensor.tensor[int(cache.block_ids[at + i])].reshape(-1).view(torch.uint8)[: ref.page_size_bytes]
                    number = int(kept.block_ids[chunks + chunk])
                    row = self._kept[ref.tensor_idx][number]
                    if self._canonical:
                        self._copy_canonical(page, row, number * self._blocks + part, part, ref.mapping, store)
                        continue
                    start = part * tensor.page_size_bytes
                    place = row[start : start + ref.page_size_bytes]
                    place.copy_(page) if store else page.copy_(place)
            at += size
            chunks += -(-(skipped + size) // self._blocks)
        self._done.append(TransferResult(job, True))
        return True

    @staticmethod
    def _copy_canonical(page: Any, row: Any, number: int, part: int, mapping: Any, store: bool) -> None:
        """The block ``part`` of a row, ``number`` of all rows' blocks."""
        if store and not mapping.is_writer(number):
            return
        place = row[part * mapping.canonical_page_size_bytes :]
        for run in mapping.runs:
            for i in range(run.num_fragments):
                here, there = run.local_offset + i * run.local_stride, run.canonical_offset + i * run.canonical_stride
                one, other = page[here : here + run.fragment_size], place[there : there + run.fragment_size]
                other.copy_(one) if store else one.copy_(other)

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
            kept = [
                torch.zeros(_chunks(self), t.page_size_bytes * self.blocks_per_chunk, dtype=torch.uint8) for t in kv_caches.tensors
            ]
            self._copies = Copies(kv_caches, kept, self.blocks_per_chunk)
        return self._copies


class TiersSpec(TieringOffloadingSpec):
    """The CPU tier in shared memory, poisoned, with tiers behind it. The file ``rows`` in PROBE_DIR gets the bytes of a row
    that each group's chunks use, as (offset, bytes), and ``kinds`` each group's kind."""

    _copies: Copies | None = None

    def get_manager(self) -> Any:
        _, cache = compat.engine_config()
        pathlib.Path(os.environ["PROBE_DIR"], "kinds").write_text(
            json.dumps([type(g.kv_cache_spec).__name__ for g in cache.kv_cache_groups])
        )
        return super().get_manager()

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._copies is None:
            chunks = "num_chunks" if hasattr(self, "num_chunks") else "num_blocks"
            row = "kv_bytes_per_chunk" if chunks == "num_chunks" else "kv_bytes_per_block"
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id, rank=self.config.parallel.rank, cpu_page_size=self.cpu_page_size_per_worker,
                **{chunks: _chunks(self), row: self.kv_bytes_per_chunk},
            )
            view = getattr(region, "create_next_worker_view", None) or region.create_next_view  # 0.32, 0.26
            sizes = [t.page_size_bytes for t in kv_caches.tensors]
            if canonical := getattr(self.config, "canonical_layout", False):
                self._validate_canonical_refs(kv_caches)
                view, sizes = region.create_next_canonical_view, [0] * len(sizes)
                for ref in (r for refs in kv_caches.group_data_refs for r in refs):
                    sizes[ref.tensor_idx] = max(sizes[ref.tensor_idx], ref.mapping.canonical_page_size_bytes)
            kept = [view(size * self.blocks_per_chunk).view(torch.uint8) for size in sizes]
            for rows in kept:
                rows.fill_(_POISON)
            self._note(kv_caches)
            self._copies = Copies(kv_caches, kept, self.blocks_per_chunk, canonical)
        return self._copies

    def _note(self, caches: Any) -> None:
        starts = [0]
        for t in caches.tensors:
            starts.append(starts[-1] + t.page_size_bytes * self.blocks_per_chunk)
        runs = [
            [
                (starts[ref.tensor_idx] + b * caches.tensors[ref.tensor_idx].page_size_bytes, ref.page_size_bytes)
                for ref in refs for b in range(self.blocks_per_chunk)
            ]
            for refs in caches.group_data_refs
        ]
        pathlib.Path(os.environ["PROBE_DIR"], "rows").write_text(json.dumps(runs))


def _chunks(spec: Any) -> int:
    return int(spec.num_chunks if hasattr(spec, "num_chunks") else spec.num_blocks)  # 0.32, 0.26
