"""The description of bytes: namespaces, groups, planes, and the places of their pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvhost.v1 import kvhost_pb2 as pb


@dataclass(frozen=True)
class Plane:
    """One stream of pages: a layer's K (part 0), its V (part 1), or both in one page (part 0)."""

    layer: int
    part: int
    page_bytes: int


@dataclass(frozen=True)
class Group:
    """One KV-cache group: the pages of a chunk of ``blocks`` blocks."""

    id: int
    blocks: int
    planes: Sequence[Plane]
    membership: bool = False  # keys are looked up one by one, not by prefix

    @staticmethod
    def uniform(id: int, blocks: int, layers: int, parts: int, page_bytes: int) -> Group:
        """Returns a group in which every layer has ``parts`` planes (two: keys and values) with pages of the same
        size."""
        return Group(id, blocks, [Plane(layer, part, page_bytes) for layer in range(layers) for part in range(parts)])


@dataclass(frozen=True)
class Namespace:
    """Everything, besides tokens and rank, that must agree for engines to share bytes."""

    model: str
    dtype: str
    key_bytes: int
    tokens_per_block: int
    groups: Sequence[Group]
    revision: str = ""
    engine: str = ""
    hash_algorithm: str = ""
    hash_seed: str = ""
    tensor_parallel: int = 1
    pipeline_stages: int = 1
    context_parallel: int = 1
    replicated: bool = False
    #: The number of pieces of a chunk, each a run of KV heads, for all tensor-parallel sizes: engines of other sizes
    #: load the same chunks. The planes are those of one piece. 0: each rank has a piece.
    units: int = 0
    extra: Mapping[str, str] = field(default_factory=dict)
    #: The data type of the pages if ``dtype`` does not name it. It is a hint to the host's compression, and need not
    #: agree.
    page_dtype: str = ""

    @property
    def chunk_bytes(self) -> int:
        """Returns the bytes of a chunk of all ranks."""
        pages = sum(g.blocks * p.page_bytes for g in self.groups for p in g.planes)
        return pages * (self.units or (1 if self.replicated else self.tensor_parallel))

    @property
    def rank_units(self) -> int:
        """Returns the number of units of a rank; 1 if each rank has a piece."""
        return max(1, self.units // self.tensor_parallel)

    def message(self) -> pb.Namespace:
        return pb.Namespace(
            model=self.model, revision=self.revision, dtype=self.dtype, engine=self.engine,
            hash_algorithm=self.hash_algorithm, hash_seed=self.hash_seed, key_bytes=self.key_bytes,
            tokens_per_block=self.tokens_per_block, tensor_parallel=self.tensor_parallel,
            pipeline_stages=self.pipeline_stages, context_parallel=self.context_parallel,
            replicated=self.replicated, units=self.units, extra=dict(self.extra), page_dtype=self.page_dtype,
            groups=[
                pb.Group(
                    id=g.id, blocks=g.blocks,
                    lookup=pb.LOOKUP_KIND_MEMBERSHIP if g.membership else pb.LOOKUP_KIND_PREFIX,
                    planes=[pb.Plane(layer=p.layer, part=p.part, page_bytes=p.page_bytes) for p in g.planes],
                )
                for g in self.groups
            ],
        )


def page_dtype(dtypes: Iterable[object]) -> str:
    """Returns the common floating type of torch's types. It is empty if they differ, and for integers, since the
    content of raw bytes is unknown."""
    names = {str(d).removeprefix("torch.") for d in dtypes}
    name = names.pop() if len(names) == 1 else ""
    return "" if name.startswith(("int", "uint")) else name


@dataclass(frozen=True)
class Region:
    """One plane's pages in an arena: the page of block b is at offset + b * stride. If a block of the engine has
    several of the group's pages, page i of block b is at offset + b * stride + i * page_stride, and stores and
    loads name the engine's blocks."""

    offset: int
    stride: int
    blocks: int
    pages: int = 1  # pages of a block
    page_stride: int = 0
