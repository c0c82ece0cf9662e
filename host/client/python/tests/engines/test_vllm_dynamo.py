"""Dynamo's indexer and the host agree on how much of a prompt an engine finds: real engines, a real host that is too
small for all prompts, and Dynamo's own process."""

from __future__ import annotations

import itertools
import pickle
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import vllm_model as model
from needs import needs, needs_program
from processes import Host, wait_for

needs("vllm")
needs_program("dynamo", "KVHOST_DYNAMO")

from dynamo_indexer import Indexer, Tiers  # noqa: E402
from vllm_engine import BLOCK, CHUNK, Engine, Tokens  # noqa: E402

import kvhost  # noqa: E402
from kvhost.errors import KvhostError  # noqa: E402
from kvhost.keys import KeyChain  # noqa: E402

ONE, TWO = 1, 2  # the engines' numbers as workers
CAPACITY = "48MiB"  # about 180 chunks of 280


def tokens(seed: int, count: int) -> Tokens:
    return random.Random(seed).choices(range(3, model.VOCAB), k=count)


STEMS = [tokens(i, 2 * CHUNK) for i in range(40)]
PROMPTS = [stem + tokens(1000 + 5 * i + n, CHUNK + 44) for i, stem in enumerate(STEMS) for n in range(5)]
assert len(PROMPTS) == 200
NOTHING = [0] * 200


def keys(prompt: Tokens) -> list[bytes]:
    return KeyChain(CHUNK).extend(prompt)


class Asker:
    """The host's own answer, in the group of full attention."""

    def __init__(self, host: Host, namespace: Path) -> None:
        self._host, self._namespace = host, namespace
        self._session: kvhost.Session | None = None
        self._group = 0

    def hits(self) -> list[int]:
        """How many leading tokens of each prompt the host has; none while it is away."""
        while self._host.alive():
            try:
                return [self._hit(p) for p in PROMPTS]
            except KvhostError:  # of a host before this one
                self.close()
        return NOTHING

    def _hit(self, prompt: Tokens) -> int:
        if self._session is None:
            space = pickle.loads(self._namespace.read_bytes())
            self._group = next(g.id for g in space.groups if not g.membership)
            self._session = kvhost.Session(self._host.socket, "asker", space, role="scheduler")
        found = self._session.lookup(keys(prompt), group=self._group, readers=1)
        found.release()
        return found.hits * CHUNK

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None


class Setting:
    def __init__(self, folder: Path, layers: int = 1, window: int = 0) -> None:
        self.folder = folder
        self._others = itertools.count(10_000)  # prompts of no chunk
        model.write(folder / "llama", model.config(layers, window), seed=7)
        self.host = Host(folder, CAPACITY)
        self.host.start()
        self.engines = {ONE: self.start_engine(ONE)}
        self.asker = Asker(self.host, folder / "namespace")
        self.indexers = [self.start_indexer(ONE)]

    def start_engine(self, worker: int, **options: str) -> Engine:
        """Engines of one hash seed: Dynamo drops what is below the GPU of a worker that hashes otherwise."""
        events, replay = self.at(worker)
        config = {
            "enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv@node@m",
            "endpoint": events, "replay_endpoint": replay,
        }  # fmt: skip
        return Engine(
            self.folder, f"engine-{worker}", self.folder / "llama", self.host, blocks=200,
            vllm={"kv_events_config": config, "max_num_batched_tokens": 1024, "disable_hybrid_kv_cache_manager": False},
            env={"PYTHONHASHSEED": "0", "PROBE_GONE_SECONDS": "1"}, **options,
        )  # fmt: skip

    def at(self, worker: int) -> tuple[str, str]:
        return f"ipc://{self.folder}/events-{worker}", f"ipc://{self.folder}/replay-{worker}"

    def start_indexer(self, *workers: int) -> Indexer:
        indexer = Indexer(self.folder / "indexer.log", BLOCK)
        for worker in workers:
            indexer.register(worker, *self.at(worker))
        return indexer

    def serve(self, worker: int, prompts: Sequence[Tokens]) -> None:
        for i in range(0, len(prompts), 8):
            self.engines[worker].generate(prompts[i : i + 8], 1)

    def agree(
        self, state: str, gpu: Sequence[int] | None = None, worker: int = ONE, hits: Sequence[int] | None = None
    ) -> None:
        """Waits until the answers about a worker are the host's, or ``hits``. ``gpu`` are the tokens of each prompt in
        the GPU, None where the engine's own evictions decide that."""
        wrong: list[str] = []

        def same() -> bool:
            # Events are published with a step's output; the next batch shows an indexer that it has missed one.
            self.engines[worker].generate([tokens(next(self._others), BLOCK + 1)], 2)
            there = hits or self.asker.hits()
            wrong.clear()
            for n, indexer in enumerate(self.indexers):
                told = [indexer.tiers(worker, p) for p in PROMPTS]
                want = [Tiers(g, max(g, h)) for g, h in zip(gpu or [t.gpu for t in told], there, strict=True)]
                wrong.extend(
                    f"indexer {n}, prompt {i}: want {w}, got {t}"
                    for i, (w, t) in enumerate(zip(want, told, strict=True)) if w != t
                )  # fmt: skip
            return not wrong

        try:
            wait_for(state, same)
        except AssertionError:
            raise AssertionError(f"{state}: {len(wrong)} of 200 answers are wrong: {wrong[:5]}") from None

    def close(self) -> None:
        self.asker.close()
        for engine in self.engines.values():
            engine.kill()
        for indexer in self.indexers:
            indexer.stop()
        self.host.kill()


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    s = Setting(tmp_path_factory.mktemp("dynamo"))
    yield s
    s.close()


def test_stored(setting: Setting) -> None:
    setting.serve(ONE, PROMPTS[:50])
    setting.agree("what was stored")
    assert sum(setting.asker.hits()) > 0


def test_evicted(setting: Setting) -> None:
    setting.serve(ONE, PROMPTS)
    setting.agree("after evictions")
    assert 0 < sum(setting.asker.hits()) < 200 * 3 * CHUNK


def test_after_a_reset(setting: Setting) -> None:
    setting.engines[ONE].reset()
    setting.agree("after a reset", NOTHING)


def test_half_in_the_gpu(setting: Setting) -> None:
    setting.engines[ONE].reset()
    setting.serve(ONE, [p[: CHUNK + BLOCK + 1] for p in PROMPTS[:100:5]])
    setting.agree("half of some prompts in the GPU", [CHUNK + BLOCK] * 100 + [0] * 100)


def test_a_gap(setting: Setting) -> None:
    indexer = setting.indexers[0]
    indexer.pause(ONE)
    setting.serve(ONE, PROMPTS[::-1])
    setting.engines[ONE].reset()
    indexer.listen(ONE)
    setting.agree("after a gap and a replay", NOTHING)
    assert "Replay complete" in indexer.output()


def test_an_indexer_that_comes_late(setting: Setting) -> None:
    setting.indexers.append(setting.start_indexer(ONE))
    setting.agree("what a late indexer was replayed", NOTHING)


def test_the_host_restarts(setting: Setting) -> None:
    setting.host.kill()
    setting.host.start()
    setting.agree("after a restart of the host", NOTHING)
    assert sum(setting.asker.hits()) > 0


def test_the_host_is_away_for_long(setting: Setting) -> None:
    setting.host.kill()
    setting.agree("without a host", NOTHING)
    setting.host.start()
    setting.agree("when the host is back", NOTHING)
    assert sum(setting.asker.hits()) > 0


def test_the_host_comes_back_empty(setting: Setting) -> None:
    setting.host.kill()
    shutil.rmtree(setting.host.root)
    setting.host.start()
    setting.agree("with an empty host", NOTHING)
    setting.serve(ONE, PROMPTS[:100])
    setting.agree("with what an empty host was given")
    assert sum(setting.asker.hits()) > 0


def test_two_engines(setting: Setting) -> None:
    """The second stores nothing: it finds what the first one stored, before and after it has looked it up."""
    setting.engines[TWO] = setting.start_engine(TWO, store="none")
    for indexer in setting.indexers:
        indexer.register(TWO, *setting.at(TWO))
    setting.serve(TWO, PROMPTS)
    setting.engines[TWO].reset()
    setting.agree("what another engine has stored", NOTHING, TWO)
    setting.serve(ONE, PROMPTS[100:])
    setting.agree("what another engine stores", NOTHING, TWO)
    setting.agree("what it stores itself")


def test_a_damaged_file(setting: Setting) -> None:
    """Found by one engine. Neither has it any more."""
    setting.engines[ONE].reset()
    at = next(i for i, hit in enumerate(setting.asker.hits()) if hit == 3 * CHUNK)
    _damage(setting.host, keys(PROMPTS[at])[2])
    setting.serve(TWO, [PROMPTS[at]])
    wait_for("the damage is found", lambda: setting.asker.hits()[at] == 2 * CHUNK)
    setting.engines[TWO].reset()
    setting.agree("a damaged chunk", NOTHING, ONE)
    setting.agree("a damaged chunk", NOTHING, TWO)


def _damage(host: Host, key: bytes) -> None:
    (file,) = [f for f in host.files() if key in f.read_bytes()[:4096]]
    with file.open("r+b") as f:
        f.seek(-4096, 2)
        f.write(random.Random(1).randbytes(4096))


def test_new_weights(setting: Setting) -> None:
    """The engine finds nothing of what was stored before, though the host has it, and the other engine does."""
    setting.engines[ONE].reset(connector=True)
    setting.agree("new weights", NOTHING, hits=NOTHING)
    setting.agree("the engine with the old weights", NOTHING, TWO)
    setting.serve(ONE, PROMPTS[:5])
    setting.engines[ONE].reset()
    setting.agree("stored with new weights", NOTHING, hits=[3 * CHUNK] * 5 + [0] * 195)


def test_an_engine_restarts(setting: Setting) -> None:
    setting.engines[ONE].stop()
    setting.engines[ONE] = setting.start_engine(ONE)
    for indexer in setting.indexers:
        indexer.unregister(ONE)
        indexer.register(ONE, *setting.at(ONE))
    setting.agree("an engine that has looked up nothing", NOTHING, hits=NOTHING)
    setting.serve(ONE, PROMPTS)
    setting.engines[ONE].reset()
    setting.agree("an engine that has looked up all", NOTHING)


def test_two_groups(tmp_path: Path) -> None:
    s = Setting(tmp_path, layers=2, window=CHUNK)
    try:
        s.serve(ONE, PROMPTS)
        s.agree("two groups, after evictions")
        s.engines[ONE].reset()
        s.agree("two groups, after a reset", NOTHING)
        assert sum(s.asker.hits()) > 0
    finally:
        s.close()
