"""The first example of the package's README runs, and loads what it has stored."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import re

README = pathlib.Path(__file__).parent.parent / "README.md"


def test_first_example_runs() -> None:
    example = re.search(r"```python\n(import kvhost\n.*?)```", README.read_text(), re.DOTALL)
    assert example, "the README has no example that imports kvhost"
    code = example.group(1)
    assert code.count('"/run/kvhost/kvhost.sock"') == 1, "the example has no socket to replace"
    code = code.replace("/run/kvhost/kvhost.sock", os.environ["KVHOST_SOCKET"])
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, str(README), "exec"), {})
    said = out.getvalue()
    assert "Result.STORED" in said, f"want the chunk stored, got {said!r}"
    assert said.endswith("[]\n"), f"want no block that failed, got {said!r}"
