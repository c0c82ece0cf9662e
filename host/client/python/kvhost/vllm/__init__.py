"""vLLM connector of kvhost: ``KvhostConnector``, for ``--kv-transfer-config`` (see README.md in this directory).

The connector translates between vLLM and a kvhost session; the host decides what to keep. The modules that know vLLM
are ``connector``, ``model``, ``stats`` and ``compat``; the others work without vLLM.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvhostConnector", "register"]


def register() -> None:
    """Makes ``KvhostConnector`` known to vLLM by its name alone.

    vLLM calls this as a plugin in each of its processes. Importing the connector calls it, too: MultiConnector's
    statistics name a connector's class, whatever way it was loaded."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector("KvhostConnector", "kvhost.vllm.connector", "KvhostConnector")
    except ValueError:
        pass  # this process has registered it before


def __getattr__(name: str) -> Any:
    if name == "KvhostConnector":  # imported on demand: keys and page geometry are of use without vLLM
        from kvhost.vllm.connector import KvhostConnector

        return KvhostConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
