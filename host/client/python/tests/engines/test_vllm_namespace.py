"""What the connector tells the host of vLLM's cache."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace as Record
from typing import Any

import pytest
import vllm_model
from kvhost.shape import Group
from needs import needs

needs("vllm")

import torch  # noqa: E402
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, VllmConfig  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec  # noqa: E402

from kvhost.vllm.groups import GroupPlan  # noqa: E402
from kvhost.vllm.model import namespace, plan_groups  # noqa: E402
from kvhost.vllm.settings import Refused, Settings  # noqa: E402


@pytest.mark.parametrize(
    "cache,model,tensors,dtype,page_dtype",
    [
        ("auto", "torch.bfloat16", ["torch.bfloat16"] * 2, "auto/bfloat16", "bfloat16"),
        ("float16", "torch.bfloat16", ["torch.float16"] * 2, "float16/bfloat16", "float16"),
        ("auto", "torch.bfloat16", ["torch.float8_e4m3fn"] * 2, "auto/bfloat16", "float8_e4m3fn"),
        ("fp8_e4m3", "torch.bfloat16", ["torch.uint8"] * 2, "fp8_e4m3/bfloat16", ""),
        ("auto", "torch.bfloat16", ["torch.bfloat16", "torch.float8_e4m3fn"], "auto/bfloat16", ""),
    ],
)
def test_the_type_of_the_cache_is_told(
    cache: str, model: str, tensors: list[str], dtype: str, page_dtype: str
) -> None:
    config = Record(
        model_config=Record(
            model="org/model", model_weights="", revision=None, dtype=model, quantization=None, hf_config=Record(to_dict=dict)
        ),
        cache_config=Record(cache_dtype=cache),
        parallel_config=Record(
            pipeline_parallel_size=1, decode_context_parallel_size=1, cp_kv_cache_interleave_size=1, tensor_parallel_size=1
        ),
        load_config=Record(load_format="dummy"),
        compilation_config=Record(static_forward_context={}),
    )
    regions: Any = Record(plan=GroupPlan(0, 16, 64, 0), group=Group.uniform(0, 4, 1, 1, 4096), layout=["same"])
    caches = {f"layer{i}": Record(dtype=t, device=Record(type="cuda")) for i, t in enumerate(tensors)}
    settings: Any = Record(model="", revision="", extra={})
    made = namespace(config, Record(kv_cache_groups=[]), settings, [regions], caches, 0)
    assert (made.dtype, made.page_dtype) == (dtype, page_dtype)


def test_a_hybrid_is_refused() -> None:
    full = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32)
    state = MambaSpec(block_size=16, shapes=((4, 8),), dtypes=(torch.float32,))
    groups = [KVCacheGroupSpec(["a"], full), KVCacheGroupSpec(["b"], state)]
    config = Record(parallel_config=ParallelConfig(), model_config=None, device_config=Record(device_type="cuda"))
    with pytest.raises(Refused, match="group 1 is MambaSpec; .*: for others use the tier of vLLM's offloading"):
        plan_groups(config, KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups), Settings(chunk_tokens=64))


@pytest.mark.parametrize("mla", [False, True])
def test_mla_on_a_processor_is_refused(tmp_path: Path, mla: bool) -> None:
    """vLLM 0.32 runs it without AMX. After a hit it says other tokens, with its own ExampleConnector too."""
    kind = vllm_model.mla_config() if mla else vllm_model.config(1)
    (tmp_path / "config.json").write_text(json.dumps(kind))
    config = VllmConfig(
        model_config=ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, dtype="float32"),
        cache_config=CacheConfig(block_size=16), device_config=DeviceConfig("cpu"),
    )
    for own in (True, False):
        config.cache_config.enable_prefix_caching = own
        why = "MLA on this processor" if mla and not own else "the model has no KV cache"
        with pytest.raises(Refused, match=why):
            plan_groups(config, Record(kv_cache_groups=[]), Settings())
