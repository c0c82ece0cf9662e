"""Tests need a host, or its binary: without KVHOST_SOCKET and KVHOST_BIN those are not collected, and pytest says so."""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("KVHOST_SOCKET") else ["test_host.py", "test_objects_host.py"]
if not os.environ.get("KVHOST_BIN"):
    collect_ignore += ["test_own.py", "test_prefetch.py", "test_traces.py", "test_vllm_tier_host.py", "test_withdrawals.py"]


def pytest_report_header() -> list[str]:
    missing = "not set, so there is no host to test against"
    return [f"{name}: {os.environ.get(name, missing)}" for name in ("KVHOST_SOCKET", "KVHOST_BIN")]
