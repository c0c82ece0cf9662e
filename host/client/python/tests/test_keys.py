"""Keys of the vLLM connector: they are on disks, so they must never change."""

from __future__ import annotations

import subprocess
import sys

from kvhost.keys import KeyChain, Item

TOKENS = list(range(1, 21))
GOLDEN = [
    "55a70c87c404c8ebf3ac63086acbaa1511979cabc76c53b633d0208802429e48",
    "6439f8944cec1207f20215f982d28d95b4e971f53321afa21d20dc8220595ecb",
]
GOLDEN_FULL = "d792104ac9cc2db8706152ccbf0001824d91a4714f80f0096120e12c43b6a976"


def keys(**options: object) -> list[bytes]:
    return KeyChain(8, **options).extend(TOKENS)  # type: ignore[arg-type]


def test_golden() -> None:
    assert [k.hex() for k in keys()] == GOLDEN
    assert keys(salt="s", adapter=b"a", items=[Item(6, 4, "img")])[1].hex() == GOLDEN_FULL


def test_independent_of_the_hash_seed() -> None:
    code = "from kvhost.keys import KeyChain; print(KeyChain(8, salt='x').extend(range(1, 21))[-1].hex())"
    said = {
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
                       capture_output=True, text=True, check=True).stdout
        for seed in ("0", "1", "random")
    }
    assert said == {keys(salt="x")[-1].hex() + "\n"}


def test_whatever_decides_the_kv_decides_the_key() -> None:
    variants = [
        keys(), keys(salt="a"), keys(adapter=b"a"), keys(adapter=b"b"), keys(generation=b"a"),
        keys(items=[Item(0, 2, "a")]), keys(items=[Item(0, 2, "b")]), keys(items=[Item(0, 3, "a")]),
        keys(items=[Item(1, 2, "a")]), KeyChain(4).extend(TOKENS)[:2],
    ]
    assert len({k for v in variants for k in v}) == sum(len(v) for v in variants)


def test_a_key_covers_its_prefix_and_no_more() -> None:
    assert len(keys()) == 2  # the tail of four tokens has none
    assert KeyChain(8).extend([*TOKENS[:8], 99, *TOKENS[9:]])[0] == keys()[0]
    assert KeyChain(8).extend([*TOKENS[:8], 99, *TOKENS[9:]])[1] != keys()[1]
    assert KeyChain(8).extend([99, *TOKENS[1:]])[1] != keys()[1]
    late = keys(items=[Item(8, 4, "img")])
    assert late[0] == keys()[0] and late[1] != keys()[1]
    both = keys(items=[Item(6, 4, "img")])
    assert both[0] != keys()[0] and both[1] != late[1]


def test_extending() -> None:
    chain, seen = KeyChain(8), list(TOKENS[:10])
    assert len(chain.extend(seen)) == 1
    seen += TOKENS[10:]
    assert len(chain.extend(seen, 15)) == 1
    assert chain.extend(seen) == keys()
