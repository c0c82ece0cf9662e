"""The engine's KV tensors as regions of the host: one plane per layer and run of bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvhost import cuda
from kvhost.adopted import SEPARATE_BYTES, AdoptedMemory, in_heap
from kvhost.session import Session
from kvhost.shape import Group, Plane, Region
from kvhost.vllm.geometry import block_dimension, order_inside, pages_of
from kvhost.vllm.groups import GroupPlan
from kvhost.vllm.settings import Refused


@dataclass(frozen=True)
class LayerPages:
    """One plane: where its pages are in this process' or the GPU's address space."""

    address: int
    stride: int
    blocks: int


class GroupRegions:
    """One KV cache group's planes."""

    def __init__(self, plan: GroupPlan, layers: Sequence[tuple[str, Any, int]], blocks: int) -> None:
        """``layers`` are (name, tensor, bytes of a block), ``blocks`` is how many blocks the cache has."""
        self.plan = plan
        self.planes: list[Plane] = []
        self.pages: list[LayerPages] = []
        self.layout: list[str] = []  # of each layer's block, in words
        self.positions: dict[str, int] = {}  # of the layers, in the order in which a load delivers them
        seen: dict[tuple[int, tuple[int, ...]], int] = {}
        for at, (name, tensor, block_bytes) in enumerate(layers):
            self.positions[name] = seen.setdefault((tensor.data_ptr(), tuple(tensor.stride())), len(seen))
            if len(seen) == len(self.layout):
                continue  # a layer that uses another's cache
            try:
                runs = pages_of(tensor.shape, tensor.stride(), tensor.element_size(), blocks, block_bytes)
            except Refused as e:
                raise Refused(f"layer {name}: {e}") from None
            dim = block_dimension(tensor.shape, tensor.element_size(), blocks, block_bytes)
            assert dim is not None
            rows = tensor.shape[dim] // blocks
            inside = order_inside(tensor.shape, tensor.stride(), dim)
            self.layout.append(f"{name} {tensor.dtype} {rows} rows, {inside}")
            for part, run in enumerate(runs):
                self.planes.append(Plane(at, part, run.size))
                self.pages.append(LayerPages(tensor.data_ptr() + run.offset, run.stride, blocks))

    @property
    def group(self) -> Group:
        return Group(self.plan.id, self.plan.blocks, self.planes, membership=bool(self.plan.window))

    @property
    def chunk_bytes(self) -> int:
        return self.plan.blocks * sum(p.page_bytes for p in self.planes)


class HostMemory:
    """KV tensors in host memory: their pages are moved into a memfd that the host maps."""

    device_uuid = ""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors.values()}
        if min(storages.values()) < SEPARATE_BYTES:
            raise Refused(f"a layer's cache has {min(storages.values())} bytes; the heap may use its pages, too")
        if any(in_heap(address) for address in storages):
            raise Refused("a layer's cache lies in the heap, where other allocations use its pages, too")
        self._memory = AdoptedMemory(storages.items())

    def export(self) -> None:
        """Nothing: the memory stays where it is."""

    def register(self, session: Session, regions: GroupRegions) -> None:
        where = [Region(self._memory.offset(p.address), p.stride, p.blocks) for p in regions.pages]
        session.register(regions.plan.id, self._memory, where)


class DeviceMemory:
    """KV tensors of one GPU, shared by CUDA IPC."""

    def __init__(self, tensors: Mapping[str, Any], groups: Sequence[GroupRegions]) -> None:
        self._groups = groups
        self.device_uuid = cuda.device_uuid(next(iter(tensors.values())).device.index)
        self.export()

    def export(self) -> None:
        """Asks CUDA for the handles. Call it on the engine's thread: others have no CUDA context."""
        self._exported: dict[int, cuda.IpcMemory] = {}
        for group in self._groups:
            for page in group.pages:
                try:
                    self._exported[page.address] = cuda.export_ipc(page.address)
                except cuda.CudaError as e:
                    raise Refused(f"the cache's memory cannot be shared ({e}): use neither expandable segments nor "
                                  "an allocator for sleep mode") from None

    def register(self, session: Session, regions: GroupRegions) -> None:
        where = [self._exported[p.address] for p in regions.pages]
        session.register(
            regions.plan.id, [w.handle for w in where],
            [Region(w.offset, p.stride, p.blocks) for w, p in zip(where, regions.pages, strict=True)],
        )


def share(tensors: Mapping[str, Any], groups: Sequence[GroupRegions]) -> HostMemory | DeviceMemory:
    """Prepares the tensors' memory for registration."""
    kinds = {t.device.type for t in tensors.values()}
    if kinds == {"cpu"}:
        return HostMemory(tensors)
    if kinds == {"cuda"}:
        if len({t.device for t in tensors.values()}) > 1:
            raise Refused("the layers' caches are on several GPUs")
        return DeviceMemory(tensors, groups)
    raise Refused(f"the layers' caches are on {', '.join(sorted(kinds))}")
