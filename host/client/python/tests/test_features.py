"""The manual's table of what works with vLLM is made of the tests that show it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "engines"))

import features  # noqa: E402

CELLS = [(f, d, cell) for f, cells in features.TABLE.items() for d, cell in zip(features.DOORS, cells, strict=True)]


@pytest.mark.parametrize(("feature", "door", "cell"), CELLS)
def test_each_answer_has_a_test(feature: str, door: str, cell: features.Cell) -> None:
    for answer in cell.answers:
        assert answer in ("yes", "bytes", "refused"), f"{feature}, {door}: {answer}"
    for test in filter(None, (cell.test, cell.old)):
        file, name, parameter = re.fullmatch(r"([./\w]+\.py)::(\w+)(?:\[(.+)\])?", test).groups()  # type: ignore[union-attr]
        text = (HERE / "engines" / file).read_text()
        assert f"\ndef {name}(" in text, f"{feature}, {door}: {file} has no {name}"
        for word in parameter.rsplit("-", 1) if parameter else []:
            assert f'"{word}"' in text, f"{feature}, {door}: {file} names no {word}"


def test_the_manual_has_the_table() -> None:
    manual = (HERE.parents[2] / "docs" / "engines.md").read_text()
    assert features.table() in manual, f"want in host/docs/engines.md:\n{features.table()}"
