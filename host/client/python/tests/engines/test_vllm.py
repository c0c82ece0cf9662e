"""vLLM's own engine on a processor, with kvhost and without: the same tokens, and the same bytes of KV.

Scenarios share an engine process where they can, because an engine takes a while to start. The reference tokens come
from an engine without kvhost. Prompts are prefilled in steps of one chunk, so that a hit changes no step's shape."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm_model as model
from needs import needs, needs_fp8
from processes import Host, own_host, wait_for
from vllm_engine import BLOCK, CHUNK, WARM, Answers, Engine, Tokens

needs("vllm")

BLOCKS = 56  # of 128 tokens: eight requests of 1,000 tokens do not fit


def prompt(seed: int, length: int, *, like: Tokens | None = None, shared: int = 0) -> Tokens:
    rng = random.Random(seed)
    head = (like or [])[:shared]
    return head + [rng.randrange(3, model.VOCAB) for _ in range(length - len(head))]


LONG = [prompt(i, 1500) for i in range(3)]
CROWD = [prompt(100 + i, 900) for i in range(8)]
SHARED = [prompt(200 + i, 1024) for i in range(4)]
MIXED = [
    prompt(1000 + i, 60 + i * 37 % 1300, like=SHARED[i % 4], shared=min(i * 128 % 1024, 60 + i * 37 % 1300))
    for i in range(200)
]
HITS = 1500 // CHUNK * CHUNK


def tokens(answers: Answers) -> list[Tokens]:
    return [t for t, _ in answers]


class Reference:
    """What an engine without kvhost says."""

    def __init__(self, folder: Path, path: Path, name: str, *, all: bool) -> None:
        engine = Engine(folder, name, path, None, blocks=4 * BLOCKS)
        self.long = tokens(engine.one_by_one(LONG))
        if all:
            self.crowd = tokens(engine.generate(CROWD, 160))
            self.mixed = tokens(engine.generate(MIXED, 4))
        engine.stop()


class Setting:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.llama, self.other = folder / "llama", folder / "other"
        model.write(self.llama, model.config(3), seed=7)
        model.write(self.other, model.config(4, window=300), seed=8)
        self.reference = Reference(folder, self.llama, "reference", all=True)
        self.host = Host(folder)
        self.host.start()
        self._engine: Engine | None = None
        self._starts = 0

    def engine(self) -> Engine:
        """The engine with kvhost that most scenarios share; started when there is none."""
        if self._engine is None:
            self._starts += 1
            self._engine = Engine(self.folder, f"engine{self._starts}", self.llama, self.host, blocks=BLOCKS)
        return self._engine

    def stop_engine(self) -> None:
        if self._engine is not None:
            self._engine.stop()
            self._engine = None

    def check_bytes(self, at_least: int) -> None:
        """Every chunk that was loaded has bytes that were computed under its key."""
        computed = set((self.folder / "computed").read_text().splitlines())
        loaded = (self.folder / "loaded").read_text().splitlines()
        assert set(loaded) <= computed
        assert len(loaded) >= at_least
        (self.folder / "loaded").write_text("")

    def hang_in_mid_load(self, engine: Engine | None = None) -> None:
        """LONG is being generated, and the host stops where a load of it begins."""
        (self.folder / "stop").write_text(str(self.host.pid()))
        (engine or self.engine()).send("generate", LONG, 8, None)
        wait_for("a load begins", self.host.hangs)

    def host_dies_in_mid_load(self) -> None:
        """The engine answers without the host, and uses it again when it is back."""
        engine, want = self.engine(), self.reference.long
        self.hang_in_mid_load()
        self.host.kill()
        assert tokens(engine.answer()) == want
        self.host.start()
        self.uses_the_host_again()

    def uses_the_host_again(self) -> None:
        self.engine().comes_to(LONG[1:2], [(self.reference.long[1], HITS)])

    def close(self) -> None:
        if self._engine is not None:
            self._engine.kill()
        self.host.kill()


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    s = Setting(tmp_path_factory.mktemp("engines"))
    yield s
    s.close()


def test_hits_give_the_same_tokens(setting: Setting) -> None:
    engine, want = setting.engine(), setting.reference.long
    cold = engine.one_by_one(LONG)
    assert tokens(cold) == want and [c for _, c in cold] == [0, 0, 0]
    engine.reset()
    warm = engine.one_by_one(LONG)
    assert tokens(warm) == want and [c for _, c in warm] == [HITS] * 3
    setting.check_bytes(3 * HITS // CHUNK)
    counts = engine.ask("counters")
    beside = counts["vllm:kvhost_loads"] - counts["vllm:kvhost_loads_in_step"]
    phases = {p: counts.get(f"vllm:kvhost_{p}_seconds", 0) for p in ("lookup", "wait", "load", "notice", "schedule")}
    assert phases == dict.fromkeys(phases, 3) | {"schedule": beside}, "want each phase of each load"

    partly = prompt(50, 1500, like=LONG[0], shared=700)  # two chunks and a half
    engine.reset()
    assert engine.generate([partly])[0][1] == 700 // CHUNK * CHUNK
    # The engine's own cache has the shared part to its last full block: kvhost adds the rest to it.
    engine.reset()
    assert engine.generate([LONG[0][: 3 * BLOCK + 1]])[0][1] == CHUNK
    assert tokens(engine.generate([LONG[0]])) == want[:1]
    setting.check_bytes(HITS // CHUNK - 1)


def test_generated_tokens_are_stored(setting: Setting) -> None:
    engine = setting.engine()
    start = prompt(60, 250)
    said = engine.generate([start], 300)[0][0]
    engine.reset()
    again = engine.generate([start + said[:280]], 20)[0]
    assert again == (said[280:], 2 * CHUNK)


def test_a_client_forbids(setting: Setting) -> None:
    engine, secret = setting.engine(), prompt(70, 700)
    want, cached, _ = engine.ask("transfer", secret, 8, {"kvhost": {"store": False}})
    engine.reset()
    assert (cached, engine.ask("transfer", secret, 8, None)[:2]) == (0, (want, 0)), "its KV was stored"
    engine.reset()
    assert engine.ask("transfer", secret, 8, {"kvhost": {"load": False}})[:2] == (want, 0), "KV was loaded for it"
    engine.reset()
    assert engine.ask("transfer", secret, 8, {})[:2] == (want, 2 * CHUNK)


def test_engine_restart(setting: Setting) -> None:
    setting.engine()
    setting.stop_engine()
    warm = setting.engine().one_by_one(LONG)
    assert tokens(warm) == setting.reference.long and [c for _, c in warm] == [HITS] * 3
    setting.check_bytes(3 * HITS // CHUNK)


def test_the_default_rule_after_a_restart(setting: Setting) -> None:
    """When everything hits, the connector gives up a chunk to learn how fast the engine computes, and no more."""
    setting.stop_engine()
    engine = Engine(setting.folder, "faster", setting.llama, setting.host, blocks=BLOCKS, load_when="faster")
    try:
        for _ in range(2):
            warm = engine.one_by_one(LONG)
            assert tokens(warm) == setting.reference.long
            assert {c for _, c in warm} <= {HITS, HITS - CHUNK}
            engine.reset()
    finally:
        engine.kill()


def test_an_engine_starts_its_own_host(setting: Setting, tmp_path: Path) -> None:
    """One setting, and no host before: chunks are found again after a kill of the engine and of its host."""
    root, want = tmp_path / "kv", setting.reference.long
    transfer = {
        "kv_connector": "KvhostConnector", "kv_connector_module_path": "kvhost.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"root": f"{root}=1GiB", "load_when": "always", "lookup_timeout": 5.0},
    }
    with own_host(root) as (env, kill_host):
        for life in range(2):
            engine = Engine(
                setting.folder, f"own{life}", setting.llama, None, blocks=BLOCKS, vllm={"kv_transfer_config": transfer}, env=env,
                forked=life > 0,
            )
            try:
                said = engine.one_by_one(LONG)
                assert tokens(said) == want and [c for _, c in said] == [life * HITS] * 3, f"life {life}"
                assert engine.count("has started a host of its own") == 1
                engine.comes_to(LONG, [(t, HITS) for t in want])
            finally:
                engine.kill()
            kill_host()


def test_host_restart(setting: Setting) -> None:
    engine, want = setting.engine(), setting.reference.long
    setting.host.stop()
    engine.reset()
    without = engine.one_by_one(LONG)
    assert tokens(without) == want and [c for _, c in without] == [0, 0, 0]
    engine.reset()
    connected = engine.count("kvhost scheduler: connected")
    setting.host.start()
    wait_for("the engine connects again", lambda: engine.count("kvhost scheduler: connected") > connected)
    assert engine.one_by_one(LONG[:1]) == [(want[0], HITS)], "the first request after the host's return hits"


def test_host_killed_in_mid_load(setting: Setting) -> None:
    setting.engine().reset()
    setting.host_dies_in_mid_load()


def test_abort_in_mid_load(setting: Setting) -> None:
    engine, want = setting.engine(), setting.reference.long
    assert tokens(engine.one_by_one(LONG)) == want  # they are stored, if this is the first test
    engine.reset()
    (setting.folder / "stop").write_text(str(setting.host.pid()))
    engine.ask("begin", "aborted", LONG[2])
    wait_for("a load begins", setting.host.hangs)
    engine.ask("abort", "aborted")
    others = engine.generate([CROWD[0]], 160)  # meanwhile the host answers nobody
    assert tokens(others) == setting.reference.crowd[:1]
    setting.host.resume()
    engine.reset()  # succeeds once the aborted request has given its blocks back
    setting.uses_the_host_again()
    engine.reset()
    assert engine.one_by_one(LONG) == [(w, HITS) for w in want]


def test_damaged_pieces(setting: Setting) -> None:
    engine, want = setting.engine(), setting.reference.long
    engine.reset()
    damaged = setting.host.files(64 << 10)
    assert len(damaged) >= 3 * HITS // CHUNK
    for path in damaged:
        with path.open("r+b") as f:
            f.seek(path.stat().st_size // 2)
            f.write(b"\xa5" * 64)
    assert tokens(engine.one_by_one(LONG)) == want
    assert engine.said("were not loaded")
    engine.reset()
    assert engine.one_by_one(LONG) == [(w, HITS) for w in want]  # it stored what it computed


def test_preemption(setting: Setting) -> None:
    engine = setting.engine()
    engine.reset()
    rounds = 0
    while rounds < 2 or not (setting.folder / "preempted").exists():
        assert rounds < 10, "nothing was preempted"  # on a busy machine the first are done before the last have come
        rounds += 1
        assert tokens(engine.generate(CROWD, 160)) == setting.reference.crowd
        engine.reset()
    setting.check_bytes(8)


def test_mixed_requests(setting: Setting) -> None:
    engine = setting.engine()
    for _ in range(2):
        answers = engine.generate(MIXED, 4)
        assert tokens(answers) == setting.reference.mixed
        engine.reset()
    assert sum(c for _, c in answers) > 0.5 * sum(len(p) for p in MIXED)
    setting.check_bytes(32)  # the fewer, the more of a shared prefix the engine has itself, or the host has not read


@pytest.mark.parametrize("paused", [False, True])
def test_tails_in_a_small_pool_are_stored_or_counted(setting: Setting, paused: bool) -> None:
    """Four of these prompts fill the pool, and a part of it may be held for the host to read. A host that reads more
    slowly than the engine computes does not get all. The rest is counted, and stored when it is computed again."""
    engine = setting.engine()
    crowd = [prompt(300 + 20 * paused + i, 5 * CHUNK + 20) for i in range(20)]

    def dropped() -> int:
        return int(engine.ask("counters").get("vllm:kvhost_chunks_dropped", 0))

    before = dropped()
    if paused:
        setting.host.hang()
    said = tokens(engine.generate(crowd, 2))
    if paused:
        setting.host.resume()
    engine.reset()  # and the host has read all
    lost = dropped() - before
    if paused:
        setting.uses_the_host_again()
    again = []
    for p in crowd:
        engine.reset()
        again += engine.generate([p], 2)
    assert tokens(again) == said
    missing = [5 - cached // CHUNK for _, cached in again]
    # The end of a prompt may be read, and stored, when its beginning has been taken back from the host that was stopped.
    unreachable = sum(n > 0 for n in missing) if paused else 0
    assert lost <= sum(missing) <= lost + unreachable
    assert lost > 60 or not paused
    engine.reset()
    assert engine.one_by_one(crowd, 2) == [(t, 5 * CHUNK) for t in said]


def test_an_ending_engine_leaves_what_it_stored(setting: Setting) -> None:
    fresh = [prompt(400 + i, 4 * CHUNK + 10) for i in range(4)]
    said = tokens(setting.engine().generate(fresh))
    setting.stop_engine()
    assert setting.engine().one_by_one(fresh) == [(t, 4 * CHUNK) for t in said]


def test_two_models_and_a_sliding_window(setting: Setting) -> None:
    """The second model has two KV cache groups; both models see the same prompts."""
    setting.engine().one_by_one(LONG)
    wait_for("the host has published all", setting.host.idle)
    setting.stop_engine()
    reference = Reference(setting.folder, setting.other, "other-reference", all=False)
    assert reference.long != setting.reference.long
    engine = Engine(setting.folder, "other", setting.other, setting.host, blocks=4 * BLOCKS, load_timeout=600.0)
    try:
        cold = engine.one_by_one(LONG)
        assert tokens(cold) == reference.long and [c for _, c in cold] == [0, 0, 0]
        assert engine.said("kvhost: 2 groups")
        engine.reset()
        warm = engine.one_by_one(LONG)
        assert tokens(warm) == reference.long and [c for _, c in warm] == [HITS] * 3
        setting.check_bytes(3 * HITS // CHUNK)

        engine.reset()
        setting.hang_in_mid_load(engine)
        assert tokens(engine.answer()) == reference.long
        assert setting.host.hangs(), "want answers though the host's process is stopped with a load in flight"
        setting.host.resume()
        engine.comes_to(LONG[:1], [(reference.long[0], HITS)])
        engine.reset()
        assert engine.one_by_one(LONG) == [(w, HITS) for w in reference.long]

        engine.reset()
        setting.hang_in_mid_load(engine)
        setting.host.kill()
        assert tokens(engine.answer()) == reference.long
        setting.host.start()
    finally:
        engine.kill()
    assert setting.engine().one_by_one(LONG) == [(w, HITS) for w in setting.reference.long]


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_workers(setting: Setting, size: str) -> None:
    """Each worker stores and loads its own part of a chunk; a hit needs both."""
    setting.stop_engine()
    engine = Engine(setting.folder, size, setting.llama, setting.host, blocks=2 * BLOCKS, vllm={size: 2, **WARM})
    try:
        cold = engine.one_by_one(LONG)
        assert tokens(cold) == setting.reference.long and [c for _, c in cold] == [0, 0, 0]
        engine.reset()
        assert engine.one_by_one(LONG) == [(w, HITS) for w in setting.reference.long]
        setting.check_bytes(2 * 3 * HITS // CHUNK)
    finally:
        engine.kill()


@pytest.mark.parametrize("block, heads", [(32, 2), (BLOCK, 1)])
def test_another_size_loads_what_one_has_stored(setting: Setting, tmp_path: Path, block: int, heads: int) -> None:
    """Two ranks, each with a KV head or both with the same one, load what one has stored, and one what two have, in a later life of the
    host."""
    setting.stop_engine()
    model.write(tmp_path / "model", model.config(3) | {"num_key_value_heads": heads}, seed=7)
    host, said = Host(tmp_path), dict[int, Tokens]()
    host.start()

    def lives(size: int, prompts: list[int], hits: int) -> None:
        vllm = {"tensor_parallel_size": size, "block_size": block, **WARM}
        engine = Engine(tmp_path, f"{size} ranks", tmp_path / "model", host, blocks=2 * BLOCKS * BLOCK // block, vllm=vllm, share="sizes")
        try:
            for found in (hits, HITS):
                for i, answer in zip(prompts, engine.one_by_one([LONG[i] for i in prompts]), strict=True):
                    assert answer == (said.setdefault(i, answer[0]), found), f"of {size} ranks"
                engine.reset()
        finally:
            engine.stop()

    try:
        lives(1, [0, 1], 0)
        lives(2, [0, 1], HITS)
        lives(2, [2], 0)
        host.stop()
        host.start()
        lives(1, [0, 1, 2], HITS)
        assert heads != 2 or [said[i] for i in range(3)] == setting.reference.long
    finally:
        host.kill()


def test_fp8_and_heads_first(setting: Setting) -> None:
    """The cache has another dtype than the other engines': their chunks are not for it, and its own are. Bytes are
    compared, not tokens: with fp8 on a processor vLLM's own tokens differ from one cold run to the next."""
    needs_fp8()
    setting.stop_engine()
    engine = Engine(
        setting.folder, "fp8", setting.llama, setting.host, blocks=2 * BLOCKS, vllm={"kv_cache_dtype": "fp8"},
        env={"VLLM_KV_CACHE_LAYOUT": "HND"},
    )  # fmt: skip
    try:
        cold = engine.one_by_one(LONG)
        assert [c for _, c in cold] == [0, 0, 0]
        engine.reset()
        assert [c for _, c in engine.one_by_one(LONG)] == [HITS] * 3
        setting.check_bytes(3 * HITS // CHUNK)
    finally:
        engine.kill()


def test_lora_adapters_have_chunks_of_their_own(setting: Setting) -> None:
    setting.stop_engine()
    paths = [setting.folder / "first-adapter", setting.folder / "second-adapter"]
    for i, path in enumerate(paths):
        model.write_lora(path, model.config(3), seed=20 + i)
    engine = Engine(
        setting.folder, "lora", setting.llama, setting.host, blocks=2 * BLOCKS,
        vllm={"enable_lora": True, "max_loras": 2},
    )  # fmt: skip
    adapters = [("first", 1, str(paths[0])), ("second", 2, str(paths[1]))]
    try:
        base = engine.generate(LONG[:1])
        cold = [engine.generate(LONG[:1], 8, a)[0] for a in adapters]
        assert [c for _, c in cold] == [0, 0]
        assert len({tuple(t) for t, _ in [base[0], *cold]}) == 3, "the adapters change nothing"
        engine.reset()
        assert [engine.generate(LONG[:1], 8, a)[0] for a in adapters] == [(t, HITS) for t, _ in cold]
        assert engine.generate(LONG[:1]) == [(base[0][0], HITS)]
        setting.check_bytes(3 * HITS // CHUNK)
    finally:
        engine.kill()


def test_a_drop_leaves_what_a_request_in_the_queue_has(setting: Setting, tmp_path: Path) -> None:
    setting.stop_engine()
    host = Host(tmp_path)
    host.start()
    engine = Engine(
        setting.folder, "queue", setting.llama, host, blocks=2 * BLOCKS, chunk_tokens=CHUNK, lookup_wait=5.0,
        vllm={"max_num_seqs": 1, "enable_prefix_caching": False},
    )  # requests run in their order
    try:
        drop, no = {"kvhost": {"drop_seconds": 0}}, {"kvhost": {}}
        engine.generate([prompt(540, 600)])  # the workers have reported
        first, _, again = engine.ask("queue", [(LONG[0], 8, drop), (LONG[1], 1000, no), (LONG[0], 8, no)])
        assert first == (setting.reference.long[0], 0)
        assert again == (first[0], HITS), "want what waits for it left"
        engine.ask("queue", [(LONG[2], 8, drop), (LONG[1], 1000, no)])
        assert engine.generate(LONG[2:]) == [(setting.reference.long[2], 0)], "want dropped what nothing waits for"
    finally:
        engine.kill()
        host.kill()


def test_clients_keep_and_drop_what_they_will(setting: Setting, tmp_path: Path) -> None:
    """Three prompts fit into the host's root. Of two that were stored first, the pinned one stays when others come."""
    setting.stop_engine()
    host = Host(tmp_path, "16MiB")
    host.start()
    engine = Engine(setting.folder, "kept", setting.llama, host, blocks=2 * BLOCKS, chunk_tokens=CHUNK, pin_seconds=600.0)
    pinned, other, dropped = LONG
    try:
        def say(p: Tokens, **said: Any) -> tuple[int, dict[str, str]]:
            engine.reset()
            tokens, cached, answer = engine.ask("transfer", p, 8, {"kvhost": said})
            assert p not in LONG or tokens == setting.reference.long[LONG.index(p)]
            return cached, (answer or {}).get("kvhost_answers", {})

        assert say(pinned, pin_seconds=900) == (0, {"pin_seconds": "clipped: 600"})
        assert say(other, return_seconds=3) == (0, {"return_seconds": "accepted"})
        for i in range(8):
            say(prompt(500 + i, 1500))
        assert [say(p)[0] for p in (pinned, other)] == [HITS, 0], "want the pinned prompt alone kept"

        engine.reset()
        before = {p.name for p in host.files()}
        want = {"drop_seconds": "accepted", "prefetch_seconds": "rejected: the host has one level", "demote": "rejected: it is not known"}
        assert say(dropped, drop_seconds=0, prefetch_seconds=1, demote=True) == (0, want)
        engine.reset()  # all is published
        wait_for("the dropped chunks are gone", lambda: {p.name for p in host.files()} <= before)
        assert [say(p)[0] for p in (pinned, dropped)] == [HITS, 0]

        long, last = prompt(520, 2500), prompt(530, 1500)  # half of the root has ten chunks
        assert say(long, pin_seconds=30)[1] == {"pin_seconds": f"clipped: 30, of {5 * CHUNK} tokens"}
        assert say(last, pin_seconds=30)[1] == {"pin_seconds": "rejected: what is pinned has its share of the host"}
        assert [say(p)[0] for p in (last, pinned)] == [HITS, HITS], "want what is stored after pins found, too"
    finally:
        engine.kill()
        host.kill()
