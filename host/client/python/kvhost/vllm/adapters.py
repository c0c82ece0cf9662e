"""LoRA adapters by content.

An adapter's name, number and path do not identify its weights: its files may be replaced, and the engine may have
read them before or after that. So the workers record the version of the files that the engine has loaded. The
scheduler reads the files, and uses their content in keys as long as they have that version. If the engine loads the
adapter only later, the workers compare the version then. Requests with another version are computed and not stored."""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from kvhost.content import Digests, Unknown, version

log = logging.getLogger("vllm.kvhost")

Rank = tuple[int, int]  # (pipeline stage, rank in the stage)

_READERS = 2  # threads that read adapters' files


@dataclass(frozen=True)
class Loaded:
    """An adapter that the engine has loaded."""

    path: str  # path in its request
    folder: str
    version: bytes  # version of its files; b"" if it is not known


@dataclass(frozen=True)
class Content:
    """The content of an adapter's files."""

    number: int  # vLLM's number of the adapter
    version: bytes
    key: bytes  # digest for the request's keys
    of_hub: bool = False  # the files of its path are known only while the engine has loaded them

    def is_of(self, loaded: Loaded) -> bool:
        return loaded.version == self.version


class LoadedAdapters:
    """The worker's half: the adapters that vLLM's manager has loaded, with the versions of their files."""

    def __init__(self, manager: Any, resolve: Callable[[str], str]) -> None:
        """``resolve`` returns the folder of an adapter's path, which may name a repository of the hub."""
        self._manager = manager
        self._known: dict[int, Loaded] = {}
        self._reported: dict[int, Loaded] = {}
        load = manager._load_adapter

        def noting(request: Any) -> Any:
            folder = resolve(request.lora_path)
            before = _version(folder, request)
            adapter = load(request)
            same = before if before == _version(folder, request) else b""
            self._known[request.lora_int_id] = Loaded(request.lora_path, folder, same)
            return adapter

        manager._load_adapter = noting

    def now(self) -> dict[int, Loaded]:
        return {n: self._known.get(n, Loaded("", "", b"")) for n in self._manager.list_adapters()}

    def changed(self) -> dict[int, Loaded] | None:
        """Returns all loaded adapters if they have changed since the last call, else None."""
        now = self.now()
        if now == self._reported:
            return None
        self._reported = now
        return now

    def may_load(self, content: Content) -> bool:
        """Whether KV of this content may be loaded for the adapter: the engine has loaded this content, or no files
        yet."""
        loaded = self.now().get(content.number)
        return not content.of_hub if loaded is None else content.is_of(loaded)

    def may_store(self, content: Content) -> bool:
        """Whether KV that the adapter computed belongs to this content."""
        loaded = self.now().get(content.number)
        return loaded is not None and content.is_of(loaded)


def _version(folder: str, request: Any) -> bytes:
    if getattr(request, "tensorizer_config_dict", None):
        return b""  # its weights are in other files
    try:
        return version(folder)
    except Unknown:
        return b""


class Asked:
    """A request's question for its adapter's content."""

    def __init__(self, answer: Future[Content | None]) -> None:
        self._answer, self._began, self._waited = answer, time.monotonic(), False

    def done(self, seconds: float) -> bool:
        """Whether there is an answer. Only the first call waits for it."""
        if not self._waited:
            self._waited = True
            wait([self._answer], seconds)
        return self._answer.done()

    @property
    def age(self) -> float:
        return time.monotonic() - self._began

    @property
    def content(self) -> Content | None:
        return self._answer.result(0) if self._answer.done() else None


class Adapters:
    """The scheduler's half. Files are read on threads of its own; all else runs on the scheduler's thread."""

    def __init__(self, applied: str) -> None:
        """``applied`` describes how the engine applies any adapter (:func:`kvhost.vllm.identity.adapters`)."""
        self._applied = applied
        self._digests = Digests()
        self._readers = ThreadPoolExecutor(_READERS, "kvhost-lora")
        self._loaded: dict[Rank, Mapping[int, Loaded]] = {}
        self._names: dict[int, set[str]] = {}  # names of adapters by number
        self._blocks: dict[str, bytes] = {}  # by name: the version of the KV in the engine's own cache; b"": several versions
        self._said: set[str] = set()

    def ask(self, lora: Any) -> Asked:
        self._names.setdefault(lora.lora_int_id, set()).add(lora.lora_name)
        local = _local(lora.lora_path)
        return Asked(self._readers.submit(self._read, lora, local or self._of_hub(lora), not local))

    def _of_hub(self, lora: Any) -> str:
        """Returns the folder from which the engine has loaded a repository."""
        loaded = (a.get(lora.lora_int_id) for a in self._loaded.values())
        return next((x.folder for x in loaded if x is not None and x.path == lora.lora_path), "")

    def _read(self, lora: Any, folder: str, of_hub: bool) -> Content | None:
        """Reads the files, on a thread for that."""
        name = f"LoRA adapter {lora.lora_name!r}"
        try:
            if getattr(lora, "tensorizer_config_dict", None):
                raise Unknown(f"{lora.lora_path}: tensorizer's files are not read")
            if not folder:
                return None  # a repository that the engine has not loaded yet
            files, digest = self._digests.of(folder)
        except Unknown as e:
            if name not in self._said:
                self._said.add(name)
                log.warning("kvhost: %s: its requests are computed, and not stored: %s", name, e)
            return None
        self._said.discard(name)
        layout = b"3" if getattr(lora, "is_3d_lora_weight", False) else b""
        applied = self._applied.encode()
        key = hashlib.blake2b(digest + struct.pack(">I", len(applied)) + applied + layout, digest_size=32).digest()
        return Content(lora.lora_int_id, files, key, of_hub)

    def agrees(self, lora: Any, content: Content | None, computed: int) -> bool:
        """Whether KV of this content agrees with the engine's own KV for the adapter, which has ``computed`` tokens
        in the engine's cache. That cache identifies an adapter by its name, so it may have KV that other weights of
        this name computed."""
        if content is None or not self.current(content):
            return False
        alone = self._note(lora.lora_name, content.version)
        return alone or not computed

    def current(self, content: Content) -> bool:
        """Whether no worker has loaded other files for the adapter."""
        return all(content.is_of(a[content.number]) for a in self._loaded.values() if content.number in a)

    def _note(self, name: str, version: bytes) -> bool:
        """Records the version that the engine computes with. Returns whether no other version of this name was seen."""
        if self._blocks.setdefault(name, version) != version:
            self._blocks[name] = b""
        return bool(self._blocks[name])

    def reported(self, loaded: Mapping[Rank, Mapping[int, Loaded]]) -> None:
        """Records the adapters that the workers have loaded."""
        self._loaded.update(loaded)
        for adapters in loaded.values():
            for number, adapter in adapters.items():
                for name in self._names.get(number, ()):
                    self._note(name, adapter.version)

    def forget(self) -> None:
        """Forgets the content of the engine's own cache, which was emptied."""
        self._blocks.clear()

    def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)


def _local(path: str) -> str:
    """Returns an adapter's folder by vLLM's rules, or "" if the path names a repository of the hub."""
    if os.path.isabs(path) or path.startswith("~"):
        return os.path.expanduser(path)
    return os.path.abspath(path) if os.path.exists(path) else ""
