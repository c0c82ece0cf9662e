"""What SGLang's plugin makes of requests. SGLang itself is not needed: a request is what its constructor leaves."""

from __future__ import annotations

import importlib.util
import itertools
import random
from pathlib import Path
from types import SimpleNamespace as Record
from typing import Any

import pytest
from test_content import adapter

import kvhost
from kvhost.content import Digests

_spec = importlib.util.spec_from_file_location("plugin", Path(kvhost.__file__).parent / "sglang/plugin.py")
assert _spec is not None and _spec.loader is not None
plugin: Any = importlib.util.module_from_spec(_spec)  # of a directory that imports SGLang
_spec.loader.exec_module(plugin)

NUMBERS = ["0" * 32, "1" * 32]


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two adapters, of which the second one's content is not known: what names each."""
    monkeypatch.setattr(plugin, "_adapters", {})
    folder = adapter(tmp_path / "a")
    plugin._load_adapter(lambda m, a: None, None, Record(lora_id=NUMBERS[0], lora_path=folder, lora_name="a"))
    assert plugin._adapters == {NUMBERS[0]: Digests().of(folder)[1].hex()}
    return [plugin._adapters[NUMBERS[0]], NUMBERS[1], plugin._server().decode()]


def extra_key(said: str | None, number: str | None) -> str | None:
    request = Record(lora_id=number, extra_key=said if number is None else (said or "") + number)
    plugin._new_request(None, request)
    return request.extra_key  # type: ignore[no-any-return]


def test_what_a_client_says_is_no_adapters_name(names: list[str]) -> None:
    assert extra_key(names[0], None) != extra_key(None, NUMBERS[0])
    assert extra_key(None, None) is None, "a request without either has SGLang's own keys"


def test_no_two_requests_share_a_key(names: list[str]) -> None:
    """Whatever the client says: also what the plugin itself has made."""
    seen: dict[str | None, Any] = {}
    texts: list[str | None] = [None, "", "class", "0:", "1:a0:", *names, *NUMBERS]
    texts += [extra_key(t, n) for t in texts for n in (None, *NUMBERS)]
    dice = random.Random(1)
    texts += ["".join(dice.choices(["0", "1", ":", "a", names[0], "\0"], k=dice.randint(1, 8))) for _ in range(500)]
    for said, number in itertools.product(dict.fromkeys(texts), [None, *NUMBERS]):
        made = extra_key(said, number)
        request = (said or "" if number else said, number)
        assert seen.setdefault(made, request) == request, f"{request} and {seen[made]} have the key {made!r}"


def test_generations_of_one_server_are_apart() -> None:
    seen = {b""}
    for events in itertools.product(["weights", "clear"], repeat=4):
        g = plugin.Generation()
        for event in events:
            g.next(event)
        seen.add(g.name)
    assert len(seen) == 17
