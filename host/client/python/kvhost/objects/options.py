"""What users say of the host, in whatever configuration their engine has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

from kvhost.own import OwnHost, check_settings

_O = TypeVar("_O", bound="HostOptions")


@dataclass
class HostOptions:
    """``socket``: the host's; or ``root`` and ``memory`` of one that the engine starts for itself (``kvhost.own``).
    ``timeout``: seconds until a host that is slow counts as gone; one whose process is stopped does after two.
    ``prefetch``: what a lookup finds is copied to the host's nearest level until it is loaded.
    ``extra``: texts by name that must agree, too, for engines to share what they store."""

    socket: str = "/run/kvhost/kvhost.sock"
    timeout: float = 30.0
    prefetch: bool = True
    root: str = ""
    memory: str = ""
    extra: dict[str, str] = field(default_factory=dict)
    own: OwnHost | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.root or self.memory:
            self.own = OwnHost(self.root, self.memory)
            self.socket = self.own.socket

    @classmethod
    def parse(cls: type[_O], where: str, said: Mapping[str, Any]) -> _O:
        """Reads what a user said at a place of the engine's configuration. ValueError names what is wrong."""
        known = {f.name: f.default for f in fields(cls) if f.init}
        for name, value in said.items():
            if name not in known:
                raise ValueError(f"{where}.{name}: unknown, there are {', '.join(sorted(known))}")
            wrong = _wrong(value, known[name])
            if wrong:
                raise ValueError(f"{where}.{name}: {value!r}, want {wrong}")
        check_settings(where, said)
        extra = said.get("extra", {})
        if not isinstance(extra, Mapping) or not all(isinstance(t, str) for kv in extra.items() for t in kv):
            raise ValueError(f"{where}.extra: {extra!r}, want texts by name")
        return cls(**said)

    @property
    def apart(self) -> tuple[tuple[str, str], ...]:
        """What ``extra`` adds to a kind. No name of it is one of an engine's."""
        return tuple((f"operator.{name}", self.extra[name]) for name in sorted(self.extra))


@dataclass
class Options(HostOptions):
    """``arena_bytes``: shared memory that objects pass through. ``sessions``: the most with the host at a time; each kind of
    object has one."""

    arena_bytes: int = 1 << 30
    sessions: int = 64


def _wrong(value: object, default: object) -> str:
    """What would be right, where a value is not."""
    if default is MISSING or default is None:
        return ""  # its owner checks it
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, str):
        return "" if isinstance(value, str) and value else "a path"
    kinds, least = ((int,), min(1, default)) if isinstance(default, int) else ((int, float), 1e-3)
    ok = isinstance(value, kinds) and not isinstance(value, bool) and value >= least
    return "" if ok else f"a {'whole ' if kinds == (int,) else ''}number, at least {least}"
