"""What sets one server's pages apart from another's."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from kvhost.objects.kind import KEY_BYTES, Kind

#: State that is sharded by rank even where all ranks hold the same KV.
_ALWAYS_SHARDED = "mamba"


def host_key(page_hash: str) -> bytes:
    """SGLang's page hashes cover all tokens up to the page's end."""
    return hashlib.blake2b(page_hash.encode(), digest_size=KEY_BYTES, person=b"kvhost.sglang.1").digest()


def kind(config: Any, pool: Any, name: str, form: str, pages: Sequence[int], tenant: int) -> Kind:
    """The objects of one host pool on one rank. ``form`` says how a pool's page becomes an object: by the pool's own
    buffers, or flat."""
    return Kind(
        model=config.model_name or "unknown",
        engine="sglang",
        pages=tuple(pages),
        tenant=tenant,
        dtype=str(getattr(pool, "dtype", "opaque")).removeprefix("torch."),
        tokens=max(1, int(getattr(pool, "page_size", 1) or 1)),
        extra=(
            ("form", form),
            ("layers", f"{getattr(pool, 'start_layer', 0)}-{getattr(pool, 'end_layer', 0)}"),
            ("layout", str(getattr(pool, "layout", ""))),
            ("pool", name),
            ("rank", _rank(config, name)),
        ),
    )


def _rank(config: Any, name: str) -> str:
    """Empty where all ranks hold the same bytes."""
    parts = []
    if not config.is_mla_model or name == _ALWAYS_SHARDED:
        parts.append(f"tp{config.tp_rank}/{config.tp_size}")
    if config.pp_size > 1:
        parts.append(f"pp{config.pp_rank}/{config.pp_size}")
    if config.attn_cp_size > 1:
        parts.append(f"cp{config.attn_cp_rank}/{config.attn_cp_size}")
    if config.dcp_size > 1:
        parts.append(f"dcp{config.dcp_rank}/{config.dcp_size} of tp{config.tp_size}, page {config.logical_page_size}")
    return " ".join(parts)
