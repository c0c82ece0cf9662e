"""Counts of tokens: no difference of them is negative or larger than the prompt, whatever the sizes of blocks, chunks, prompts
and of what the engine's own cache has."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from vllm_doubles import DoubleLink, DoublePool, DoubleSession, request, step

from kvhost import NOT_WANTED
from kvhost.keys import KeyChain
from kvhost.vllm.groups import GroupPlan, chunk_size
from kvhost.vllm.holds import Holds
from kvhost.vllm.orders import LoadOrder, WorkerReport
from kvhost.vllm.scheduler import Scheduler
from kvhost.vllm.settings import Settings

TOKENS = list(range(2000))
LEFT_IN_STEP = 2  # tokens that a step with a load computes at least


class Rig:
    def __init__(self, block: int, chunk: int, in_step: bool) -> None:
        self.block, self.chunk, self.in_step = block, chunk, in_step
        self.session, self.pool = DoubleSession(), DoublePool(2 * 3 * chunk // block + 16)
        link: Any = DoubleLink(self.session)
        self.s = Scheduler(
            Settings(load_when="always", lookup_wait=0.0), link, (GroupPlan(0, block, chunk),), 1, 1, loads=True,
            step_tokens=8192, holds=Holds(self.pool, [(block, 0)], 8192, 0, 1), in_step=in_step,
        )
        self.s.reported(WorkerReport(epochs={(0, 0): 0}))

    def run(self, length: int, computed: int, resident: int, want: float) -> None:
        """A prompt of ``length`` tokens, of which the engine has ``computed`` and the host ``resident`` chunks. The engine takes
        the part ``want`` of what it is promised."""
        what = f"block {self.block}, chunk {self.chunk}, prompt {length}, computed {computed}, resident {resident} chunks"
        r = request("a", TOKENS[:length])
        self.session.resident = set(KeyChain(self.chunk).extend(TOKENS[:length])[:resident])
        n = self.s.matched(r, computed)
        inside = self.s.loads_in_step(r)
        most = length - computed - (LEFT_IN_STEP if inside else 0)
        assert n is not None and 0 <= n <= max(0, most), f"{what}: {n} tokens are promised, want 0 to {most}"
        if computed < resident * self.chunk < length - LEFT_IN_STEP:
            assert n == resident * self.chunk - computed, f"{what}: {n} tokens are promised of {resident} chunks"
        taken = int(n * want) // self.block * self.block if want < 1 else n
        table = [[1 + i for i in range(-(-length // self.block))]]
        self.s.allocated(r, table, taken)
        r.num_computed_tokens = computed + taken
        orders = self.s.step(step({"a": max(1, length - r.num_computed_tokens)}))
        for order in orders.loads:
            self.check(order, table[0], computed, computed + taken, what)
        assert bool(orders.loads) == bool(taken), f"{what}: {len(orders.loads)} loads are ordered for {taken} tokens"
        for store in orders.stores:
            for _, chunks in store.chunks:
                for c in chunks:
                    assert (c.index + 1) * self.chunk <= length, f"{what}: chunk {c.index} is stored, which is not whole"
        over = [o.id for o in orders.loads] + [o.id for o in orders.stores]
        report = WorkerReport(free=Counter(over), loaded=Counter(o.request_id for o in orders.loads if not o.in_step))
        self.s.reported(report)
        self.s.received(report, set())
        self.s.output()
        self.s.finished(r)
        late = self.s.step(step({}))
        self.s.reported(WorkerReport(free=Counter(o.id for o in late.stores)))
        assert not self.pool.held, f"{what}: blocks are held with nothing in flight"

    def check(self, order: LoadOrder, table: list[int], computed: int, end: int, what: str) -> None:
        """The host writes the blocks of the tokens that are wanted, and of no others but, inside a step, those behind them in
        the last chunk."""
        last = -(-end // self.chunk) * self.chunk if order.in_step else end
        mine = set(table[computed // self.block : -(-last // self.block)])
        must = set(table[computed // self.block : -(-end // self.block)])
        written = {b for g in order.groups for c in g.chunks for b in c.blocks if b != NOT_WANTED}
        assert must <= written <= mine, f"{what}: blocks {sorted(written)} are written for tokens {computed} to {end}"


@pytest.mark.parametrize("in_step", [False, True], ids=["beside", "in the step"])
@pytest.mark.parametrize("blocks", [range(1, 9), range(9, 65), range(65, 257)], ids=lambda r: f"{r.start}-{r.stop - 1}")
def test_every_count_is_bounded(blocks: range, in_step: bool) -> None:
    dice = random.Random(blocks.start)
    for block in blocks:
        for wished in {1, dice.choice([2, 8, 256, dice.randint(1, 512)])}:
            chunk = chunk_size(wished, [block])
            rig = Rig(block, chunk, in_step)
            for length in [n for n in (1, 2, chunk - 1, chunk, chunk + 1, 2 * chunk, 2 * chunk + 3) if 1 <= n <= len(TOKENS)]:
                most = (length - 1) // block
                rig.run(length, most * block, length // chunk, 1)
                rig.run(length, dice.randint(0, most) * block, dice.randint(0, length // chunk), dice.choice([1, 1, 0.5]))
            rig.s.close()
