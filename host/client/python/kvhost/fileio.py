"""Files from and to GPU memory, by ctypes on libcufile alone: what kvhost's Go package gds calls FileIO."""

from __future__ import annotations

import ctypes as C
import enum
import os
from types import TracebackType
from typing import Any

from . import cuda


class StorageMode(enum.Enum):
    """How a file's bytes move."""

    AUTO = "auto"  # cuFile where it works; an operation that fails there is done again through host memory
    DIRECT = "direct"  # cuFile only: what fails there fails
    STAGED = "staged"  # through host memory only


class CuFileError(OSError):
    """A call of cuFile failed: with a code of its own (5001 and up), or with an errno of the file under it."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(code if code < 5000 else 0, f"{call}: {os.strerror(code) if code < 5000 else f'cuFile error {code}'}")
        self.call, self.code = call, code


class _Error(C.Structure):
    _fields_ = [("code", C.c_int), ("cuda", C.c_int)]


class _Descr(C.Structure):
    _fields_ = [("type", C.c_int), ("handle", C.c_uint64), ("ops", C.c_void_p)]


_NAMES = ("libcufile.so.0", "libcufile.so", "/usr/local/cuda/lib64/libcufile.so.0")
_SLOT = 4 << 20
_library: Any = None


def _cufile(names: tuple[str, ...] = _NAMES) -> Any:
    """The library with its driver open; it is never closed. OSError where there is none."""
    global _library
    if _library is None:
        error: OSError | None = None
        for name in names:
            try:
                lib = C.CDLL(name, use_errno=True)
            except OSError as e:
                error = e
                continue
            for call in ("cuFileDriverOpen", "cuFileHandleRegister"):
                getattr(lib, call).restype = _Error
            for call in ("cuFileRead", "cuFileWrite"):
                getattr(lib, call).restype = C.c_ssize_t
            answer = lib.cuFileDriverOpen()
            if answer.code:
                raise CuFileError("cuFileDriverOpen", answer.code)
            _library = lib
            break
        else:
            raise error or OSError("no libcufile")
    return _library


class DeviceFile:
    """An open file whose bytes go to and from device memory. Calls are made where the GPU's context is current
    (``cuda.use_device``, or a framework's doing)."""

    def __init__(self, path: str | os.PathLike[str], flags: int, mode: StorageMode = StorageMode.AUTO, perm: int = 0o600) -> None:
        self.mode, self.fallbacks, self.why = mode, 0, ""
        self._fd, self._direct, self._handle = os.open(path, flags, perm), -1, C.c_void_p()
        if mode is StorageMode.STAGED:
            return
        try:
            self._direct = os.open(path, (flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC)) | os.O_DIRECT)
            descr = _Descr(type=1, handle=self._direct)
            answer = _cufile().cuFileHandleRegister(C.byref(self._handle), C.byref(descr))
            if answer.code:
                raise CuFileError("cuFileHandleRegister", answer.code)
        except OSError as e:
            if self._direct >= 0:
                os.close(self._direct)
            self._direct, self.why = -1, str(e)
            if mode is StorageMode.DIRECT:
                os.close(self._fd)
                raise

    @property
    def direct(self) -> bool:
        """Whether cuFile has the file; ``why`` says why not."""
        return self._direct >= 0

    def write(self, address: int, size: int, offset: int) -> bool:
        """Writes device memory at an offset. True: by cuFile."""
        return self._move(True, address, size, offset)

    def read(self, address: int, size: int, offset: int) -> bool:
        """Reads to device memory. A file that ends before is EOFError, and what the memory holds then is not to be used."""
        return self._move(False, address, size, offset)

    def _move(self, write: bool, address: int, size: int, offset: int) -> bool:
        if size < 0 or offset < 0:
            raise ValueError(f"{size} bytes at {offset}")
        if self.direct:
            try:
                self._by_cufile(write, address, size, offset)
                return True
            except (OSError, EOFError):
                if self.mode is StorageMode.DIRECT:
                    raise
                self.fallbacks += 1
        self._by_staging(write, address, size, offset)
        return False

    def _by_cufile(self, write: bool, address: int, size: int, offset: int) -> None:
        call = "cuFileWrite" if write else "cuFileRead"
        C.set_errno(0)
        n = getattr(_cufile(), call)(self._handle, C.c_uint64(address), C.c_size_t(size), C.c_int64(offset), C.c_int64(0))
        if n < 0:
            raise CuFileError(call, C.get_errno() if n == -1 else -n)
        if n != size:
            raise EOFError(f"{n} of {size} bytes at {offset}")

    def _by_staging(self, write: bool, address: int, size: int, offset: int) -> None:
        buffer = bytearray(min(size, _SLOT))
        view, raw = memoryview(buffer), (C.c_ubyte * len(buffer)).from_buffer(buffer)
        for done in range(0, size, _SLOT):
            n = min(_SLOT, size - done)
            if write:
                cuda.copy_to_host(C.addressof(raw), address + done, n)
                at = 0
                while at < n:
                    at += os.pwrite(self._fd, view[at:n], offset + done + at)
            else:
                at = 0
                while at < n:
                    got = os.preadv(self._fd, [view[at:n]], offset + done + at)
                    if got == 0:
                        raise EOFError(f"{done + at} of {size} bytes at {offset}")
                    at += got
                cuda.copy_to_device(address + done, C.addressof(raw), n)

    def close(self) -> None:
        """Closes the file. No operation may be under way."""
        if self._direct >= 0:
            _cufile().cuFileHandleDeregister(self._handle)
            os.close(self._direct)
            self._direct = -1
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> DeviceFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
