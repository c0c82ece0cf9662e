"""What the connector tells the host of vLLM's cache."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace as Record
from typing import Any

import pytest
import vllm_model
from kvhost.errors import Refused
from kvhost.shape import Group
from needs import needs, needs_fp8

needs("vllm")

import torch  # noqa: E402
from vllm.config import CacheConfig, DeviceConfig, LoRAConfig, ModelConfig, MultiModalConfig, ParallelConfig, VllmConfig  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec  # noqa: E402

from kvhost import content  # noqa: E402
from kvhost.shape import Namespace  # noqa: E402
from kvhost.vllm import identity, tierrows  # noqa: E402
from kvhost.vllm.groups import GroupPlan  # noqa: E402
from kvhost.vllm.model import namespace, plan_groups  # noqa: E402
from kvhost.vllm.settings import Settings  # noqa: E402


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
            model="org/model", model_weights="", revision=None, dtype=model, quantization=None, hf_config=Record(to_dict=dict),
            max_model_len=100,
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
    made = namespace(config, Record(kv_cache_groups=[]), Settings(), [regions], caches, 0)
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


class Engine:
    """The configuration of an engine with a small model, and what its two doors make of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.env = folder, dict[str, str]()
        model = self.config = VllmConfig(
            model_config=ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=64),
            cache_config=CacheConfig(block_size=16), device_config=DeviceConfig("cpu"),
        )
        self.model, self.cache, self.settings = model.model_config, model.cache_config, Settings()
        self.layer, self.layout, self.ranks = "layer0", "NHD", 1

    def spaces(self) -> list[Namespace]:
        full = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32)
        cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([self.layer], full)])
        regions: Any = Record(plan=GroupPlan(0, 16, 64, 0), group=Group.uniform(0, 4, 1, 1, 4096), layout=[self.layout])
        caches = {self.layer: Record(dtype=torch.float32, device=Record(type="cuda"))}
        object.__setattr__(self.config.parallel_config, "tensor_parallel_size", self.ranks)
        connector = namespace(self.config, cache, self.settings, [regions], caches, 0)
        rows = [tierrows.RowGroup(0, 64, [(0, 4096)])]
        offloading = Record(
            parallel=Record(world_size=1, tp_size=self.ranks, pp_size=1, pcp_size=1, dcp_size=1), kv_cache_layout=self.layout,
            cache=Record(blocks_per_chunk=4), groups=[Record(tokens_per_block=16, layer_names=[self.layer])],
        )
        with pytest.MonkeyPatch.context() as m:
            for name, value in self.env.items():
                m.setenv(name, value)
            spaces = [connector, tierrows.namespace(self.config, cache, offloading, self.settings, rows)]
            if self.env:
                spaces[0] = namespace(self.config, cache, self.settings, [regions], caches, 0)
            return [identity.weighed(space, self.config) for space in spaces]

    def file(self, name: str, content: bytes = b"{}") -> None:
        (self.folder / name).write_bytes(content)

    def rope(self, kind: str) -> None:
        of = self.model.hf_config
        of.rope_scaling = of.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0}

    def draft(self, seed: int, layers: int = 1) -> None:
        folder = self.folder.parent / f"draft{seed}-{layers}"
        vllm_model.write(folder, vllm_model.config(layers), seed)
        draft = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=64)
        self.config.speculative_config = Record(draft_model_config=draft, num_speculative_tokens=1)

    def attention(self) -> None:
        backend = Record(get_name=lambda: "ANOTHER")
        self.config.compilation_config.static_forward_context[self.layer] = Record(get_attn_backend=lambda: backend)
        self.config.attention_config.backend = "ANOTHER"

    def pictures(self, **options: Any) -> None:
        self.model.multimodal_config = MultiModalConfig(**options)

    def weights(self, seed: int) -> None:
        vllm_model.write(self.folder.parent / "other", vllm_model.config(1), seed)
        for file in (self.folder.parent / "other").iterdir():
            shutil.copy(file, self.folder)


def _set(of: str, **values: Any) -> Any:
    def change(e: Engine) -> None:
        for name, value in values.items():
            object.__setattr__(getattr(e, of), name, value)

    return change


#: What decides KV: each makes another namespace of both doors. With a first change where it is what the second differs from.
DECIDES: dict[str, tuple[Any, ...]] = {
    "weights": (lambda e: e.weights(9),),
    "weights in another format": (lambda e: e.file("pytorch_model.bin"),),
    "quantisation beside the weights": (lambda e: e.file("hf_quant_config.json"),),
    "code beside the weights": (lambda e: e.file("modeling_x.py"),),
    "processor of pictures": (lambda e: e.file("preprocessor_config.json"),),
    "its settings": (lambda e: e.file("preprocessor_config.json"), lambda e: e.file("preprocessor_config.json", b"{ }")),
    "options of the processor": (lambda e: e.pictures(mm_processor_kwargs={"num_crops": 4}),),
    "pruned videos": (lambda e: e.pictures(video_pruning_rate=0.5),),
    "rope theta": (lambda e: setattr(e.model.hf_config, "rope_theta", 5.0),),
    "rope scaling": (lambda e: e.rope("yarn"),),
    "context of long ropes": (lambda e: e.rope("longrope"), _set("model", max_model_len=128)),
    "window": (lambda e: setattr(e.model.hf_config, "sliding_window", 32),),
    "data type": (_set("model", dtype=torch.bfloat16),),
    "type of the cache": (_set("cache", cache_dtype="fp8"),),
    "quantisation": (_set("model", quantization="fp8"),),
    "quantisation of its own": (_set("model", quantization_config={"linear": "int8"}),),
    "implementation": (_set("model", model_impl="transformers"),),
    "architecture": (_set("model", model_class_overrides={"A": "b:C"}),),
    "queries in fp8": (lambda e: setattr(e.config.attention_config, "use_prefill_query_quantization", True),),
    "attention backend": (lambda e: e.attention(),),
    "layout of pages": (lambda e: setattr(e, "layout", "HND"),),
    "number of ranks": (lambda e: setattr(e, "ranks", 2),),
    "draft model": (lambda e: e.draft(1),),
    "its weights": (lambda e: e.draft(1), lambda e: e.draft(2)),
    "its shape": (lambda e: e.draft(1), lambda e: e.draft(1, 2)),
    "numbers of the environment": (lambda e: e.env.update(VLLM_CPU_INT4_W4A8="1"),),
    "their values": (lambda e: e.env.update(VLLM_MARLIN_INPUT_DTYPE="int8"), lambda e: e.env.update(VLLM_MARLIN_INPUT_DTYPE="fp8")),
    "layers": (lambda e: setattr(e, "layer", "layer1"),),
    "name": (lambda e: setattr(e, "settings", Settings(model="m")),),
    "revision": (lambda e: setattr(e, "settings", Settings(revision="2")),),
    "what the operator adds": (lambda e: setattr(e, "settings", Settings(extra={"a": "b"})),),
    "under a name of the connector's": (lambda e: setattr(e, "settings", Settings(extra={"weights": "x"})),),
}

#: What does not: engines share KV across it.
SHARED: dict[str, Any] = {
    "the same": lambda e: None,
    "tokenizer": lambda e: e.file("tokenizer.json"),
    "chat template": lambda e: e.file("chat_template.jinja"),
    "longest context": _set("model", max_model_len=128),
    "seed": _set("model", seed=5),
    "n-gram drafts": lambda e: setattr(e.config, "speculative_config", Record(draft_model_config=e.model, num_speculative_tokens=1)),
    "log level": lambda e: e.env.update(VLLM_LOGGING_LEVEL="DEBUG"),
    "pictures without options": lambda e: e.pictures(),
}


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    vllm_model.write(tmp_path / "model", vllm_model.config(1), 7)
    return Engine(tmp_path / "model")


@pytest.fixture(autouse=True)
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "process_start", lambda: time.time() + 60)


@pytest.mark.parametrize("what", DECIDES)
def test_what_decides_kv_decides_the_namespace(engine: Engine, what: str) -> None:
    if what == "type of the cache":
        needs_fp8()
    *before, change = DECIDES[what]
    for b in before:
        b(engine)
    old = engine.spaces()
    change(engine)
    for door, was, now in zip(("connector", "tier"), old, engine.spaces(), strict=True):
        assert was != now, f"another {what} has the same namespace in the {door}"


@pytest.mark.parametrize("what", SHARED)
def test_what_does_not_is_shared(engine: Engine, what: str) -> None:
    old = engine.spaces()
    SHARED[what](engine)
    doors = 1 if what == "n-gram drafts" else 2  # for which the tier has another runner
    assert engine.spaces()[:doors] == old[:doors]


def test_sizes_and_blocks_that_share(engine: Engine) -> None:
    """With share = "sizes" neither the tensor-parallel size nor, where a backend keeps tokens in their order, the block is in the
    namespace. Without it each size has its own."""

    def space(ranks: int, block: int, backend: str, share: str = "sizes") -> Namespace:
        spec = FullAttentionSpec(block_size=block, num_kv_heads=2 // ranks, head_size=16, dtype=torch.float32)
        cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer0"], spec)])
        object.__setattr__(engine.config.parallel_config, "tensor_parallel_size", ranks)
        layer = Record(get_attn_backend=lambda: Record(get_name=lambda: backend))
        engine.config.compilation_config.static_forward_context["layer0"] = layer
        regions: Any = Record(plan=GroupPlan(0, block, 64, 0), group=Group.uniform(0, 64, 1, 1, 128), layout=["same"])
        caches = {"layer0": Record(dtype=torch.float32, device=Record(type="cuda"))}
        made = namespace(engine.config, cache, Settings(share=share), [regions], caches, 0)
        assert (made.units, made.tokens_per_block) == ((2, 1) if share else (0, block))
        return dataclasses.replace(made, tensor_parallel=1)  # which the host leaves out where there are units

    ordered = [space(ranks, block, "FLASH_ATTN") for ranks in (1, 2) for block in (16, 64)]
    assert all(s == ordered[0] for s in ordered)
    assert space(1, 16, "ANOTHER") == space(2, 16, "ANOTHER") != space(2, 32, "ANOTHER")
    assert space(1, 16, "ANOTHER") != ordered[0]
    assert space(1, 16, "FLASH_ATTN", "") != space(2, 16, "FLASH_ATTN", "")


def test_what_the_operator_adds_takes_no_field(engine: Engine) -> None:
    engine.settings = Settings(extra={"weights": "x"})
    for space in engine.spaces():
        assert space.extra["weights"] != "x" and space.extra["operator.weights"] == "x"


def test_scales_of_the_first_prompt_are_refused(engine: Engine) -> None:
    if not hasattr(engine.cache, "calculate_kv_scales"):
        return  # vLLM 0.32 has none
    object.__setattr__(engine.cache, "calculate_kv_scales", True)
    with pytest.raises(Refused, match="calculate_kv_scales: .* no other life or engine can read it"):
        engine.spaces()


@pytest.mark.parametrize("change", [
    {"lora_dtype": "bfloat16"}, {"target_modules": ["o_proj"]}, {"enable_tower_connector_lora": True}, {"enable_moe_shared_loras": True},
])  # fmt: skip
def test_how_adapters_are_applied_is_in_their_keys(change: dict[str, Any]) -> None:
    assert identity.adapters(LoRAConfig()) == identity.adapters(LoRAConfig(max_loras=3, max_lora_rank=64))
    assert identity.adapters(LoRAConfig()) != identity.adapters(LoRAConfig(**change))
