"""The host's tenants of cache salts."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping

#: The least number of a tenant that is made from a salt. Lower numbers are the operator's.
HASHED = 1 << 31


class TenantError(ValueError):
    """The configured tenants are not possible in the host."""


def check_tenants(tenants: object) -> None:
    if not isinstance(tenants, Mapping):
        raise TenantError(f"{tenants!r}, want an object of salt: number")
    for salt, number in tenants.items():
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < HASHED:
            raise TenantError(f"{salt!r} has {number!r}, want a number from 0 to {HASHED - 1}")


def tenant(salt: str, named: Mapping[str, int]) -> int:
    """Returns the number of a salt: the operator's; 0 without a salt; otherwise a number that is made from the salt,
    so that it survives restarts. Salts that share a number share a quota, not objects: the salt is in every key."""
    if salt in named:
        return named[salt]
    return _hashed(salt) if salt else 0


@functools.lru_cache(maxsize=1)  # a salt may be of any length, and all keys of a prompt have the same one
def _hashed(salt: str) -> int:
    return HASHED | zlib.crc32(salt.encode("utf-8", "surrogatepass")) & (HASHED >> 1) - 1
