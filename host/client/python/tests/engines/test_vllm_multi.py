"""kvhost and another connector in vLLM's MultiConnector: the same tokens as an engine without, in both orders.

Statistics are on, as ``vllm serve`` has them."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm_model as model
from needs import needs
from processes import DEADLINE, Host, wait_for
from vllm_engine import BLOCK, CHUNK, HERE, Answers, Engine, Tokens

needs("vllm")

BLOCKS = 56  # of 128 tokens
RNG = random.Random(30)
PROMPTS: list[Tokens] = [[RNG.randrange(3, model.VOCAB) for _ in range(n)] for n in (1500, 1300, CHUNK - 20)]
OURS = [len(p) // CHUNK * CHUNK for p in PROMPTS]  # tokens that kvhost keeps: none of the last
BLOCKS_OF = [len(p) // BLOCK * BLOCK for p in PROMPTS]  # that others keep
BOTH = pytest.mark.parametrize("first", ["kvhost first", "kvhost last"])

Child = dict[str, Any]


class Setting:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.llama, self.hybrid = folder / "llama", folder / "hybrid"
        model.write(self.llama, model.config(3), seed=7)
        model.write(self.hybrid, model.config(4, window=300), seed=8)
        self.reference = self.alone(self.llama)
        self.started = 0

    def alone(self, path: Path) -> list[Tokens]:
        """What an engine without connectors says."""
        engine = Engine(self.folder, f"{path.name}-alone", path, None, blocks=4 * BLOCKS)
        tokens = [t for t, _ in engine.one_by_one(PROMPTS)]
        engine.stop()
        return tokens

    def host(self) -> Host:
        """A new one, on a root of its own."""
        self.started += 1
        folder = self.folder / f"host{self.started}"
        folder.mkdir()
        host = Host(folder)
        host.start()
        return host

    def engine(
        self, name: str, host: Host, children: list[Child], *, role: str = "kv_both", path: Path | None = None,
        env: dict[str, str] | None = None, **vllm: Any,
    ) -> Engine:
        transfer = {
            "kv_connector": "MultiConnector", "kv_role": role, "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": children},
        }
        options = {"kv_transfer_config": transfer, **vllm}
        return Engine(
            self.folder, f"{name}{self.started}", path or self.llama, host, blocks=4 * BLOCKS, vllm=options, env=env
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


def tier(host: Host) -> Child:
    config = {
        "spec_name": "TiersSpec", "spec_module_path": "vllm_offloading", "cpu_bytes_to_use": 32 << 20,
        "secondary_tiers": [{"type": "kvhost", "socket": host.socket, "lookup_timeout": 5.0}],
    }
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": config}


def ordered(first: str, ours: Child, other: Child) -> list[Child]:
    return [ours, other] if first == "kvhost first" else [other, ours]


def hits(first: str) -> list[int]:
    """How many tokens of each prompt are loaded: by the first connector that has any."""
    preferred = OURS if first == "kvhost first" else BLOCKS_OF
    return [n or others for n, others in zip(preferred, BLOCKS_OF, strict=True)]


def expected(tokens: list[Tokens], cached: list[int]) -> Answers:
    return list(zip(tokens, cached, strict=True))


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
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True, timeout=DEADLINE)
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
        assert engine.one_by_one(PROMPTS) == expected(setting.reference, [0, 0, 0])
        engine.reset()
        assert engine.one_by_one(PROMPTS) == expected(setting.reference, hits(first))
        # LLM records statistics of those steps only that gave tokens: loads are in others.
        assert engine.ask("counters")["vllm:kvhost_chunks_ordered"] == sum(OURS) // CHUNK
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
        assert engine.one_by_one(PROMPTS) == expected(setting.reference, [0, 0, 0])
        engine.reset()
        assert engine.generate(PROMPTS) == expected(setting.reference, hits(first))
        engine.reset()
        host.kill()
        assert engine.generate(PROMPTS) == expected(setting.reference, BLOCKS_OF)  # the other has all of it
        engine.stop()
    finally:
        engine.kill()


def test_two_hosts(setting: Setting) -> None:
    """Each has what the engine computes, and the first that has anything of a prompt loads. Counters are of both."""
    near, far = setting.host(), setting.host()
    children = [kvhost(near), kvhost(far)]
    chunks = sum(OURS) // CHUNK
    try:
        engine = setting.engine("two", far, children, max_num_batched_tokens=2048)  # see above: each step gives a token
        assert engine.one_by_one(PROMPTS) == expected(setting.reference, [0, 0, 0])
        engine.reset()
        wait_for("both hosts have published all", lambda: near.idle() and far.idle())
        assert len(near.files()) == len(far.files()) == chunks
        assert engine.one_by_one(PROMPTS) == expected(setting.reference, OURS)
        assert engine.ask("counters")["vllm:kvhost_chunks_ordered"] == 2 * chunks
        engine.reset()
        near.kill()
        assert engine.one_by_one(PROMPTS) == expected(setting.reference, OURS), "want the other host's"
        engine.stop()
        shutil.rmtree(near.root)
        near.start()
        engine = setting.engine("again", far, children, max_num_batched_tokens=2048)
        assert engine.one_by_one(PROMPTS) == expected(setting.reference, OURS), "want what the first engine stored"
        engine.stop()
    finally:
        engine.kill()
        near.kill()
        far.kill()


def nixl(role: str) -> Child:
    return {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}


def side_channel() -> dict[str, str]:
    """NIXL's own port, and no network but this machine's."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(s.getsockname()[1]), "UCX_NET_DEVICES": "lo"}


def prefilled(engine: Engine, prompt: Tokens) -> tuple[Tokens, int, dict[str, Any]]:
    """The first token, how many tokens of the prompt were cached, and what a decode engine is to be given."""
    token, cached, params = engine.ask("transfer", prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False})
    params.pop("remote_prefill_cached_tokens", None)  # which 0.32's decode engine would give in place of its own number
    return token, cached, params


@BOTH
@pytest.mark.parametrize("door", ["connector", "tier"])
def test_prefill_and_decode_with_nixl(setting: Setting, host: Host, first: str, door: str) -> None:
    needs("nixl")
    kept, env = (OURS, {}) if door == "connector" else (BLOCKS_OF, {"PYTHONHASHSEED": "0"})
    engines = []
    try:
        for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
            ours = kvhost(host, kv_connector_module_path="kvhost.vllm") if door == "connector" else tier(host)
            children = ordered(first, ours, nixl(role))
            engines.append(setting.engine(name, host, children, role=role, env=side_channel() | env))
        prefill, decode = engines
        for again in (False, True):  # whether the prefill engine finds its prompts in kvhost
            for prompt, tokens, ours in zip(PROMPTS, setting.reference, kept, strict=True):
                token, cached, params = prefilled(prefill, prompt)
                assert (token, cached) == (tokens[:1], ours if again else 0)
                if door == "tier":
                    prefill.generate([[5] * 8])  # vLLM's offloading stores with the next step
                wait_for("the host has published all", host.idle)
                brought = ours if ours and first == "kvhost first" else len(prompt)
                assert decode.ask("transfer", prompt, 8, params)[:2] == (tokens, brought)
            for e in engines:
                e.reset()  # succeeds when both connectors have given all blocks back
        assert decode.one_by_one(PROMPTS) == expected(setting.reference, kept)
        for e in engines:
            e.stop()
    finally:
        for e in engines:
            e.kill()


def test_a_load_whose_prefill_engine_is_gone(setting: Setting, host: Host) -> None:
    """NIXL cannot tell it that its blocks are not wanted, and says so by a request that kvhost is loading."""
    needs("nixl")
    engines = []
    try:
        for name, role in (("gone", "kv_producer"), ("left", "kv_consumer")):
            ours = kvhost(host, kv_connector="ProbeConnector", kv_connector_module_path="vllm_probe")
            engines.append(
                setting.engine(
                    name, host, [ours, nixl(role)], role=role, path=setting.hybrid, env=side_channel(),
                    disable_log_stats=True,
                )
            )
        prefill, decode = engines
        _, _, params = prefilled(prefill, PROMPTS[0])
        wait_for("the host has published all", host.idle)
        prefill.kill()
        (setting.folder / "stop").write_text(str(host.pid()))
        decode.send("transfer", PROMPTS[0], 8, params)
        wait_for("a load begins", host.hangs)
        wait_for("NIXL fails", lambda: decode.said("handshake_failed"))
        answer = decode.answer()  # no request waits for a host that is stopped
        assert answer[0] == setting.alone(setting.hybrid)[0], f"got {answer}, want the tokens that are computed alone"
        host.resume()
    finally:
        for e in engines:
            e.kill()
