"""Leaves out what left_out.txt names, and nothing else; and hosts of which each test has one of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import left_out
import pytest
from processes import Host


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    there = {f"{Path(i.path).name}::{i.name}": i for i in items}
    files = {Path(i.path).name for i in items}
    out = [t for t in left_out.tests() if t.partition("::")[0] in files]
    if lacking := [t for t in out if t not in there and "::" not in " ".join(config.args)]:
        raise pytest.UsageError(f"left_out.txt names {', '.join(lacking)}, want tests that there are")
    leaving = [there[t] for t in out if t in there]
    config.hook.pytest_deselected(items=leaving)
    items[:] = [i for i in items if i not in leaving]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    h = Host(tmp_path)
    h.start()
    yield h
    h.stop()


@pytest.fixture
def compressing(tmp_path: Path) -> Iterator[Host]:
    h = Host(tmp_path, "1GiB", "--store-compression", "huffman")
    h.start()
    yield h
    h.stop()
