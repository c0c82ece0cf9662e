"""The tests need a host: without KVHOST_SOCKET none is collected, and pytest says so."""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("KVHOST_SOCKET") else ["test_host.py", "test_objects_host.py"]


def pytest_report_header() -> str:
    return f"KVHOST_SOCKET: {os.environ.get('KVHOST_SOCKET', 'not set, so there is no host to test against')}"
