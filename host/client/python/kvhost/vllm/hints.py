"""What is known of a request besides its tokens: what its client wants of the cache, and what policies learn at its end."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvhost.session import EndReason, Hints

# vLLM's RequestStatus by name. It cannot tell a tool call from another stop: a client may say so (see of_request).
_REASONS = {
    "FINISHED_STOPPED": EndReason.STOP,
    "FINISHED_LENGTH_CAPPED": EndReason.LENGTH,
    "FINISHED_ABORTED": EndReason.ABORT,
}


def _said(params: Any) -> dict[str, Any]:
    said = (params or {}).get("kvhost")
    return said if isinstance(said, dict) else {}


def forbids(params: Any, act: str) -> bool:
    """Whether a request's client forbids to "load" KV for it, as one that measures prefill does, or to "store" its KV, as
    one whose prompt is secret, or never comes again: ``kv_transfer_params: {"kvhost": {"store": false}}``."""
    return _said(params).get(act) is False


def of_client(params: Any, reason: EndReason | None = None) -> Hints:
    """What a request's client has said, ``kv_transfer_params: {"kvhost": {"tool_call": true, "return_seconds": 30}}``: its
    stop is a tool call, and the conversation is expected to go on after so long. ``reason`` is the engine's, None where it
    does not tell why a request has ended."""
    said = _said(params)
    if reason in (None, EndReason.STOP) and said.get("tool_call") is True:
        reason = EndReason.TOOL_CALL
    seconds = said.get("return_seconds", 0)
    valid = isinstance(seconds, (int, float)) and 0 <= seconds < 1 << 22
    return Hints(reason=reason or EndReason.UNSPECIFIED, return_seconds=float(seconds) if valid else 0.0)


def of_request(request: Any) -> Hints:
    """A request's hints: the engine's, and its client's."""
    told = of_client(request.kv_transfer_params, _REASONS.get(str(request.status), EndReason.UNSPECIFIED))
    return dataclasses.replace(
        told,
        tokens_in=request.num_prompt_tokens,
        tokens_out=request.num_tokens - request.num_prompt_tokens,
        priority=max(-(1 << 31), min((1 << 31) - 1, int(getattr(request, "priority", 0)))),
    )
