"""MLPerf Storage's KV cache benchmark with kvhost in the place of its NVMe backend, or with its own:

    mlperf_kvcache.py <its folder kv_cache_benchmark> kvhost=<socket>|own <its options>

kvhost needs a root without memory before it, as the benchmark drops the page cache before each of its own reads. What is read
is compared with what was written in both cases, outside the time that is measured."""

from __future__ import annotations

import hashlib
import itertools
import sys
import time
import zlib
from typing import Any

import numpy as np

from kvhost.objects.connection import Connector
from kvhost.objects.kind import Kind
from kvhost.objects.options import Options
from kvhost.objects.store import ObjectStore, StoreObject
from kvhost.session import Result

_PART = 4 << 20  # bytes of an object; the end of an array has a smaller one of its own
_SMALL = 256 << 10


def _backend(base: Any, socket: str) -> Any:
    store = ObjectStore(Connector(Options(socket=socket), "mlperf"))
    kinds = {size: Kind("mlperf", "mlperf", (size,)) for size in (_PART, _SMALL)}
    versions = itertools.count()

    class Kvhost(base):  # type: ignore[misc]
        def __init__(self, base_path: str | None = None) -> None:
            self._arrays: dict[str, tuple[int, Any]] = {}

        def _parts(self, name: str, version: int, size: int) -> list[tuple[int, list[tuple[bytes, int]]]]:
            """By size of the parts: their keys, and where in the array each begins."""
            whole = size // _PART
            starts = {_PART: range(0, whole * _PART, _PART), _SMALL: range(whole * _PART, size, _SMALL)}
            return [
                (part, [(hashlib.sha256(f"{name} {version} {at}".encode()).digest(), at) for at in of]) for part, of in starts.items() if of
            ]

        def write(self, key: str, data: Any) -> Any:
            flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            version, start = next(versions), time.perf_counter()
            padded = flat
            if flat.nbytes % _SMALL:
                padded = np.zeros(-(-flat.nbytes // _SMALL) * _SMALL, np.uint8)
                padded[: flat.nbytes] = flat
            address = padded.ctypes.data
            for part, objects in self._parts(key, version, flat.nbytes):
                results = store.store(kinds[part], [StoreObject(k, [address + at]) for k, at in objects])
                assert set(results) == {Result.STORED}, f"{key}: {results}, want all stored"
            total = time.perf_counter() - start
            self._arrays[key] = version, (data.shape, data.dtype, flat.nbytes)
            return base.IOTiming(total=total, device=total, host=0.0)

        def read(self, key: str) -> Any:
            if key not in self._arrays:
                raise KeyError(key)
            version, (shape, dtype, size) = self._arrays[key]
            start = time.perf_counter()
            flat = np.empty(-(-size // _SMALL) * _SMALL, np.uint8)
            address = flat.ctypes.data
            for part, objects in self._parts(key, version, size):
                there = store.load(kinds[part], [k for k, _ in objects], [[address + at] for _, at in objects])
                assert all(there), f"{key}: {there.count(False)} of {len(there)} parts are not there"
            total = time.perf_counter() - start
            return flat[:size].view(dtype).reshape(shape), base.IOTiming(total=total, device=total, host=0.0)

        def delete(self, key: str) -> None:
            if (entry := self._arrays.pop(key, None)) is not None:
                for part, objects in self._parts(key, entry[0], entry[1][2]):
                    store.discard(kinds[part], [k for k, _ in objects])

        def clear(self) -> None:
            for key in list(self._arrays):
                self.delete(key)

    return Kvhost


def _checked(backend: Any) -> Any:
    """Ends the program where other bytes are read than were written."""

    class Checked(backend):  # type: ignore[misc]
        def write(self, key: str, data: Any) -> Any:
            self.__dict__.setdefault("_sums", {})[key] = zlib.crc32(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
            return super().write(key, data)

        def read(self, key: str) -> Any:
            data, timing = super().read(key)
            got = zlib.crc32(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
            counts["read" if got == self._sums[key] else "wrong"] += 1
            return data, timing

    return Checked


counts = {"read": 0, "wrong": 0}


def main() -> None:
    folder, which = sys.argv[1:3]
    sys.argv[1:] = sys.argv[3:]
    sys.path.insert(0, folder)
    from kv_cache import backends, cache
    from kv_cache.cli import main as run

    own = backends.NVMeBackend
    cache.NVMeBackend = _checked(own if which == "own" else _backend(backends.StorageBackend, which.removeprefix("kvhost=")))
    run()
    print(f"arrays read: {counts['read']} as they were written, {counts['wrong']} others")
    sys.exit(counts["wrong"] > 0)


if __name__ == "__main__":
    main()
