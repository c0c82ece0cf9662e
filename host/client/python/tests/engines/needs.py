"""What tests of engines need beyond what the client does."""

from __future__ import annotations

import importlib.util
import os

import pytest


def needs(module: str) -> None:
    """Skips the calling module without a package, by its name. KVHOST_REQUIRE_TOOLS names, with commas, those whose
    absence is a failure."""
    if importlib.util.find_spec(module) is not None:
        return
    if module in os.environ.get("KVHOST_REQUIRE_TOOLS", "").split(","):
        raise ModuleNotFoundError(f"{module} is not installed, and KVHOST_REQUIRE_TOOLS names it")
    pytest.skip(f"{module} is not installed", allow_module_level=True)
