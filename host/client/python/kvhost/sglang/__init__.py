"""kvhost for SGLang: it keeps the pages of its device pools, by three flags::

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker":"KvhostLinker","linker_module_path":"kvhost.sglang",
      "linker_extra_config":{"root":"/mnt/nvme0/kv=500GiB"}}'

or the pages of its hierarchical cache, by two::

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name":"kvhost",
      "module_path":"kvhost.sglang","class_name":"KvhostStorage","interface_v1":1,"kvhost":{"socket":"..."}}'

``README.md`` in this directory has all settings.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvhostLinker", "KvhostStorage"]


def __getattr__(name: str) -> Any:
    """Imports a class on first use, since it needs SGLang."""
    if name == "KvhostLinker":
        from kvhost.sglang.linker import KvhostLinker

        return KvhostLinker
    if name == "KvhostStorage":
        from kvhost.sglang.storage import KvhostStorage

        return KvhostStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
