"""The settings in ``adapter_params``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase

from kvhost.lmcache.tenants import TenantError, check_tenants
from kvhost.objects import Options

_WHERE = "adapter_params"


@dataclass
class AdapterOptions(Options):
    """There are ``threads`` threads for stores, and as many for loads. ``tenants`` maps cache salts to tenant
    numbers. ``shared`` says that other machines use the host's roots, too, for example a bucket."""

    threads: int = 2
    shared: bool = False
    tenants: dict[str, int] = field(default_factory=dict)


class KvhostL2AdapterConfig(L2AdapterConfigBase):
    def __init__(self, options: AdapterOptions) -> None:
        self.options = options

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> KvhostL2AdapterConfig:
        options = AdapterOptions.parse(_WHERE, d)
        try:
            check_tenants(options.tenants)
        except TenantError as e:
            raise ValueError(f"{_WHERE}.tenants: {e}") from None
        return cls(options)

    @classmethod
    def help(cls) -> str:
        return (
            "kvhost L2 adapter, adapter_params:\n"
            "- socket (str): of a host that runs (default /run/kvhost/kvhost.sock)\n"
            "- root (str), memory (str): of a host that is started: DIR=SIZE, SIZE, or both\n"
            "- arena_bytes (int): shared memory that objects pass through (default 1 GiB)\n"
            "- timeout (float): seconds until a host that does not answer counts as gone (default 30)\n"
            "- sessions (int): the most with the host at a time (default 64)\n"
            "- prefetch (bool): what is found comes to the host's nearest level until it is loaded (default true)\n"
            "- threads (int): threads that store, and as many that load (default 2)\n"
            "- tenants (dict): tenant numbers for cache salts (default: made from the salt)\n"
            "- extra (dict): more that must agree for servers to share objects, texts by name (default none)"
        )
