"""SGLang's own engine on a processor with Gemma 3 of 270M, a model that was trained on text: a life computes, a second one finds the same
pages through kvhost as the linker of its unified cache, and both say the same. Its sliding windows have no pool of their own."""

from __future__ import annotations

from pathlib import Path

import gemma
from needs import needs, needs_directory
from processes import Host, wait_for

needs("sglang")
GEMMA = needs_directory("gemma", "KVHOST_GEMMA")

from sglang_engine import Engine  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

PAGE = 128  # tokens


def test_text_through_the_linker(host: Host, tmp_path: Path) -> None:
    model = gemma.model(GEMMA)
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = gemma.prompts(tokenizer)[1:2]  # SGLang's attention in plain torch takes a minute for it
    lives = []
    for life in ("computes", "loads"):
        engine = Engine(model, tmp_path / f"{life}.log", {"socket": host.socket}, page_size=PAGE, chunked_prefill_size=PAGE)
        lives.append([engine.generate([p], gemma.GENERATED)[0] for p in prompts])
        if life == "computes":
            wait_for("the stores", lambda: len(host.files()) > 0 and host.idle())
        engine.close()
    gemma.same_text(tokenizer, *[[a["tokens"] for a in life] for life in lives])
    computed, loaded = ([a["cached"] for a in life] for life in lives)
    assert computed == [0] * len(prompts), "want a first life that computes"
    assert loaded == [len(p) // PAGE * PAGE for p in prompts], "want all whole pages from kvhost"
