"""The connector's settings, from ``kv_connector_extra_config``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvhost.events import MEDIUMS


class Refused(Exception):
    """The connector does not understand a setting, a model or a memory layout. The engine runs without it."""


@dataclass(frozen=True)
class Settings:
    socket: str = ""  # empty: $KVHOST_SOCKET, then /run/kvhost/kvhost.sock
    chunk_tokens: int = 256  # rounded up to a multiple of every group's block
    load_when: str = "faster"  # than computing (see rates.py), or "always"
    prefetch: bool = True  # with several levels: hits come nearer while their request waits for blocks
    store: str = "all"  # "prompt": not what the engine generates; "none"
    tenant: int = 0
    model: str = ""  # instead of vLLM's model name: two paths of one model
    revision: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)  # more that must agree, into the namespace
    events_medium: str = "DISK"  # the tier that KV cache events name
    lookup_wait: float = 0.002  # seconds that the scheduler waits for a lookup before it serves others
    lookup_timeout: float = 1.0  # seconds until a lookup counts as a miss
    load_timeout: float = 60.0  # seconds until a load is cancelled
    fence_timeout: float = 0.25  # seconds that a step waits for stores of reused blocks before they are cancelled
    unread_blocks: float = 0.25  # of the cache that may wait for the host to read it; above that nothing is stored

    @staticmethod
    def parse(extra: Mapping[str, Any]) -> Settings:
        known = {f.name: f for f in dataclasses.fields(Settings)}
        for name in extra:
            if name not in known:
                raise ValueError(f"kv_connector_extra_config: unknown setting {name!r}, known are {', '.join(known)}")
        s = Settings(**extra)
        if not s.socket:
            s = dataclasses.replace(s, socket=os.environ.get("KVHOST_SOCKET") or "/run/kvhost/kvhost.sock")
        choices = ("load_when", ("faster", "always")), ("store", ("all", "prompt", "none")), ("events_medium", MEDIUMS)
        for name, values in choices:
            if getattr(s, name) not in values:
                raise ValueError(f"kv_connector_extra_config: {name} is {getattr(s, name)!r}, want one of {values}")
        if not isinstance(s.prefetch, bool):
            raise ValueError(f"kv_connector_extra_config: prefetch is {s.prefetch!r}, want true or false")
        if s.chunk_tokens < 1:
            raise ValueError(f"kv_connector_extra_config: chunk_tokens is {s.chunk_tokens}, want at least 1")
        for name in ("lookup_wait", "lookup_timeout", "load_timeout", "fence_timeout", "unread_blocks"):
            if not getattr(s, name) >= 0:
                raise ValueError(f"kv_connector_extra_config: {name} is {getattr(s, name)}, want 0 or more")
        return s
