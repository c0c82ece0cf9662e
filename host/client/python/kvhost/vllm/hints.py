"""Hints of a request: the wishes of its client for the cache, and the information for policies at its end."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

from kvhost.session import EndReason, Hints

log = logging.getLogger("vllm.kvhost")

_VERSION = "1"  # version of the actions of kv_hints

# vLLM's RequestStatus by name. It does not distinguish a tool call from another stop; a client may do that (see
# of_request).
_REASONS = {
    "FINISHED_STOPPED": EndReason.STOP,
    "FINISHED_LENGTH_CAPPED": EndReason.LENGTH,
    "FINISHED_ABORTED": EndReason.ABORT,
}


#: The most seconds that a client may look ahead.
LONGEST = 3600.0
#: The wishes for the time after a request's end (see keeper.py).
KEPT = ("pin_seconds", "prefetch_seconds", "drop_seconds")


def _seconds(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1 << 22


def _bool(value: Any) -> bool:
    return isinstance(value, bool)


#: The names of a client's hints, with the allowed values.
_VALID = {"load": _bool, "store": _bool, "tool_call": _bool, **dict.fromkeys(("return_seconds", *KEPT), _seconds)}


@functools.lru_cache(maxsize=16)  # logs each once; bounded, since clients choose the names
def _not_known(version: str) -> None:
    log.warning("kvhost: kv_hints: actions kvhost of version %r are ignored: known is %r", version, _VERSION)


#: Versions of the actions that vLLM's and SGLang's proposals name. Each is ``kv.pin`` or the like.
_VERB_VERSIONS = ("1.0", "1")
_RETAINED = 300.0  # seconds of a hint to retain without a value


@dataclasses.dataclass(frozen=True)
class _Verb:
    """An orchestrator's action, in terms of a client's hints."""

    name: str  # spelling of the action's type
    says: dict[str, Any] = dataclasses.field(default_factory=dict)
    stores: bool = False  # the action only needs the request to be stored
    clipped: str = ""  # the part of the action that is ignored; "" if none is
    rejected: str = ""


def _verb(action: Any) -> _Verb | None:
    """Returns the verb of an action, or None for unknown actions."""
    name, payload = str(action.action_type), action.payload if isinstance(action.payload, dict) else {}
    verb = name.lower().removeprefix("kv.")
    if verb not in ("share", "prefetch", "demote", "pin", "retain"):
        return None
    if action.action_version not in _VERB_VERSIONS:
        return _Verb(name, rejected=f"its version is {action.action_version!r}, known is {_VERB_VERSIONS[0]!r}")
    seconds: Any = payload.get("ttl_seconds")
    if seconds is not None and not _seconds(seconds):
        return _Verb(name, rejected=f"{seconds!r} is no value of ttl_seconds")
    if verb == "pin":
        return _Verb(name, {"pin_seconds": (1 << 22) - 1 if seconds is None else seconds})
    if verb == "prefetch":
        return _Verb(name, {"prefetch_seconds": 0})
    if verb == "retain":
        told = _RETAINED if seconds is None else min(float(seconds), LONGEST)
        whole = seconds == told and "priority" not in payload
        return _Verb(name, {"return_seconds": told}, clipped="" if whole else f"{told:g}, told to policies")
    if verb == "share":
        where = "the host and its peers have it for all engines, and for no destination" if payload.get("destination") else ""
        return _Verb(name, stores=True, clipped=where)
    return _Verb(name, stores=True, clipped="the host has it, whose policies choose the level")


def _actions(request: Any) -> Any:
    return getattr(getattr(request, "kv_hints", None), "actions", ())


def _verbs(request: Any) -> list[_Verb]:
    return [v for action in _actions(request) if (v := _verb(action)) is not None]


def _named(request: Any) -> dict[str, Any]:
    """Returns a request's hints. A client gives them in ``kv_transfer_params``; an orchestrator in the actions
    ``kvhost`` of vLLM's ``kv_hints`` (from 0.32 on). Both have the same form. The client's hints take precedence."""
    said: dict[str, Any] = {}
    for action in _actions(request):
        if action.action_type != "kvhost":
            continue
        if action.action_version == _VERSION:
            said |= action.payload
        else:
            _not_known(str(action.action_version)[:40])
    client = (request.kv_transfer_params or {}).get("kvhost")
    if not isinstance(client, dict):
        return said
    return said | client if said else client  # not copied for each chunk, since the client chooses its size


def _said(request: Any) -> dict[str, Any]:
    """Returns all hints by name. An orchestrator's verbs add hints that are not named elsewhere."""
    said: dict[str, Any] = {}
    for v in _verbs(request):
        said |= v.says
    return said | _named(request)


def wished(request: Any) -> dict[str, float]:
    """Returns the client's wishes for the time after a request's end: seconds from its end, by name."""
    said = _said(request)
    return {name: float(said[name]) for name in KEPT if _seconds(said.get(name))}


def answer(request: Any, rejected: dict[str, str], clipped: dict[str, str], unstored: str = "") -> dict[str, Any] | None:
    """Returns the result of each hint of a client or an orchestrator, by name; None without hints. ``unstored`` is
    the reason for which the request is not stored; "" if it is stored."""

    def told(name: str, value: Any) -> str:
        if not (valid := _VALID.get(name)):
            return "rejected: it is not known"
        if not valid(value):
            return f"rejected: {value!r} is no value of it"
        if why := rejected.get(name):
            return f"rejected: {why}"
        return f"clipped: {clipped[name]}" if name in clipped else "accepted"

    answers = {name: told(name, value) for name, value in _named(request).items()}
    for v in _verbs(request):
        why = v.rejected or (unstored if v.stores else "")
        each = [told(name, _said(request)[name]) for name in v.says] or ["accepted"]
        done = f"clipped: {v.clipped}" if each == ["accepted"] and v.clipped else each[0]
        answers[v.name] = f"rejected: {why}" if why else done
    return {"kvhost_answers": answers} if answers else None


def forbids(request: Any, act: str) -> bool:
    """Whether the client forbids an ``act`` for a request, as in ``kv_transfer_params: {"kvhost": {"store":
    false}}``. A client forbids "load" to measure prefill, for example, and "store" if the prompt is secret or will
    not return."""
    return _said(request).get(act) is False


def of_client(request: Any, reason: EndReason | None = None) -> Hints:
    """Returns the reason of a request's end and the expected time until its conversation continues. The client gives
    them in ``kv_transfer_params: {"kvhost": {"tool_call": true, "return_seconds": 30}}``: the stop is a tool call,
    and the conversation continues after 30 s. ``reason`` is the engine's reason, or None."""
    said = _said(request)
    if reason in (None, EndReason.STOP) and said.get("tool_call") is True:
        reason = EndReason.TOOL_CALL
    seconds: Any = said.get("return_seconds")
    return Hints(reason=reason or EndReason.UNSPECIFIED, return_seconds=float(seconds) if _seconds(seconds) else 0.0)


def of_request(request: Any) -> Hints:
    """Returns a request's hints: the engine's and its client's."""
    told = of_client(request, _REASONS.get(str(request.status), EndReason.UNSPECIFIED))
    return dataclasses.replace(
        told,
        tokens_in=request.num_prompt_tokens,
        tokens_out=max(0, request.num_tokens - request.num_prompt_tokens),
        priority=max(-(1 << 31), min((1 << 31) - 1, int(getattr(request, "priority", 0)))),
    )
