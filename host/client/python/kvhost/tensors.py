"""The places of tensors in a file of weights, and the samples that represent them."""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_ROW = 64 << 10  # most bytes of a row that is made by joining trailing dimensions
_SMALL = 64 << 10  # most bytes of rows that are read whole
_LONG = 256 << 10  # bytes of a row from which on it counts as many rows
_UNIT = 4 << 10  # least bytes of a sample
_LEAST, _APART = 16, 128  # samples of a matrix; rows for each
_THINNEST = 32  # of rows below a KiB at most one in this many is read
_HEADER = 256 << 20  # most bytes of a header

Span = tuple[int, int]  # offset in the file, bytes


@dataclass(frozen=True)
class Rows:
    """The successive rows of one matrix. A tensor of more dimensions is several matrices."""

    offset: int
    count: int
    size: int  # bytes of each row


def samples(fd: int, size: int, name: str) -> Iterator[Span]:
    """Returns the spans that represent a file, in ascending order: all bytes outside tensors, small tensors, and
    whole rows of large ones. There is one row in each 128 rows and in each sixteenth of a matrix, so that a part
    of a matrix, cut by rows or by columns, has some of them."""
    try:
        found = sorted(_matrices(fd, size, name), key=lambda r: r.offset)
    except (ArithmeticError, ValueError, LookupError, TypeError, struct.error, zipfile.BadZipFile):
        found = []  # another format, or a damaged file
    return _joined(_spans(found, size))


def _spans(found: Iterable[Rows], size: int) -> Iterator[Span]:
    at = 0
    for rows in found:
        if rows.offset < at or rows.offset + rows.count * rows.size > size:
            continue  # bytes that overlap another tensor belong to that one
        yield from _rest(at, rows.offset)
        yield from _samples(rows)
        at = rows.offset + rows.count * rows.size
    yield from _rest(at, size)


def _rest(begin: int, end: int) -> Iterator[Span]:
    """Returns the spans outside tensors: headers, and whole files of another format."""
    if end - begin <= _HEADER:
        yield begin, end - begin
    else:
        yield from _samples(Rows(begin, 1, end - begin))


def _samples(r: Rows) -> Iterator[Span]:
    total = r.count * r.size
    if total <= _SMALL:
        yield r.offset, total
        return
    row = r.size if r.size <= _LONG else _UNIT
    unit = row * -(-_UNIT // row)
    units = -(-total // unit)
    n = min(units, max(_LEAST, min(-(-total // row // _APART), -(-units // _THINNEST))))
    dice = zlib.crc32(struct.pack(">QQ", r.offset, total))
    for i in range(n):
        first, end = units * i // n, units * (i + 1) // n
        dice = (dice * 1664525 + 1013904223) & 0xFFFFFFFF  # random distances, since changes may be at even ones
        at = (first + (dice >> 8) % (end - first)) * unit
        yield r.offset + at, min(unit, total - at)


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    at = length = 0
    for offset, n in spans:
        if offset == at + length and length + n <= _HEADER:
            length += n
            continue
        if length:
            yield at, length
        at, length = offset, n
    if length:
        yield at, length


def _matrices(fd: int, size: int, name: str) -> Iterator[Rows]:
    if name.endswith(".safetensors"):
        return _safetensors(fd)
    return _gguf(fd, size) if name.endswith(".gguf") else _torch(fd)


def _shaped(offset: int, size: int, shape: list[int]) -> Iterator[Rows]:
    """Returns a tensor's matrices. Its last dimension is the contiguous one."""
    elements = math.prod(shape)
    if not elements or not size:
        return
    row, dims = 1, [n for n in shape if n != 1]
    while dims and (row == 1 or row * dims[-1] * size <= _ROW * elements):
        row *= dims.pop()
    bytes_, odd = divmod(row * size, elements)
    if odd:
        yield Rows(offset, 1, size)
        return
    rows = 1
    while dims and rows < _LEAST:
        rows *= dims.pop()
    for i in range(math.prod(dims)):
        yield Rows(offset + i * rows * bytes_, rows, bytes_)


def _safetensors(fd: int) -> Iterator[Rows]:
    (n,) = struct.unpack("<Q", os.pread(fd, 8, 0))
    header = json.loads(os.pread(fd, min(n, _HEADER), 8))
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            yield from _shaped(8 + n + begin, end - begin, tensor.get("shape") or [end - begin])


def _torch(fd: int) -> Iterator[Rows]:
    """Reads files of torch.save, which are archives of raw storages. Their shapes are in a pickle, which is searched
    and never loaded."""
    with os.fdopen(os.dup(fd), "rb") as file, zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            head = os.pread(fd, 30, entry.header_offset)
            lengths = struct.unpack("<HH", head[26:30])
            yield Rows(entry.header_offset + 30 + sum(lengths), 1, entry.compress_size)


# GGUF: bytes by type of value; type 8 is a text, 9 a list.
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def _gguf(fd: int, size: int) -> Iterator[Rows]:
    head = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    if head[:4] != b"GGUF":
        raise ValueError("no GGUF")
    _, tensors, values = struct.unpack_from("<IQQ", head, 4)
    at, alignment = 24, 32

    def number(form: str) -> int:
        nonlocal at
        (n,) = struct.unpack_from(form, head, at)
        at += struct.calcsize(form)
        return int(n)

    def text() -> bytes:
        nonlocal at
        n = number("<Q")
        at += n
        return head[at - n : at]

    def skip(kind: int) -> None:
        nonlocal at
        if kind == 8:
            text()
        elif kind == 9:
            inner, n = number("<I"), number("<Q")
            if inner in _SCALARS:
                at += n * _SCALARS[inner]
            else:
                for _ in range(n):
                    skip(inner)
        else:
            at += _SCALARS[kind]

    for _ in range(values):
        key, kind = text(), number("<I")
        if key == b"general.alignment" and kind == 4:
            alignment = struct.unpack_from("<I", head, at)[0]
        skip(kind)
    found: list[tuple[int, list[int]]] = []
    for _ in range(tensors):
        text()
        shape = [number("<Q") for _ in range(number("<I"))]
        number("<I")  # the tensor's type
        found.append((number("<Q"), shape[::-1]))  # the first dimension is the contiguous one
    start = -(-at // alignment) * alignment
    found.sort()
    for (offset, shape), end in zip(found, [*(o for o, _ in found[1:]), size - start]):
        rows = math.prod(shape[:-1])
        row = (end - offset) // max(1, rows)  # in bytes, since blocks of quantised numbers have no size in elements
        if row:
            matrices = math.prod(shape[:-2])
            rows //= matrices
            for i in range(matrices):
                yield Rows(start + offset + i * rows * row, rows, row)
