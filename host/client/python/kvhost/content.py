"""The content of files of weights, so that keys and namespaces depend on it and not on a name or a path.

The files of an adapter and of a small model are read whole. Of a large model all settings, headers and small tensors
are read, and some rows of the others. The result does not depend on the place of the files, so engines on all machines
agree."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch

from kvhost import wholes
from kvhost.tensors import samples
from kvhost.wholes import Changing, Unknown, Unread

__all__ = ["Changing", "Digests", "Unknown", "Unread", "fingerprint", "of_model", "process_start", "version"]

_PIECE = 1 << 20
_REMEMBERED = 4096  # most remembered digests of adapters
_READ_WHOLE = 512 << 20  # bytes of a model up to which it is read whole
_READERS = 4  # threads

_SAFE, _OTHER = (".safetensors",), (".bin", ".pt", ".pth", ".gguf")
WEIGHTS = (*_SAFE, *_OTHER)
_SHARD = re.compile(r"-\d{5}-of-(\d{5})")  # a file of a model in several GGUF files, of which engines name the first
#: Files next to the weights that decide a model's KV or the processing of its pictures, and code.
_SETTINGS = ("config.json", "params.json", "*quant*.json", "*process*.json", "*.py")


def version(folder: str) -> bytes:
    """Returns a value that changes whenever an adapter's files change. It is computed from the results of stat, and
    not from the files' bytes."""
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
        self._known: OrderedDict[bytes, bytes] = OrderedDict()  # digests by version

    def of(self, folder: str) -> tuple[bytes, bytes]:
        """Returns the version of an adapter's files and the digest of their bytes."""
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
    """Returns the configuration, and the files that vLLM and SGLang may read weights from."""
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


def of_model(path: str, revision: str | None = None, wait: float | None = None) -> str:
    """Returns the identity of the weights that this process has loaded: the digest of a model's files, or the commit of
    a repository in the hub's cache.

    Files with the same samples as others that this machine has seen are read whole. Raises :class:`Unread` if that
    takes longer than ``wait`` seconds."""
    if os.path.exists(path):
        return fingerprint(path, process_start(), wholes.Known(wait))
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(path, "config.json", revision=revision)
    except (ImportError, ValueError) as e:  # not the name of a repository
        raise Unknown(f"{path}: {e}") from e
    if not isinstance(cached, str):
        raise Unknown(f"{path}: neither files nor a repository in the hub's cache")
    return f"{path}@{os.path.basename(os.path.dirname(cached))}"


def fingerprint(path: str, since: float = float("inf"), known: wholes.Known | None = None) -> str:
    """Returns a digest of a folder with a model's files, or of one file. The digest covers names, sizes, settings, and
    all or some whole rows of every tensor (see ``tensors.py``). A model of up to 512 MiB is read whole. With ``known``,
    different files with the same samples get different digests.

    Raises :class:`Changing` if a file changed after ``since``, in seconds of the epoch."""
    files = _model_files(path)
    whole = hashlib.blake2b(b"kvhost weights 2\0", digest_size=16)
    with _readable(path):
        small = sum(os.stat(f).st_size for f in files) <= _READ_WHOLE
        for name, part in zip(files, wholes.each(lambda f: _sampled(f, small), files, _READERS)):
            whole.update(_text(os.path.basename(name)) + part)
        for name in files:
            if os.stat(name).st_ctime >= since:
                raise Changing(f"{name} changed after this process had started, which may have loaded other weights")
    text = whole.hexdigest()
    return text if small or known is None else known.settle(text, files)


def _sampled(name: str, whole: bool) -> bytes:
    with open(name, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        h = hashlib.blake2b(struct.pack(">Q", size), digest_size=32)
        if not whole:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # read-ahead would be useless
        for at, n in [(0, size)] if whole or not name.endswith(WEIGHTS) else samples(file.fileno(), size, name):
            h.update(struct.pack(">QQ", at, n))
            for piece in range(at, at + n, _PIECE):
                h.update(os.pread(file.fileno(), min(_PIECE, at + n - piece), piece))
    return h.digest()


def process_start() -> float:
    """Returns the start time of this process, in seconds of the epoch."""
    with open("/proc/self/stat") as stat:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def _model_files(path: str) -> list[str]:
    folder, one = (path, "") if os.path.isdir(path) else os.path.split(path)
    exact = glob.escape(one)
    of_one = (exact, _SHARD.sub(r"-*-of-\1", exact), "mmproj*.gguf") if one.endswith(".gguf") else (exact,)
    patterns = of_one if one else (*(f"*{end}" for end in WEIGHTS), *_SETTINGS)
    with _readable(path):
        names = [n for n in sorted(os.listdir(folder or ".")) if any(fnmatch(n, p) for p in patterns)]
    if not any(n.endswith(WEIGHTS) for n in names):
        raise Unknown(f"{path}: has no weights")
    return [os.path.join(folder, n) for n in names]


@contextmanager
def _readable(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise Unknown(f"{path}: {e}") from e


def _text(s: str) -> bytes:
    raw = os.fsencode(s)
    return struct.pack(">I", len(raw)) + raw
