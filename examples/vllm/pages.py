"""Writes the KV of a trained model as pages in bf16, to measure compression with.

    make .build/gemma/installed
    PYTHONPATH=host/client/python/tests/engines .build/engines/bin/python examples/vllm/pages.py /tmp/pages
    go test ./host/internal/codec -run '^$' -bench Codec/real -pages /tmp/pages/real-K,/tmp/pages/real-V,/tmp/pages/real-KV

The model is Gemma 3 with 270 million parameters. It computes 1,024 tokens of English and then 1,024 of code, both from this
repository. Each layer has 1 MiB of K and 1 MiB of V, token by token as in vLLM. The script prints the ratios of two ideal
codes, from their entropies. The first codes the plane of even bytes and that of odd bytes, in extents of 64 KiB. The second
codes the exponent and sign of each value by its channel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gemma
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

REPOSITORY = Path(__file__).resolve().parents[2]
TEXTS = ("host/docs/rationale.md", "host/internal/codec/codec.go")
TOKENS, EXTENT = 1024, 64 << 10


def kv() -> tuple[np.ndarray, np.ndarray]:
    """Returns K and V by layer, token and channel, as the 16 bits of bf16."""
    path = gemma.model(REPOSITORY / ".build" / "gemma")
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = [i for name in TEXTS for i in tokenizer.encode((REPOSITORY / name).read_text(), add_special_tokens=False)[:TOKENS]]
    assert len(ids) == len(TEXTS) * TOKENS, f"the texts have {len(ids)} tokens"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    cache = Layers(config=model.config)
    with torch.no_grad():
        model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1)
    k, v = (torch.stack([of[i][0].transpose(0, 1).flatten(1) for of in cache.computed]) for i in (0, 1))
    return k.view(torch.int16).numpy().view(np.uint16), v.view(torch.int16).numpy().view(np.uint16)


class Layers(DynamicCache):
    """A cache that keeps all KV of each layer. The plain cache keeps only the end of a sliding window."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.computed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(self, key: torch.Tensor, value: torch.Tensor, *args: Any, **more: Any) -> Any:
        self.computed.append((key, value))
        return super().update(key, value, *args, **more)


def entropy(values: np.ndarray, kinds: int) -> float:
    """Returns the entropy in bits for each value."""
    share = np.bincount(values.reshape(-1), minlength=kinds) / values.size
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum())


def by_planes(bits: np.ndarray) -> float:
    """Returns the ratio of an ideal code for the two planes of each extent."""
    extents = bits.reshape(-1, EXTENT // 2)
    return 16 / float(np.mean([entropy(e & 0xFF, 256) + entropy(e >> 8, 256) for e in extents]))


def by_channels(bits: np.ndarray) -> float:
    """Returns the ratio of an ideal code that knows the channel and layer for the sign and exponent, and nothing for the
    mantissa."""
    upper = np.mean([entropy(layer[:, c] >> 7, 512) for layer in bits for c in range(layer.shape[1])])
    lower = np.mean([entropy(e & 0x7F, 128) for e in bits.reshape(-1, EXTENT // 2)])
    return 16 / float(upper + lower)


def main() -> None:
    to = Path(sys.argv[1])
    to.mkdir(parents=True, exist_ok=True)
    k, v = kv()
    both = np.stack([k, v], axis=1).reshape(-1, *k.shape[1:])
    for name, bits in (("real-K", k), ("real-V", v), ("real-KV", both)):
        (to / name).write_bytes(bits.tobytes())
        print(f"{name}: {bits.nbytes} bytes, ideal by planes {by_planes(bits):.3f}, by channels {by_channels(bits):.3f}")


if __name__ == "__main__":
    main()
