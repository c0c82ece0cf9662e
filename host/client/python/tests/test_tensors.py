"""What of a large model's files stands for them: some rows of every tensor, and all that is small."""

from __future__ import annotations

import json
import math
import os
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvhost import content
from kvhost.content import fingerprint
from kvhost.tensors import samples

Tensors = dict[str, tuple[int, ...]]  # shapes, of two bytes an element
Where = dict[str, int]  # offsets in the file


def safetensors(file: Path, tensors: Tensors) -> Where:
    header: dict[str, Any] = {}
    at = 0
    for name, shape in tensors.items():
        n = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + n]}
        at += n
    text = json.dumps(header).encode()
    with file.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + at)
    return {name: 8 + len(text) + t["data_offsets"][0] for name, t in header.items()}


def torch(file: Path, tensors: Tensors) -> Where:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", "shapes")
        for i, shape in enumerate(tensors.values()):
            archive.writestr(f"archive/data/{i}", bytes(2 * math.prod(shape)))
        entries = {e.filename: e for e in archive.infolist()}
    return {name: entries[f"archive/data/{i}"].header_offset + 30 + len(f"archive/data/{i}") for i, name in enumerate(tensors)}


def gguf(file: Path, tensors: Tensors) -> Where:
    def text(s: str) -> bytes:
        return struct.pack("<Q", len(s)) + s.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 3)
    head += text("general.name") + struct.pack("<I", 8) + text("m")
    head += text("general.alignment") + struct.pack("<II", 4, 64)
    head += text("words") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b")
    at, where = 0, {}
    for name, shape in tensors.items():
        where[name] = at
        head += text(name) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", n) for n in reversed(shape))
        head += struct.pack("<IQ", 1, at)
        at += -(-2 * math.prod(shape) // 64) * 64
    start = -(-len(head) // 64) * 64
    with file.open("wb") as f:
        f.write(head)
        f.truncate(start + at)
    return {name: start + offset for name, offset in where.items()}


FORMATS: dict[str, Callable[[Path, Tensors], Where]] = {
    "model.safetensors": safetensors, "pytorch_model.bin": torch, "model.gguf": gguf,
}


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "_READ_WHOLE", 0)


def changed(file: Path, spans: list[tuple[int, int]]) -> bool:
    """Whether a change of these bytes, which are 0, is seen. It is taken back."""
    before = fingerprint(str(file))
    with file.open("r+b") as f:
        for at, n in spans:
            os.pwrite(f.fileno(), b"\xff" * n, at)
        after = fingerprint(str(file))
        for at, n in spans:
            os.pwrite(f.fileno(), bytes(n), at)
    return after != before


@pytest.mark.parametrize("format", FORMATS)
def test_every_tensor_is_in_it(tmp_path: Path, format: str) -> None:
    shapes: Tensors = {"q": (8192, 4096), "k_scale": (1,), "v_scale": (1,), "bias": (100,), "experts": (4, 256, 1024), "norm": (2048,)}
    where = FORMATS[format](tmp_path / format, shapes)
    for name, shape in shapes.items():
        assert changed(tmp_path / format, [(where[name], 2 * math.prod(shape))]), f"another {name} is not seen"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("ranks", [2, 8])
def test_every_rank_of_a_tensor_is_in_it(tmp_path: Path, format: str, ranks: int) -> None:
    rows, columns = 512, 4096
    where = FORMATS[format](tmp_path / format, {"before": (33, 77), "w": (rows, columns)})["w"]
    for rank in range(ranks):
        n = 2 * rows * columns // ranks
        assert changed(tmp_path / format, [(where + rank * n, n)]), f"rank {rank} of {ranks} by rows is not seen"
        part = 2 * columns // ranks
        spans = [(where + 2 * columns * row + rank * part, part) for row in range(rows)]
        assert changed(tmp_path / format, spans), f"rank {rank} of {ranks} by columns is not seen"


@pytest.mark.parametrize("format", ["model.safetensors", "model.gguf"])
def test_every_expert_is_in_it(tmp_path: Path, format: str) -> None:
    experts, rows, columns = 16, 256, 1024
    where = FORMATS[format](tmp_path / format, {"experts": (experts, rows, columns)})["experts"]
    for expert in range(experts):
        n = 2 * rows * columns // 8
        at = where + expert * 8 * n + random.Random(expert).randrange(8) * n
        assert changed(tmp_path / format, [(at, n)]), f"an eighth of expert {expert} is not seen"


@pytest.mark.parametrize(("rows", "columns"), [(6144, 512), (1000, 2048), (4096, 600)])
def test_so_many_neighbouring_rows_are_seen_anywhere(tmp_path: Path, rows: int, columns: int) -> None:
    """What the manual promises."""
    file = tmp_path / "model.safetensors"
    where, dice = safetensors(file, {"a": (3, 5), "w": (rows, columns)})["w"], random.Random(1)
    for _ in range(40):
        first = dice.randint(0, rows - 256)
        assert changed(file, [(where + 2 * columns * first, 2 * columns * 256)]), f"256 rows from {first} on are not seen"


def test_heads_of_a_fused_tensor_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    where = safetensors(file, {"qkv": (48 * 128, 1024)})["qkv"]
    for head in range(40, 48):
        assert changed(file, [(where + 2 * 1024 * 128 * head, 2 * 1024 * 128)]), f"head {head} is not seen"


def test_rows_that_change_in_turns_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    where = safetensors(file, {"w": (4096, 1024)})["w"]
    for odd in range(2):
        assert changed(file, [(where + 2048 * row, 2048) for row in range(odd, 4096, 2)])


def test_little_of_a_large_tensor_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    safetensors(file, {"w": (1 << 17, 4096), "x": (14336, 4096), "vector": (1 << 20,), "long": (2, 1 << 24), "pairs": (4096, 2, 40000)})
    size = file.stat().st_size
    with file.open("rb") as f:
        spans = list(samples(f.fileno(), size, file.name))
    assert sum(n for _, n in spans) < size / 60
    assert spans == sorted(spans) and all(a + n <= b for (a, n), (b, _) in zip(spans, spans[1:]))


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64, struct.pack("<Q", 2) + b"{]", b"GGUF" + b"\xff" * 60, b"PK\3\4"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_file_of_another_format_is_read_whole(tmp_path: Path, format: str, damage: bytes) -> None:
    file = tmp_path / format
    file.write_bytes(damage)
    with file.open("rb") as f:
        assert list(samples(f.fileno(), len(damage), format)) == ([(0, len(damage))] if damage else [])


def test_names_are_the_same_on_all_machines(tmp_path: Path) -> None:
    """They are in namespaces on disks, so they must never change."""
    safetensors(tmp_path / "model.safetensors", {"w": (4096, 1024), "scale": (1,)})
    assert fingerprint(str(tmp_path)) == "fab934753da2930fc5be7a06bb08aa93"
