"""A model that was trained on text, with its tokenizer and its sliding windows: Gemma 3 of 270M. Of its 18 layers three attend to
all tokens and the others to the last 512, and vLLM's cache has six groups.

An engine's first life computes what the second says with its prompts from kvhost. They are prefilled in steps of one chunk, so
that a hit changes no step's shape."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import gemma
import pytest
from needs import needs, needs_directory
from processes import Host
from test_vllm_tier import Lives
from vllm_engine import CHUNK

needs("vllm")
GEMMA = needs_directory("gemma", "KVHOST_GEMMA")

from transformers import AutoTokenizer  # noqa: E402

#: Licences, and of which of their tokens each prompt is.
PROMPTS = [("kvhost", 0, 1400), ("typing_extensions", 0, 1700), ("numpy", 0, 1300), ("numpy", 3000, 1500), ("kvhost", 1400, 900),
           ("numpy", 6000, 1800)]
GENERATED = 12


def licence(of: str) -> str:
    if of == "kvhost":
        return (Path(__file__).parents[5] / "LICENSE").read_text()
    return next(f for f in distribution(of).files or () if f.stem == "LICENSE").read_text()


@pytest.fixture
def lives(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Lives]:
    # Blocks for all that the host has not read: a chunk of a window that has gone is not stored.
    lives = Lives(tmp_path, request.param, skip_tokenizer_init=False, num_gpu_blocks_override=1024)
    lives.model = gemma.model(GEMMA)
    lives.host = Host(tmp_path)
    lives.host.start()
    yield lives
    lives.close()


@pytest.mark.parametrize("lives", ["connector", "tier"], indirect=True)
def test_text_is_the_same_in_both_lives(lives: Lives) -> None:
    tokenizer = AutoTokenizer.from_pretrained(lives.model)
    texts = []
    for of, begin, length in PROMPTS:
        ids = tokenizer.encode(licence(of), add_special_tokens=False)[begin : begin + length]
        assert len(ids) == length, f"the licence of {of} has no {begin + length} tokens"
        texts.append(tokenizer.decode(ids))
    more = {"cpu_bytes_to_use": 256 << 20, "blocks_per_chunk": 2} if lives.door == "tier" else {}
    said = []
    for _ in range(2):
        engine = lives.engine(env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, **more)
        said.append(engine.ask("complete", texts, GENERATED))
        lives.published()
        engine.stop()
    computed, loaded = said
    differ = [f"prompt {i} of {n} tokens:\n computed {a!r}\n loaded   {b!r}"
              for i, ((a, n, _), (b, _, _)) in enumerate(zip(computed, loaded, strict=True)) if a != b]
    assert not differ, "want the same text from loaded KV as from computed, got\n" + "\n".join(differ)
    lengths = [n for _, n, _ in computed]
    assert min(lengths) >= 900 and max(lengths) <= 1850, f"prompts of {lengths} tokens, want some of 900 to 1,800"
    assert [n for _, _, n in computed] == [0] * len(texts), "want a first life that computes"
    want = [n // CHUNK * CHUNK for n in lengths]
    assert [n for _, _, n in loaded] == want, f"want all whole chunks loaded, of prompts of {lengths} tokens"
