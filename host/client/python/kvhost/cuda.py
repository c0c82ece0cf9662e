"""GPU memory for kvhost, by ctypes and the CUDA driver alone: handles by which the host maps memory of this process."""

from __future__ import annotations

import ctypes as C
import threading
from dataclasses import dataclass
from typing import Any


class CudaError(RuntimeError):
    """A call of the CUDA driver failed."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call}: CUDA error {code}")
        self.call, self.code = call, code


class _Handle(C.Structure):
    _fields_ = [("bytes", C.c_ubyte * 64)]


_driver: Any = None


def _cuda() -> Any:
    global _driver
    if _driver is None:
        _driver = C.CDLL("libcuda.so.1")
        _check("cuInit", 0)
    return _driver


def _check(call: str, *args: Any) -> None:
    code = getattr(_driver if call == "cuInit" else _cuda(), call)(*args)
    if code:
        raise CudaError(call, code)


def device_uuid(ordinal: int = 0) -> str:
    """The GPU's UUID, for ``Session(device_uuid=...)``."""
    raw = (C.c_ubyte * 16)()
    _check("cuDeviceGetUuid_v2", C.byref(raw), ordinal)
    h = bytes(raw).hex()
    return f"GPU-{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"


def synchronize() -> None:
    """Waits for the context's work so far. Call it before a store, and before a load into blocks that the work still
    reads."""
    _check("cuCtxSynchronize")


@dataclass(frozen=True)
class IpcMemory:
    """The place of an address: the handle of its allocation, and the offset in it."""

    handle: bytes
    offset: int


def export_ipc(address: int) -> IpcMemory:
    """Exports memory of cuMemAlloc (a PyTorch tensor's ``data_ptr()``, with expandable segments off)."""
    handle, base, size = _Handle(), C.c_uint64(), C.c_size_t()
    _check("cuIpcGetMemHandle", C.byref(handle), C.c_uint64(address))
    _check("cuMemGetAddressRange_v2", C.byref(base), C.byref(size), C.c_uint64(address))
    return IpcMemory(bytes(handle.bytes), address - base.value)


class DeviceSemaphores:
    """64-bit semaphores in device memory, which streams and the host wait for and write."""

    def __init__(self, count: int) -> None:
        self.count = count
        address, context, stream = C.c_uint64(), C.c_void_p(), C.c_void_p()
        _check("cuMemAlloc_v2", C.byref(address), C.c_size_t(max(8 * count, 2 << 20)))  # an allocation of its own, for IPC
        _check("cuCtxGetCurrent", C.byref(context))
        _check("cuStreamCreate", C.byref(stream), 1)  # a stream that waits for no other
        self.address: int = address.value
        self._context, self._stream = context, stream
        self._lock = threading.Lock()
        for i in range(count):
            self.store(i, 0)

    def export(self) -> IpcMemory:
        return export_ipc(self.address)

    def load(self, i: int) -> int:
        value = C.c_uint64()
        with self._lock:
            _check("cuCtxSetCurrent", self._context)
            _check("cuMemcpyDtoHAsync_v2", C.byref(value), C.c_uint64(self.address + 8 * i), C.c_size_t(8), self._stream)
            _check("cuStreamSynchronize", self._stream)
        return value.value

    def store(self, i: int, value: int) -> None:
        """Writes a semaphore at once, from any thread, without waiting for other streams."""
        with self._lock:
            _check("cuCtxSetCurrent", self._context)
            self.store_on(self._stream.value or 0, i, value)
            _check("cuStreamSynchronize", self._stream)

    def store_on(self, stream: int, i: int, value: int) -> None:
        """Queues the write of a semaphore on a stream (``torch.cuda.Stream.cuda_stream``)."""
        _check("cuStreamWriteValue64_v2", C.c_void_p(stream), C.c_uint64(self.address + 8 * i), C.c_uint64(value), 0)

    def wait_on(self, stream: int, i: int, value: int) -> None:
        """Makes a stream wait until a semaphore has a value, or a higher one."""
        _check("cuStreamWaitValue64_v2", C.c_void_p(stream), C.c_uint64(self.address + 8 * i), C.c_uint64(value), 0)

    def close(self) -> None:
        """Frees the semaphores. No session may share them any more."""
        _check("cuStreamDestroy_v2", self._stream)
        _check("cuMemFree_v2", C.c_uint64(self.address))
