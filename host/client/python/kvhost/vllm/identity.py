"""The settings of an engine that decide the bytes of its KV, besides tokens and the shape of the cache.
``host/docs/engines.md`` lists them with their places."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from kvhost import content
from kvhost.environment import numbers
from kvhost.errors import Refused
from kvhost.shape import Namespace
from kvhost.vllm.settings import Settings

log = logging.getLogger("vllm.kvhost")

# Names of settings in vLLM's configuration that change KV, with the value that means "as in the model".
_MODEL = (
    "quantization_config", "override_attention_dtype", "model_class_overrides", "model_impl", "code_revision",
    "disable_sliding_window",
)
_PICTURES = (
    "media_io_kwargs", "mm_processor_kwargs", "mm_encoder_attn_dtype", "video_pruning_rate", "video_pruning_method",
    "mm_device_do_normalize",
)
_ATTENTION = (
    "use_prefill_query_quantization", "disable_flashinfer_q_quantization", "indexer_kv_dtype", "indexer_sparse_logits",
)
_LORA = ("target_modules", "enable_tower_connector_lora", "enable_moe_shared_loras", "enable_mixed_moe_lora_format")
_PLAIN = ("", "auto", "None", "False", "{}", "[]")
_LONG_ROPE = ("longrope", "su")  # its factors depend on the engine's longest context


def facts(vllm_config: Any, settings: Settings) -> dict[str, str]:
    """Returns the facts for the namespace, except the weights. Additions of the operator are separate."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if getattr(cache, "calculate_kv_scales", False):
        raise Refused("calculate_kv_scales: each engine takes the scales of its KV from the first prompt that it computes, so no "
                      "other life or engine can read it. Calibrate the model, and leave the option out")
    config = hf_config(model)
    chosen = {
        "model": _chosen(model, _MODEL),
        "attention": _chosen(getattr(vllm_config, "attention_config", None), _ATTENTION),
        "pictures": _chosen(getattr(model, "multimodal_config", None), _PICTURES),
        "context": model.max_model_len if set(_ropes(config)) & set(_LONG_ROPE) else 0,
    }
    found = {
        "config": digest(config),
        "quantization": str(model.quantization or ""),
        "settings": digest(chosen) if any(chosen.values()) else "",
        "environment": digest(set_) if (set_ := numbers("VLLM_")) else "",
    }
    return found | {f"operator.{name}": value for name, value in settings.extra.items()}


def _chosen(of: Any, names: Iterable[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        value = getattr(of, name, None)
        value = getattr(value, "value", value)  # the value of an enum
        value = dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
        if str(value) not in _PLAIN and value != _default(of, name):
            found[name] = value
    return found


def _default(of: Any, name: str) -> Any:
    if not dataclasses.is_dataclass(of):
        return None
    field: Any = next((f for f in dataclasses.fields(of) if f.name == name), None)
    value = getattr(field, "default", None)
    value = getattr(value, "default", value)  # pydantic's Field
    return getattr(value, "value", value)


def _ropes(config: Any) -> Iterator[str]:
    """Returns the kinds of rotary embeddings at any place in a configuration."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            if name in ("rope_type", "type") and isinstance(value, str):
                yield value
            yield from _ropes(value)


def adapters(lora_config: Any) -> str:
    """Returns the settings by which the engine applies any LoRA adapter."""
    chosen = _chosen(lora_config, _LORA)
    return json.dumps([str(lora_config.lora_dtype), chosen], sort_keys=True, default=str)


def weighed(space: Namespace, vllm_config: Any) -> Namespace:
    """Returns a namespace with the identities of the weights of the model and of its draft model, which has KV, too.
    It reads some or all of the files, so it must not run on the engine's thread."""
    model, load = vllm_config.model_config, vllm_config.load_config
    extra = {"weights": weights(model, load)}
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if draft is not None and (draft.model, draft.revision) != (model.model, model.revision):
        known = weights(draft, load)
        extra["draft"] = digest([known or [draft.model, draft.revision], hf_config(draft), str(draft.quantization or "")])
    return dataclasses.replace(space, extra={**space.extra, **extra})


class Named:
    """A namespace with the identity of the weights, which are read at the first call, on a link's thread, while the
    engine starts."""

    def __init__(self, space: Namespace, vllm_config: Any, told: Callable[[Namespace], None], refuse: Callable[[str], None]) -> None:
        """Exactly one of ``told`` and ``refuse`` is called, once."""
        self._space, self._config, self._told, self._refuse = space, vllm_config, told, refuse
        self._named: Namespace | None = None

    def __call__(self) -> Namespace:
        if self._named is None:
            try:
                self._named = weighed(self._space, self._config)
            except Exception as e:
                self._refuse(str(e) if isinstance(e, Refused) else f"telling what the weights are: {e!r}")
                raise Refused("it was said why") from e
            self._told(self._named)
        return self._named


def hf_config(model: Any) -> Any:
    """Returns the model's own configuration without versions and paths, which do not change its KV."""
    config = dict(model.hf_config.to_dict())
    for name in ("transformers_version", "_name_or_path"):
        config.pop(name, None)
    return config


def weights(model: Any, load: Any) -> str:
    """Returns the identity of the weights, independent of the model's path."""
    if load.load_format == "dummy":
        return "dummy"
    try:
        return content.of_model(getattr(model, "model_weights", "") or model.model, model.revision)
    except content.Changing as e:
        raise Refused(f"{e}: start the engine again") from e
    except content.Unknown as e:
        log.warning("kvhost: weights are known by name only, set revision if they are replaced: %s", e)
        return ""


def digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
