"""What routers know of an engine's chunks, against a model of the host's lookup."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvhost.vllm.chunktree import Chunk, ChunkTree

PARTS = 2
WHOLE = (1 << PARTS) - 1


def key(name: str) -> bytes:
    return name.encode()


def chunk(name: str) -> Chunk:
    """A chunk whose parent's name is its own without the last letter."""
    return Chunk(key(name[:-1]), name, [b"event"])


class Router:
    """Counts what it is told of, and insists on being told of nothing twice, and of parents first."""

    def __init__(self, tree: ChunkTree) -> None:
        self._tree = tree
        self.counts: set[str] = set()

    def take(self, most: int = 1 << 30) -> int:
        gone, come = self._tree.take(most)
        for c in gone:
            assert c.name in self.counts, f"{c.name} is removed, and was not there"
            self.counts.discard(str(c.name))
        for c in come:
            name = str(c.name)
            assert name not in self.counts, f"{name} comes twice"
            assert len(name) == 1 or name[:-1] in self.counts, f"{name} comes before its parent"
            self.counts.add(name)
        return len(gone) + len(come)

    def forgets(self) -> None:
        self.counts.clear()
        self._tree.untold()


def tree(*names: str, most_bytes: int = 1 << 30, parts: int = 1) -> tuple[ChunkTree, Router]:
    made = ChunkTree(parts, most_bytes)
    for name in names:
        made.add(key(name), chunk(name))
    return made, Router(made)


def says(router: Router, *names: str) -> None:
    router.take()
    assert router.counts == set(names)


def test_a_chunk_counts_with_all_before_it() -> None:
    t, router = tree("a", "ab", "abc", "abd")
    t.stored(key("abc"), 1)
    t.stored(key("ab"), 1)
    says(router)
    t.stored(key("a"), 1)
    says(router, "a", "ab", "abc")
    t.evicted(key("ab"), 1)
    says(router, "a")
    t.stored(key("abd"), 1)
    t.stored(key("ab"), 1)
    says(router, "a", "ab", "abc", "abd")


def test_all_parts_are_needed() -> None:
    t, router = tree("a", "b", parts=2)
    t.stored(key("a"), 1)
    t.found(key("b"), 1.0)
    says(router, "b")
    t.stored(key("a"), 2)
    t.evicted(key("b"), 2)
    says(router, "a")


def test_what_comes_and_goes_between_two_calls() -> None:
    t, router = tree("a", "b")
    t.stored(key("a"), 1)
    says(router, "a")
    t.evicted(key("a"), 1)
    t.stored(key("a"), 1)
    t.stored(key("b"), 1)
    t.evicted(key("b"), 1)
    gone, come = t.take(10)
    assert ([c.name for c in gone], [c.name for c in come]) == (["a"], ["a"])


def test_a_call_returns_so_many() -> None:
    names = ["a", "ab", "abc", "abcd", "x"]
    t, router = tree(*names)
    for name in names:
        t.stored(key(name), 1)
    assert [router.take(2) for _ in range(4)] == [2, 2, 1, 0] and router.counts == set(names)
    t.evicted(key("ab"), 1)
    t.evicted(key("x"), 1)
    t.stored(key("x"), 1)
    assert router.take(3) == 3 and len(router.counts) == 2
    says(router, "a", "x")


def test_routers_that_forget_are_told_again() -> None:
    t, router = tree("a", "ab", "x")
    for name in ("a", "ab", "x"):
        t.stored(key(name), 1)
    says(router, "a", "ab", "x")
    t.evicted(key("x"), 1)
    router.forgets()
    says(router, "a", "ab")


def test_a_snapshot() -> None:
    t, router = tree("a", "ab", "b", "c")
    for name in ("a", "ab", "b"):
        t.stored(key(name), 1)
    t.found(key("c"), 5.0)
    t.stored(key("c"), 1)
    t.only(1, {key("a"): 1}, since=5.0)
    says(router, "a", "c")


def test_the_oldest_are_forgotten() -> None:
    t, router = tree("a", "ab", "b", "c", most_bytes=4 * (ChunkTree.OVERHEAD + 5))
    for name in ("a", "ab", "b"):
        t.stored(key(name), 1)
    says(router, "a", "ab", "b")
    t.found(key("a"), 1.0)
    t.add(key("d"), chunk("d"))
    t.stored(key("d"), 1)
    says(router, "a", "b", "d")  # no request had "ab" for longest
    t.add(key("e"), chunk("e"))
    t.add(key("f"), chunk("f"))
    t.add(key("fg"), chunk("fg"))
    t.stored(key("fg"), 1)
    t.stored(key("f"), 1)
    says(router, "d", "f", "fg")
    assert len(t) == 4


def test_one_name_is_one_chunk() -> None:
    """Two keys of a prompt that the engine's hashes do not tell apart: an adapter was replaced in place."""
    t, router = tree("a", "ab")
    t.stored(key("a"), 1)
    t.stored(key("ab"), 1)
    says(router, "a", "ab")
    t.add(key("other"), Chunk(b"", "a", [b"event"]))
    t.stored(key("other"), 1)
    gone, come = t.take(10)
    assert [c.name for c in gone] == ["a", "ab"] and [c.name for c in come] == ["a"]
    t.evicted(key("a"), 1)
    assert t.take(10) == ([], [])


def test_new_weights() -> None:
    t, router = tree("a", "ab")
    t.stored(key("a"), 1)
    says(router, "a")
    t.forget()
    says(router)
    assert len(t) == 0 and key("a") not in t
    t.stored(key("a"), 1)
    says(router)


class Model:
    """The host, as lookups see it, of the chunks that the tree knows."""

    def __init__(self, t: ChunkTree) -> None:
        self._tree = t
        self.parts: dict[str, int] = {}

    def reachable(self) -> set[str]:
        return {n for n in self.parts if all(self._has(n[: i + 1]) for i in range(len(n)))}

    def _has(self, name: str) -> bool:
        return key(name) in self._tree and self.parts.get(name) == WHOLE


SECOND = [first + letter for first in "ab" for letter in "cd"]
THIRD = [second + letter for second in SECOND for letter in "ef"]
NAMES: Sequence[str] = ["a", "b", *SECOND, *THIRD, *(third + "g" for third in THIRD)]


@pytest.mark.parametrize("seed", range(40))
def test_histories(seed: int) -> None:
    """Whatever happens, routers end up with what a lookup finds."""
    rng = random.Random(seed)
    t = ChunkTree(PARTS, rng.choice((1 << 30, 9 * (ChunkTree.OVERHEAD + 5))))
    model, router = Model(t), Router(t)
    for now in range(2000):
        name, part = rng.choice(NAMES), rng.choice((1, 2, WHOLE))
        what = rng.choices(
            ("add", "stored", "evicted", "found", "take", "forgets", "snapshot", "none", "forget", "check"),
            (200, 200, 60, 60, 100, 4, 8, 2, 1, 40),
        )[0]
        if what == "add":
            for i in range(1, len(name) + 1):  # a request has all chunks before it
                if key(name[:i]) not in t:
                    t.add(key(name[:i]), chunk(name[:i]))
                    model.parts[name[:i]] = 0
        elif key(name) not in t and what in ("stored", "evicted", "found"):
            pass  # the reader drops it
        elif what == "stored":
            t.stored(key(name), part)
            model.parts[name] |= part
        elif what == "evicted":
            t.evicted(key(name), part)
            model.parts[name] &= ~part
        elif what == "found":
            t.found(key(name), now)
            model.parts[name] = WHOLE
        elif what == "take":
            router.take(rng.randrange(4))
        elif what == "forgets":
            router.forgets()
        elif what == "snapshot":
            there = {n: rng.randrange(4) for n in NAMES if rng.random() < 0.5}
            t.only(part, {key(n): bits for n, bits in there.items()}, since=now + 1)
            for n in model.parts:
                model.parts[n] &= there.get(n, 0) | ~part
        elif what == "none":
            t.none()
            model.parts = dict.fromkeys(model.parts, 0)
        elif what == "forget":
            t.forget()
        else:
            while router.take(3):
                pass
            assert router.counts == model.reachable(), f"step {now}"
