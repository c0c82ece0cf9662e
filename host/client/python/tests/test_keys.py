"""Keys of the vLLM connector: they are on disks, so they must never change."""

from __future__ import annotations

import hashlib
import random
import struct
import subprocess
import sys
from typing import Any

from kvhost.keys import KEY_BYTES, Item, KeyChain

TOKENS = list(range(1, 21))
GOLDEN = [
    "b73428968ae723edabee6d0966ae1fbea6ba656b282849f75bdc05c89f0da633",
    "371d3d096ac1cbbe05bde0f197d39c3f5730a59851447c4db3cce83ca61dda5b",
]
GOLDEN_FULL = "f63286da3aaea97d95cbf05a592e4cb6030977f55dbf43e8d88d4fdb94aaa3e4"


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


class Text(str):
    """Counts how often it is read."""

    reads = 0

    def encode(self, *args: Any, **options: Any) -> bytes:
        self.reads += 1
        return super().encode(*args, **options)


def test_what_a_client_says_is_read_once() -> None:
    picture, salt = Text("u" * 1000), Text("s" * 1000)
    chain = KeyChain(8, salt=salt, items=[Item(0, 800, picture)])
    for n in range(8, 808, 8):
        chain.extend(range(n))
    assert len(chain.keys) == 100
    assert (picture.reads, salt.reads) == (1, 1), "an identifier and a salt are read once, however long the prompt is"


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES).digest()


def test_items_that_overlap_chunks_and_one_another() -> None:
    """The keys are those of the documented format."""
    dice = random.Random(1)
    for _ in range(200):
        size, tokens = dice.randint(1, 9), [dice.randint(0, 9) for _ in range(60)]
        items = [Item(dice.randint(0, 60), dice.randint(1, 30), f"i{n}") for n in range(dice.randint(0, 6))]
        last = digest(b"kvhost chain 3\0" + struct.pack(">I", size) + 3 * struct.pack(">Q", 0))
        want = []
        for start in range(0, len(tokens) // size * size, size):
            text = last + b"".join(struct.pack(">I", t) for t in tokens[start : start + size])
            for i in sorted(items, key=lambda i: i.start):
                if i.start < start + size and i.start + i.length > start:
                    text += struct.pack(">qI", i.start - start, i.length) + digest(i.identifier.encode())
            want.append(last := digest(text))
        chain = KeyChain(size, items=items)
        chain.extend(tokens[: dice.randint(0, 60)])
        assert chain.extend(tokens) == want, f"chunks of {size}, {items}"


def test_no_text_moves_into_another() -> None:
    """Adapter, salt and generation are apart, whatever is in them."""
    seen: dict[bytes, tuple[bytes, ...]] = {}
    texts = [b"", b"a", b"aa", b"\0", struct.pack(">Q", 0), struct.pack(">Q", 1) + b"a"]
    for adapter in texts:
        for salt in texts:
            for generation in texts:
                key = KeyChain(8, adapter=adapter, salt=salt.decode("latin1"), generation=generation).extend(TOKENS)[0]
                assert key not in seen, f"{(adapter, salt, generation)} has the key of {seen[key]}"
                seen[key] = adapter, salt, generation
