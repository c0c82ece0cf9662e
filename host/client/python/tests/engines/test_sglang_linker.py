"""SGLang's unified cache with kvhost as its linker: its own tree, components, pools, allocators, wrapper and factory, over a real host.
Only the model that would fill the pools is left out."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from needs import needs
from processes import DEADLINE, Host, own_host, wait_for

needs("sglang")

from sglang.srt.mem_cache.unified_cache import unified_cache_linker  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.srt.runtime_context import get_context  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang_pools import SHAPES, Rank  # noqa: E402
from test_sglang import Server  # noqa: E402

from kvhost import pulse  # noqa: E402
from kvhost.keys import KeyChain  # noqa: E402
from kvhost.sglang import linker, plugin  # noqa: E402
from kvhost.sglang.batches import Part  # noqa: E402

plugin.register()  # as SGLang's load_plugins does
HookRegistry.apply_hooks()

KINDS = pytest.mark.parametrize("kind", sorted(SHAPES))
FAULTS = ("resumed", "killed", "damaged", "aborted", "retracted")


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "generation", plugin.Generation())
    monkeypatch.setattr(get_context(), "_config_bags", None)
    monkeypatch.setattr(get_context(), "_server_args", None)
    args = ServerArgs(model_path="dummy", load_format="dummy")
    args._mamba_cache_chunk_size = 64  # which SGLang reads from a model's configuration
    get_context().set_server_args(args)


@pytest.fixture
def ranks(host: Host) -> Iterator[Any]:
    """Makes ranks, which are closed at the end."""
    made: list[Rank] = []

    def rank(kind: str = "full", **options: Any) -> Rank:
        extra = {"socket": host.socket, **options.pop("extra", {})}
        made.append(Rank(SHAPES[kind], extra, **options))
        return made[-1]

    yield rank
    for r in made:
        r.close()


def prompt(tokens: int) -> list[int]:
    return [random.randrange(50_000) for _ in range(tokens)]


@KINDS
def test_a_second_life_loads_what_the_first_has_stored(ranks: Any, kind: str) -> None:
    first, tokens = ranks(kind), prompt(200)
    served = first.serve(tokens)
    assert (served.loaded, served.wrong) == (0, []), "want nothing there"
    first.settle()
    second = ranks(kind)
    second.poison()
    served = second.serve([*tokens, 1, 2, 3])
    assert (served.device, served.loaded) == (0, 200 // second.shape.page * second.shape.page)
    assert (served.aborted, served.wrong) == (False, [])
    assert first.leaks() == second.leaks() == {}


@KINDS
def test_prompts_that_share_a_part_find_it(ranks: Any, kind: str) -> None:
    """Conversations that grow and fork, in lives whose tree and pools have forgotten all of it."""
    rank, shared = ranks(kind), prompt(96)
    turns = [shared + prompt(48), shared + prompt(80)]
    for t in (shared, *turns, turns[0] + prompt(64)):
        assert rank.serve(t).wrong == []
        rank.settle()
    page = rank.shape.page
    for t, want in ((turns[0] + prompt(9), 144), (turns[1] + prompt(5), 176), (shared + prompt(40), 96)):
        rank.forget()
        served = rank.serve(t)
        assert (served.device, served.loaded, served.aborted, served.wrong) == (0, want // page * page, False, [])
    assert rank.leaks() == {}


def test_lookups_give_every_length_that_all_pools_can_restore(ranks: Any) -> None:
    """Ranks intersect them: the longest alone may be one that another rank lacks."""
    rank, tokens = ranks("mamba"), prompt(60)
    for n in (20, 33, 50):  # a state of Mamba is there at the ends of prompts
        rank.serve(tokens[:n])
        rank.settle()
    rank.forget()
    assert rank.lengths(tokens) == [20, 33, 50]
    full = ranks("full")
    full.serve(tokens[:50])
    full.settle()
    full.forget()
    assert full.lengths(tokens) == [1, 2, 3], "want pages of 16 tokens, whole ones"
    window = ranks("swa")
    for n in (96, 144):
        window.serve(tokens * 3 if n == 144 else (tokens * 3)[:n])
        window.settle()
    window.forget()
    assert set(window.lengths(tokens * 3)) >= {6, 9}, "want the ends of both prompts"


def damage(host: Host, share: int = 1) -> None:
    """Bytes at the end of the host's files, of each so-many-th of them."""
    for path in host.files()[::share]:
        with path.open("r+b") as f:
            f.seek(-64, 2)
            was = f.read(64)
            f.seek(-64, 2)
            f.write(bytes(255 - b for b in was))


@KINDS
def test_damaged_pages_abort_their_batch_and_are_computed_when_asked_again(host: Host, ranks: Any, kind: str) -> None:
    rank, tokens = ranks(kind), prompt(160)
    rank.serve(tokens)
    rank.forget()
    wait_for("the stores", host.idle)
    damage(host)
    served = rank.serve([*tokens, 1])
    assert served.loaded > 0, "want a hit, since nobody has read what is damaged"
    assert served.aborted, f"want the request aborted, got {served}"
    assert rank.linker.counts["aborted"] == 1
    assert rank.leaks() == {}
    again = rank.serve([*tokens, 1])
    assert (again.aborted, again.wrong) == (False, []) and again.loaded < served.loaded
    rank.forget()
    last = rank.serve([*tokens, 1])
    assert (last.aborted, last.wrong) == (False, []) and last.loaded == len(tokens) // rank.shape.page * rank.shape.page


def test_a_second_look_for_pages_takes_no_longer_than_the_load_may(host: Host, ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, tokens, asked = ranks(extra={"load_timeout": 60.0}), prompt(160), list[float]()
    rank.serve(tokens)
    rank.forget()
    wait_for("the stores", host.idle)
    damage(host)
    request = rank.request([*tokens, 1])
    served = rank.admitted(request)

    class Silent:
        def result(self, seconds: float) -> Any:
            asked.append(seconds)
            raise TimeoutError

    for module in (linker, pulse):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + sum(asked), sleep=time.sleep))
    monkeypatch.setattr(rank.linker._session(), "start_lookup", lambda *args, **options: Silent())
    rank.forward([request], [served])
    assert served.aborted and 0 < sum(asked) <= 60 + pulse.PAUSE, f"want a minute at most, waited {sum(asked)} s"


def test_other_requests_of_a_batch_are_served_where_no_page_is_damaged(host: Host, ranks: Any) -> None:
    rank, prompts = ranks(), [prompt(64) for _ in range(4)]
    for t in prompts:
        rank.serve(t)
    rank.forget()
    rank.serve_all([[*t, 1] for t in prompts])
    rank.forget()
    assert [(s.loaded, s.aborted, s.wrong) for s in rank.serve_all([[*t, 2] for t in prompts])] == [(64, False, [])] * 4


@KINDS
@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_host_that_ends_in_the_middle_of_a_load_costs_that_batch(host: Host, ranks: Any, kind: str, end: str) -> None:
    """Nothing of a stopped host's reaches the pools once it goes on: SGLang has given the pages to others."""
    rank, tokens = ranks(kind), prompt(160)
    rank.serve(tokens)
    rank.forget()
    wait_for("the stores", host.idle)
    request = rank.request([*tokens, 1])
    served = rank.admitted(request)
    assert served.loaded > 0
    host.hang()
    rank.waits(0.3)
    mapped = os.dup(rank.linker._memory._memory.fd)  # which the host has, too
    rank.forward([request], [served], lambda layer: host.kill() if end == "killed" and layer == 0 else None)
    assert served.aborted and rank.leaks() == {}
    others = [prompt(128) for _ in range(3)]
    for t in others:
        s = rank.serve(t)
        assert (s.loaded, s.aborted, s.wrong) == (0, False, [])
    if end == "stopped":  # it goes on where it was, and writes to all that it may
        os.pwrite(mapped, os.urandom(os.fstat(mapped).st_size), 0)
    os.close(mapped)
    host.start() if end == "killed" else host.resume()
    rank.waits()
    wait_for("the session", lambda: rank.linker._session() is not None)
    wait_for("the offloads", lambda: rank.cache.check_hicache_events() or not rank.cache.linker.pending_offloads)
    for t in others:
        s = rank.serve([*t, 1])
        assert s.device > 0 and s.wrong == [], "want what was computed meanwhile, and nothing that the host has written since"
    rank.forget()

    def hit() -> bool:
        found = rank.serve([*tokens, 2])
        assert (found.aborted, found.wrong) == (False, [])
        rank.forget()
        return found.loaded == len(tokens) // rank.shape.page * rank.shape.page

    wait_for("a hit, which may be a minute away", hit)


def test_a_stopped_host_of_its_own_holds_no_server_with_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA cannot take memory back that is shared, so nothing but the end of the host's process ends its writes."""
    monkeypatch.setattr(linker, "_KILL_SECONDS", 0.2)
    monkeypatch.setattr(linker, "_CANCEL_SECONDS", 0.2)
    tokens = prompt(160)
    with own_host(tmp_path / "kv") as (env, kill_host):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        rank = Rank(SHAPES["full"], {"root": f"{tmp_path}/kv=1GiB"})
        wait_for("the session", lambda: rank.linker._session() is not None)
        monkeypatch.setattr(rank.linker._memory, "take_back", lambda: False)
        rank.serve(tokens)
        rank.settle()
        rank.forget()
        request = rank.request([*tokens, 1])
        served = rank.admitted(request)
        assert served.loaded > 0
        host = rank.linker._session()._stream.host._pid
        os.kill(host, signal.SIGSTOP)
        rank.waits(0.3)
        stopped = os.pidfd_open(host)
        rank.forward([request], [served], lambda layer: None)
        assert served.aborted and select.select([stopped], [], [], DEADLINE)[0], "want the stopped host's process ended"
        os.close(stopped)
        rank.waits()
        again = rank.serve([*tokens, 1])
        assert (again.aborted, again.wrong) == (False, [])
        wait_for("the session with the next host", lambda: rank.linker._session() is not None)
        assert rank.linker._session()._stream.host._pid != host
        rank.close()


def test_requests_go_on_while_the_host_is_stopped(host: Host, ranks: Any) -> None:
    rank, tokens = ranks(), prompt(160)
    rank.serve(tokens)
    rank.forget()
    host.hang()
    rank.waits(0.3)
    for _ in range(5):
        s = rank.serve([*tokens, 1])
        assert (s.loaded, s.aborted, s.wrong) == (0, False, [])
        rank.forget()  # which waits for offloads: they are taken back
    host.resume()
    rank.waits()

    def hit() -> bool:
        rank.forget()
        return bool(rank.serve([*tokens, 2]).loaded)

    wait_for("a hit", hit)


def test_a_host_that_is_away_at_the_start_is_found_later(host: Host, ranks: Any) -> None:
    host.stop()
    rank, tokens = ranks(), prompt(100)
    assert rank.serve(tokens).wrong == []
    rank.forget()
    host.start()
    wait_for("the session", lambda: rank.linker._session() is not None)
    rank.serve(tokens)
    rank.forget()
    assert rank.serve([*tokens, 1]).loaded == 96


def test_a_load_waits_for_the_forward_under_way(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may go to pages of a request that has ended, and to which that forward still writes one more token."""
    rank, tokens, order = ranks(), prompt(200), []

    class Event:
        def record(self, stream: Any = "scheduler") -> None:
            self._stream = stream

        def synchronize(self) -> None:
            order.append(self._stream)

    def begin(part: Part, session: Any, real: Any = Part.begin) -> None:
        order.append("load")
        real(part, session)

    rank.serve(tokens)
    rank.forget()
    monkeypatch.setattr(unified_cache_linker, "device_module", SimpleNamespace(Event=Event))
    monkeypatch.setattr(Part, "begin", begin)
    rank.linker.forward_stream = "forward"
    served = rank.serve([*tokens, 1])
    assert (served.loaded, served.wrong) == (192, [])
    assert order[:3] == ["scheduler", "forward", "load"], "want the load to begin after both streams' work"


@KINDS
def test_aborted_requests_give_back_what_they_had(ranks: Any, kind: str) -> None:
    """Before their load begins."""
    rank, tokens = ranks(kind), prompt(160)
    rank.serve(tokens)
    rank.forget()
    for _ in range(5):
        request = rank.request([*tokens, 1])
        assert rank.admitted(request).loaded > 0
        rank.abort(request)
        assert rank.leaks() == {} and not rank.linker._queued
    served = rank.serve([*tokens, 1])
    assert served.loaded > 0 and (served.aborted, served.wrong) == (False, [])


@KINDS
def test_a_pool_of_little_more_than_one_request(ranks: Any, kind: str) -> None:
    """Each request evicts the one before, and loads evict, too."""
    size = 192 if kind != "mamba" else 96
    rank = ranks(kind, slots=size * 5 // 4 // 16 * 16)
    prompts = [prompt(size - 16) for _ in range(6)]
    for turn in range(3):
        for t in random.sample(prompts, len(prompts)):
            served = rank.serve([*t, *range(turn)])
            assert (served.aborted, served.wrong) == (False, [])
            assert not turn or served.device + served.loaded >= size - 16
            rank.settle()
    assert rank.leaks() == {}


@KINDS
def test_reset_leaves_nothing_under_way(host: Host, ranks: Any, kind: str) -> None:
    rank, tokens = ranks(kind), prompt(160)
    rank.serve(tokens)
    rank.cache.reset()  # with offloads that nobody has taken note of
    assert not rank.linker._offloads and not rank.linker._found
    rank.restart_pools()
    wait_for("the end of the stores that were cut off", host.idle)  # meanwhile the host takes no others of the same chunks
    rank.serve(tokens)
    rank.settle()
    rank.cache.reset()
    rank.restart_pools()
    served = rank.serve([*tokens, 1])
    assert served.loaded > 0 and (served.aborted, served.wrong) == (False, [])


def test_servers_start_their_own_host(tmp_path: Path) -> None:
    """One setting, and no host before."""
    tokens = prompt(100)
    with own_host(tmp_path / "kv") as (env, kill_host), pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        setting = {"root": f"{tmp_path}/kv=1GiB"}
        first = Rank(SHAPES["full"], setting)
        wait_for("the session", lambda: first.linker._session() is not None)
        first.serve(tokens)
        first.settle()
        kill_host()
        second = Rank(SHAPES["full"], setting)
        second.poison()
        wait_for("a hit", lambda: len(second.lengths(tokens)) == 6)
        served = second.serve([*tokens, 1])
        assert (served.loaded, served.wrong) == (96, [])
        first.close()
        second.close()


def test_settings_are_read_as_all_connectors_read_them(host: Host) -> None:
    for said, match in (
        ({"socket": host.socket, "root": "/r=1GiB"}, "want one of them"),
        ({"sockets": "/s"}, "linker_extra_config.sockets: unknown"),
        ({"lookup_timeout": "1"}, "linker_extra_config.lookup_timeout: '1', want a number"),
        ({"arena_bytes": 4096}, "linker_extra_config.arena_bytes: unknown"),
    ):
        with pytest.raises(ValueError, match=match):
            Rank(SHAPES["full"], said)
    with pytest.raises(ValueError, match="pipeline stages"):
        Rank(SHAPES["full"], {"socket": host.socket}, pp_size=2)


@pytest.mark.parametrize("other", [
    {"page": 32}, {"slots": 512}, {"mla": True}, {"window": 40, "components": SHAPES["swa"].components, "full": (1, 3, 5)},
])
def test_only_what_has_the_same_bytes_is_found(ranks: Any, host: Host, other: dict[str, Any]) -> None:
    """Another size of the pool changes no page; a page of other tokens, or of another layout, is another's."""
    tokens, first = prompt(128), ranks()
    first.serve(tokens)
    first.settle()
    second = Rank(dataclasses.replace(SHAPES["full"], **other), {"socket": host.socket})
    assert bool(second.lengths(tokens)) == ("slots" in other)
    second.close()


def test_neither_hicache_nor_vllm_finds_pages_of_the_linker(host: Host, ranks: Any) -> None:
    """HiCache's pages have another layout, under the same keys. vLLM's keys are of other hashes, whatever the layout."""
    rank, tokens = ranks(), prompt(64)
    rank.serve(tokens)
    rank.settle()
    names = get_storage_hash_str(array("q", tokens), None, page_size=16)
    hicache = Server(host.socket, model_name="dummy")
    assert hicache.storage.batch_exists(names) == 0
    hicache.close()
    session = rank.linker._latest()
    assert session.lookup(rank.linker._names(names)).hits == 4
    assert session.lookup(KeyChain(16).extend(tokens)).hits == 0


def test_new_weights_have_pages_of_their_own(ranks: Any) -> None:
    rank, tokens = ranks(), prompt(100)
    rank.serve(tokens)
    rank.forget()
    plugin.generation.changing()
    assert rank.lengths(tokens) == [], "want nothing of weights that change"
    rank.serve(tokens)
    rank.forget()
    plugin.generation.flushed()
    assert rank.lengths(tokens) == [], "want nothing of the old weights"
    rank.serve(tokens)
    rank.forget()
    served = rank.serve([*tokens, 1])
    assert (served.loaded, served.wrong) == (96, [])


@pytest.mark.parametrize(("kind", "slots"), [("full", 4096), ("mamba", 4096), ("full", 288)])
def test_faults_at_any_moment(host: Host, ranks: Any, kind: str, slots: int) -> None:
    """Loads are real ones, and the moments random: no byte is wrong that SGLang uses, and no slot is lost. FAULTS says how often each fault
    comes. A pool of 288 slots has room for little more than one request."""
    rank, longest = ranks(kind, slots=slots), [0.0]
    turns = int(os.environ.get("FAULTS", "3")) * len(FAULTS)
    seen = {fault: Counter[str]() for fault in FAULTS}

    def serve(prompts: list[list[int]], turn: int) -> None:
        for batch in [prompts] if slots > 1000 else [[t] for t in prompts]:
            if slots < 1000:  # pages that are being stored leave no room
                rank.settle()
            began = time.monotonic()
            for s in rank.serve_all([[*t, turn] for t in batch]):
                assert s.aborted or not s.wrong, f"turn {turn}: {s}"
                seen[FAULTS[turn % len(FAULTS)]]["aborted" if s.aborted else "loaded" if s.loaded else "computed"] += 1
            longest[0] = max(longest[0], time.monotonic() - began)

    for turn in range(turns):
        fault, prompts = FAULTS[turn % len(FAULTS)], [prompt(224) for _ in range(3)]
        for t in prompts:
            rank.serve(t)
            rank.settle()
        rank.forget()
        wait_for("the stores", host.idle)
        if fault == "damaged":
            damage(host, random.randrange(1, 4))
        elif fault in ("aborted", "retracted"):  # before the forward; one that is retracted comes again
            for t in prompts[:2]:
                request = rank.request([*t, turn])
                rank.admit(request)
                rank.abort(request)
        moment = threading.Timer(random.random() / 10, host.hang) if fault in ("resumed", "killed") else None
        if moment is not None:
            rank.waits(0.2)
            moment.start()
        serve(prompts if fault != "aborted" else prompts[2:], turn)
        if moment is not None:
            moment.join()
            host.kill() if fault == "killed" else host.resume()
        serve(prompts, turn)
        if fault == "killed":
            host.start()
        rank.waits()
        wait_for("the session", lambda: rank.linker._session() is not None)
        rank.forget()
        assert rank.leaks() == {}, f"turn {turn}, {fault}"
    counted = {fault: dict(of) for fault, of in seen.items()}
    print(f"\n{kind}, {slots} slots: {counted}, longest batch {longest[0]:.1f} s, {dict(rank.linker.counts)}")
    assert seen["retracted"]["loaded"] and sum(of["aborted"] for of in seen.values()), f"want loads, and some that end in their middle: {counted}"


def test_ranks_take_the_same_branch(host: Host) -> None:
    """What one rank lacks or cannot load is computed on all; what one rank fails to load is aborted on all."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = [
        subprocess.Popen([sys.executable, str(Path(__file__).with_name("sglang_ranks.py")), str(r), "2", str(port), host.socket],
                         stdout=subprocess.PIPE, text=True) for r in (0, 1)
    ]
    said = [[json.loads(line) for line in r.communicate(timeout=DEADLINE)[0].splitlines() if line.startswith("{")] for r in ranks]
    assert [r.returncode for r in ranks] == [0, 0]
    for answers in said:
        assert [(a["what"], a["loaded"], a["aborted"], a["wrong"]) for a in answers] == [
            ("all pages", 160, False, []), ("one rank lacks a page", 80, False, []),
            ("one rank cannot load what it has found", 0, False, []), ("the load of one rank fails", 160, True, []),
            ("all pages again", 160, False, []),
        ]
