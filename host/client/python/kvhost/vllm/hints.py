"""What is known of a request besides its tokens: what its client wants of the cache, and what policies learn at its end."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

from kvhost.session import EndReason, Hints

log = logging.getLogger("vllm.kvhost")

_VERSION = "1"  # of the actions of kv_hints

# vLLM's RequestStatus by name. It cannot tell a tool call from another stop: a client may say so (see of_request).
_REASONS = {
    "FINISHED_STOPPED": EndReason.STOP,
    "FINISHED_LENGTH_CAPPED": EndReason.LENGTH,
    "FINISHED_ABORTED": EndReason.ABORT,
}


#: What may happen after a request's end (see keeper.py).
KEPT = ("pin_seconds", "prefetch_seconds", "drop_seconds")


def _seconds(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1 << 22


def _bool(value: Any) -> bool:
    return isinstance(value, bool)


#: What a client may say, and which values each has.
_VALID = {"load": _bool, "store": _bool, "tool_call": _bool, **dict.fromkeys(("return_seconds", *KEPT), _seconds)}


@functools.lru_cache(maxsize=16)  # says it once, and remembers few of what clients make up
def _not_known(version: str) -> None:
    log.warning("kvhost: kv_hints: actions kvhost of version %r are ignored: known is %r", version, _VERSION)


def _said(request: Any) -> dict[str, Any]:
    """What the client says in ``kv_transfer_params``, and an orchestrator in the actions ``kvhost`` of vLLM's ``kv_hints`` (from
    0.32 on), whose payloads are the same. The client's word stands."""
    said: dict[str, Any] = {}
    for action in getattr(getattr(request, "kv_hints", None), "actions", ()):
        if action.action_type != "kvhost":
            continue
        if action.action_version == _VERSION:
            said |= action.payload
        else:
            _not_known(str(action.action_version)[:40])
    client = (request.kv_transfer_params or {}).get("kvhost")
    if not isinstance(client, dict):
        return said
    return said | client if said else client  # not copied for each chunk: the client has made it as large as it likes


def wished(request: Any) -> dict[str, float]:
    """What a request's client wants to happen after its end: seconds from then, by name."""
    said = _said(request)
    return {name: float(said[name]) for name in KEPT if _seconds(said.get(name))}


def answer(request: Any, rejected: dict[str, str], clipped: dict[str, str]) -> dict[str, Any] | None:
    """What became of each thing that a client has said, by its name; None where it has said nothing."""
    answers: dict[str, str] = {}
    for name, value in _said(request).items():
        if not (valid := _VALID.get(name)):
            answers[name] = "rejected: it is not known"
        elif not valid(value):
            answers[name] = f"rejected: {value!r} is no value of it"
        elif why := rejected.get(name):
            answers[name] = f"rejected: {why}"
        else:
            answers[name] = f"clipped: {clipped[name]}" if name in clipped else "accepted"
    return {"kvhost_answers": answers} if answers else None


def forbids(request: Any, act: str) -> bool:
    """Whether a request's client forbids to "load" KV for it, as one that measures prefill does, or to "store" its KV, as
    one whose prompt is secret, or never comes again: ``kv_transfer_params: {"kvhost": {"store": false}}``."""
    return _said(request).get(act) is False


def of_client(request: Any, reason: EndReason | None = None) -> Hints:
    """What a request's client has said, ``kv_transfer_params: {"kvhost": {"tool_call": true, "return_seconds": 30}}``: its
    stop is a tool call, and the conversation is expected to go on after so long. ``reason`` is the engine's, None where it
    does not tell why a request has ended."""
    said = _said(request)
    if reason in (None, EndReason.STOP) and said.get("tool_call") is True:
        reason = EndReason.TOOL_CALL
    seconds: Any = said.get("return_seconds")
    return Hints(reason=reason or EndReason.UNSPECIFIED, return_seconds=float(seconds) if _seconds(seconds) else 0.0)


def of_request(request: Any) -> Hints:
    """A request's hints: the engine's, and its client's."""
    told = of_client(request, _REASONS.get(str(request.status), EndReason.UNSPECIFIED))
    return dataclasses.replace(
        told,
        tokens_in=request.num_prompt_tokens,
        tokens_out=max(0, request.num_tokens - request.num_prompt_tokens),
        priority=max(-(1 << 31), min((1 << 31) - 1, int(getattr(request, "priority", 0)))),
    )
