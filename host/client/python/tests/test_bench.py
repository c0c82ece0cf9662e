"""kvhost bench stores and loads through this client, in a process of its own."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest


def bench(python: str, root: pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [os.environ["KVHOST_BIN"], "bench", "--through", "python", "--python", python, "--root", str(root), "--root", "memory:",
         "--memory", "host", "--chunks", "2", "--rounds", "1", "--pages", "fp8", "--json", "--engine-direct-io=false"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_every_pass_has_figures(tmp_path: pathlib.Path) -> None:
    done = bench(sys.executable, tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [r["pass"] for r in rows] == 2 * ["store", "load, first", "load, again", "load, by layer"]
    assert [r["route"] for r in rows] == 4 * ["staged"] + 4 * ["memory"]
    assert all(r["ours"] > 0 and r["through"] == "python" for r in rows)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("script", "says"),
    [("exit 3", "has ended"), ("echo hello", "hello"), ("read x; echo '{\"error\": \"no kvhost\"}'", "no kvhost")],
)
def test_a_client_that_fails_is_said(tmp_path: pathlib.Path, script: str, says: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o700)
    root = tmp_path / "root"
    root.mkdir()
    done = bench(str(python), root)
    assert done.returncode != 0
    assert says in done.stderr
    assert not list(root.iterdir())
