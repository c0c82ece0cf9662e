"""What the engine knows about a request when it ends, for policies."""

from __future__ import annotations

from typing import Any

from kvhost.session import EndReason, Hints

# vLLM's RequestStatus by name. It cannot tell a tool call from another stop: a client may say so (see of_request).
_REASONS = {
    "FINISHED_STOPPED": EndReason.STOP,
    "FINISHED_LENGTH_CAPPED": EndReason.LENGTH,
    "FINISHED_ABORTED": EndReason.ABORT,
}


def of_request(request: Any) -> Hints:
    """A request's hints.

    Its client may add ``kv_transfer_params: {"kvhost": {"tool_call": true, "return_seconds": 30}}``: its stop is a tool
    call, and the conversation is expected to go on after so long."""
    reason = _REASONS.get(str(request.status), EndReason.UNSPECIFIED)
    said = (request.kv_transfer_params or {}).get("kvhost")
    said = said if isinstance(said, dict) else {}
    if reason == EndReason.STOP and said.get("tool_call") is True:
        reason = EndReason.TOOL_CALL
    seconds = said.get("return_seconds", 0)
    valid = isinstance(seconds, (int, float)) and 0 <= seconds < 1 << 22
    return Hints(
        reason=reason,
        tokens_in=request.num_prompt_tokens,
        tokens_out=request.num_tokens - request.num_prompt_tokens,
        priority=max(-(1 << 31), min((1 << 31) - 1, int(getattr(request, "priority", 0)))),
        return_seconds=float(seconds) if valid else 0.0,
    )
