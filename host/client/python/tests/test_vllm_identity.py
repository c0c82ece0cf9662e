"""What the vLLM connector reads of weights while the engine starts, and what becomes of a refusal."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace as Record
from typing import Any

import pytest
from test_content import safetensors
from vllm_doubles import DoubleSession

from kvhost import content
from kvhost.environment import numbers
from kvhost.errors import Refused
from kvhost.shape import Group, Namespace
from kvhost.vllm import identity
from kvhost.vllm.identity import Named
from kvhost.link import Link
from kvhost.vllm.settings import Settings

SPACE = Namespace("m", "bf16", 32, 16, [Group.uniform(0, 1, 1, 1, 64)], extra={"config": "c"})


def config(path: Path, draft: Any = None) -> Any:
    model = Record(model=str(path), model_weights="", revision=None, hf_config=Record(to_dict=dict), quantization=None)
    return Record(
        model_config=model, load_config=Record(load_format="auto"),
        speculative_config=Record(draft_model_config=draft) if draft is not None else None,
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    safetensors(tmp_path / "model.safetensors", 2, 64)
    return tmp_path


def test_weights_are_read_on_the_links_thread_and_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    told: list[Namespace] = []

    def of_model(path: str, revision: str | None) -> str:
        reads.append(threading.current_thread().name)
        return "read"

    monkeypatch.setattr(content, "of_model", of_model)
    named = Named(SPACE, config(model), told.append, lambda why: pytest.fail(why))
    opened = threading.Semaphore(0)

    def open(epoch: int) -> Any:
        named()
        opened.release()
        return [DoubleSession()]

    link = Link("w", "/none", open, leads=True)
    link.start(0)
    opened.acquire()
    link.follow(1)
    opened.acquire()
    link.close()
    assert reads == ["kvhost-link-w"] and [s.extra for s in told] == [{"config": "c", "weights": "read"}]


def test_a_refusal_is_said_once_and_ends_the_link(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changing(path: str, revision: str | None) -> str:
        raise content.Changing("model.safetensors changed")

    said: list[str] = []
    monkeypatch.setattr(content, "of_model", changing)
    named = Named(SPACE, config(model), lambda space: pytest.fail("it was named"), said.append)

    def open(epoch: int) -> Any:
        named()

    link = Link("w", "/none", open, leads=True)
    link.start(0)
    link._thread.join()
    assert said == ["model.safetensors changed: start the engine again"] and link.sessions() == []
    link.close()


def test_a_draft_of_the_models_own_files_is_no_other_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "process_start", lambda: time.time() + 60)
    of = config(model)
    plain = identity.weighed(SPACE, of)
    own = config(model, draft=of.model_config)
    assert identity.weighed(SPACE, own) == plain
    other = tmp_path / "draft"
    other.mkdir()
    safetensors(other / "model.safetensors", 3, 64)
    assert identity.weighed(SPACE, config(model, draft=config(other).model_config)) != plain


def test_what_the_environment_computes_in() -> None:
    env = {"VLLM_MARLIN_INPUT_DTYPE": "int8", "VLLM_LOGGING_LEVEL": "INFO", "OTHER_FP8": "1", "NVIDIA_TF32_OVERRIDE": "0"}
    assert numbers("VLLM_", env) == {"VLLM_MARLIN_INPUT_DTYPE": "int8", "NVIDIA_TF32_OVERRIDE": "0"}


def test_scales_of_the_first_prompt_are_refused() -> None:
    of = Record(model_config=None, cache_config=Record(calculate_kv_scales=True))
    with pytest.raises(Refused, match="calculate_kv_scales: .* no other life or engine can read it"):
        identity.facts(of, Settings())
