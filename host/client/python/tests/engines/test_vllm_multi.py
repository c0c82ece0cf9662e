"""kvhost and another connector in vLLM's MultiConnector: the same tokens as an engine without, in both orders.

Statistics are on, as ``vllm serve`` has them."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm_model as model
from needs import needs
from processes import Host
from vllm_engine import BLOCK, CHUNK, HERE, Engine, Tokens

needs("vllm")

BLOCKS = 56  # of 128 tokens
RNG = random.Random(30)
PROMPTS: list[Tokens] = [[RNG.randrange(3, model.VOCAB) for _ in range(1500)] for _ in range(3)]
HITS = 1500 // CHUNK * CHUNK
WHOLE_BLOCKS = 1500 // BLOCK * BLOCK
BOTH = pytest.mark.parametrize("first", ["kvhost first", "kvhost last"])

Child = dict[str, Any]


class Setting:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.llama = folder / "llama"
        model.write(self.llama, model.config(3), seed=7)
        engine = Engine(folder, "reference", self.llama, None, blocks=BLOCKS)
        self.reference = [t for t, _ in engine.one_by_one(PROMPTS)]
        engine.stop()
        self.started = 0

    def host(self) -> Host:
        """A new one, on a root of its own."""
        self.started += 1
        folder = self.folder / f"host{self.started}"
        folder.mkdir()
        host = Host(folder)
        host.start()
        return host

    def engine(
        self, name: str, host: Host, children: list[Child], *, role: str = "kv_both", env: dict[str, str] | None = None,
        **vllm: Any,
    ) -> Engine:
        transfer = {
            "kv_connector": "MultiConnector", "kv_role": role, "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": children},
        }
        vllm |= {"kv_transfer_config": transfer, "disable_log_stats": False}
        return Engine(
            self.folder, f"{name}{self.started}", self.llama, host, blocks=BLOCKS, vllm=vllm, env=env
        )


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting(tmp_path_factory.mktemp("multi"))


@pytest.fixture
def host(setting: Setting) -> Iterator[Host]:
    h = setting.host()
    yield h
    h.kill()


def kvhost(host: Host, **more: Any) -> Child:
    extra = {"socket": host.socket, "load_when": "always", "lookup_timeout": 5.0}
    return {"kv_connector": "KvhostConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra, **more}


def ordered(first: str, ours: Child, other: Child) -> list[Child]:
    return [ours, other] if first == "kvhost first" else [other, ours]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with this package as pip installs it, with the metadata that names its plugin."""
    folder = tmp_path_factory.mktemp("package")
    client, source = HERE.parents[1], folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(client / name, source)
    shutil.copytree(client / "kvhost", source / "kvhost")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder / "site")]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True, timeout=300)
    return folder / "site"


@BOTH
def test_with_a_connector_that_loads_in_the_step(setting: Setting, host: Host, package: Path, first: str) -> None:
    """The first time with the plugin that the package names, the second time as a module without plugins."""
    other = {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(setting.folder / first)},
    }
    if first == "kvhost first":
        ours, env = kvhost(host), {"PYTHONPATH": os.pathsep.join([str(HERE), str(package)])}
    else:
        ours, env = kvhost(host, kv_connector_module_path="kvhost.vllm"), {"VLLM_PLUGINS": ""}
    # The example keeps whole prompts only, and only those of one step.
    options: Any = {"max_num_batched_tokens": 2048, "disable_hybrid_kv_cache_manager": True}
    engine = setting.engine("example", host, ordered(first, ours, other), env=env, **options)
    try:
        assert engine.one_by_one(PROMPTS) == [(t, 0) for t in setting.reference]
        engine.reset()
        hit = HITS if first == "kvhost first" else WHOLE_BLOCKS
        assert engine.one_by_one(PROMPTS) == [(t, hit) for t in setting.reference]
        # LLM records statistics of those steps only that gave tokens: loads are in others.
        assert engine.ask("counters")["vllm:kvhost_chunks_ordered"] == len(PROMPTS) * HITS // CHUNK
        engine.stop()
    finally:
        engine.kill()


@BOTH
def test_with_vllms_offloading(setting: Setting, host: Host, first: str) -> None:
    other = {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostMemorySpec", "spec_module_path": "vllm_offloading", "cpu_bytes_to_use": 64 << 20,
        },
    }
    ours = kvhost(host, kv_connector_module_path="kvhost.vllm")
    engine = setting.engine("offloading", host, ordered(first, ours, other))
    try:
        assert engine.one_by_one(PROMPTS) == [(t, 0) for t in setting.reference]
        engine.reset()
        hit = HITS if first == "kvhost first" else WHOLE_BLOCKS
        assert engine.generate(PROMPTS) == [(t, hit) for t in setting.reference]
        engine.reset()
        host.kill()
        assert engine.generate(PROMPTS) == [(t, WHOLE_BLOCKS) for t in setting.reference]  # the other has all of it
        engine.stop()
    finally:
        engine.kill()
