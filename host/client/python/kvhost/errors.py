"""The errors of this package."""

from __future__ import annotations

import enum


class Code(enum.IntEnum):
    """The host's reason for a refused message or a failed chunk; the numbers of the protocol."""

    UNSPECIFIED = 0
    INVALID = 1
    DISAGREEMENT = 2
    LIMIT = 3
    UNKNOWN = 4
    BUSY = 5
    LEASE_OVER = 6
    DAMAGED = 7
    IO = 8
    CANCELLED = 9
    CLOSING = 10
    INTERNAL = 11
    DENIED = 12

    @classmethod
    def _missing_(cls, value: object) -> Code:
        return cls.UNSPECIFIED  # a code of a newer host


def printable(text: str) -> str:
    """Returns foreign text as one line that is safe on a terminal: characters of control, of direction and
    separators are shown as numbers."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class KvhostError(Exception):
    """The base of all errors here. Many contain text of a host or its peers, and engines log them."""

    def __str__(self) -> str:
        return printable(super().__str__())


class Refused(Exception):
    """A connector does not understand a setting, a model or a memory layout. The engine runs without it, or does not start."""


class HostGoneError(KvhostError):
    """No host answers, or the session with it is over. The caller connects again."""


class HostStoppedError(HostGoneError):
    """The host's process is stopped: it does not answer, and may go on at any time."""


OTHER_VERSION = "the host is of another version than this package: replace the older one"


class VersionError(HostGoneError):
    """The host and this package have different versions. Connecting again helps only after one of the two was
    replaced."""


class HostError(KvhostError):
    """The host's refusal of one message, or the failure of one chunk. Some codes have a class of their own."""

    def __new__(cls, code: int, field: str, message: str) -> HostError:
        return super().__new__(_BY_CODE.get(code, cls) if cls is HostError else cls)

    def __init__(self, code: int, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.code = Code(code)
        self.field = field


class UnknownError(HostError):
    """The message names an object that does not exist."""


class LimitError(HostError):
    """A limit of the host, or the session's share of its memory, descriptors or room, is used up. Try again when less is
    in flight."""


class DeniedError(HostError):
    """This process's user lacks the permission, for example to be the tenant that HELLO names."""


class InvalidError(HostError):
    """A field of the message has a bad value, or memory of this process is gone."""


class DisagreementError(HostError):
    """HELLO contradicts the engine's other sessions, or values that the operator has pinned."""


class LeaseOverError(HostError):
    """The lease was released, used or has expired. Look up again."""


class DamagedError(HostError):
    """The stored bytes have wrong checksums, or are gone. The next lookup misses."""


class StorageError(HostError):
    """The storage failed."""


class CancelledError(HostError):
    """The job was cancelled."""


_BY_CODE = {
    Code.UNKNOWN: UnknownError, Code.INVALID: InvalidError, Code.DISAGREEMENT: DisagreementError, Code.LIMIT: LimitError, Code.LEASE_OVER: LeaseOverError,
    Code.DAMAGED: DamagedError, Code.IO: StorageError, Code.CANCELLED: CancelledError, Code.DENIED: DeniedError,
}  # fmt: skip
