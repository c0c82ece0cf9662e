"""What vLLM's engine can do beside plain generation, through each door: what it says while kvhost stores and when it loads is
what it says without kvhost. features.py has the whole table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm_model as model
from features import OLD
from needs import needs, needs_fp8
from test_vllm_tier import LENGTH, ROW, Lives, cached, counted, prompts, stored_parts, tokens, used_parts
from vllm_engine import BLOCK, CHUNK, WARM, Answers, Tokens

needs("vllm")

HITS = {"connector": LENGTH // CHUNK * CHUNK, "tier": LENGTH // BLOCK * BLOCK}
#: A feature's options of vLLM. With several workers, a row of the tier has a cell of each.
OPTIONS: dict[str, dict[str, Any]] = {
    "TP 2": {"tensor_parallel_size": 2},
    "PP 2": {"pipeline_parallel_size": 2, **WARM},
    "prefix caching off": {"enable_prefix_caching": False},
    "n-gram drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
    "draft model": {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 2, "model": "drafting"}},
    "EAGLE": {"speculative_config": {"method": "eagle", "num_speculative_tokens": 2, "model": "drafting"}},
    "sliding windows": {},
    "fp8": {"kv_cache_dtype": "fp8"},
}
IN_TEST_VLLM = ("TP 2", "PP 2", "sliding windows", "fp8")  # where the connector's are
BOTH = ("connector", "tier")
PROMPTS = prompts(1, 3)


@pytest.fixture
def lives(tmp_path_factory: pytest.TempPathFactory, door: str) -> Iterator[Lives]:
    made = Lives(tmp_path_factory.mktemp("features"), door)
    made.lookup_timeout = 60.0  # no host is stopped here
    made.host.start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Tokens]:
    """What a plain engine without kvhost says to each prompt."""
    return said_alone(tmp_path_factory.mktemp("alone"), model.config(4))


def said_alone(folder: Path, config: dict[str, Any]) -> list[Tokens]:
    folder.mkdir(exist_ok=True)
    lives = Lives(folder, "")
    model.write(lives.model, config, seed=7)
    said = tokens(lives.engine().one_by_one(PROMPTS))
    lives.close()
    assert len({tuple(t) for t in said}) == len(PROMPTS), "want tokens that depend on the prompt"
    return said


@pytest.mark.parametrize("feature, door", [(f, d) for f in OPTIONS for d in BOTH if d == "tier" or f not in IN_TEST_VLLM])
def test_lives(lives: Lives, alone: list[Tokens], feature: str) -> None:
    """With ``fp8`` on a processor vLLM's own tokens differ from one cold run to the next: the hits count there."""
    if feature == "fp8":
        needs_fp8()
    lives.vllm, config, want = OPTIONS[feature], model.config(4), alone
    if feature == "sliding windows":
        config = model.config(5, window=300)
        want = said_alone(lives.folder / "alone", config)
    if feature in ("draft model", "EAGLE"):
        model.write(lives.folder / "drafting", model.config(1), seed=9, drafts=feature == "EAGLE")
        lives.vllm = {"speculative_config": OPTIONS[feature]["speculative_config"] | {"model": str(lives.folder / "drafting")}}
    model.write(lives.model, config, seed=7)
    engine = lives.engine()
    first = engine.one_by_one(PROMPTS)
    assert cached(first) == [0, 0, 0]
    assert tokens(first) == want or feature == "fp8", "the first life said something else than an engine without kvhost"
    lives.published()
    engine.stop()
    if lives.door == "tier":
        parts, used, cells = stored_parts(engine), used_parts(lives.folder), 2 if feature in ("TP 2", "PP 2") else 1
        assert parts == [cells * n for n in used], f"chunks have {parts} bytes, want {cells} times {used}"
        assert feature != "sliding windows" or min(parts) < max(parts), f"chunks have {parts} bytes, want the groups to differ"

    engine = lives.engine()
    again = engine.one_by_one(PROMPTS)
    assert tokens(again) == want or feature == "fp8", "what was loaded is not what an engine without kvhost has computed"
    anew = BLOCK if OLD and (feature, lives.door) == ("EAGLE", "tier") else 0  # 0.26's offloading leaves its head a block
    assert cached(again) == [HITS[lives.door] - anew] * 3
    assert not counted(engine, "chunks_not_loaded")


@pytest.mark.parametrize("door", BOTH)
def test_data_parallel_ranks(lives: Lives, alone: list[Tokens]) -> None:
    """Each finds what the other one has stored."""
    model.write(lives.model, model.config(4), seed=7)
    lives.vllm = {"data_parallel_size": 2}
    engine = lives.engine()
    assert engine.generate(PROMPTS[:2]) == [(w, 0) for w in alone[:2]]
    lives.published()
    engine.stop()
    engine = lives.engine()
    assert engine.generate(PROMPTS[1::-1]) == [(w, HITS[lives.door]) for w in alone[1::-1]]


@pytest.mark.parametrize("door", BOTH)
def test_sleep(lives: Lives, alone: list[Tokens]) -> None:
    """Of the engine alone (level 0) nothing is lost. With its memory, vLLM empties the cache of its connector too, as it may wake
    up with other weights. What the memory had is spoilt meanwhile."""
    model.write(lives.model, model.config(4), seed=7)
    lives.vllm = {"worker_extension_cls": "vllm_probe.Sleeper"}
    engine = lives.engine(**{"cpu_bytes_to_use": 16 * ROW} if lives.door == "tier" else {})  # one prompt takes another's rows
    hits = [(w, HITS[lives.door]) for w in alone]

    def answers() -> Answers:
        """Each prompt once the host has the chunks of the one before, whose rows it takes."""
        said: Answers = []
        for p in PROMPTS:
            said += engine.generate([p])
            lives.published()
        return said

    assert answers() == [(w, 0) for w in alone]
    engine.reset()
    for level, want in ((0, hits), (1, [(w, 0) for w in alone]), (2, [(w, 0) for w in alone])):
        engine.ask("sleep", level)
        engine.ask("wake")
        assert answers() == want, f"after sleep of level {level}"
        engine.reset()
        assert answers() == hits, f"what was stored after sleep of level {level}"
        engine.reset()
    assert not counted(engine, "chunks_not_loaded")


@pytest.mark.parametrize("door", BOTH)
def test_pictures(lives: Lives) -> None:
    """Prompts with the same tokens have the same KV only with the same picture."""
    model.write_qwen_vl(lives.model, seed=7)
    lives.vllm = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1, "video": 0}, "mm_processor_cache_gb": 0}
    (asked,) = prompts(1, 1, LENGTH)
    asked = [t % 1000 + 3 for t in asked]
    asked[300] = model.IMAGE
    alone = lives.engine(door="")
    want = [alone.ask("picture", asked, seed, 8)[0] for seed in (1, 2)]
    assert want[0] != want[1], "want tokens that depend on the picture"
    engine = lives.engine()
    assert engine.ask("picture", asked, 1, 8) == (want[0], 0)
    lives.published()
    engine.stop()
    engine = lives.engine()
    other, same = engine.ask("picture", asked, 2, 8), engine.ask("picture", asked, 1, 8)
    block = CHUNK if lives.door == "connector" else BLOCK
    assert other == (want[1], 300 // block * block), "want the part before the picture only"
    length = len(asked) + model.IMAGE_TOKENS - 1
    assert same == (want[0], length // block * block)


@pytest.mark.parametrize("door", ["tier"])
def test_both_doors_in_one_engine(lives: Lives, alone: list[Tokens]) -> None:
    """In vLLM's MultiConnector the first that has anything of a prompt loads it, and both store."""
    model.write(lives.model, model.config(4), seed=7)
    connector = {
        "kv_connector": "KvhostConnector", "kv_connector_module_path": "kvhost.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"socket": lives.host.socket, "load_when": "always", "lookup_timeout": 5.0},
    }
    lives.vllm = {"kv_transfer_config": {
        "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [lives.offloading(), connector]},
    }}
    engine = lives.engine()
    assert engine.one_by_one(PROMPTS) == [(w, 0) for w in alone]
    lives.published()
    assert len({p.relative_to(lives.host.root).parts[0] for p in lives.host.files()}) == 2, "want chunks of both doors"
    engine.stop()
    assert lives.engine().one_by_one(PROMPTS) == [(w, HITS["tier"]) for w in alone]
