"""The host's settings in the configuration of any engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

from kvhost.own import OwnHost, check_settings

_O = TypeVar("_O", bound="HostOptions")


@dataclass
class HostOptions:
    """``socket`` is the path of a running host's socket. With ``root`` and ``memory`` the engine starts its own host
    instead (``kvhost.own``). A slow host counts as gone after ``timeout`` seconds, a stopped one after two.
    ``prefetch`` copies hits to the host's nearest level before their load. ``extra`` has further texts, by name,
    that must be equal for engines to share objects."""

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
        """Reads the settings at a place of the engine's configuration. ValueError names a wrong setting."""
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
        """Returns the additions of ``extra`` to a kind. Their names differ from all of the engine's."""
        return tuple((f"operator.{name}", self.extra[name]) for name in sorted(self.extra))


@dataclass
class Options(HostOptions):
    """``arena_bytes`` is the size of the shared memory that objects pass through. ``sessions`` is the most sessions
    with the host at a time; each kind of object has one."""

    arena_bytes: int = 1 << 30
    sessions: int = 64


def _wrong(value: object, default: object) -> str:
    """Returns a description of the right values if a value is wrong; otherwise ""."""
    if default is MISSING or default is None:
        return ""  # the owner of the setting checks it
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, str):
        return "" if isinstance(value, str) and value else "a path"
    kinds, least = ((int,), min(1, default)) if isinstance(default, int) else ((int, float), 1e-3)
    ok = isinstance(value, kinds) and not isinstance(value, bool) and value >= least
    return "" if ok else f"a {'whole ' if kinds == (int,) else ''}number, at least {least}"
