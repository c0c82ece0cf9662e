"""vLLM connector of kvhost: ``KvhostConnector``, for ``--kv-transfer-config`` (see README.md beside this file).

The connector translates between vLLM and a kvhost session; the host decides what to keep. The modules that know vLLM
are ``connector``, ``model``, ``stats`` and ``compat``; the others work without vLLM.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvhostConnector"]


def __getattr__(name: str) -> Any:
    if name == "KvhostConnector":  # imported on demand: keys and page geometry are of use without vLLM
        from kvhost.vllm.connector import KvhostConnector

        return KvhostConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
