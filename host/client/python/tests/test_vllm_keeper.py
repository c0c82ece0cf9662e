"""What happens after a request's end because its client wishes it."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace as Record
from typing import Any

import pytest
from test_vllm_scheduler import CHUNK, FULL, KEYS, TOKENS, Rig
from vllm_doubles import DoubleLink, DoubleSession, request

from kvhost.errors import Code, HostError
from kvhost.session import DiscardResult
from kvhost.vllm import hints, keeper
from kvhost.vllm.keeper import Keeper
from waits import left

NEVER = math.inf


class Kept:
    """A keeper whose clock and thread are the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(threading.Thread, "start", lambda self: None)
        self.session, self.now = DoubleSession(), 1000.0
        self.session.resident, self.session.lease_seconds = set(KEYS), 8.0
        self.link = DoubleLink(self.session)
        self.keeper = Keeper(self.link, [FULL], 1, lambda: self.now)  # type: ignore[arg-type]

    def held(self) -> int:
        """Leases that are not released."""
        return len(self.session.lookups) - len(self.session.released)

    def after(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            self.keeper.act()


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    return Kept(monkeypatch)


def test_a_pin_is_a_lease_that_is_renewed_until_its_time_is_over(kept: Kept) -> None:
    kept.keeper.keep(KEYS, 0, 60.0, NEVER, NEVER)
    kept.keeper.act()
    for _ in range(14):
        before = len(kept.session.lookups)
        kept.after(4.0)
        assert (kept.held(), len(kept.session.lookups) > before) == (1, True), "want one lease, renewed in half of its time"
    kept.after(8.0)
    asked = len(kept.session.lookups)
    kept.after(60.0)
    assert (kept.held(), len(kept.session.lookups), kept.session.prefetches) == (0, asked, [False] * asked)


@pytest.mark.parametrize("failed", [False, True])
def test_a_pin_holds_its_lease_until_it_has_another(kept: Kept, failed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "_ANSWER_SECONDS", 0.0)
    kept.keeper.keep(KEYS, 0, 60.0, NEVER, NEVER)
    kept.keeper.act()
    kept.session.answers, start = False, kept.session.start_lookup

    def failing(*keys: Any, **more: Any) -> Any:
        pending = start(*keys, **more)
        pending._call(HostError(Code.LIMIT, "lease", "too many"))
        return pending

    if failed:
        monkeypatch.setattr(kept.session, "start_lookup", failing)
    kept.after(4.0)
    assert (len(kept.session.lookups) > 1, kept.session.released) == (True, []), "want another asked for, and none released"
    kept.session.answers = True
    monkeypatch.undo()
    kept.after(4.0)
    assert kept.session.released == [1]


def test_pins_have_a_share_of_the_host(kept: Kept) -> None:
    kept.session.pin_bytes = 6 * kept.session.chunk_bytes
    branch, other = [*KEYS[:2], b"x", b"y", b"z"], [b"1", b"2", b"3"]
    assert kept.keeper.keep(KEYS, 0, 20.0, NEVER, NEVER) == len(KEYS) == 4
    assert kept.keeper.keep(branch, 0, 60.0, NEVER, NEVER) == 4, "want the two that both have counted once, and two more"
    assert kept.keeper.keep(other, 0, 60.0, NEVER, NEVER) == 0
    assert kept.keeper.keep(KEYS, 0, 20.0, NEVER, NEVER) == 4, "want what is pinned pinned again"
    kept.after(1.0)
    assert {tuple(p.keys) for p in kept.session.lookups} == {tuple(KEYS), tuple(branch[:4])} and all(kept.session.pins)
    kept.after(20.0)
    assert kept.keeper.keep(other, 0, 60.0, NEVER, NEVER) == 3, "want room once another pin is over"


def test_chunks_come_nearer_when_they_are_to(kept: Kept) -> None:
    kept.session.levels = 2
    kept.keeper.keep(KEYS, 0, 0.0, 20.0, NEVER)
    kept.after(19.5)
    assert not kept.session.lookups
    kept.after(1.0)
    assert (kept.session.prefetches[0], kept.held()) == (True, 1)
    kept.after(20.0)
    assert all(kept.session.prefetches) and kept.held() == 0, "want the lease of a prefetch for as long as a lease, and no longer"


def test_a_request_drops_its_own_chunks(kept: Kept) -> None:
    kept.keeper.keep(KEYS, 1, 5.0, NEVER, 10.0)
    kept.after(9.5)
    assert not kept.session.discarded
    kept.session.in_use = {KEYS[2]}
    kept.after(1.0)
    assert kept.session.resident == {KEYS[0], KEYS[2]}, "want what it found, and what is in use, left"
    kept.session.in_use = set()
    kept.after(5.0)
    assert (kept.session.resident, kept.held()) == ({KEYS[0]}, 0)
    tries = len(kept.session.discarded)
    kept.after(100.0)
    assert len(kept.session.discarded) == tries


def test_no_message_has_more_keys_than_the_host_takes_nor_many_discards(kept: Kept) -> None:
    many = [bytes([n % 256, n // 256]) for n in range(1500)]
    kept.session.resident = set(many)
    pinned = kept.keeper.keep(many, 0, 5.0, NEVER, 5.0)
    kept.after(6.0)
    want = kept.session.limits.keys_per_lookup
    assert (pinned, {len(p.keys) for p in kept.session.lookups}) == (want, {want}), "want pinned as many as a lookup may have"
    assert not kept.session.resident and max(map(len, kept.session.discarded)) <= 64, "want lookups let in between discards"


def test_a_request_that_comes_during_a_drop_stops_it(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [bytes([n % 256, n // 256]) for n in range(300)]
    kept.session.resident, discard = set(many), kept.session.discard

    def during(keys: Any, **more: Any) -> Any:
        kept.keeper.continued(many[:200])
        return discard(keys, **more)

    monkeypatch.setattr(kept.session, "discard", during)
    kept.keeper.keep(many, 0, 0.0, NEVER, 5.0)
    kept.after(60.0)
    assert kept.session.resident == set(many[64:200]), "want no more than a message dropped of what goes on, and the rest"


def test_what_is_never_stored_is_dropped_a_few_times(kept: Kept) -> None:
    kept.session.resident = set()
    kept.keeper.keep(KEYS, 0, 0.0, NEVER, 0.0)
    kept.after(200.0)
    assert kept.session.discarded == [KEYS] * 6


def test_what_goes_on_is_not_dropped(kept: Kept) -> None:
    kept.keeper.keep(KEYS[:2], 0, 0.0, NEVER, 5.0)
    kept.keeper.keep(KEYS, 0, 0.0, NEVER, 5.0)
    kept.keeper.continued(KEYS[:2])
    kept.after(60.0)
    assert kept.session.discarded == [KEYS[2:]], "want what the longer one has beyond it dropped, and nothing else"


@pytest.mark.parametrize(("own", "drop"), [(4, 0.0), (2, 0.0), (2, 10.0)])
def test_a_pin_outlasts_the_drop_of_another_request(kept: Kept, own: int, drop: float) -> None:
    kept.keeper.keep(KEYS, 0, 60.0, NEVER, NEVER)
    kept.after(20.0)
    kept.keeper.keep(KEYS, own, 0.0, NEVER, drop)
    for _ in range(7):
        kept.after(5.0)
        assert (kept.held(), kept.session.resident) == (1, set(KEYS)), f"after {kept.now - 1020} s, want one lease and no drop"
    kept.after(60.0)
    assert (kept.held(), kept.session.resident) == (0, set(KEYS[:own]))


def test_a_host_that_goes_and_comes_back(kept: Kept) -> None:
    kept.keeper.keep(KEYS, 0, 300.0, NEVER, NEVER)
    kept.after(4.0)
    kept.session.die()
    kept.after(30.0)
    kept.link.up = []
    assert kept.keeper.levels == 0
    kept.after(30.0)
    again = DoubleSession()
    kept.link.up = [again]
    kept.after(60.0)
    assert again.lookups, "want the pin at the new host"


def test_its_thread_runs_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    session = DoubleSession()
    session.resident = set(KEYS)
    gone = threading.Event()

    def discard(keys: list[bytes], group: int) -> list[DiscardResult]:
        gone.set()
        return [DiscardResult.REMOVED for _ in keys]

    monkeypatch.setattr(session, "discard", discard)
    k = Keeper(DoubleLink(session), [FULL], 1)  # type: ignore[arg-type]
    k.keep(KEYS, 0, 0.0, NEVER, 0.0)
    assert gone.wait(left()), "want what is due done without a step of the engine"
    k.close()
    assert k._thread is not None
    k._thread.join(left())
    assert not k._thread.is_alive()


@pytest.mark.parametrize(
    ("said", "settings", "levels", "want"),
    [
        ({"pin_seconds": 30}, {}, 1, {"pin_seconds": "accepted"}),
        ({"pin_seconds": 9000, "return_seconds": 9000}, {}, 1, {"pin_seconds": "clipped: 300", "return_seconds": "accepted"}),
        ({"drop_seconds": 9000}, {}, 1, {"drop_seconds": "clipped: 3600"}),
        ({"pin_seconds": 30}, {"pin_seconds": 0.0}, 1, {"pin_seconds": "rejected: this engine allows no pins"}),
        ({"prefetch_seconds": 5}, {}, 1, {"prefetch_seconds": "rejected: the host has one level"}),
        ({"prefetch_seconds": 5}, {}, 2, {"prefetch_seconds": "accepted"}),
        ({"pin_seconds": 5}, {}, 0, {"pin_seconds": "rejected: no host is there"}),
        ({"load": False, "drop_seconds": 0}, {}, 1,
         {"load": "accepted", "drop_seconds": "rejected: it was not looked up, and its chunks may be others' as well"}),
        ({"pin_seconds": "long", "evict": 1}, {}, 1,
         {"pin_seconds": "rejected: 'long' is no value of it", "evict": "rejected: it is not known"}),
        ({"tool_call": True}, {}, 1, {"tool_call": "accepted"}),
    ],
)  # fmt: skip
def test_each_wish_is_answered(
    said: Any, settings: dict[str, Any], levels: int, want: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    rig, r = Rig(**settings), request("a", TOKENS)
    r.kv_transfer_params = {"kvhost": said}
    rig.session.levels = levels
    assert rig.s.matched(r, 0) == 0
    rig.s.allocated(r, rig.table(36), 0)
    rig.run(r, 36)
    if not levels:
        rig.link.epoch = -1
    assert rig.s.finished(r) == {"kvhost_answers": want}


def verb(kind: str, version: str = "1.0", **payload: Any) -> Any:
    return Record(action_id="1", action_type=kind, action_version=version, payload=payload)


@pytest.mark.parametrize(
    ("verbs", "client", "want", "kept"),
    [
        ([verb("kv.pin", ttl_seconds=30)], {}, {"kv.pin": "accepted"}, (30.0, NEVER)),
        ([verb("Pin")], {}, {"Pin": "clipped: 300"}, (300.0, NEVER)),
        ([verb("kv.pin", ttl_seconds=30)], {"pin_seconds": 60}, {"pin_seconds": "accepted", "kv.pin": "accepted"}, (60.0, NEVER)),
        ([verb("kv.pin", ttl_seconds="long")], {}, {"kv.pin": "rejected: 'long' is no value of ttl_seconds"}, None),
        ([verb("kv.pin", version="2.0")], {}, {"kv.pin": "rejected: its version is '2.0', known is '1.0'"}, None),
        ([verb("kv.prefetch", version="1")], {}, {"kv.prefetch": "accepted"}, (0.0, 0.0)),
        ([verb("kv.retain", ttl_seconds=40)], {}, {"kv.retain": "accepted"}, None),
        ([verb("Retain")], {}, {"Retain": "clipped: 300, told to policies"}, None),
        ([verb("Retain", ttl_seconds=9000, priority=3)], {}, {"Retain": "clipped: 3600, told to policies"}, None),
        ([verb("kv.share"), verb("kv.demote")], {},
         {"kv.share": "accepted", "kv.demote": "clipped: the host has it, whose policies choose the level"}, None),
        ([verb("Share", destination="b")], {},
         {"Share": "clipped: the host and its peers have it for all engines, and for no destination"}, None),
        ([verb("kv.share"), verb("kv.demote")], {"store": False},
         {"store": "accepted", "kv.share": "rejected: it is not to be stored", "kv.demote": "rejected: it is not to be stored"}, None),
        ([verb("kv.fetch", block_hashes=[1]), verb("kv.pin", ttl_seconds=5)], {}, {"kv.pin": "accepted"}, (5.0, NEVER)),
    ],
)  # fmt: skip
def test_an_orchestrators_verbs(
    verbs: list[Any], client: dict[str, Any], want: dict[str, str], kept: tuple[float, float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    rig, r = Rig(), request("a", TOKENS)
    rig.session.levels = 2
    r.kv_hints, r.kv_transfer_params = Record(actions=verbs), {"kvhost": client}
    said: list[tuple[float, float]] = []
    monkeypatch.setattr(rig.s._keeper, "keep", lambda keys, own, pin, near, drop: said.append((pin, near)) or len(keys))
    assert rig.s.matched(r, 0) == 0
    rig.s.allocated(r, rig.table(36), 0)
    rig.run(r, 36)
    assert rig.s.finished(r) == {"kvhost_answers": want}
    assert said == ([kept] if kept else []), f"want pinned and brought near so long after its end: {kept}"
    retained = [min(v.payload.get("ttl_seconds", 300.0), 3600.0) for v in verbs if "retain" in v.action_type.lower()]
    assert hints.of_request(r).return_seconds == sum(retained), "want policies told of what is to be retained"


def test_verbs_without_kv() -> None:
    rig, r = Rig(), request("a", TOKENS[: CHUNK - 1])
    r.kv_hints = Record(actions=[verb("kv.share"), verb("kv.pin", ttl_seconds=5)])
    assert rig.s.matched(r, 0) == 0
    rig.s.allocated(r, rig.table(CHUNK - 1), 0)
    rig.run(r, CHUNK - 1)
    assert rig.s.finished(r) == {"kvhost_answers": {
        "kv.share": "rejected: no whole chunk of it was computed and stored", "kv.pin": "rejected: no whole chunk of it was computed",
    }}


@pytest.mark.parametrize(
    ("share", "want"), [(4, "accepted"), (3, f"clipped: 30, of {3 * CHUNK} tokens"), (0, "rejected: what is pinned has its share of the host")]
)
def test_what_is_pinned_of_a_request_is_told(share: int, want: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    rig, r = Rig(), request("a", TOKENS)
    r.kv_transfer_params = {"kvhost": {"pin_seconds": 30}}
    rig.session.pin_bytes = share * rig.session.chunk_bytes
    assert rig.s.matched(r, 0) == 0
    rig.s.allocated(r, rig.table(36), 0)
    rig.run(r, 36)
    assert rig.s.finished(r) == {"kvhost_answers": {"pin_seconds": want}}
    rig.s._keeper.act()
    assert [p.keys for p in rig.session.lookups[1:]] == [KEYS[:share]][: bool(share)]


def test_who_says_nothing_gets_no_answer_and_who_has_no_chunk_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "MOST", 0)
    rig, silent, short = Rig(), request("a", TOKENS), request("b", TOKENS[: CHUNK - 1])
    short.kv_transfer_params = {"kvhost": {"pin_seconds": 5}}
    for r in (silent, short):
        assert rig.s.matched(r, 0) == 0
        rig.s.allocated(r, rig.table(len(r.all_token_ids)), 0)
        rig.run(r, len(r.all_token_ids))
    assert rig.s.finished(silent) is None
    assert rig.s.finished(short) == {"kvhost_answers": {"pin_seconds": "rejected: no whole chunk of it was computed"}}
    silent.request_id, silent.num_computed_tokens, silent.kv_transfer_params = "c", 0, {"kvhost": {"pin_seconds": 5}}
    rig.s.matched(silent, 0)
    rig.s.allocated(silent, rig.table(36), 0)
    rig.run(silent, 36)
    assert rig.s.finished(silent) == {"kvhost_answers": {"pin_seconds": "rejected: this engine keeps 256 requests already"}}


def test_what_came_while_the_host_was_away_can_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    rig, r = Rig(), request("a", TOKENS)
    r.kv_transfer_params = {"kvhost": {"store": False, "pin_seconds": 5}}
    rig.link.epoch = -1
    assert rig.s.matched(r, 0) == 0
    rig.s.allocated(r, rig.table(36), 0)
    rig.run(r, 36)
    rig.link.epoch = 0
    assert rig.s.finished(r) == {"kvhost_answers": {"store": "accepted", "pin_seconds": "accepted"}}
    rig.s._keeper.act()
    assert [p.keys for p in rig.session.lookups] == [KEYS]


def test_a_lookup_that_fails_tells_nothing_of_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    rig, r = Rig(), request("a", TOKENS)
    r.kv_transfer_params = {"kvhost": {"drop_seconds": 0}}
    rig.session.resident, rig.session.answers = set(KEYS[:2]), False
    assert rig.s.matched(r, 0) is None
    rig.session.lookups[0]._call(HostError(Code.LIMIT, "lease", "too many"))
    assert rig.s.matched(r, 0) == 0
    rig.s.allocated(r, rig.table(36), 0)
    rig.run(r, 36)
    why = "it was not looked up, and its chunks may be others' as well"
    assert rig.s.finished(r) == {"kvhost_answers": {"drop_seconds": f"rejected: {why}"}}


@pytest.mark.parametrize("order", [("first", "other", "over"), ("other", "first", "over"), ("first", "over", "other")])
def test_what_another_request_has_too_is_not_dropped(order: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    rig, both = Rig(), {"first": request("a", TOKENS), "other": request("b", [*TOKENS[:20], *range(60)])}
    both["first"].kv_transfer_params = {"kvhost": {"drop_seconds": 0}}
    for name in order:
        if name == "over":
            rig.s.finished(both["first"])
        else:
            assert rig.s.matched(r := both[name], 0) == 0
            rig.s.allocated(r, rig.table(len(r.all_token_ids)), 0)
            rig.run(r, len(r.all_token_ids))
    rig.session.resident = set(KEYS)
    rig.s._keeper.act()
    assert rig.session.resident == set(KEYS[:2]), f"want the two chunks that both have left, in the order {order}"


@pytest.mark.parametrize("waits", ["before", "after"])
def test_what_a_request_in_the_queue_has_is_not_dropped(waits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has not asked for it yet."""
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    rig, first, queued = Rig(), request("a", TOKENS), request("b", [*TOKENS[:20], *range(60)])
    first.kv_transfer_params = {"kvhost": {"drop_seconds": 0}}
    assert rig.s.matched(first, 0) == 0
    rig.s.allocated(first, rig.table(36), 0)
    rig.run(first, 36)
    if waits == "before":
        rig.s.new_request(queued)
    rig.s.finished(first)
    if waits == "after":
        rig.s.new_request(queued)
    rig.session.resident = set(KEYS)
    rig.s._keeper.act()
    assert rig.session.resident == set(KEYS[:2]), "want the two chunks that the other one has left"


def test_the_next_turn_stops_a_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    rig, first, after = Rig(), request("a", TOKENS), request("b", [*TOKENS, *range(60)])
    first.kv_transfer_params = {"kvhost": {"drop_seconds": 3600}}
    assert rig.s.matched(first, 0) == 0
    rig.s.allocated(first, rig.table(36), 0)
    rig.run(first, 36)
    rig.s.finished(first)
    (kept,) = rig.s._keeper._kept.values()
    assert kept.drop < NEVER
    rig.session.resident = set(KEYS)
    assert rig.s.matched(after, 0) == len(KEYS) * CHUNK
    assert kept.drop == NEVER
