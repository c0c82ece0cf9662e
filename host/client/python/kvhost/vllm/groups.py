"""KV cache groups: the chunks of each that a hit needs, and the blocks of a request that may be stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvhost.session import NOT_WANTED

#: vLLM's block 0 means "no block", as for tokens that a sliding window has passed.
NULL_BLOCK = 0


@dataclass(frozen=True)
class GroupPlan:
    """One KV cache group. ``window`` is 0 if every token attends to all earlier ones."""

    id: int
    block_tokens: int
    chunk_tokens: int
    window: int = 0

    @property
    def blocks(self) -> int:
        """Blocks per chunk."""
        return self.chunk_tokens // self.block_tokens

    def skipped(self, computed: int) -> int:
        """Returns the number of leading tokens that no later token attends to after ``computed`` tokens."""
        return max(0, computed - self.window + 1) if self.window else 0

    def needed(self, chunks: int, first: int = 0) -> range:
        """Returns the chunks at or after ``first`` that must be loaded for the engine to continue after ``chunks``
        chunks."""
        return range(max(first, self.skipped(chunks * self.chunk_tokens) // self.chunk_tokens), chunks)

    def storable(self, chunk: int, computed: int) -> bool:
        """Whether all blocks of a chunk are still held in a step that begins with ``computed`` tokens."""
        return self.skipped(computed) // self.block_tokens <= chunk * self.blocks

    def chunk_blocks(self, table: Sequence[int], chunk: int) -> list[int]:
        return list(table[chunk * self.blocks : (chunk + 1) * self.blocks])

    def wanted_blocks(self, table: Sequence[int], chunk: int, computed: int, end: int) -> list[int]:
        """Returns a chunk's blocks for a load of the tokens from ``computed`` to ``end``, without those that the
        window has passed."""
        first, last = computed // self.block_tokens, -(-end // self.block_tokens)
        blocks = self.chunk_blocks(table, chunk)
        blocks += [NULL_BLOCK] * (self.blocks - len(blocks))
        return [
            b if first <= chunk * self.blocks + i < last and b != NULL_BLOCK else NOT_WANTED
            for i, b in enumerate(blocks)
        ]


def chunk_size(tokens: int, block_tokens: Sequence[int]) -> int:
    """Returns the smallest multiple of all groups' blocks that is at least ``tokens``."""
    unit = math.lcm(*block_tokens)
    return -(-tokens // unit) * unit


def longest_hit(groups: Sequence[GroupPlan], chunks: int, has: Callable[[int, int], bool]) -> int:
    """Returns the number of leading chunks that the engine can load. ``has(position in groups, chunk)`` tells
    whether a chunk is there."""
    n = chunks
    for at, g in enumerate(groups):
        if not g.window:
            n = next((i for i in range(n) if not has(at, i)), n)
    windows = [(at, g) for at, g in enumerate(groups) if g.window]
    return next((b for b in range(n, 0, -1) if all(has(at, i) for at, g in windows for i in g.needed(b))), 0)
