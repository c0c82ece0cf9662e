"""What ``adapter_params`` may say."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase

from kvhost.lmcache.tenants import TenantError, check_tenants


@dataclass
class KvhostL2AdapterConfig(L2AdapterConfigBase):
    """``socket``: the host's. ``arena_bytes``: shared memory that objects pass through. ``timeout``: seconds until an
    answer that does not come means that the host is gone. ``threads``: that store, and as many that load. ``sessions``:
    at most so many with the host, one for each (model, group, size, tenant) in use. ``tenants``: numbers for cache salts."""

    socket: str = "/run/kvhost/kvhost.sock"
    arena_bytes: int = 1 << 30
    timeout: float = 30.0
    threads: int = 2
    sessions: int = 64
    tenants: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> KvhostL2AdapterConfig:
        known = {f.name: f for f in fields(cls)}
        for name in d:
            if name not in known:
                raise ValueError(f"adapter_params.{name}: unknown, there are {', '.join(sorted(known))}")
        config = cls(**d)
        if not isinstance(config.socket, str) or not config.socket:
            raise ValueError("adapter_params.socket: want the path of the host's socket")
        for name in ("arena_bytes", "threads", "sessions"):
            value = getattr(config, name)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ValueError(f"adapter_params.{name}: {value!r}, want a number above 0")
        if not isinstance(config.timeout, (int, float)) or config.timeout <= 0:
            raise ValueError(f"adapter_params.timeout: {config.timeout!r}, want seconds above 0")
        try:
            check_tenants(config.tenants)
        except TenantError as e:
            raise ValueError(f"adapter_params.tenants: {e}") from None
        return config

    @classmethod
    def help(cls) -> str:
        return (
            "kvhost L2 adapter, adapter_params:\n"
            "- socket (str): the host's socket (default /run/kvhost/kvhost.sock)\n"
            "- arena_bytes (int): shared memory that objects pass through (default 1 GiB)\n"
            "- timeout (float): seconds until a silent host counts as gone (default 30)\n"
            "- threads (int): threads that store, and as many that load (default 2)\n"
            "- sessions (int): most sessions with the host (default 64)\n"
            "- tenants (dict): tenant numbers for cache salts (default: made from the salt)"
        )
