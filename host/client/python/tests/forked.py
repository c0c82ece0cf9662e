"""A process that was forked from the test's."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_child(do: Callable[[], object]) -> str:
    """What a forked child gets: the result, or the error."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            said = f"returned {do()}"
        except BaseException as e:
            said = f"{type(e).__name__}: {e}"
        os.write(write, said.encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as f:
        said = f.read()
    os.waitpid(child, 0)
    return said
