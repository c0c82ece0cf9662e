"""What sets one server's pages apart from another's."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

from kvhost import content
from kvhost.objects.kind import KEY_BYTES, Kind

log = logging.getLogger("kvhost")

#: State that is sharded by rank even where all ranks hold the same KV.
_ALWAYS_SHARDED = "mamba"


def host_key(page_hash: str, generation: bytes = b"") -> bytes:
    """SGLang's page hashes cover the cache salt, the extra key with the LoRA adapter, and all tokens up to the page's
    end."""
    text = page_hash.encode()
    return hashlib.blake2b(text, digest_size=KEY_BYTES, person=b"kvhost.sglang.1", key=generation).digest()


def kind(
    config: Any, pool: Any, name: str, form: str, pages: Sequence[int], tenant: int,
    more: tuple[tuple[str, str], ...] = (),
) -> Kind:
    """The objects of one host pool on one rank. ``form`` says how a pool's page becomes an object: by the pool's own
    buffers, or flat. ``more`` must agree, too."""
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
            *more,
        ),
    )


def model() -> tuple[tuple[str, str], ...]:
    """What decides a page's bytes besides the model's name, which is what SGLang's user calls it."""
    from sglang.srt.runtime_context import get_context, get_model

    if not get_context().is_config_namespace_published("model"):
        return ()  # no server runs in this process
    m = get_model()
    facts = ("quantization", "dtype", "kv_cache_dtype", "json_model_override_args", "load_format")
    known = [(name, str(getattr(m, name))) for name in facts]
    if m.load_format == "dummy":
        return tuple(known)
    try:
        return (*known, ("weights", content.of_model(m.model_path, m.revision)))
    except content.Changing:
        raise
    except content.Unknown as e:
        log.warning("kvhost: weights are known by name only: %s", e)
        return (*known, ("path", m.model_path), ("revision", str(m.revision or "")))


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
