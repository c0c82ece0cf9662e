"""Two hosts that lend each other, and an engine at each: one loads what the other has computed, says the same tokens, and goes on
when the lender stops, ends or has wrong bytes."""

from __future__ import annotations

import random
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import vllm_model as model
from needs import needs
from processes import DEADLINE, Host, wait_for
from vllm_engine import CHUNK, Engine, Tokens

needs("vllm")

LENGTH = 1500
HITS = LENGTH // CHUNK * CHUNK
RNG = random.Random(38)
#: By test. Each is loaded once by each engine, so it comes from the lender.
PROMPTS: dict[str, list[Tokens]] = {
    name: [[RNG.randrange(3, model.VOCAB) for _ in range(LENGTH)] for _ in range(2)] for name in ("hits", "stops", "ends", "damaged")
}


def free_ports(n: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [int(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Lending(Host):
    def __init__(self, folder: Path, listen: int, other: int, http: int) -> None:
        folder.mkdir()
        self.http = http
        super().__init__(
            folder, "1GiB", "--peers-listen", f"127.0.0.1:{listen}", "--peers-hosts", f"127.0.0.1:{other}", "--peers-deadline", "5s",
            "--http-listen", f"127.0.0.1:{http}",
        )

    def metric(self, name: str) -> float:
        with closing(urlopen(f"http://127.0.0.1:{self.http}/metrics", timeout=DEADLINE)) as r:
            found = re.findall(rf"^kvhost_{name}(?:{{.*}})? (\S+)$", r.read().decode(), re.MULTILINE)
        return sum(map(float, found))


class Pair:
    """A lender with the chunks of all prompts, and a host that has none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        model.write(self.model, model.config(3), seed=7)
        first, second, *http = free_ports(4)
        self.lender = Lending(folder / "lender", first, second, http[0])
        self.host = Lending(folder / "host", second, first, http[1])
        self.lender.start()
        engine = self.engine("computes", self.lender)
        self.want = {}
        for name, prompts in PROMPTS.items():
            answers = engine.one_by_one(prompts)
            assert [c for _, c in answers] == [0, 0]
            self.want[name] = [t for t, _ in answers]
        engine.reset()
        engine.stop()

    def engine(self, name: str, host: Host, **options: Any) -> Engine:
        return Engine(self.folder, name, self.model, host, blocks=64, **options)

    def knows(self) -> bool:
        """Whether the host knows all that the lender has."""
        try:
            return self.host.metric("peer_here") == 1 and self.host.metric("peer_entries") == len(self.lender.files())
        except URLError:  # it is still starting: the socket of its last run is there
            return False

    def start(self) -> None:
        """A host without chunks, while the lender runs."""
        self.host.start()
        wait_for("the host knows what the lender has", self.knows)

    def check_bytes(self, least: int) -> None:
        """All that was loaded has bytes that were computed under its key."""
        loaded = (self.folder / "loaded").read_text().splitlines()
        assert set(loaded) <= set((self.folder / "computed").read_text().splitlines())
        assert len(loaded) >= least
        (self.folder / "loaded").write_text("")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    p = Pair(tmp_path_factory.mktemp("peers"))
    yield p
    p.lender.kill()
    p.host.kill()


@pytest.fixture(scope="module", params=["beside", "step"])
def engine(pair: Pair, request: pytest.FixtureRequest) -> Iterator[Engine]:
    pair.host.root = pair.host.root.with_name(request.param)
    pair.host.command[2] = f"{pair.host.root}=1GiB"
    pair.start()
    e = pair.engine(request.param, pair.host, load_in=request.param)
    yield e
    e.kill()
    pair.host.kill()  # the next one has another root


def test_hits(pair: Pair, engine: Engine) -> None:
    before = pair.host.metric("peer_read_bytes_total")
    assert engine.one_by_one(PROMPTS["hits"]) == [(w, HITS) for w in pair.want["hits"]]
    pair.check_bytes(2 * HITS // CHUNK)
    assert pair.host.metric("peer_read_bytes_total") - before >= 2 * HITS // CHUNK * 4097


def doom(pair: Pair, engine: Engine, name: str) -> None:
    """The lender is stopped when a load begins."""
    (pair.folder / "stop").write_text(str(pair.lender.pid()))
    engine.send("generate", PROMPTS[name], 8, None)
    wait_for("a load begins", pair.lender.hangs)


def test_the_lender_stops(pair: Pair, engine: Engine) -> None:
    before = pair.host.metric("peer_failures_total")
    doom(pair, engine, "stops")
    assert [t for t, _ in engine.answer()] == pair.want["stops"]
    assert pair.host.metric("peer_failures_total") > before
    pair.lender.resume()
    pair.check_bytes(0)
    wait_for("the lender is asked again", pair.knows)


def test_the_lender_ends(pair: Pair, engine: Engine) -> None:
    doom(pair, engine, "ends")
    pair.lender.stop(signal.SIGKILL)
    assert [t for t, _ in engine.answer()] == pair.want["ends"]
    pair.check_bytes(0)
    pair.lender.start()
    wait_for("the lender is known again", pair.knows)


def test_the_lender_has_wrong_bytes(pair: Pair, engine: Engine) -> None:
    whole = {f: f.read_bytes() for f in pair.lender.files()}
    for f, b in whole.items():
        f.write_bytes(b[:-5000] + bytes([b[-5000] ^ 1]) + b[-4999:])
    try:
        before = pair.host.metric("peer_blamed_total")
        assert [t for t, _ in engine.one_by_one(PROMPTS["damaged"])] == pair.want["damaged"]
        assert pair.host.metric("peer_blamed_total") > before
        pair.check_bytes(0)
    finally:
        for f, b in whole.items():
            f.write_bytes(b)
