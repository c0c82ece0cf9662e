"""The engine's blocks that the host's jobs may touch, and how many of them they may be.

The engine gives a block to another request once no reference to it is left. While the host may read or write a block, the
connector holds a reference of its own, as another request would. So no step and no load overwrites what the host reads, and
nothing reads what the host overwrites, whatever becomes of the request: it may end, be preempted, or start over.

A block that is held is one that the engine cannot compute in, and a request that waits for its load holds blocks without
being able to run. vLLM schedules its queue in order and stops at the first request that finds no blocks. So the holds are
bounded such that, once all that runs has ended,

* every request with an ordered load finds the blocks for the rest of its tokens, and
* the largest request finds all of its blocks, even if no load ever ends: also one that waits for its load, and then has to
  take other blocks, since a host that is stopped may write those of the load whenever it goes on. A request of more than half
  of the blocks may have a hit that leaves too few for that: its load leaves what the largest of the others needs.

The blocks of a store that is not read come free all the same: it is taken back (see kvhost.withdrawals).

Connectors of one engine share its blocks, and the bound: what one may hold depends on what all of them do. A block that two hosts
read counts for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class _Hold:
    blocks: list[int]
    ranks: int  # that have not said yet that the host is done with the blocks


class Holds:
    """The holds of one engine core. An order to the workers holds its blocks under its number."""

    def __init__(
        self, pool: Any, groups: Sequence[tuple[int, int]], step_tokens: int, lookahead: int, ranks: int
    ) -> None:
        """``pool`` is the engine's BlockPool, ``groups`` are those that take blocks of it: (tokens of a block, window or 0).
        ``step_tokens`` is the most that a step computes, ``lookahead`` how many tokens a request needs room for beyond
        those it has. ``ranks`` is how many workers take each order."""
        self._pool = pool
        self._groups, self._step_tokens, self._lookahead, self._ranks = groups, step_tokens, lookahead, ranks
        self._holds: dict[int, _Hold] = {}
        self._stores: dict[int, int] = {}  # blocks by store order
        self._waiting: dict[str, tuple[int, int]] = {}  # requests with an ordered load: (held, needed) blocks
        self._loads: dict[int, str] = {}  # requests by load order
        self._abandoned: set[int] = set()  # load orders
        self._all: list[Holds] = vars(pool).setdefault("kvhost_holds", [])  # of the engine's connectors
        self._all.append(self)

    @property
    def any(self) -> bool:
        """Whether a block is held."""
        return bool(self._holds)

    @property
    def pending(self) -> bool:
        """Whether a block is held of which the engine learns by further steps that the host is done with it. That may last
        for any time where a load was abandoned."""
        return len(self._holds) > len(self._abandoned)

    @property
    def size(self) -> int:
        """The engine's blocks. One of them is its null block."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def free(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def needs(self, tokens: int) -> int:
        """The most blocks that a request of so many tokens takes."""
        tokens += self._lookahead
        total = 0
        for block, window in self._groups:
            n = math.ceil(tokens / block)
            if window:
                n = min(n, math.ceil((window + self._step_tokens) / block) + 1)
            total += n
        return total

    # ---- loads -------------------------------------------------------------------------------------------------------

    def room_to_load(self, needed: int, left: int) -> int:
        """How many blocks a load may hold for a request that needs ``needed`` in all, so that ``left`` are left."""
        held, others = self._of_waiting()
        idle = self._idle()
        if others + needed + idle > self.size:
            return 0
        return max(0, self.size - held - idle - left)

    def _of_waiting(self) -> tuple[int, int]:
        """Blocks that the waiting requests have, and that they need."""
        each = [blocks for h in self._all for blocks in h._waiting.values()]
        return sum(held for held, _ in each), sum(needed for _, needed in each)

    def _idle(self) -> int:
        """Blocks that are held for no request that waits."""
        return sum(h._unread() + h._left() for h in self._all)

    def _unread(self) -> int:
        return sum(self._stores.values())

    def _left(self) -> int:
        return sum(len(self._holds[order].blocks) for order, request in self._loads.items() if request not in self._waiting)

    def load(self, order: int, request: str, blocks: Sequence[int], held: int, needed: int) -> None:
        """``blocks`` are those that the host writes, ``held`` how many the waiting request has."""
        self._hold(order, blocks)
        self._loads[order] = request
        self._waiting[request] = held, needed

    def scheduled(self, request: str) -> None:
        """The request waits no more: it runs, has ended, or has given up its blocks."""
        self._waiting.pop(request, None)

    def abandon(self, request: str, order: int) -> None:
        """The request leaves its blocks, and the host may still write them."""
        self.scheduled(request)
        if order in self._holds:
            self._loads[order] = ""  # a request of the same name may come
            self._abandoned.add(order)

    @property
    def waiting(self) -> bool:
        """Whether a request waits with blocks for its load, or to be scheduled after it."""
        return bool(self._waiting)

    def waits(self, request: str) -> bool:
        return any(request in h._waiting for h in self._all)

    # ---- stores ------------------------------------------------------------------------------------------------------

    def room_to_store(self, blocks: int, limit: int, largest: int) -> bool:
        """Whether a store may hold so many blocks, where all stores may hold ``limit``. ``largest`` is what the largest
        request needs that waits for no load."""
        held, needed = self._of_waiting()
        total = self._idle() + blocks + max(needed, held + largest)
        return sum(h._unread() for h in self._all) + blocks <= limit and total <= self.size

    def store(self, order: int, blocks: Sequence[int]) -> None:
        self._hold(order, blocks)
        self._stores[order] = len(blocks)

    @property
    def stores(self) -> bool:
        return bool(self._stores)

    # ---- both --------------------------------------------------------------------------------------------------------

    def _hold(self, order: int, blocks: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[b] for b in blocks])
        self._holds[order] = _Hold(list(blocks), self._ranks)

    def holds(self, order: int) -> bool:
        return order in self._holds

    def free_on(self, orders: Iterable[tuple[int, int]]) -> None:
        """``orders`` are (order, ranks): on so many more ranks the host touches its blocks no more."""
        for order, ranks in orders:
            hold = self._holds.get(order)
            if hold is None:
                continue
            hold.ranks -= ranks
            if hold.ranks > 0:
                continue
            del self._holds[order]
            self._stores.pop(order, None)
            self._loads.pop(order, None)
            self._abandoned.discard(order)
            self._pool.free_blocks([self._pool.blocks[b] for b in reversed(hold.blocks)])

    @contextmanager
    def let_go(self) -> Iterator[None]:
        """Nothing is held inside: the engine may drop what it knows of the blocks. It must give none to a request."""
        held = [self._pool.blocks[b] for hold in self._holds.values() for b in hold.blocks]
        self._pool.free_blocks(reversed(held))
        try:
            yield
        finally:
            self._pool.touch(held)
