"""The places of pages in SGLang's host pools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvhost.objects import Addresses, Kind, Mapping, Place


@dataclass
class Pool:
    """A host pool, and the objects of its pages."""

    name: str
    raw: Any  # SGLang's HostKVCache or a sidecar's pool
    buffers: Kind | None  # objects of the pool's own buffers; None if its layout has none
    flat: Kind | None  # objects of one copy of the page; None if the pool has none

    @property
    def page_slots(self) -> int:
        """Returns the number of a transfer's indices per page."""
        return int(getattr(self.raw, "logical_page_size", 0) or getattr(self.raw, "page_size", 1) or 1)


def page_sizes(pool: Any) -> list[int]:
    """Returns the bytes of each buffer of a page, in the pool's order; empty if the pool's layout has no such
    buffers."""
    import torch

    slots = int(getattr(pool, "logical_page_size", 0) or getattr(pool, "page_size", 1) or 1)
    try:
        meta = pool.get_page_buffer_meta(torch.zeros(slots, dtype=torch.int64))
    except (AttributeError, ValueError, NotImplementedError):
        return []
    return [int(size) for size in meta[1]] if meta else []


def flat_size(pool: Any) -> int:
    """Returns the bytes of a flat page; 0 if the pool has none."""
    try:
        page = pool.get_dummy_flat_data_page()
    except (AttributeError, ValueError, NotImplementedError):
        return 0
    return int(page.numel() * page.element_size())


def shared_place(pool: Pool) -> Place | None:
    """Returns the place of the pool's pages if SGLang has allocated the pool in shared memory, else None."""
    import torch

    assert pool.buffers is not None
    fd, pages = getattr(pool.raw, "fd", None), int(getattr(pool.raw, "size", 0)) // pool.page_slots
    if fd is None or pages < 2:
        return None
    first, second, last = (
        addresses(pool, torch.arange(n * pool.page_slots, (n + 1) * pool.page_slots))[0] for n in (0, 1, pages - 1)
    )
    planes = tuple((a, b - a) for a, b in zip(first, second))
    end = max(a + size for a, size in zip(last, pool.buffers.pages))
    mapping = Mapping.find(min(first), end - min(first), fd)
    place = Place(mapping, planes, pages) if mapping is not None else None
    return place if place is not None and place.block(last) == pages - 1 else None


def addresses(pool: Pool, indices: Any) -> list[Addresses]:
    """Returns the addresses of the buffers of each page of a transfer."""
    assert pool.buffers is not None
    found, _ = pool.raw.get_page_buffer_meta(indices)
    n = len(pool.buffers.pages)
    return [found[i : i + n] for i in range(0, len(found), n)]
