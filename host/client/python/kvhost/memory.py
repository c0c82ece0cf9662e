"""An engine's KV tensors, in host memory or a GPU's, as memory that the host reads and writes in place."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvhost import cuda
from kvhost.adopted import SEPARATE_BYTES, AdoptedMemory, in_heap
from kvhost.errors import Refused
from kvhost.session import Session
from kvhost.shape import Region


@dataclass(frozen=True)
class PagesAt:
    """The places of one plane's pages in this process's or the GPU's address space, in the form of
    :class:`kvhost.shape.Region`."""

    address: int
    stride: int
    blocks: int
    pages: int = 1
    page_stride: int = 0

    def region(self, offset: int) -> Region:
        return Region(offset, self.stride, self.blocks, self.pages, self.page_stride)


class HostMemory:
    """KV tensors in host memory. Their pages are moved into a memfd that the host maps."""

    device_uuid = ""

    def __init__(self, tensors: Iterable[Any]) -> None:
        self._storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        if (least := min(self._storages.values())) < SEPARATE_BYTES:
            raise Refused(f"a layer's cache has {least} bytes; the heap may use its pages, too")
        if any(in_heap(address) for address in self._storages):
            raise Refused("a layer's cache lies in the heap, where other allocations use its pages, too: set "
                          f"MALLOC_MMAP_THRESHOLD_={SEPARATE_BYTES} in the engine's environment")
        self._memory = AdoptedMemory(self._storages.items())

    def export(self) -> None:
        """Does nothing: host memory needs no handles."""

    def take_back(self) -> bool:
        """Moves the tensors to other memory at the same addresses, so that a host that had them, and may be stopped
        in the middle of a copy, cannot reach them. No other thread may write to them during the call. They must
        be registered again."""
        taken, self._memory = self._memory, AdoptedMemory(self._storages.items(), again=True)
        taken.close()
        return True

    def register(self, session: Session, group: int, pages: Sequence[PagesAt]) -> None:
        session.register(group, self._memory, [p.region(self._memory.offset(p.address)) for p in pages])


class DeviceMemory:
    """KV tensors of one GPU, shared by CUDA IPC."""

    def __init__(self, tensors: Iterable[Any], addresses: Collection[int]) -> None:
        self._addresses = addresses
        self.device_uuid = cuda.device_uuid(next(iter(tensors)).device.index)
        self.export()

    def export(self) -> None:
        """Gets the handles from CUDA. Call it on the engine's thread, since other threads have no CUDA context."""
        self._exported: dict[int, cuda.IpcMemory] = {}
        for address in self._addresses:
            try:
                self._exported[address] = cuda.export_ipc(address)
            except cuda.CudaError as e:
                raise Refused(f"the cache's memory cannot be shared ({e}): use neither expandable segments nor "
                              "an allocator for sleep mode") from None

    def take_back(self) -> bool:
        """Returns False: CUDA cannot take shared memory back."""
        return False

    def register(self, session: Session, group: int, pages: Sequence[PagesAt]) -> None:
        where = [self._exported[p.address] for p in pages]
        session.register(group, [w.handle for w in where], [p.region(w.offset) for w, p in zip(where, pages, strict=True)])


def share(tensors: Collection[Any], pages: Iterable[PagesAt]) -> HostMemory | DeviceMemory:
    """Prepares the tensors' memory for registration. ``pages`` are all that will be registered."""
    kinds = {t.device.type for t in tensors}
    if kinds == {"cpu"}:
        return HostMemory(tensors)
    if kinds == {"cuda"}:
        if len({t.device for t in tensors}) > 1:
            raise Refused("the layers' caches are on several GPUs")
        return DeviceMemory(tensors, {p.address for p in pages})
    raise Refused(f"the layers' caches are on {', '.join(sorted(kinds))}")
