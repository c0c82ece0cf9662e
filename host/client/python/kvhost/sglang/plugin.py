"""Hooks for facts that SGLang does not report to its storage: changes of weights, and the content of LoRA adapters.

SGLang loads this plugin in each of its processes, by the entry point ``sglang.srt.plugins``. A storage is refused
without its hooks."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from kvhost.content import Digests, Unknown

log = logging.getLogger("kvhost")

_SCHEDULER = "sglang.srt.managers.scheduler"
_UPDATES = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


class Generation:
    """A name that separates pages that must not be found: those of other weights, and those from before the storage was
    cleared.

    It is made from the history of this server, so its ranks agree, and no other server has the same."""

    def __init__(self) -> None:
        self.name = b""  # empty for pages of the weights that the server was started with
        self.unsure = False  # the weights are changing, and SGLang still has pages of the old ones

    def next(self, event: str) -> None:
        self.name = hashlib.blake2b(_apart(self.name.hex(), event, _server().decode()).encode(), digest_size=16).digest()

    def changing(self) -> None:
        if not self.unsure:
            log.info("SGLang's weights change: no page is stored or loaded until its cache was flushed")
        self.unsure = True

    def flushed(self) -> None:
        """Records that SGLang has dropped all its pages, and its storage threads have ended their work."""
        if self.unsure:
            self.next("weights")
            self.unsure = False


generation = Generation()
_adapters: dict[str, str] = {}  # the name of an adapter's KV, by SGLang's number of the adapter
_digests = Digests()


@cache
def _server() -> bytes:
    """Returns an id that this server's processes share with no other server: their starting process, and its start
    time."""
    parent = os.getppid()
    try:
        with open(f"/proc/{parent}/stat") as stat, open("/proc/sys/kernel/random/boot_id") as boot:
            facts = [boot.read(), stat.read().rpartition(")")[2].split()[19], os.readlink("/proc/self/ns/pid")]
    except OSError:
        facts = [os.urandom(16).hex()]
    return " ".join([str(parent), *facts]).encode()


def register() -> None:
    """Registers the hooks, in processes that schedule."""
    if _SCHEDULER not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, (kind, hook) in _HOOKS.items():
        HookRegistry.register(target, hook, HookType[kind])


def missing() -> list[str]:
    """Returns the missing hooks in a process that schedules. Other processes have no weights."""
    if _SCHEDULER not in sys.modules:
        return []
    from sglang.srt.plugins.hook_registry import HookRegistry

    return [target for target in _HOOKS if target not in getattr(HookRegistry, "_patched", ())]


def check() -> None:
    """Raises ValueError if this SGLang lacks a fact that names pages."""
    from sglang.srt.mem_cache import utils

    if not hasattr(utils, "storage_namespace_seed"):
        raise ValueError("kvhost: this SGLang's page hashes leave out the cache salt and the LoRA adapter: want 0.5.20")
    if lacking := missing():
        raise ValueError(
            f"kvhost: SGLang has no hooks at {', '.join(lacking)}: install kvhost's package into its environment, and "
            "let SGLANG_PLUGINS name kvhost if it is set"
        )


def _load_adapter(load: Callable[..., Any], manager: Any, adapter: Any) -> Any:
    """Records the content of a loaded adapter."""
    before = _content(adapter)
    result = load(manager, adapter)
    if before and before == _content(adapter):
        _adapters[adapter.lora_id] = before[1].hex()
    return result


def _content(adapter: Any) -> tuple[bytes, bytes] | None:
    try:
        return _digests.of(adapter.lora_path)
    except Unknown as e:
        log.warning("LoRA adapter %r: its pages are not found after a restart: %s", adapter.lora_name, e)
        return None


def _new_request(result: None, request: Any, *args: Any, **options: Any) -> None:
    """SGLang's page hashes begin with the client's text and an adapter's number. This function replaces the number
    with the digest of the adapter's files, which is equal in all servers and changes with the files. Without a
    digest only this server can load the adapter's pages. The client's text is a field of its own, also without an
    adapter, since it could otherwise equal an adapter's name."""
    number, said = request.lora_id, request.extra_key
    if number is not None:
        name = _adapters.get(number) or _apart(number, hashlib.blake2b(_server(), digest_size=16).hexdigest())
        request.extra_key = _apart(name, (said or "").removesuffix(number))
    elif said is not None:
        request.extra_key = _apart("", said)


def _apart(*fields: str) -> str:
    """Returns one text of several, which no other texts make."""
    return "".join(f"{len(f)}:{f}" for f in fields)


def _changing(*args: Any, **options: Any) -> None:
    generation.changing()


def _changed(result: Any, *args: Any, **options: Any) -> None:
    if not generation.unsure:  # SGLang's cache was flushed before the end of this change
        generation.next("weights")


def _flushed(result: bool, *args: Any, **options: Any) -> None:
    if result:
        generation.flushed()


#: The hooks: the function, the time, and the hook itself.
_HOOKS: dict[str, tuple[str, Callable[..., Any]]] = {
    "sglang.srt.lora.lora_manager.LoRAManager._load_lora_adapter": ("AROUND", _load_adapter),
    "sglang.srt.managers.schedule_batch.Req.__init__": ("AFTER", _new_request),
    f"{_SCHEDULER}.Scheduler.flush_cache": ("AFTER", _flushed),
    **{
        f"{_UPDATES}.{name}": ("BEFORE", _changing)
        for name in (
            "begin_weight_update", "update_weights_from_disk", "update_weights_from_distributed",
            "update_weights_from_tensor", "update_weights_from_ipc",
        )
    },
    f"{_UPDATES}.end_weight_update": ("AFTER", _changed),
}
