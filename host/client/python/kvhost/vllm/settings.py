"""The connector's settings, from ``kv_connector_extra_config``."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvhost.events import MEDIUMS
from kvhost.own import OwnHost, check_settings


@dataclass(frozen=True)
class Settings:
    socket: str = ""  # socket of a running host; empty: $KVHOST_SOCKET, then /run/kvhost/kvhost.sock
    root: str = ""  # "DIR=SIZE" of a host that the engine starts for itself (see kvhost.own), instead of a socket
    memory: str = ""  # memory of that host, alone or before its root
    chunk_tokens: int = 256  # rounded up to a multiple of every group's block
    load_when: str = "faster"  # load only if that is faster than computing (see rates.py), or "always"
    load_in: str = "auto"  # "step": inside the step that computes behind the hit; "beside": between steps; "auto": by request
    step_delay: float = 0.01  # seconds that loads may add to a step in which other requests run ("auto")
    step_timeout: float = 2.0  # seconds until a load inside a step is cancelled
    pin_seconds: float = 300.0  # longest pin of a client's chunks in seconds; 0: no pins
    prefetch: bool = True  # with several levels: copy hits to the nearest level while their request waits for blocks
    store: str = "all"  # "prompt": no generated tokens; "none": no stores
    share: str = ""  # "sizes": share chunks with engines of other tensor-parallel sizes
    tenant: int = 0
    model: str = ""  # name in place of vLLM's, for two paths of one model
    revision: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)  # further texts of the namespace, which must agree
    events_medium: str = "DISK"  # the tier that KV cache events name
    lookup_wait: float = 0.002  # seconds that the scheduler waits for a lookup before it serves others
    lookup_timeout: float = 1.0  # seconds until a lookup counts as a miss
    load_timeout: float = 60.0  # seconds until a load is cancelled
    read_timeout: float = 10.0  # seconds until a store that the host has not read is cancelled
    shutdown_wait: float = 3.0  # seconds that an ending engine waits for the host to write stores
    unread_blocks: float = 0.25  # share of the cache that stores may hold until the host has read it; other chunks wait

    @staticmethod
    def parse(
        extra: Mapping[str, Any], where: str = "kv_connector_extra_config", only: Collection[str] = (), also: Collection[str] = ()
    ) -> Settings:
        """Reads settings. ``where`` is their place, for errors. Allowed are all names, or ``only`` these, and
        ``also`` names that are no settings of the connector."""
        known = {f.name: f for f in dataclasses.fields(Settings) if not only or f.name in only}
        for name in extra:
            if name not in known:
                raise ValueError(f"{where}: unknown setting {name!r}, known are {', '.join([*known, *also])}")
        for name, value in extra.items():
            want, is_it = _TYPES[str(known[name].type)]
            if not is_it(value):
                raise ValueError(f"{where}: {name} is {value!r}, want {want}")
        s = Settings(**extra)
        check_settings(where, extra)
        if not (s.socket or s.root or s.memory):
            s = dataclasses.replace(s, socket=os.environ.get("KVHOST_SOCKET") or "/run/kvhost/kvhost.sock")
        choices = (
            ("load_when", ("faster", "always")), ("load_in", ("auto", "step", "beside")), ("store", ("all", "prompt", "none")),
            ("share", ("", "sizes")),
            ("events_medium", MEDIUMS),
        )
        for name, values in choices:
            if getattr(s, name) not in values:
                raise ValueError(f"{where}: {name} is {getattr(s, name)!r}, want one of {values}")
        if s.chunk_tokens < 1:
            raise ValueError(f"{where}: chunk_tokens is {s.chunk_tokens}, want at least 1")
        if not 0 <= s.tenant < 1 << 32:
            raise ValueError(f"{where}: tenant is {s.tenant}, want 0 to {(1 << 32) - 1}")
        return s

    @functools.cached_property
    def own(self) -> OwnHost | None:
        """Returns the host that the engine starts for itself; None if it starts none."""
        return OwnHost(self.root, self.memory, logging.getLogger("vllm.kvhost")) if self.root or self.memory else None

    @property
    def path(self) -> str:
        """Returns the path of the host's socket."""
        return self.own.socket if self.own else self.socket


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _texts(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(t, str) for kv in value.items() for t in kv)


#: The allowed values, in words and as a predicate, by a field's type.
_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("a text", lambda v: isinstance(v, str)),
    "bool": ("true or false", lambda v: isinstance(v, bool)),
    "int": ("a whole number", lambda v: isinstance(v, int) and not isinstance(v, bool)),
    "float": ("a number, 0 or more", _number),
    "Mapping[str, str]": ("texts by name", _texts),
}
