"""Holds on the engine's blocks that the host's jobs may touch, and their bounds.

The engine gives a block to another request once no reference to it is left. While the host may read or write a block,
the connector holds a reference of its own, as another request would. So no step and no load overwrites bytes that the
host reads, and no request reads bytes that the host overwrites, even if the request of the job ends, is preempted or
restarts.

The engine cannot use a held block, and a request that waits for its load has blocks and cannot run. vLLM schedules its
queue in order and stops at the first request that finds no blocks. So the holds have a bound. Once all running requests
have ended,

* every request with an ordered load finds the blocks for the rest of its tokens, and
* the largest request finds all of its blocks, even if no load ever ends. This includes a request that waits for its
  load and must then take other blocks, since a stopped host may write those of the load when it goes on. A request with
  more than half of the blocks may have a hit that leaves too few blocks for that; its load leaves the blocks that the
  largest other request needs.

The blocks of an unread store become free in any case, since the store is withdrawn (see kvhost.withdrawals).

Connectors of one engine share its blocks and the bound, which counts the holds of all of them. A block that two
hosts read counts for both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class _Hold:
    blocks: list[int]
    ranks: int  # ranks that have not reported yet that the host is done with the blocks


class Holds:
    """The holds of one engine core. An order to the workers holds its blocks under the order's number."""

    def __init__(
        self, pool: Any, groups: Sequence[tuple[int, int]], step_tokens: int, lookahead: int, ranks: int
    ) -> None:
        """``pool`` is the engine's BlockPool, and ``groups`` are the groups that use it: (tokens of a block, window
        or 0). ``step_tokens`` is the most tokens of a step, ``lookahead`` the number of tokens that a request
        needs room for beyond its own, and ``ranks`` the number of workers that get each order."""
        self._pool = pool
        self._groups, self._step_tokens, self._lookahead, self._ranks = groups, step_tokens, lookahead, ranks
        self._holds: dict[int, _Hold] = {}
        self._stores: dict[int, int] = {}  # number of blocks, by store order
        self._waiting: dict[str, tuple[int, int]] = {}  # requests with an ordered load: (held, needed) blocks
        self._loads: dict[int, str] = {}  # requests, by load order
        self._abandoned: set[int] = set()  # abandoned load orders
        self._all: list[Holds] = vars(pool).setdefault("kvhost_holds", [])  # the Holds of all connectors of the engine
        self._all.append(self)

    @property
    def any(self) -> bool:
        """Whether a block is held."""
        return bool(self._holds)

    @property
    def pending(self) -> bool:
        """Whether further steps will report the end of a hold. Holds of abandoned loads do not count, since they may
        last for any time."""
        return len(self._holds) > len(self._abandoned)

    @property
    def size(self) -> int:
        """The number of the engine's blocks. One of them is its null block."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def free(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def needs(self, tokens: int) -> int:
        """Returns the most blocks that a request of the given tokens takes."""
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
        """Returns the number of blocks that a load may hold for a request that needs ``needed`` in all, so that
        ``left`` remain."""
        held, others = self._of_waiting()
        idle = self._idle()
        if others + needed + idle > self.size:
            return 0
        return max(0, self.size - held - idle - left)

    def _of_waiting(self) -> tuple[int, int]:
        """Returns the blocks that the waiting requests have, and those that they need."""
        each = [blocks for h in self._all for blocks in h._waiting.values()]
        return sum(held for held, _ in each), sum(needed for _, needed in each)

    def _idle(self) -> int:
        """Returns the number of held blocks that no waiting request has."""
        return sum(h._unread() + h._left() for h in self._all)

    def _unread(self) -> int:
        return sum(self._stores.values())

    def _left(self) -> int:
        return sum(len(self._holds[order].blocks) for order, request in self._loads.items() if request not in self._waiting)

    def load(self, order: int, request: str, blocks: Sequence[int], held: int, needed: int) -> None:
        """Holds the blocks of a load. ``blocks`` are the blocks that the host writes, and ``held`` is the number of
        blocks that the waiting request has."""
        self._hold(order, blocks)
        self._loads[order] = request
        self._waiting[request] = held, needed

    def scheduled(self, request: str) -> None:
        """Records that a request no longer waits: it runs, has ended, or has released its blocks."""
        self._waiting.pop(request, None)

    def abandon(self, request: str, order: int) -> None:
        """Records that a request has left its blocks while the host may still write them."""
        self.scheduled(request)
        if order in self._holds:
            self._loads[order] = ""  # a new request may have the same name
            self._abandoned.add(order)

    @property
    def waiting(self) -> bool:
        """Whether a request waits with blocks for its load, or to be scheduled after it."""
        return bool(self._waiting)

    def waits(self, request: str) -> bool:
        return any(request in h._waiting for h in self._all)

    # ---- stores ------------------------------------------------------------------------------------------------------

    def room_to_store(self, blocks: int, limit: int, largest: int) -> bool:
        """Whether a store may hold the given number of blocks. All stores together may hold ``limit``. ``largest``
        is the number of blocks of the largest request that waits for no load."""
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
        """Records that on further ranks the host has ended orders. ``orders`` are (order, number of such ranks)."""
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
        """A context without holds, in which the engine may reset its block pool, but must not give a block to a
        request."""
        held = [self._pool.blocks[b] for hold in self._holds.values() for b in hold.blocks]
        self._pool.free_blocks(reversed(held))
        try:
            yield
        finally:
            self._pool.touch(held)
