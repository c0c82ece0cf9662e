"""What bytes are: namespaces, groups, planes, and where their pages stand."""

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
    """One KV-cache group: the pages that a chunk of ``blocks`` blocks is made of."""

    id: int
    blocks: int
    planes: Sequence[Plane]
    membership: bool = False  # looked up key by key, not by prefix

    @staticmethod
    def uniform(id: int, blocks: int, layers: int, parts: int, page_bytes: int) -> Group:
        """A group whose layers all have ``parts`` planes (two: keys and values) with pages of the same size."""
        return Group(id, blocks, [Plane(layer, part, page_bytes) for layer in range(layers) for part in range(parts)])


@dataclass(frozen=True)
class Namespace:
    """All that must agree, besides tokens and rank, for one engine's bytes to be another's."""

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
    #: Pieces of a chunk, each a run of KV heads, whatever the tensor-parallel size: engines of other sizes load what this one
    #: stores. The planes are those of one. 0: the pieces are the ranks'.
    units: int = 0
    extra: Mapping[str, str] = field(default_factory=dict)
    #: What the pages hold, where ``dtype`` does not say it: a hint to the host's compression, not to be agreed on.
    page_dtype: str = ""

    @property
    def chunk_bytes(self) -> int:
        """Of all ranks."""
        pages = sum(g.blocks * p.page_bytes for g in self.groups for p in g.planes)
        return pages * (self.units or (1 if self.replicated else self.tensor_parallel))

    @property
    def rank_units(self) -> int:
        """How many units a rank has; 1 where the pieces are the ranks'."""
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
    """The name of the floating type that all of torch's are. Empty where they differ, and for integers: it is unknown what
    raw bytes hold."""
    names = {str(d).removeprefix("torch.") for d in dtypes}
    name = names.pop() if len(names) == 1 else ""
    return "" if name.startswith(("int", "uint")) else name


@dataclass(frozen=True)
class Region:
    """One plane's pages in an arena: block b's page is at offset + b * stride. Where the engine's blocks have several of the group's
    pages, page i of block b is at offset + b * stride + i * page_stride, and stores and loads name the engine's blocks."""

    offset: int
    stride: int
    blocks: int
    pages: int = 1  # of a block
    page_stride: int = 0
