"""Refusals have a class by their code, where callers want to tell them apart."""

import pytest

import kvhost


@pytest.mark.parametrize(
    ("code", "kind"), [(1, kvhost.HostError), (3, kvhost.OverLimit), (12, kvhost.Denied), (99, kvhost.HostError)]
)
def test_class_by_code(code: int, kind: type) -> None:
    error = kvhost.HostError(code, "field", "text")
    assert type(error) is kind
    assert str(error) == "field: text"
    assert error.code == (code if code < 99 else kvhost.Code.UNSPECIFIED)
