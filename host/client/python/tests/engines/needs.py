"""What tests of engines need beyond what the client does."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest


def needs(module: str) -> None:
    """Skips the calling module without a package, by its name. KVHOST_REQUIRE_TOOLS names, with commas, those whose
    absence is a failure."""
    if importlib.util.find_spec(module) is None:
        _lacks(module, f"{module} is not installed")


def needs_program(name: str, variable: str) -> None:
    """Likewise, without a program that a variable of the environment names."""
    if not os.path.exists(os.environ.get(variable, "")):
        _lacks(name, f"{variable} does not name {name}")


def needs_directory(name: str, variable: str) -> Path:
    """Likewise, without what is installed in a directory that a variable of the environment names."""
    directory = Path(os.environ.get(variable, "/nowhere"))
    if not (directory / "installed").exists():
        _lacks(name, f"{variable} does not name {name}")
    return directory


def has_fp8() -> bool:
    """Whether vLLM for processors has a cache in fp8 here."""
    import torch

    return torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()


def needs_fp8() -> None:
    """Skips the calling test without that."""
    if not has_fp8():
        pytest.skip("this processor has neither AVX-512 nor AMX, which vLLM's cache in fp8 needs")


def _lacks(name: str, why: str) -> None:
    if name in os.environ.get("KVHOST_REQUIRE_TOOLS", "").split(","):
        raise ModuleNotFoundError(f"{why}, and KVHOST_REQUIRE_TOOLS names {name}")
    pytest.skip(why, allow_module_level=True)
