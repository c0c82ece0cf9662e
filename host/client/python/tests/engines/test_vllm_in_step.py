"""vLLM's own engine on a processor: loads inside the step that computes behind them. vLLM schedules no step on a processor before
it knows the last one's output; test_vllm_core.py does."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from needs import needs
from test_vllm import BLOCKS, HITS, LONG, MIXED, Setting, prompt, tokens
from vllm_engine import CHUNK, Engine

needs("vllm")


class InStep(Setting):
    def engine(self) -> Engine:
        if self._engine is None:
            self._starts += 1
            self._engine = Engine(
                self.folder, f"engine{self._starts}", self.llama, self.host, blocks=BLOCKS, load_in="step"
            )
        return self._engine

    def loads(self) -> int:
        """How many loads have run inside a step."""
        return int(self.engine().ask("counters").get("vllm:kvhost_loads_in_step", 0))


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InStep]:
    s = InStep(tmp_path_factory.mktemp("in_step"))
    yield s
    s.close()


def stored(setting: InStep) -> None:
    """All of LONG is stored."""
    setting.engine().one_by_one(LONG)
    setting.engine().reset()


def test_hits(setting: InStep) -> None:
    engine, want = setting.engine(), setting.reference.long
    assert tokens(engine.one_by_one(LONG)) == want
    (setting.folder / "loaded").write_text("")
    for _ in range(2):
        engine.reset()
        before = setting.loads()
        assert engine.one_by_one(LONG) == [(w, HITS) for w in want]
        assert setting.loads() > before  # the last ones are counted with the next step
    setting.check_bytes(2 * 3 * HITS // CHUNK)


def test_a_whole_prompt(setting: InStep) -> None:
    """Its last two tokens are computed, in a block that is loaded."""
    engine, whole = setting.engine(), prompt(70, 4 * CHUNK)
    want = engine.generate([whole])[0][0]
    engine.reset()
    before = setting.loads()
    assert engine.generate([whole]) == [(want, len(whole) - 2)]
    assert setting.loads() - before == 1
    assert engine.generate([whole])[0][0] == want
    (setting.folder / "loaded").write_text("")  # the last chunk with the tokens that were computed anew


def test_an_answer_of_one_token(setting: InStep) -> None:
    """The request ends with the step that loads its hit. What that step has computed is stored."""
    engine = setting.engine()
    longer = prompt(81, 6 * CHUNK + 7)
    engine.generate([longer[: 2 * CHUNK + 1]], 1)
    engine.reset()
    before = setting.loads()
    (want, cached), = engine.generate([longer], 1)
    assert cached == 2 * CHUNK
    engine.reset()
    assert engine.generate([longer], 1) == [(want, 6 * CHUNK)]
    engine.reset()
    assert engine.generate([longer], 8)[0][1] == 6 * CHUNK
    assert setting.loads() > before  # the last ones are counted with the next step


def test_several_requests_in_a_step(setting: InStep) -> None:
    engine = setting.engine()
    chosen = [i for i, p in enumerate(MIXED) if len(p) % CHUNK > 1]  # of others the last tokens are computed in loaded blocks
    for _ in range(2):
        answers = engine.generate([MIXED[i] for i in chosen], 4)
        assert tokens(answers) == [setting.reference.mixed[i] for i in chosen]
        engine.reset()
    assert sum(c for _, c in answers) > 0.5 * sum(len(MIXED[i]) for i in chosen)
    setting.check_bytes(32)


def test_damaged_pieces(setting: InStep) -> None:
    """The second request has its prefix from the blocks that the first one's load leaves bad."""
    engine, want = setting.engine(), setting.reference.long
    stored(setting)
    longer = LONG[0] + prompt(80, 300)
    said = engine.generate([longer])[0][0]
    engine.reset()
    damage(setting)
    assert tokens(engine.generate([LONG[0], longer, LONG[1]])) == [want[0], said, want[1]]
    assert engine.said("were not loaded")
    assert tokens(engine.generate([LONG[0], longer, LONG[1]])) == [want[0], said, want[1]], "bad blocks were forgotten"
    stored(setting)
    assert engine.one_by_one(LONG) == [(w, HITS) for w in want]


def damage(setting: InStep) -> None:
    for path in setting.host.files(64 << 10):
        with path.open("r+b") as f:
            f.seek(path.stat().st_size // 2)
            f.write(b"\xa5" * 64)


@pytest.mark.parametrize("seconds", [0.0, 1.0, 8.0])
def test_a_host_that_stops(setting: InStep, seconds: float) -> None:
    """For less than ``step_timeout``, and for longer: then the step goes on without the load, and its blocks stay unused
    until the host has ended it."""
    engine, want = setting.engine(), setting.reference.long
    stored(setting)
    setting.hang_in_mid_load()
    timer = threading.Timer(seconds, setting.host.resume)
    timer.start()
    assert tokens(engine.answer()) == want
    timer.join()
    engine.reset()  # all blocks come free
    assert tokens(engine.one_by_one(LONG)) == want
    stored(setting)
    assert engine.one_by_one(LONG) == [(w, HITS) for w in want]


def test_a_host_that_dies(setting: InStep) -> None:
    stored(setting)
    setting.host_dies_in_mid_load()


def test_an_abort(setting: InStep) -> None:
    engine, want = setting.engine(), setting.reference.long
    stored(setting)
    damage(setting)
    engine.ask("begin", "aborted", LONG[2])
    engine.ask("abort", "aborted")
    assert tokens(engine.generate(LONG)) == want
    engine.reset()
    assert tokens(engine.one_by_one(LONG)) == want
