"""The common properties of the objects of one session."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvhost.shape import Group, Namespace, Plane

KEY_BYTES = 32


@dataclass(frozen=True)
class Kind:
    """The properties that must agree for objects to share a session: the fields of a namespace with one group, and
    the tenant."""

    model: str
    engine: str  # the engine that made the bytes, since no other engine has the same keys
    pages: tuple[int, ...]  # bytes of each run of an object's memory, in the order of its addresses
    tenant: int = 0
    dtype: str = "opaque"
    tokens: int = 1  # tokens of an object, if the engine gives them
    extra: tuple[tuple[str, str], ...] = ()  # further texts that separate the bytes
    #: The data type of the pages if ``dtype`` does not name it. Objects of one kind may differ in it.
    page_dtype: str = field(default="", compare=False)

    @property
    def object_bytes(self) -> int:
        return sum(self.pages)

    def namespace(self) -> Namespace:
        planes = [Plane(0, part, size) for part, size in enumerate(self.pages)]
        return Namespace(
            model=self.model,
            dtype=self.dtype,
            key_bytes=KEY_BYTES,
            tokens_per_block=self.tokens,
            groups=[Group(0, blocks=1, planes=planes, membership=True)],
            engine=self.engine,
            extra=dict(self.extra),
            page_dtype=self.page_dtype,
        )
