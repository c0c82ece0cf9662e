"""The tests that left_out.txt names, which are not run."""

from __future__ import annotations

import re
from pathlib import Path

_FILE = Path(__file__).resolve().with_suffix(".txt")


def tests() -> dict[str, str]:
    """Why, by test."""
    found = {}
    for line in _FILE.read_text().splitlines():
        if line.startswith("#") or not line.strip():
            continue
        test, why, since = (part.strip() for part in line.split("|"))
        assert why and re.fullmatch(r"\d{4}-\d\d-\d\d", since), f"{_FILE.name}: want a test, why and a date, got {line}"
        found[test] = why
    return found


def text() -> str:
    """For those who read what CI prints."""
    lines = [f"left out: {test}: {why}" for test, why in tests().items()]
    return "\n".join(lines or ["left out: nothing"])
