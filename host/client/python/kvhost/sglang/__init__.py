"""SGLang's hierarchical cache keeps its pages in kvhost, by two flags::

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name":"kvhost",
      "module_path":"kvhost.sglang","class_name":"KvhostStorage","interface_v1":1,"kvhost":{"socket":"..."}}'

``README.md`` in this directory says what else there is.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvhostStorage"]


def __getattr__(name: str) -> Any:
    """Imports SGLang with the class that needs it, and not before."""
    if name == "KvhostStorage":
        from kvhost.sglang.storage import KvhostStorage

        return KvhostStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
