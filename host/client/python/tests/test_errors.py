"""Refusals have a class by their code, where callers want to tell them apart."""

import pytest

import kvhost


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (1, kvhost.Invalid), (2, kvhost.Disagreement), (3, kvhost.OverLimit), (4, kvhost.HostError), (6, kvhost.LeaseOver),
        (7, kvhost.Damaged), (8, kvhost.StorageFailed), (9, kvhost.Cancelled), (12, kvhost.Denied), (99, kvhost.HostError),
    ],
)  # fmt: skip
def test_class_by_code(code: int, kind: type) -> None:
    error = kvhost.HostError(code, "field", "text")
    assert type(error) is kind
    assert str(error) == "field: text"
    assert error.code == (code if code < 99 else kvhost.Code.UNSPECIFIED)


def test_an_arena_has_a_size() -> None:
    with pytest.raises(ValueError, match="0 bytes"):
        kvhost.Arena(0)
    arena = kvhost.Arena(4096)
    assert repr(arena) == "Arena(4096)"
    arena.close()
    assert repr(arena) == "<closed Arena>"
