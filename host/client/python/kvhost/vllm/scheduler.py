"""The scheduler's half: it looks prompts up, and orders the workers' stores and loads."""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvhost.errors import KvhostError
from kvhost.link import Link
from kvhost.session import NOT_WANTED
from kvhost.vllm import hints
from kvhost.vllm.adapters import Adapters, Asked, Content
from kvhost.vllm.groups import NULL_BLOCK, GroupPlan
from kvhost.vllm.holds import Holds
from kvhost.vllm.hints import LONGEST
from kvhost.vllm.keeper import MOST, Keeper, common
from kvhost.keys import KeyChain, Item
from kvhost.pulse import Pulse
from kvhost.vllm.lookups import RequestLookup
from kvhost.vllm.orders import ChunkOrder, GroupLoad, LoadOrder, StepOrders, StoreOrder, WorkerReport
from kvhost.vllm.rates import LastLife, LoadOrCompute, Part
from kvhost.vllm.settings import Settings

if TYPE_CHECKING:
    from kvhost.vllm.kvevents import KVEvents

log = logging.getLogger("vllm.kvhost")

_REMEMBERED = 1 << 16  # keys with bad bytes
_ALL = 1 << 62  # above any request's number of chunks: no more of its chunks are stored
_READ_SOON = 0.25  # seconds after which the host has usually read a store's blocks
#: Behind a load inside it, a step computes at least this many tokens. A step in which each request computes one token
#: may run as one CUDA graph, which waits for the whole load before its first layer.
_COMPUTED_BEHIND = 2
#: Behind a load of at most this many bytes a step may compute one token, and so be such a graph: to wait for the whole
#: load then takes less time than to launch the layers one by one.
GRAPH_BYTES = 512 << 20
#: States of a request that ended with the output of a step. The loads inside that step have then succeeded, since the
#: engine would compute the step again otherwise. So all chunks of the request are stored, also those of the step that
#: loaded its hit.
_ANSWERED = {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"}
_TRACEPARENT = 128  # most characters; W3C's values have 55
#: The longest rest of a step without work, in seconds. An engine that only waits for the host makes such steps one
#: after the other, each with a message to its workers. A request that arrives during the rest waits for its end.
_REST, _FIRST_REST = 0.005, 0.0005
_SAY_AGAIN = 60.0  # seconds between two log lines about chunks that were not stored

#: Reasons for which a computed chunk was not offered to the host.
AWAY = "no session with the host"
NO_ANSWER = "the host does not answer"
NO_ROOM = "no more blocks could be held for the host to read"
PASSED = "their sliding window had passed them before more blocks could be held for the host to read"


@dataclass
class Promise:
    """The answer to the engine's last question about a request."""

    step: int = 0  # number of the step in which the engine asked
    local: int = 0  # leading tokens that the engine's own cache has
    hit: int = 0  # leading chunks that the request gets from the host
    in_step: bool = False  # the hit is loaded inside the step that computes behind it


class Tracked:
    """The connector's state of one request."""

    def __init__(self, request: Any, number: int, chain: KeyChain | None) -> None:
        self.request = request
        self.number = number
        self.chain = chain  # None until the content of the request's LoRA adapter is known
        self.asked: Asked | None = None  # the pending question for the adapter's content; None if there is none
        self.adapter: Content | None = None
        self.table: list[list[int]] = []  # blocks by group
        self.lookup: RequestLookup | None = None
        self.since = 0.0  # time of the first lookup since it last had blocks
        self.promise = Promise()
        self.loading = 0  # number of its load order, until the request is scheduled; 0: none
        self.received = 0.0  # time at which the end of its load was noticed, until the request is scheduled; 0: none
        self.may_load = not hints.forbids(request, "load")
        self.may_store = not hints.forbids(request, "store")
        self.may_drop = "drop_seconds" in hints.wished(request)
        self.found: int | None = None  # chunks that the host had when the request came; None before
        self.shared: int | None = None  # leading chunks that other requests have, too; None until the comparison
        self.stored = 0  # chunks that the host has, or was ordered to store
        self.end = 0  # chunks that are computed, or are in scheduled steps
        self.late = 0  # chunks that were computed while there was no room to store them

    @property
    def traceparent(self) -> str:
        """The client's trace, or "". The host's spans join it. Each message repeats it."""
        named: str = (getattr(self.request, "trace_headers", None) or {}).get("traceparent", "")
        return named if len(named) <= _TRACEPARENT else ""


class Scheduler:
    """All requests of one engine core. Its methods run on the scheduler's thread."""

    def __init__(
        self, settings: Settings, link: Link, groups: Sequence[GroupPlan], ranks: int, stages: int, *, loads: bool,
        step_tokens: int, holds: Holds, events: KVEvents | None = None, adapters: Adapters | None = None,
        in_step: bool = False, last_life: LastLife | None = None, longest: int = 0, graph_tokens: int = 0,
    ) -> None:
        """``ranks`` is the number of ranks per pipeline stage. ``loads`` is false if the engine could not recover
        from a failed load, and ``in_step`` if it could not recover from one inside a step. ``step_tokens`` is the
        most tokens of a step, ``longest`` the most tokens of a request, and ``graph_tokens`` the most tokens that
        are loaded before a step that is one graph."""
        self._pulse = Pulse(settings.lookup_timeout, lambda: time.monotonic())
        self._longest = longest
        self._graph_tokens = graph_tokens
        self._hung: set[int] = set()  # orders of loads that the host did not end; it gets no other loads until it ends them
        self._unanswered: RequestLookup | None = None  # the last lookup that was not answered during the wait
        self._settings, self._link, self._groups = settings, link, groups
        self._holds = holds
        self._chunk = groups[0].chunk_tokens
        self._ranks, self._stages = ranks, stages
        self._loads_allowed = loads
        self._in_step_allowed = in_step and settings.load_in != "beside"
        self._ran: set[str] = set()  # requests of the last step
        self._loads_in_step: set[int] = set()  # load orders of steps without output yet
        self._tables: list[list[list[int]]] = []  # the blocks of requests, by step, since the first step of _loads_in_step
        self._step_seconds: float | None = None  # expected time of the loads in the step that is being scheduled; None: no loads
        self._events = events  # None: the engine publishes none
        self._keeper = Keeper(link, groups, (1 << ranks) - 1)
        self._adapters = adapters  # None: the engine has no LoRA
        self._requests: dict[str, Tracked] = {}
        self._live: dict[str, Any] = {}  # all requests of the engine, by id
        # (tokens, id) of the two largest requests that wait for no load; None: to be computed in this step.
        self._largest: list[tuple[int, str]] | None = None
        self._most_tokens = 0  # tokens of the largest request
        self._stalled = 0  # steps in a row that scheduled nothing
        self._loading: dict[str, int] = {}  # by request, also after its end: ranks whose load is not over
        self._last_number = 0
        self._last_order = 0
        self._generation = b""
        self._orders = StepOrders()
        self._ordered = 0.0  # time of the last store order
        self._dropped: dict[str, tuple[int, float]] = {}  # by cause: chunks since the last log line, and the time of that line
        self._bad: OrderedDict[bytes, None] = OrderedDict()
        self._worker_epochs: dict[tuple[int, int], int] = {}
        self._awaited: int | None = None  # the last epoch in which requests waited for the workers
        self._await_until = 0.0
        self._choice = LoadOrCompute(step_tokens, self._chunk, last=last_life)
        self._last_step = 0  # the number of the step that is scheduled next
        self._unproven = -1  # the last step that loads KV
        self._ordered_at: dict[int, float] = {}  # order times of loads that no rank has reported, by order
        self.counts: dict[str, Any] = {}  # counts since they were last taken; for the phases of loads, lists of seconds

    def _count(self, name: str, n: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + n

    def _took(self, phase: str, begin: float, end: float) -> None:
        self.counts.setdefault(f"{phase}_seconds", []).append(max(0.0, end - begin))

    # ---- requests ----------------------------------------------------------------------------------------------------

    def track(self, request: Any) -> Tracked | None:
        """Returns the state of a request, or None if its token ids do not determine its KV."""
        if getattr(request, "prompt_embeds", None) is not None:
            return None
        t = self._requests.get(request.request_id)
        if t is None:
            self._last_number = self._last_number % 0xFFFFFFFF + 1
            t = Tracked(request, self._last_number, None if request.lora_request is not None else self._chain(request))
            self._requests[request.request_id] = t
            self._live[request.request_id], self._largest = request, None
        return t

    def _chain(self, request: Any, adapter: bytes = b"") -> KeyChain:
        return KeyChain(
            self._chunk,
            adapter=adapter,
            salt=request.cache_salt or "",
            items=[Item(f.mm_position.offset, f.mm_position.length, f.identifier) for f in request.mm_features],
            generation=self._generation,
        )

    def new_request(self, request: Any) -> None:
        self._live[request.request_id], self._largest = request, None
        if self._keeper.drops and request.lora_request is None and (t := self.track(request)) is not None and t.chain is not None:
            self._keeper.continued(t.chain.extend(request.all_token_ids, request.num_tokens))

    def _queued(self, t: Tracked, keys: Sequence[bytes]) -> int:
        """Returns the number of leading chunks that a request shares with requests that the engine has not asked
        about yet."""
        begin, n = t.request.all_token_ids[: self._chunk], 0
        for r in list(self._live.values()):
            if r.lora_request is not None or r.all_token_ids[: self._chunk] != begin:
                continue
            if (o := self.track(r)) is not None and o.chain is not None:
                n = max(n, common(o.chain.extend(r.all_token_ids, r.num_tokens), keys))
        return n

    def matched(self, request: Any, computed: int) -> int | None:
        """Returns the number of tokens after the ``computed`` ones that can be loaded; None: ask again."""
        if self._in_the_way(request):
            return None
        t = self.track(request)
        if t is None:
            return 0
        t.promise, t.table, t.end = Promise(self._last_step, computed), [], 0
        self._holds.scheduled(request.request_id)  # the request has no blocks
        if not self._ready():
            return None if self._soon_ready() else 0
        if request.lora_request is not None and not (known := self._identify(t, computed)):
            return 0 if known is False else None
        assert t.chain is not None
        keys = t.chain.extend(request.all_token_ids, request.num_tokens)
        if t.shared is None:
            self._compare(t, keys)
        if not keys or not t.may_load or getattr(request, "skip_reading_prefix_cache", False) or self._hung or self._stopped():
            return 0
        if t.lookup is not None and (t.lookup.epoch != self._link.epoch or t.lookup.done() and not t.lookup.fresh):
            t.lookup.release()
            t.lookup = None
        if t.lookup is None and not self._ask(t, keys):
            return 0
        lookup = t.lookup
        assert lookup is not None
        if not self._answered(lookup):
            if time.monotonic() - lookup.began < self._settings.lookup_timeout:
                return None
            self._count("lookups_timed_out")
            t.may_load, t.lookup = False, None
            return 0
        there = lookup.hit(len(keys))
        if t.found is None and not lookup.failed:
            t.found = there
        if self._events is not None:
            self._events.found(keys[:there])
        hit = self._before_bad(keys, there)
        t.promise.in_step = hit * self._chunk > computed and self._inside(t, lookup, hit, computed)
        room, later = self._room(t, hit) if hit * self._chunk > computed else (hit, hit)
        if room < later and time.monotonic() - t.since < self._settings.lookup_timeout:
            return None  # blocks that are held now will be free soon
        take = self._worth(lookup, hit, room, computed)
        # A hit in a farther level that is computed all the same is stored again, which copies it to the nearest level
        # at once.
        t.stored = max(t.stored, max(take, computed // self._chunk) if take < hit and lookup.is_far else there)
        more = self._end(t, take) - computed
        if more <= 0:  # the engine has all tokens except those that the step computes in any case
            lookup.release()
            t.lookup = None
            return 0
        t.promise.hit = take
        return more

    def _stopped(self) -> bool:
        """Whether the host's process is stopped. A stopped host gets no lookups and no orders."""
        return self._pulse.stopped(next(iter(self._link.sessions()), None))

    def _answered(self, lookup: RequestLookup) -> bool:
        """Whether a lookup was answered. The scheduler waits a moment for it once, unless an earlier wait for
        another lookup failed."""
        idle = self._unanswered is not None and not self._unanswered.done(0)
        answered = lookup.done(0 if lookup.waited or idle else self._settings.lookup_wait)
        if not (answered or idle):
            self._unanswered = lookup
        lookup.waited = True
        return answered

    def _compare(self, t: Tracked, keys: Sequence[bytes]) -> None:
        """Records the shared chunks of a request, which are not dropped at the end of either request."""
        t.shared = 0
        self._keeper.continued(keys)
        for o in self._requests.values():
            if o is not t and o.shared is not None and o.chain is not None and (o.may_drop or t.may_drop):
                n = common(keys, o.chain.keys)
                t.shared, o.shared = max(t.shared, n), max(o.shared, n)

    def _end(self, t: Tracked, chunks: int) -> int:
        """Returns the number of leading tokens that the engine gets from the given chunks."""
        end = chunks * self._chunk
        if not t.promise.in_step:
            return end
        return min(end, t.request.num_tokens - (1 if end - t.promise.local <= self._graph_tokens else _COMPUTED_BEHIND))

    def loads_in_step(self, request: Any) -> bool:
        """Whether the last hit of :meth:`matched` is loaded inside the request's next step."""
        t = self._requests.get(request.request_id)
        return t is not None and t.promise.in_step

    def _inside(self, t: Tracked, lookup: RequestLookup, hit: int, computed: int) -> bool:
        """Whether to load inside the step that computes the tokens behind the hit, and not between steps.

        The request then starts one step sooner, since the engine notices the end of a load between steps only at the
        next step. But all other requests of the step wait for the load."""
        if not self._in_step_allowed or self._settings.load_in == "step":
            return self._in_step_allowed
        if self._step_seconds is None and not self._ran - {t.request.request_id}:
            return True
        seconds = lookup.parts(computed // self._chunk, hit)[-1][1]
        return 0 < seconds and (self._step_seconds or 0.0) + seconds <= self._settings.step_delay

    def _in_the_way(self, request: Any) -> bool:
        """Whether the engine should look at the requests behind this one.

        The engine stops at the first request that finds no blocks. If no request runs, and requests with blocks of
        their own are behind it in the queue, the engine would stop there for ever. So every second such step skips a
        request that may find too few blocks. The other steps try it, since it may need fewer blocks than estimated."""
        return bool(
            self._stalled % 2
            and (self._holds.any or self._holds.waiting)
            and self._holds.needs(request.num_tokens) > self._holds.free
        )

    def _room(self, t: Tracked, hit: int) -> tuple[int, int]:
        """Returns how many of the leading chunks may be loaded without stopping the engine: now, and after the held
        blocks are free."""
        needed = self._holds.needs(t.request.num_tokens)
        left = max(needed, self._largest_ever())
        later = self._fitting(hit, self._holds.size - left)
        if later < hit and 2 * needed > self._holds.size:  # the request cannot start over while its load has the blocks
            left = 0 if t.promise.in_step else self._needed_by_largest(but=t.request.request_id)
            later = self._fitting(hit, self._holds.size - left)
        return self._fitting(hit, self._holds.room_to_load(needed, left)), later

    def _largest_ever(self) -> int:
        """Blocks of the largest present or future request. For a future request loads leave half of all blocks."""
        self._measure()
        return max(self._holds.needs(self._most_tokens + 1), min(self._holds.needs(self._longest), self._holds.size // 2))

    def _fitting(self, chunks: int, blocks: int) -> int:
        while chunks and self._holds.needs(chunks * self._chunk) > blocks:
            chunks -= 1
        return chunks

    def _needed_by_largest(self, but: str = "") -> int:
        """Blocks of the largest request, other than ``but``, that waits for no load."""
        tokens = next((n for n, id in self._measure() if id != but), 0)
        return self._holds.needs(tokens + 1) if tokens else 0

    def _measure(self) -> list[tuple[int, str]]:
        if self._largest is None:
            self._most_tokens = max((r.num_tokens for r in self._live.values()), default=0)
            free = ((r.num_tokens, id) for id, r in self._live.items() if not self._holds.waits(id))
            self._largest = heapq.nlargest(2, free)
        return self._largest

    def _unneeded(self) -> int:
        """Blocks that are left if all requests have the blocks that they need."""
        return self._holds.size - sum(self._holds.needs(r.num_tokens + 1) for r in self._live.values())

    def _identify(self, t: Tracked, computed: int) -> bool | None:
        """Whether the content of the request's LoRA adapter is known; None while its files are read."""
        lora, known = t.request.lora_request, False
        if t.stored < _ALL and self._adapters is not None:
            t.asked = t.asked or self._adapters.ask(lora)
            if not t.asked.done(self._settings.lookup_wait) and t.asked.age < self._settings.lookup_timeout:
                return None
            content, t.asked = t.asked.content, None
            known = t.adapter in (None, content) and self._adapters.agrees(lora, content, computed)
            if known and t.adapter is None:
                assert content is not None
                t.adapter, t.chain = content, self._chain(t.request, content.key)
        if not known:
            self._count("adapters_not_known")
            t.may_load, t.stored = False, _ALL
        return known

    def _ready(self) -> bool:
        """Whether the host answers, and every worker has a session in the same epoch."""
        epoch = self._link.epoch
        return (
            epoch >= 0
            and len(self._worker_epochs) == self._ranks * self._stages
            and all(e == epoch for e in self._worker_epochs.values())
        )

    def _soon_ready(self) -> bool:
        """Whether requests should wait until :meth:`_ready`. This is so during the first attempt to connect, and
        while the host is there but some workers have not reported a session of its epoch. The report takes a step or
        two, which the engine makes while its requests wait. They wait at most ``lookup_timeout``, once in each
        epoch."""
        epoch = self._link.epoch
        if epoch < 0 and not self._link.starting:
            return False
        now = time.monotonic()
        if epoch != self._awaited:
            self._awaited, self._await_until = epoch, now + self._settings.lookup_timeout
        return now < self._await_until

    def _ask(self, t: Tracked, keys: Sequence[bytes]) -> bool:
        epoch = self._link.epoch
        sessions = self._link.sessions(epoch)
        if not sessions:
            return False
        limit = min(s.limits.keys_per_lookup for s in sessions) or len(keys)
        if self._events is not None:
            self._events.describe(t.request, keys, 0, len(keys[:limit]))
        try:
            t.lookup = RequestLookup(
                sessions, self._groups, keys[:limit], t.number, (1 << self._ranks) - 1, self._settings.prefetch,
                t.traceparent, epoch=epoch,
            )
        except KvhostError:
            return False
        t.since = t.since or time.monotonic()
        self._count("lookups")
        return True

    def _before_bad(self, keys: Sequence[bytes], hit: int) -> int:
        return next((i for i in range(hit) if keys[i] in self._bad), hit) if self._bad else hit

    def _worth(self, lookup: RequestLookup, hit: int, room: int, computed: int) -> int:
        """Returns how many of the leading hit chunks to load. There are blocks for ``room`` of them."""
        if hit * self._chunk <= computed or not self._loads_allowed:
            return 0
        take = lookup.hit(room)
        if take and self._settings.load_when != "always":
            parts = [Part(n * self._chunk - computed, s) for n, s in lookup.parts(computed // self._chunk, take)]
            take = lookup.hit((computed + self._choice.choose(parts)) // self._chunk)
        if take < hit:
            self._count("hits_not_loaded_whole")
        return take if take * self._chunk > computed else 0

    def allocated(self, request: Any, table: Sequence[Sequence[int]], external: int) -> None:
        """Records that the request has blocks, and orders the load of the ``external`` tokens that the host has."""
        t = self._requests.get(request.request_id)
        if t is None:
            return
        t.table = [list(blocks) for blocks in table]
        t.since = 0.0
        lookup, t.lookup = t.lookup, None
        if not external:
            if lookup is not None:
                lookup.release()
            return
        promise = t.promise
        assert lookup is not None and promise.hit and t.chain is not None
        end = promise.local + external  # the engine may want fewer tokens than promised
        first = promise.local // self._chunk
        if promise.in_step:
            if end == self._end(t, promise.hit):
                end = promise.hit * self._chunk  # whole chunks are loaded
            self._step_seconds = (self._step_seconds or 0.0) + lookup.parts(first, promise.hit)[-1][1]
        groups, written = [], []
        for at, g in enumerate(self._groups):
            chunks = []
            for i in g.needed(-(-end // self._chunk), first):
                chunks.append(ChunkOrder(i, g.wanted_blocks(t.table[g.id], i, promise.local, end), t.chain.keys[i]))
                written += [b for b in chunks[-1].blocks if b != NOT_WANTED]
            if chunks:
                groups.append(GroupLoad(g.id, lookup.leases(at), chunks))
        t.loading, now = self._next_order(), time.monotonic()
        self._ordered_at[t.loading] = now
        self._took("lookup", lookup.began, lookup.answered)
        self._took("wait", lookup.answered, now)
        if promise.in_step:
            self._loads_in_step.add(t.loading)
        else:
            self._loading[request.request_id] = self._ranks * self._stages
        held = sum(1 for blocks in t.table for b in blocks if b != NULL_BLOCK)
        self._holds.load(
            t.loading, request.request_id, written, held, max(held, self._holds.needs(request.num_tokens))
        )
        self._largest = None
        self._orders.loads.append(
            LoadOrder(t.loading, request.request_id, lookup.epoch, external, groups, t.adapter, promise.in_step)
        )
        if promise.in_step:
            self._count("loads_in_step")
        self._count("loads")
        self._count("tokens_loaded", external)

    def _next_order(self) -> int:
        self._last_order += 1
        return self._last_order

    def finished(self, request: Any) -> dict[str, Any] | None:
        """Ends a request. The engine then frees its blocks; blocks that the host may touch are held. Returns the
        answer to the client's hints."""
        self._live.pop(request.request_id, None)
        self._largest = None
        t = self._requests.pop(request.request_id, None)
        if t is None:
            return None
        self._holds.scheduled(request.request_id)
        self._ran.discard(request.request_id)
        if t.loading:
            self._orders.cancels.append(t.loading)
            self._holds.abandon(request.request_id, t.loading)
        if t.table and str(request.status) in _ANSWERED:
            t.end = self._complete(request, request.num_computed_tokens)
        else:
            t.end = min(t.end, request.num_computed_tokens // self._chunk)
        self._order_chunks(t, request.num_computed_tokens, ends=True)
        if t.may_store:
            self._drop(AWAY if self._link.epoch < 0 else NO_ANSWER if self._stopped() else NO_ROOM, t.end - t.stored)
        self._orders.ended.append((request.request_id, t.number))
        told = hints.of_request(request)
        for s in self._link.sessions():
            s.end_request(t.number, told, wait=False)  # this also ends the leases of its lookups
        return self._keep(t)

    def _keep(self, t: Tracked) -> dict[str, Any] | None:
        """Carries out the client's hints for the time after the request, and returns the answer."""
        wished = hints.wished(t.request)
        rejected: dict[str, str] = {}
        clipped: dict[str, str] = {}
        do: dict[str, float] = {}
        if wished:
            why = self._why_not(t)
            rejected = dict.fromkeys(wished, why) if why else self._rejected(t)
            most = {"pin_seconds": min(LONGEST, self._settings.pin_seconds)}
            do = {name: min(s, most.get(name, LONGEST)) for name, s in wished.items() if name not in rejected}
            clipped = {name: f"{s:g}" for name, s in do.items() if s < wished[name]}
        if do:
            assert t.chain is not None
            keys = t.chain.extend(t.request.all_token_ids, t.request.num_tokens)[: t.end]
            queued = self._queued(t, keys) if "drop_seconds" in do else 0
            pinned = self._keeper.keep(
                keys, max(t.found or 0, t.shared or 0, queued), do.get("pin_seconds", 0.0), do.get("prefetch_seconds", math.inf),
                do.get("drop_seconds", math.inf),
            )
            if do.get("pin_seconds") and not pinned:
                rejected["pin_seconds"] = "what is pinned has its share of the host"
            elif do.get("pin_seconds") and pinned < t.end:
                clipped["pin_seconds"] = f"{do['pin_seconds']:g}, of {pinned * self._chunk} tokens"
        return hints.answer(t.request, rejected, clipped, self._unstored(t))

    def _unstored(self, t: Tracked) -> str:
        """Returns the reason for which a request that ends is not stored; "" if it is stored."""
        if self._settings.store == "none" or hints.forbids(t.request, "store"):
            return "it is not to be stored"
        if t.stored:
            return ""
        return "no host is there" if self._link.epoch < 0 else "no whole chunk of it was computed and stored"

    def _why_not(self, t: Tracked) -> str:
        if t.chain is None or not t.end:
            return "no whole chunk of it was computed"
        if not self._keeper.levels:
            return "no host is there"
        return f"this engine keeps {MOST} requests already" if self._keeper.full else ""

    def _rejected(self, t: Tracked) -> dict[str, str]:
        rejected = {}
        if self._keeper.levels == 1:
            rejected["prefetch_seconds"] = "the host has one level"
        if not self._settings.pin_seconds:
            rejected["pin_seconds"] = "this engine allows no pins"
        if t.found is None:
            rejected["drop_seconds"] = "it was not looked up, and its chunks may be others' as well"
        return rejected

    def _drop(self, cause: str, chunks: int) -> None:
        if chunks <= 0 or self._settings.store == "none":
            return
        self._count("chunks_dropped", chunks)
        before, said = self._dropped.get(cause, (0, 0.0))
        now = time.monotonic()
        if said and now - said < _SAY_AGAIN:
            self._dropped[cause] = before + chunks, said
            return
        self._dropped[cause] = 0, now
        log.warning("kvhost: %d chunks were computed and not stored: %s", before + chunks, cause)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def step(self, output: Any) -> StepOrders:
        """Returns the orders for a scheduled step."""
        cached = output.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            new = cached.new_block_ids[at]
            t = self._requests.get(request_id)
            if t is None or new is None or request_id in cached.resumed_req_ids:
                continue  # allocated() has named the blocks of a resumed one
            for g, blocks in enumerate(new):
                t.table[g] += blocks
        proven = self._proven(output)
        for request_id, scheduled in output.num_scheduled_tokens.items():
            self._holds.scheduled(request_id)
            if (t := self._requests.get(request_id)) is not None and t.table:
                if t.received:
                    self._took("schedule", t.received, time.monotonic())
                t.loading, t.received = 0, 0.0
                if self._loads_in_step:
                    self._tables.append(t.table)
                if proven:
                    self._order_stores(t, scheduled)
        self._largest = None
        if output.num_scheduled_tokens:
            self._ran = set(output.num_scheduled_tokens)
        self._choice.steps.scheduled(output.total_num_scheduled_tokens, self._step_seconds is not None, time.monotonic())
        self._step_seconds = None
        self._last_step += 1
        self._stalled = 0 if output.total_num_scheduled_tokens else self._stalled + 1
        orders, self._orders = self._orders, StepOrders()
        orders.epoch = self._link.wanted
        orders.forward = output.total_num_scheduled_tokens > 0
        if not (orders.forward or orders.stores or orders.loads or orders.cancels or orders.ended or self._loading):
            self._rest()
        return orders

    def _rest(self) -> None:
        lookup = next((t.lookup for t in self._requests.values() if t.lookup is not None and not t.lookup.done()), None)
        if lookup is not None:
            lookup.done(_REST)
        elif not self._live and self._holds.stores:
            time.sleep(min(_REST, self._stalled * _FIRST_REST))

    def _proven(self, output: Any) -> bool:
        """Whether no step without output loads KV. Another connector's load may run in a step, and the step's output
        tells whether it failed. Until then neither its tokens nor tokens computed from them are stored."""
        if getattr(output, "has_sync_kv_loads", True):  # vLLM 0.26 lacks this field
            for request_id in output.num_scheduled_tokens:
                t = self._requests.get(request_id)
                if t is not None and t.promise.step == self._last_step and t.request.num_computed_tokens > t.promise.local:
                    self._unproven = self._last_step
        return self._last_step - len(self._choice.steps) > self._unproven

    def _order_stores(self, t: Tracked, scheduled: int) -> None:
        """Orders the chunks that this step completes."""
        t.end = self._complete(t.request, t.request.num_computed_tokens + scheduled)
        self._order_chunks(t, t.request.num_computed_tokens)

    def _complete(self, r: Any, computed: int) -> int:
        """Returns the number of chunks that the given tokens complete. Only final tokens count: no drafts, no
        placeholders."""
        final = r.num_tokens if self._settings.store == "all" else r.num_prompt_tokens
        return int(min(computed, final) // self._chunk)

    def _order_chunks(self, t: Tracked, computed: int, *, ends: bool = False) -> None:
        """Orders stores of the request's complete chunks, in order, as far as their blocks may be held. The others
        wait with the request until the host has read earlier ones. When the request ``ends``, all blocks that no
        other request needs may be held."""
        if t.end <= t.stored or t.chain is None or not t.may_store or self._settings.store == "none" or self._link.epoch < 0:
            return
        if self._stopped():
            t.late = t.end
            return
        keys = t.chain.extend(t.request.all_token_ids, t.request.num_tokens)
        if self._events is not None:
            self._events.describe(t.request, keys, t.stored, t.end)
        groups: dict[int, list[ChunkOrder]] = {}
        held: list[int] = []
        first, limit = t.stored, int(self._settings.unread_blocks * self._holds.size)
        if ends:
            limit = max(limit, self._unneeded())
        while t.stored < t.end:
            chunks = self._chunk_orders(t, t.stored, computed, keys)
            blocks = [b for _, c in chunks for b in c.blocks]
            if not self._holds.room_to_store(len(held) + len(blocks), limit, self._needed_by_largest()):
                t.late = t.end
                break
            if t.stored < t.late and len(chunks) < len(self._groups):
                self._drop(PASSED, 1)
            held += blocks
            for group, c in chunks:
                groups.setdefault(group, []).append(c)
            t.stored += 1
        if not groups:
            return
        self._count("chunks_ordered", t.stored - first)
        order = self._next_order()
        self._holds.store(order, held)
        self._ordered = time.monotonic()
        self._orders.stores.append(
            StoreOrder(order, t.request.request_id, t.number, list(groups.items()), t.traceparent, t.adapter)
        )

    def _chunk_orders(
        self, t: Tracked, i: int, computed: int, keys: Sequence[bytes]
    ) -> list[tuple[int, ChunkOrder]]:
        """Returns the orders of a chunk, one for each group that still has all of the chunk's blocks."""
        orders = []
        for g in self._groups:
            blocks = g.chunk_blocks(t.table[g.id], i)
            if g.storable(i, computed) and NULL_BLOCK not in blocks and len(blocks) == g.blocks:
                orders.append((g.id, ChunkOrder(i, blocks, keys[i], keys[i - 1] if i else b"")))
        return orders

    @property
    def pending(self) -> bool:
        """Whether the host may touch blocks. The engine must then make steps, since workers report in them that the
        host is done. Abandoned loads do not count, so that the engine can end, pause or sleep before a stopped host
        goes on."""
        return self._holds.pending

    @property
    def frees_soon(self) -> bool:
        """Whether the host will soon have read blocks, so that waiting costs less than preempting a request."""
        return self._holds.stores and time.monotonic() - self._ordered < _READ_SOON

    def output(self) -> None:
        """Records a step's output."""
        self._choice.steps.output(time.monotonic())

    def reported(self, report: WorkerReport) -> tuple[list[Any], list[Any]]:
        """Records a report of the workers. Returns the requests with failed loads, and the requests with loads that
        the host does not end. The latter must restart with other blocks."""
        if report.epochs:
            self._worker_epochs |= report.epochs
        for key in report.stored:
            self._bad.pop(key, None)
        self._count("chunks_stored", len(report.stored))
        self._loaded(report)
        if report.adapters and self._adapters is not None:
            self._adapters.reported(report.adapters)
            for tracked in self._requests.values():
                if tracked.adapter is not None and not self._adapters.current(tracked.adapter):
                    tracked.may_load, tracked.stored = False, _ALL
        for cause, chunks in report.dropped.items():
            self._drop(cause, chunks)
        abandoned = []
        for order, request_id in report.abandoned.items():
            self._hung.add(order)
            self._holds.abandon(request_id, order)
            if (t := self._requests.get(request_id)) is not None and order not in self._loads_in_step:
                abandoned.append(t.request)
        failed = [r for r in self._failed_loads(report) if r not in abandoned]
        self._holds.free_on(report.free.items())
        self._hung -= {order for order in report.free if not self._holds.holds(order)}
        return failed, abandoned

    def _loaded(self, report: WorkerReport) -> None:
        over: dict[int, float] = {}
        for load in report.loads:
            self._choice.load.add(load.tokens, load.seconds)
            over[load.order] = max(load.over, over.get(load.order, 0.0))
        for order in report.free.keys() | report.abandoned.keys():
            ordered = self._ordered_at.pop(order, None)
            if ordered is not None and order in over:
                self._took("load", ordered, over[order])
                self._took("notice", over[order], time.monotonic())

    def broken(self, report: WorkerReport) -> set[int]:
        """Returns the cached blocks that failed loads inside steps did not fill, and the blocks computed from them.
        Requests that shared bad blocks, and have ended or were preempted, may have computed some of those."""
        broken = set(report.broken)
        if broken:
            for blocks in (blocks for table in self._tables for blocks in table):
                first = next((i for i, b in enumerate(blocks) if b in report.broken), len(blocks))
                broken |= set(blocks[first:])
        self._loads_in_step -= report.free.keys() | report.abandoned.keys()
        if not self._loads_in_step:
            self._tables = []
        return broken - {NULL_BLOCK}

    def received(self, report: WorkerReport | None, received: set[str]) -> set[str]:
        """Returns the requests that have received their KV, given those that the engine has counted.

        The engine merges the reports of all connectors. Another connector may report a failure for a request that it
        does not load (NIXL in vLLM 0.26). While this connector loads the request, that report would end the
        request's wait, and the engine would compute from blocks that are not written yet."""
        over = set()
        for request_id, ranks in (report.loaded if report is not None else {}).items():
            self._loading[request_id] -= ranks
            if not self._loading[request_id]:
                del self._loading[request_id]
                over.add(request_id)
                if (t := self._requests.get(request_id)) is not None:
                    t.received = time.monotonic()
        return (received - self._loading.keys()) | over

    def _failed_loads(self, report: WorkerReport) -> list[Any]:
        failed = []
        for request_id, chunks in report.failed.items():
            self._count("chunks_not_loaded", len(chunks))
            self._bad |= dict.fromkeys(filter(None, chunks.values()))
            if (t := self._requests.get(request_id)) is None:
                continue  # the engine has ended the request because of this failure
            t.may_load, t.loading = False, 0
            if t.stored < _ALL:
                t.stored = min(t.stored, min(chunks))
            failed.append(t.request)
        while len(self._bad) > _REMEMBERED:
            self._bad.popitem(last=False)
        return failed

    def new_generation(self, generation: bytes) -> None:
        """Hides all earlier chunks from lookups, after a change of the engine's weights."""
        self._generation = generation
        if self._events is not None:
            self._events.forget()
        if self._adapters is not None:
            self._adapters.forget()
        for t in self._requests.values():
            t.may_load, t.stored = False, _ALL  # the chain belongs to the old weights

    def take_events(self) -> list[Any]:
        """Returns vLLM's events for chunks that the host stored and removed since the last call."""
        return self._events.take() if self._events is not None else []

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
        if self._adapters is not None:
            self._adapters.close()
        self._keeper.close()
        self._link.close()
