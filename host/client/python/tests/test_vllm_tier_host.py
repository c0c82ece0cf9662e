"""The traffic of the tier in vLLM's offloading with a real host: rows with holes, poison in every row that is loaded."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import kvhost
import pytest
from kvhost.link import Link
from kvhost.vllm.tierjobs import Done, Slot, TierJobs
from waits import left

ROW, ROWS, POISON = 48 << 10, 32, 0xA5
RUNS = {0: [(0, ROW)], 3: [(0, 8192), (20000, 4100)]}  # by group: (offset in the row, bytes)
GROUPS = [kvhost.Group(g, 1, [kvhost.Plane(i, 0, n) for i, (_, n) in enumerate(runs)], membership=True) for g, runs in RUNS.items()]


class Rig:
    def __init__(self, folder: Path) -> None:
        self.root, self.socket = folder / "kv", str(folder / "s")
        env = {k: v for k, v in os.environ.items() if not k.startswith("KVHOST_")} | {"KVHOST_STORE_MEMORY": "0"}
        self.host = subprocess.Popen(
            [os.environ["KVHOST_BIN"], "--root", f"{self.root}=64MiB", "--socket", self.socket, "--http-listen", ""],
            stderr=(folder / "log").open("w"), env=env,
        )
        self.arena = kvhost.Arena(ROW * ROWS)
        namespace = kvhost.Namespace(model="tier", dtype="f", key_bytes=32, tokens_per_block=16, groups=GROUPS)

        def open(epoch: int) -> list[kvhost.Session]:
            session = kvhost.Session(self.socket, f"tier/{epoch}", namespace)
            for g, runs in RUNS.items():
                session.register(g, self.arena, [kvhost.Region(at, ROW, ROWS) for at, _ in runs])
            return [session]

        self.link = Link("tier", self.socket, open, leads=True)
        assert self.link.start(left()), (folder / "log").read_text()
        self.jobs = TierJobs(self.link, RUNS, 32)

    def row(self, n: int) -> memoryview:
        return self.arena.view[n * ROW : (n + 1) * ROW]

    def done(self, job: int) -> Done:
        while left() > 0:
            self.jobs.flush()
            for done in self.jobs.finished():
                assert done.id == job, f"job {done.id} was answered, want {job}"
                return done
            time.sleep(0.002)
        raise AssertionError(f"no answer to job {job}")

    def ask(self, request: str, keys: Sequence[bytes]) -> list[bool | None]:
        while None in (found := [self.jobs.lookup(request, k) for k in keys]) and left() > 0:
            self.jobs.flush()
        return found

    def close(self) -> None:
        self.jobs.drain()
        self.link.close()
        self.arena.close()
        self.host.kill()
        self.host.wait(left())


@pytest.fixture
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    r = Rig(tmp_path_factory.mktemp("t"))
    yield r
    r.close()


def test_rows(rig: Rig) -> None:
    keys = [os.urandom(32) + g.to_bytes(4, "big") for g in (0, 0, 0, 3, 3)]
    rows = [7, 2, 11, 5, 30]
    content = [os.urandom(ROW) for _ in keys]
    for n, b in zip(rows, content, strict=True):
        rig.row(n)[:] = b
    rig.jobs.store(1, "a", [Slot(k, n) for k, n in zip(keys, rows, strict=True)])
    stored = rig.done(1)
    assert (sorted(stored.good), stored.bad) == (sorted(keys), [])
    used = [ROW] * 3 + [8192 + 4100] * 2
    assert stored.bytes == sum(used), f"{stored.bytes} bytes were stored, want those that the groups use: {sum(used)}"

    into = [20, 21, 22, 23, 24]
    damaged = keys[1]
    (piece,) = (p for p in rig.root.rglob("*") if damaged[:32].hex() in p.name)
    raw = bytearray(piece.read_bytes())
    raw[len(raw) // 2] ^= 1
    piece.write_bytes(raw)
    for n in range(ROWS):
        rig.row(n)[:] = bytes([POISON]) * ROW
    lost = os.urandom(32) + bytes(4)
    assert rig.ask("b", [*keys, lost]) == [True] * 5 + [False]
    rig.jobs.load(2, "b", [Slot(k, n) for k, n in zip([*keys, lost], [*into, 25], strict=True)])
    loaded = rig.done(2)
    assert (sorted(loaded.good), sorted(loaded.bad)) == (sorted(set(keys) - {damaged}), sorted([damaged, lost]))
    for k, n, b in zip(keys, into, content, strict=True):
        want = bytearray([POISON]) * ROW
        for at, size in RUNS[k[-1]]:
            want[at : at + size] = b[at : at + size]
        assert k == damaged or rig.row(n) == want, f"row {n} has other bytes than were stored, or bytes in its holes"
    untouched = set(range(ROWS)) - set(into) | {into[keys.index(damaged)]}
    assert all(rig.row(n) == bytes([POISON]) * ROW for n in untouched), "a row has damaged bytes, or was named by no job"
    assert rig.ask("b", [damaged]) == [False] and rig.ask("c", keys) == [k != damaged for k in keys]
