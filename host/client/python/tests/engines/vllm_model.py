"""Small Llamas with random weights of real size: what attention reads decides every token, so wrong KV shows."""

from __future__ import annotations

import json
import pathlib
from typing import Any

VOCAB = 1024


def config(layers: int, window: int = 0) -> dict[str, Any]:
    """With a ``window`` every second layer attends to so many tokens only, and the cache has two groups."""
    c: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 384,
        "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64,
        "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 500000.0,
        "hidden_act": "silu", "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
        "tie_word_embeddings": False, "attention_bias": False,
    }
    if window:
        kinds = ["full_attention", "sliding_attention"]
        c |= {"layer_types": [kinds[i % 2] for i in range(layers)], "sliding_window": window}
    return c


def mla_config() -> dict[str, Any]:
    """A DeepSeek whose layers are all dense, with the only sizes that vLLM's kernels for processors know."""
    return {n: v for n, v in config(2).items() if n != "head_dim"} | {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 64,
        "first_k_dense_replace": 2, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1,
    }


def write(path: pathlib.Path, c: dict[str, Any], seed: int, *, drafts: bool = False) -> None:
    """``drafts``: an EAGLE head, whose layers begin with what the model's own have made of a token and the next token."""
    import torch
    from safetensors.torch import save_file

    path.mkdir()
    (path / "config.json").write_text(json.dumps(c))
    torch.manual_seed(seed)
    h, ffn, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Any:
        return torch.randn(rows, columns) * gain / columns**0.5

    t = {"model.embed_tokens.weight": matrix(VOCAB, h, h**0.5), "lm_head.weight": matrix(VOCAB, h),
         "model.norm.weight": torch.ones(h)}
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        t |= {
            at + "self_attn.q_proj.weight": matrix(q, h, 2), at + "self_attn.k_proj.weight": matrix(kv, h, 2),
            at + "self_attn.v_proj.weight": matrix(kv, h), at + "self_attn.o_proj.weight": matrix(h, q, 4),
            at + "mlp.gate_proj.weight": matrix(ffn, h), at + "mlp.up_proj.weight": matrix(ffn, h),
            at + "mlp.down_proj.weight": matrix(h, ffn), at + "input_layernorm.weight": torch.ones(h),
            at + "post_attention_layernorm.weight": torch.ones(h),
        }
    if drafts:
        without = ("lm_head.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight")
        t = {name.removeprefix("model."): w for name, w in t.items() if name not in without}
        t["fc.weight"] = matrix(h, 2 * h)
    save_file(t, str(path / "model.safetensors"), metadata={"format": "pt"})


def write_lora(path: pathlib.Path, c: dict[str, Any], seed: int) -> None:
    """An adapter of the keys and values, large enough to change tokens."""
    import torch
    from safetensors.torch import save_file

    rank, h, kv = 8, c["hidden_size"], c["num_key_value_heads"] * c["head_dim"]
    path.mkdir()
    names = ["k_proj", "v_proj"]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": names, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    torch.manual_seed(seed)
    t = {}
    for i in range(c["num_hidden_layers"]):
        for name in names:
            at = f"base_model.model.model.layers.{i}.self_attn.{name}."
            t[at + "lora_A.weight"] = torch.randn(rank, h) / h**0.5
            t[at + "lora_B.weight"] = torch.randn(kv, rank)
    save_file(t, str(path / "adapter_model.safetensors"))


_SMALL = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}
_MAMBA2 = {
    "mamba_n_heads": 4, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_chunk_size": 64,
}
#: Families whose layers are not all attention, by the type of their model.
HYBRIDS: dict[str, dict[str, Any]] = {
    # gated delta nets, whose kernels for processors take bfloat16 only
    "qwen3_next": _SMALL | {
        "head_dim": 64, "num_hidden_layers": 8, "full_attention_interval": 4, "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "decoder_sparse_step": 1, "mlp_only_layers": list(range(7)), "num_experts": 2,
        "num_experts_per_tok": 1, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "norm_topk_prob": True,
    },
    # Mamba 2 and attention, one after the other
    "granitemoehybrid": _SMALL | _MAMBA2 | {
        "num_hidden_layers": 4, "layer_types": ["mamba", "mamba", "attention", "mamba"], "num_local_experts": 0,
        "num_experts_per_tok": 0, "shared_intermediate_size": 256, "position_embedding_type": "nope",
    },
    # both in each layer
    "falcon_h1": _SMALL | _MAMBA2 | {"head_dim": 64, "num_hidden_layers": 3, "mamba_d_ssm": 256},
    # short convolutions
    "lfm2": _SMALL | {
        "num_hidden_layers": 6, "layer_types": ["conv", "conv", "full_attention"] * 2, "conv_L_cache": 3, "conv_bias": False,
        "conv_dim": 128, "conv_dim_out": 128, "block_dim": 128, "block_ff_dim": 256, "block_multiple_of": 64,
        "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False, "block_use_swiglu": True, "num_heads": 2,
    },
}


def write_hybrid(path: pathlib.Path, family: str, seed: int) -> None:
    """With weights so large that what the layers remember decides every token, and states that hardly fade."""
    write_made(path, family, HYBRIDS[family], seed, dtype="bfloat16")


IMAGE, IMAGE_TOKENS = VOCAB - 1, 4  # the token that stands for a picture, and how many it becomes
_SPECIAL = {"<|vision_start|>": VOCAB - 4, "<|vision_end|>": VOCAB - 3, "<|video_pad|>": VOCAB - 2, "<|image_pad|>": IMAGE}
#: Looks at pictures of 32 times 32 points.
QWEN_VL: dict[str, Any] = {
    "vision_config": {
        "model_type": "qwen2_vl_vision", "depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 2, "patch_size": 8,
        "mlp_ratio": 2, "spatial_merge_size": 2,
    },
    "text_config": _SMALL | {
        "model_type": "qwen2_vl_text", "num_hidden_layers": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
    },
    "image_token_id": IMAGE, "video_token_id": VOCAB - 2, "vision_start_token_id": VOCAB - 4, "vision_end_token_id": VOCAB - 3,
    "tie_word_embeddings": False,
}


def write_qwen_vl(path: pathlib.Path, seed: int) -> None:
    from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    write_made(path, "qwen2_vl", QWEN_VL, seed)
    words = {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(VOCAB - 4)} | _SPECIAL, "unk_token": "w0"}
    flags = {"special": True} | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    (path / "words.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": [{"id": i, "content": w} | flags for w, i in _SPECIAL.items()], "model": words,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
    }))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path / "words.json"), bos_token="w1", eos_token="w2", pad_token="w0")
    sizes: Any = {"patch_size": 8, "merge_size": 2, "min_pixels": 32 * 32, "max_pixels": 32 * 32}
    processor: Any = Qwen2VLProcessor
    processor(
        image_processor=Qwen2VLImageProcessor(**sizes), tokenizer=tokenizer, video_processor=Qwen2VLVideoProcessor(**sizes)
    ).save_pretrained(path)


def write_made(path: pathlib.Path, family: str, config: dict[str, Any], seed: int, dtype: str = "float32") -> None:
    """A model of one of transformers' families."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(seed)
    kind: Any = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    model = kind.from_config(AutoConfig.for_model(family, **config)).to(getattr(torch, dtype))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2 and "embed" not in name:
                p.copy_(torch.randn(p.shape) * 2 / p.shape[1] ** 0.5)
            elif "embed" in name:
                p.copy_(torch.randn(p.shape))
            elif name.endswith("A_log"):
                p.fill_(-8.0)
    model.save_pretrained(path)
    saved = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(saved | config))
