"""vLLM's own engine with few blocks, and a host whose process is stopped: each request is answered while it is, with the tokens that it
has without, and what the engine took back from the host is never loaded. STOPPED_ROUNDS is how often a crowd meets a stop, STOPPED_SEED
the first seed."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import vllm_model as model
from needs import needs
from processes import Host, wait_for
from vllm_engine import Engine, Tokens, tiered

needs("vllm")

BLOCKS = 64
LENGTH = 1500
ANSWER = 8
ROUNDS = int(os.environ.get("STOPPED_ROUNDS", "3"))
SEED = int(os.environ.get("STOPPED_SEED", "1"))
#: In which an answer must come, and the host is not let go on. Computing a crowd takes seconds.
PATIENCE = 60


class Life:
    """One engine with its host, by one of the doors."""

    def __init__(self, door: str, factory: pytest.TempPathFactory) -> None:
        self.door, self.folder = door, factory.mktemp("stopped")
        self.host = Host(self.folder)
        model.write(self.folder / "model", model.config(3), seed=7)
        self.host.start()
        self._seed = 0
        self.slowest = 0.0
        self.engine = self._start()

    def _start(self) -> Engine:
        vllm, options = {}, {}
        if self.door == "tier":
            vllm = tiered(self.host)
        else:
            options = {"load_in": "step" if self.door == "in_step" else "beside", "lookup_timeout": 1.0}
        return Engine(
            self.folder, "engine", self.folder / "model", self.host, blocks=BLOCKS, vllm=vllm, env={"PYTHONHASHSEED": "0"}, **options,
        )

    def fresh(self, n: int) -> list[Tokens]:
        self._seed += 1
        rng = random.Random(self._seed)
        return [[rng.randrange(3, model.VOCAB) for _ in range(LENGTH)] for _ in range(n)]

    def stored(self, n: int) -> tuple[list[Tokens], list[Tokens]]:
        """Prompts that the host has, and what the engine says to them. The engine has forgotten them."""
        asked = self.fresh(n)
        said = [t for t, _ in self.engine.one_by_one(asked, ANSWER)]
        self.forget()
        return asked, said

    def forget(self, *, connector: bool = False) -> None:
        """The engine's cache is empty, and the host has stored all that it was given."""
        self.engine.generate([[5] * 8])  # vLLM's offloading stores with the next step
        wait_for("the host has published all", self.host.idle)
        self.engine.reset(connector=connector)

    @contextmanager
    def stop(self) -> Iterator[None]:
        self.host.hang()
        try:
            yield
        finally:
            self.host.resume()

    def answered(self, prompts: list[Tokens]) -> list[Tokens]:
        """What the engine says while the host is stopped."""
        begin = time.monotonic()
        self.engine.send("generate", prompts, ANSWER, None)
        if not self.engine.answers(PATIENCE):
            self.host.resume()
            self.engine.answer()
            pytest.fail(f"no answer to {len(prompts)} prompts within {PATIENCE} s, and one after the host had gone on: want none to wait")
        said = [t for t, _ in self.engine.answer()]
        self.slowest = max(self.slowest, time.monotonic() - begin)
        return said

    def check(self, prompts: list[Tokens], said: list[Tokens]) -> None:
        """What is found of them now gives the same tokens."""
        self.forget()
        again = [t for t, _ in self.engine.one_by_one(prompts, ANSWER)]
        wrong = [i for i, (a, b) in enumerate(zip(said, again, strict=True)) if a != b]
        assert not wrong, f"prompts {wrong} of {len(prompts)} have other tokens than before"

    def close(self) -> None:
        self.engine.kill()
        self.host.kill()


@pytest.fixture(scope="module", params=["connector", "in_step", "tier"])
def life(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    it = Life(request.param, tmp_path_factory)
    yield it
    print(f"slowest answer of {it.door} with a stopped host: {it.slowest:.2f} s")
    it.close()


def test_prompts_one_after_another(life: Life) -> None:
    asked = life.fresh(10)
    with life.stop():
        said = [t for p in asked for t in life.answered([p])]
        assert life.engine.ask("reset", False), "want the engine's cache emptied, whatever is held for the host"
        said += life.answered(asked[:3])
    life.check([*asked, *asked[:3]], said)


def test_loads_one_after_another(life: Life) -> None:
    asked, want = life.stored(6)
    (life.folder / "stop").write_text(str(life.host.pid()))  # once a load begins
    said = [t for p in asked for t in life.answered([p])]
    assert life.host.hangs(), "want the host stopped with a load in flight"
    more = life.fresh(4)
    others = [t for p in more for t in life.answered([p])]
    assert life.engine.ask("reset", True), "want the engine's caches emptied, whatever is held for the host"
    said += life.answered(asked[:1])
    life.host.resume()
    assert said == [*want, want[0]], "want the tokens that the prompts had before the stop"
    life.check([*asked, *more], [*want, *others])


@pytest.mark.parametrize("seed", range(SEED, SEED + ROUNDS))
def test_a_crowd_meets_a_stop(life: Life, seed: int) -> None:
    rng = random.Random(seed)
    asked, want = life.stored(5)
    new = life.fresh(7)
    crowd = [*asked, *new]
    order = list(range(len(crowd)))
    rng.shuffle(order)
    stop = threading.Timer(rng.random(), life.host.hang)
    stop.start()
    try:
        said = dict(zip(order, life.answered([crowd[i] for i in order]), strict=True))
        stop.join()
        late = [t for p in crowd[:2] + life.fresh(2) for t in life.answered([p])]
    finally:
        stop.join()
        life.host.resume()
    assert [said[i] for i in range(5)] == want, "want the tokens that the prompts had before the stop"
    assert late[:2] == want[:2]
    life.check(new, [said[i] for i in range(5, len(crowd))])


def test_an_engine_ends_beside_a_stopped_host(life: Life) -> None:
    with life.stop():
        life.answered(life.fresh(1))
        life.engine.stop()
        assert life.host.hangs()
