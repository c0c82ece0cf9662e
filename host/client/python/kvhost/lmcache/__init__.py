"""kvhost as the L2 of LMCache's MP server, by one flag::

    --l2-adapter '{"type":"plugin","module_path":"kvhost.lmcache","class_name":"KvhostL2Adapter",
      "adapter_params":{"socket":"..."}}'

``README.md`` in this directory describes the parameters.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvhostL2Adapter", "KvhostL2AdapterConfig"]


def __getattr__(name: str) -> Any:
    """Imports a class on first use, since it needs LMCache."""
    if name == "KvhostL2Adapter":
        from kvhost.lmcache.adapter import KvhostL2Adapter

        return KvhostL2Adapter
    if name == "KvhostL2AdapterConfig":
        from kvhost.lmcache.config import KvhostL2AdapterConfig

        return KvhostL2AdapterConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
