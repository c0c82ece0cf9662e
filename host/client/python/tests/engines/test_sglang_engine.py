"""SGLang itself on the processor with kvhost as the linker of its unified cache: in float32 its tokens are those that it computes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import vllm_model
from needs import needs
from processes import Host, wait_for

needs("sglang")

from sglang_engine import Engine  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sglang") / "model"
    vllm_model.write(path, vllm_model.config(4), 1)
    return path


def prompt(tokens: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(3, vllm_model.VOCAB) for _ in range(tokens)]


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    assert all("length" in a["ended"] for a in answers), answers
    return [a["tokens"] for a in answers]


def cached(answers: list[dict[str, Any]]) -> list[int]:
    return [a["cached"] for a in answers]


def test_a_second_life_has_the_tokens_of_the_first(host: Host, model: Path, tmp_path: Path) -> None:
    """And goes on where the host is damaged, killed and stopped."""
    shared = prompt(160, 1)
    prompts = [shared, shared + prompt(70, 2), shared + prompt(200, 3), prompt(333, 4)]
    linker = {"socket": host.socket, "lookup_timeout": 0.5}
    first = Engine(model, tmp_path / "first.log", linker)
    want = tokens([first.generate([p])[0] for p in prompts])
    wait_for("the stores", lambda: len(host.files()) > 0 and host.idle())
    first.close()
    second = Engine(model, tmp_path / "second.log", linker)
    got = second.generate(prompts)
    assert tokens(got) == want
    assert sum(cached(got)) > 0.8 * sum(map(len, prompts)), f"want hits, got {cached(got)}"
    second.flush()
    again = second.generate([prompts[3]])
    assert tokens(again) == want[3:] and cached(again) == [320], "want whole pages of the prompt"

    second.flush()
    host.hang()
    stopped = second.generate(prompts)
    assert tokens(stopped) == want, "want tokens while the host is stopped"
    host.resume()
    second.flush()
    host.kill()
    gone = second.generate(prompts)
    assert tokens(gone) == want, "want tokens while the host is gone"
    host.start()

    def hits() -> int:
        second.flush()
        answers = second.generate([prompts[3]])
        assert tokens(answers) == want[3:]
        return sum(cached(answers))

    wait_for("hits", lambda: hits() == 320)
    wait_for("the stores", host.idle)
    second.flush()
    for path in host.files():
        with path.open("r+b") as f:
            f.seek(-64, 2)
            f.write(bytes(64))
    hurt = second.generate(prompts)
    assert all("External KV cache load failed" in a["ended"] for a in hurt), "want the batch aborted"
    assert tokens(second.generate(prompts)) == want, "want tokens where the request was asked again"
    second.close()
    assert "Traceback" not in second.output() + first.output()


def test_replicas_of_data_parallelism_share(host: Host, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang gives requests to its replicas in turns, and each has a cache of its own."""
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    replicas = Engine(model, tmp_path / "replicas.log", {"socket": host.socket}, dp_size=2)
    prompts = [prompt(200, seed) for seed in range(4)]
    computed = replicas.generate(prompts)
    assert cached(computed) == [0, 0, 0, 0]
    wait_for("the stores", lambda: len(host.files()) > 0 and host.idle())
    replicas.flush()
    exchanged = replicas.generate(prompts[::-1])  # each to the other replica
    assert cached(exchanged) == [192, 192, 192, 192]
    assert tokens(exchanged) == tokens(computed)[::-1]
    replicas.close()
