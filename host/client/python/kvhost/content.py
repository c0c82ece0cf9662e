"""What files of weights hold, so that keys and namespaces depend on it and not on a name or a path.

An adapter's files are read whole. A model's are too large for that: a fingerprint has their headers and samples of
their bytes. Neither depends on where the files are, so engines on all machines agree."""

from __future__ import annotations

import hashlib
import os
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

_PIECE = 1 << 20
_REMEMBERED = 4096  # digests of adapters
_HEADER_LIMIT = 64 << 20
_SAMPLES = 2048  # of a model, and as many bytes in each as a page has
_SAMPLE_BYTES = 4096

_SAFE, _OTHER = (".safetensors",), (".bin", ".pt", ".pth", ".gguf")


class Unknown(Exception):
    """The content cannot be told: files are missing or elsewhere."""


class Changing(Unknown):
    """Files change while they are read, or after an engine may have read them."""


def version(folder: str) -> bytes:
    """Changes whenever an adapter's files do. It is made of what stat says of them, and not of their bytes."""
    h = hashlib.blake2b(digest_size=16)
    for name in _adapter_files(folder):
        with _readable(folder):
            s = os.stat(os.path.join(folder, name))
        h.update(_text(name) + struct.pack(">5Q", s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns))
    return h.digest()


class Digests:
    """Digests of adapters, remembered by the version of their files. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, bytes] = OrderedDict()  # by version

    def of(self, folder: str) -> tuple[bytes, bytes]:
        """The version of an adapter's files and the digest of their bytes."""
        now = version(folder)
        with self._lock:
            digest = self._known.get(now)
        if digest is None:
            digest = _digest(folder)
            if version(folder) != now:
                raise Changing(f"{folder}: its files changed while they were read")
            with self._lock:
                self._known[now] = digest
                while len(self._known) > _REMEMBERED:
                    self._known.popitem(last=False)
        return now, digest


def _adapter_files(folder: str) -> list[str]:
    """The configuration, and what vLLM and SGLang may read weights from."""
    with _readable(folder):
        names = sorted(os.listdir(folder))
    weights = [n for n in names if n.endswith(_SAFE)] or [n for n in names if n.endswith(_OTHER)]
    weights += [n for n in names if n in ("adapter_model.bin", "adapter_model.pt") and n not in weights]
    if "adapter_config.json" not in names or not weights:
        raise Unknown(f"{folder}: has no LoRA adapter")
    return ["adapter_config.json", *(["added_tokens.json"] if "added_tokens.json" in names else []), *weights]


def _digest(folder: str) -> bytes:
    whole = hashlib.blake2b(digest_size=32)
    piece = bytearray(_PIECE)
    for name in _adapter_files(folder):
        h = hashlib.blake2b(digest_size=32)
        with _readable(folder), open(os.path.join(folder, name), "rb", buffering=0) as file:
            while n := file.readinto(piece):
                h.update(memoryview(piece)[:n])
        whole.update(_text(name) + h.digest())
    return whole.digest()


def of_model(path: str, revision: str | None = None) -> str:
    """What the weights of a model are that this process has loaded: a fingerprint of its files, or the commit of a
    repository of the hub."""
    if os.path.exists(path):
        return fingerprint(path, process_start())
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(path, "config.json", revision=revision)
    except (ImportError, ValueError) as e:  # no name of a repository
        raise Unknown(f"{path}: {e}") from e
    if not isinstance(cached, str):
        raise Unknown(f"{path}: neither files nor a repository in the hub's cache")
    return f"{path}@{os.path.basename(os.path.dirname(cached))}"


def fingerprint(path: str, since: float = float("inf")) -> str:
    """A model's weights in a folder or a file: the names and sizes of their files, the headers of safetensors, and
    samples at even distances, 8 MiB of 16 GiB. A difference that lies between all samples is not seen.

    Raises :class:`Changing` where a file changed after ``since``, in seconds of the epoch."""
    files = _weight_files(path)
    whole = hashlib.blake2b(digest_size=16)
    total = sum(size for _, size in files)
    for name, size in files:
        whole.update(_text(os.path.basename(name)) + struct.pack(">Q", size))
        with _readable(path), open(name, "rb", buffering=0) as file:
            count = max(4, _SAMPLES * size // max(1, total))
            for part in _samples(file.fileno(), size, count, header=name.endswith(_SAFE)):
                whole.update(part)
            if os.fstat(file.fileno()).st_ctime >= since:
                raise Changing(f"{name} changed after this process had started, which may have loaded other weights")
    return whole.hexdigest()


def process_start() -> float:
    """When this process was started, in seconds of the epoch."""
    with open("/proc/self/stat") as stat:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def _weight_files(path: str) -> list[tuple[str, int]]:
    with _readable(path):
        folder = os.path.isdir(path)
        names = [os.path.join(path, n) for n in sorted(os.listdir(path))] if folder else [path]
        weights = [n for n in names if n.endswith(_SAFE)] or [n for n in names if n.endswith(_OTHER)]
        if not weights:
            raise Unknown(f"{path}: has no weights")
        return [(n, os.stat(n).st_size) for n in weights]


def _samples(fd: int, size: int, count: int, header: bool) -> Iterator[bytes]:
    if header and size > 8:
        n = struct.unpack("<Q", os.pread(fd, 8, 0))[0]
        yield os.pread(fd, min(n, size, _HEADER_LIMIT), 8)
    last = max(0, size - _SAMPLE_BYTES)
    for at in sorted({last * i // max(1, count - 1) for i in range(count)}):
        yield os.pread(fd, _SAMPLE_BYTES, at)


@contextmanager
def _readable(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise Unknown(f"{path}: {e}") from e


def _text(s: str) -> bytes:
    raw = os.fsencode(s)
    return struct.pack(">I", len(raw)) + raw
