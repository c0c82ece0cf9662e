"""What the objects of one session have in common."""

from __future__ import annotations

from dataclasses import dataclass

from kvhost.shape import Group, Namespace, Plane

#: The host's bound on the bytes of one chunk.
MAX_OBJECT_BYTES = 1 << 30

KEY_BYTES = 32


@dataclass(frozen=True)
class Kind:
    """All that must agree for objects to share a session: a namespace of one group, and the tenant."""

    model: str
    engine: str  # whose bytes these are: no other engine's objects have the same keys
    object_bytes: int
    tenant: int = 0
    extra: tuple[tuple[str, str], ...] = ()  # whatever else sets the bytes apart

    def namespace(self) -> Namespace:
        """The dtype is opaque: these engines do not say it, and the size of an object stands for it."""
        return Namespace(
            model=self.model,
            dtype="opaque",
            key_bytes=KEY_BYTES,
            tokens_per_block=1,
            groups=[Group(0, blocks=1, planes=[Plane(0, 0, self.object_bytes)], membership=True)],
            engine=self.engine,
            extra=dict(self.extra),
        )
