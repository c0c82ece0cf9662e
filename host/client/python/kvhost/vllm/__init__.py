"""vLLM connector of kvhost: ``KvhostConnector``, for ``--kv-transfer-config`` (see README.md in this directory).

The connector translates between vLLM and a kvhost session; the host decides what to keep. The modules that know vLLM
are ``connector``, ``tier``, ``tierrows``, ``model``, ``stats`` and ``compat``; the others work without vLLM.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvhostConnector", "register"]


def register() -> None:
    """Makes ``KvhostConnector`` known to vLLM by its name alone, and the tier ``kvhost`` to vLLM's offloading.

    vLLM calls this as a plugin in each of its processes. The import of the connector calls it, too, since
    MultiConnector's statistics need the name even if the class was loaded by its module's path."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector("KvhostConnector", "kvhost.vllm.connector", "KvhostConnector")
    except ValueError:
        return  # this process has registered both before
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError:
        return  # this vLLM has no tiers
    SecondaryTierFactory.register_tier("kvhost", "kvhost.vllm.tier", "KvhostTier")


def __getattr__(name: str) -> Any:
    if name == "KvhostConnector":  # imported on demand: keys and page geometry are of use without vLLM
        from kvhost.vllm.connector import KvhostConnector

        return KvhostConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
