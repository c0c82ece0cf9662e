"""The identity of a server's pages."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from kvhost import content
from kvhost.environment import numbers
from kvhost.objects.kind import KEY_BYTES, Kind

log = logging.getLogger("kvhost")

#: State that is sharded by rank even if all ranks hold the same KV.
_ALWAYS_SHARDED = "mamba"


def host_key(page_hash: str, generation: bytes = b"") -> bytes:
    """Returns the host's key of a page. SGLang's page hashes cover the cache salt, the extra key with the LoRA
    adapter, and all tokens up to the page's end."""
    text = page_hash.encode()
    return hashlib.blake2b(text, digest_size=KEY_BYTES, person=b"kvhost.sglang.1", key=generation).digest()


def kind(
    config: Any, pool: Any, name: str, form: str, pages: Sequence[int], tenant: int,
    more: tuple[tuple[str, str], ...] = (),
) -> Kind:
    """Returns the kind of the objects of one host pool on one rank. ``form`` is the form of a page as an object: the
    pool's own buffers, or flat. ``more`` has further pairs of a name and a text that must be equal to share objects."""
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
            ("rank", rank(config, name)),
            *more,
        ),
    )


#: Settings of SGLang's model that count if they differ from SGLang's own choice.
_SETTINGS = (
    "json_model_override_args", "custom_weight_loader", "model_impl", "modelopt_quant", "qsa_indexer_dtype", "quantize_and_serve",
    "rl_quant_profile",
)
_PICTURES = ("disable_fast_image_processor", "image_processor_backend", "mm_process_config")
_ADAPTERS = ("experts_shared_outer_loras",)
_FILES = ("quantization_param_path", "decrypted_config_file")  # files with scales of KV, and with a configuration
_DRAFT = ("speculative_draft_model_quantization", "speculative_draft_kv_cache_dtype")
_PLAIN = ("", "None", "False", "auto", "{}", "[]")
_READ_SECONDS = 120.0  # seconds that SGLang's start waits for weights to be read whole


def model() -> tuple[tuple[str, str], ...]:
    """Returns the facts about the model that decide a page's bytes, besides its name, which SGLang's user chooses."""
    from sglang.srt.runtime_context import get_context, get_model

    if not get_context().is_config_namespace_published("model"):
        return ()  # this process runs no server
    m = get_model()
    known = [(name, str(getattr(m, name))) for name in ("quantization", "dtype", "kv_cache_dtype", "load_format")]
    return (*known, *settings(m, get_context().config_bag), *_weights(m, m.model_path, m.revision, "weights"),
            *_draft(m, get_context().config_bag("spec")))


def settings(m: Any, bag: Callable[[str], Any]) -> list[tuple[str, str]]:
    """Returns all other settings that decide the bytes, as digests, which are short."""
    chosen: dict[str, str] = {}
    for of, names in ((m, _SETTINGS), (bag("mm"), _PICTURES), (bag("lora"), _ADAPTERS)):
        chosen |= {name: text for name in names if (text := str(getattr(of, name, None))) not in _PLAIN}
    for name in _FILES:
        if path := getattr(m, name, None):
            with open(path, "rb") as file:
                chosen[name] = hashlib.blake2b(file.read(), digest_size=16).hexdigest()
    found = {"settings": chosen, "environment": numbers("SGLANG_") | numbers("SGL_")}
    return [(name, _digest(value)) for name, value in found.items() if value]


def _draft(m: Any, spec: Any) -> list[tuple[str, str]]:
    """Returns the facts about a draft model. Its layers are in pools of their own, or after the model's."""
    path, revision = getattr(spec, "speculative_draft_model_path", None), getattr(spec, "speculative_draft_model_revision", None)
    if not path:
        return []
    own = [] if path == m.model_path else _weights(m, path, revision, "draft")
    return [*own, ("draft_settings", _digest([str(getattr(spec, name, None)) for name in _DRAFT]))]


def _weights(m: Any, path: str, revision: str | None, name: str) -> list[tuple[str, str]]:
    if m.load_format == "dummy":
        return []
    try:
        return [(name, content.of_model(path, revision, _READ_SECONDS))]
    except content.Changing:
        raise
    except content.Unread as e:
        log.warning("kvhost: pages are this server's alone until it ends: %s", e)
        return [(name, f"unread {os.urandom(16).hex()}")]
    except content.Unknown as e:
        log.warning("kvhost: weights are known by name only: %s", e)
        return [(f"{name} path", path), (f"{name} revision", str(revision or ""))]


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def rank(config: Any, name: str) -> str:
    """Returns the rank; empty if all ranks hold the same bytes."""
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
