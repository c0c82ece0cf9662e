"""vLLM's own engine with few blocks and a host that is killed, paused and started again: every request is answered, with the
tokens of an engine without kvhost. SOAK_SECONDS says for how long, SOAK_SEED with which events, SOAK_PAUSES how long the host is
stopped at a time, SOAK_LOAD_IN where loads run; SOAK_LOAD_IN=tier makes the host a tier of vLLM's own offloading."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import vllm_model as model
from needs import needs
from processes import DEADLINE, Host
from vllm_engine import Engine, Tokens, tiered

needs("vllm")

SECONDS = float(os.environ.get("SOAK_SECONDS", "45"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
LOAD_IN = os.environ.get("SOAK_LOAD_IN", "auto")
PAUSES = [float(s) for s in os.environ.get("SOAK_PAUSES", "0.05,0.5,3,12").split(",")]
BLOCKS = 64
ANSWER = 12
#: Seconds of a pause that ends only once a crowd was answered after it began: so none waits for its end.
LONG = 60


def prompts(rng: random.Random) -> list[Tokens]:
    heads = [[rng.randrange(3, model.VOCAB) for _ in range(1300)] for _ in range(6)]
    return [
        rng.choice(heads)[: rng.randrange(1300)] + [rng.randrange(3, model.VOCAB) for _ in range(rng.randrange(1, 150))]
        for _ in range(60)
    ]


class Events:
    """What happens to the host while the engine answers."""

    def __init__(self, rng: random.Random, host: Host) -> None:
        self.rng, self.host = rng, host
        self.counts: dict[str, int] = {}
        self._until = 0.0  # when a pause or an absence ends
        self.paused = False  # for long

    def happen(self, now: float) -> None:
        if self._until:
            if now >= self._until and not self.paused:
                self._end()
            return
        match self.rng.randrange(60):
            case 0:
                self._count("killed")
                self.host.kill()
                self._until = now + self.rng.choice([0.01, 0.5, 3.0])
            case 1:
                self._count("stopped in order")
                self.host.stop()
                self._until = now + self.rng.choice([0.01, 0.5])
            case 2 | 3:
                self._count("paused")
                self.host.hang()
                seconds = self.rng.choice(PAUSES)
                self._until, self.paused = now + seconds, seconds >= LONG

    def answered(self, now: float) -> None:
        """Nothing waits for the engine."""
        if self.paused and now >= self._until:
            self._end()

    def _end(self) -> None:
        self._until, self.paused = 0.0, False
        if self.host.alive():
            self.host.resume()
        else:
            self.host.start()

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1


def test_soak(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    path = tmp_path / "model"
    model.write(path, model.config(3), seed=7)
    mix = prompts(rng)
    reference = Engine(tmp_path, "reference", path, None, blocks=4 * BLOCKS)
    want = [t for t, _ in reference.generate(mix, ANSWER)]
    reference.stop()
    host = Host(tmp_path)
    host.start()
    events = Events(rng, host)
    how = {"vllm": tiered(host)} if LOAD_IN == "tier" else {"load_in": LOAD_IN, "load_timeout": 2.0, "read_timeout": 2.0}
    engine = Engine(tmp_path, "engine", path, host, blocks=BLOCKS, env={"PYTHONHASHSEED": "0"}, **how)
    end, rounds, answered = time.monotonic() + SECONDS, 0, 0
    slowest = {"beside a stopped host": 0.0, "else": 0.0}  # seconds of a round
    try:
        while time.monotonic() < end:
            rounds += 1
            chosen = [rng.randrange(len(mix)) for _ in range(rng.randrange(1, 25))]
            doomed = [(rng.choice(mix), rng.randrange(1, 60)) for _ in range(rng.randrange(6))]
            engine.send("crowd", [mix[i] for i in chosen], ANSWER, doomed)
            started = time.monotonic()
            while not engine.answers(0.1):
                events.happen(time.monotonic())
                assert time.monotonic() - started < DEADLINE, f"SOAK_SEED={SEED}, round {rounds}: no answer, see {engine.log}"
            got, now = engine.answer(), time.monotonic()
            when = "beside a stopped host" if events.paused else "else"
            slowest[when] = max(slowest[when], now - started)
            events.answered(now)
            answered += len(got)
            wrong = [i for i, t in zip(chosen, got, strict=True) if t != want[i]]
            assert not wrong, f"SOAK_SEED={SEED}, round {rounds}: want the reference's tokens, prompts {wrong} have others"
            if rng.random() < 0.5:
                engine.ask("reset", False)  # succeeds only where the host holds no block
    finally:
        engine.kill()
        host.kill()
    loaded = (tmp_path / "loaded").read_text().splitlines() if (tmp_path / "loaded").exists() else []
    print(f"\n{rounds} rounds, {answered} answers, {len(loaded)} chunks loaded, host {events.counts}, slowest round {slowest}")
    if LOAD_IN == "tier":  # whose worker has no probe
        return
    assert set(loaded) <= set((tmp_path / "computed").read_text().splitlines()), "a loaded chunk has bytes never computed"
    if SECONDS >= 600:
        assert loaded and len(events.counts) == 3, f"want loads and every event, got {len(loaded)} and {events.counts}"

