"""A model that was trained on text, with its tokenizer and its sliding windows: Gemma 3 of 270M. Three of its 18 layers attend to
all tokens and the others to the last 512, and vLLM's cache has six groups.

An engine's first life computes what the second says with its prompts from kvhost. LMCache's transfers on a processor refuse several
groups, and vLLM 0.26 cannot make one of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gemma
import pytest
from needs import needs, needs_directory
from test_vllm_tier import Lives, cached, tokens
from vllm_engine import CHUNK, Answers

needs("vllm")
GEMMA = needs_directory("gemma", "KVHOST_GEMMA")

from transformers import AutoTokenizer  # noqa: E402

@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Lives]:
    # Blocks for all that the host has not read: a chunk of a window that has gone is not stored.
    lives = Lives(tmp_path, num_gpu_blocks_override=1024)
    lives.model = gemma.model(GEMMA)
    lives.host.start()
    yield lives
    lives.close()


def check(lives: Lives, count: int, **options: Any) -> None:
    """So many of the prompts are the same text in two lives, of which the second loads them."""
    tokenizer = AutoTokenizer.from_pretrained(lives.model)
    prompts = gemma.prompts(tokenizer)[:count]
    said: list[Answers] = []
    for _ in ("computes", "loads"):
        engine = lives.engine(env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, **options)  # one process, which has one model
        said.append(engine.one_by_one(prompts, gemma.GENERATED))
        if len(said) == 1:
            lives.published()
        engine.stop()
    computed, loaded = said
    gemma.same_text(tokenizer, tokens(computed), tokens(loaded))
    assert cached(computed) == [0] * count, "want a first life that computes"
    assert cached(loaded) == [len(p) // CHUNK * CHUNK for p in prompts], "want all whole chunks from kvhost"


def test_text_through_the_connector(lives: Lives) -> None:
    lives.door = "connector"
    check(lives, 6)


def test_text_through_the_tier(lives: Lives) -> None:
    lives.door = "tier"
    check(lives, 2, cpu_bytes_to_use=256 << 20, blocks_per_chunk=2)
