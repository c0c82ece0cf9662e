"""The scheduler's half: it looks prompts up, and orders the workers' stores and loads."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvhost.errors import KvhostError
from kvhost.vllm import hints
from kvhost.vllm.groups import NULL_BLOCK, GroupPlan
from kvhost.keys import KeyChain, Item
from kvhost.vllm.link import Link
from kvhost.vllm.lookups import RequestLookup
from kvhost.vllm.orders import ChunkOrder, GroupLoad, LoadOrder, StepOrders, StoreOrder, WorkerReport
from kvhost.vllm.rates import LoadOrCompute, Part
from kvhost.vllm.settings import Settings

if TYPE_CHECKING:
    from kvhost.vllm.kvevents import KVEvents

log = logging.getLogger("vllm.kvhost")

_REMEMBERED = 1 << 16  # keys whose bytes were bad


class Tracked:
    """One request, as far as the connector knows it."""

    def __init__(self, request: Any, number: int, chain: KeyChain) -> None:
        self.request = request
        self.number = number
        self.chain = chain
        self.table: list[list[int]] = []  # blocks by group
        self.lookup: RequestLookup | None = None
        self.waited = False  # the scheduler has waited for the lookup once
        self.hit = 0  # chunks that the lookup promised
        self.local = 0  # leading tokens that the engine's own cache has
        self.loading = False
        self.may_load = True
        self.stored = 0  # chunks that the host has, or was ordered to store
        self.unread: set[int] = set()  # store orders whose blocks the host still reads
        # The trace that the engine's client has named, if any; the host's spans become part of it.
        self.traceparent: str = (getattr(request, "trace_headers", None) or {}).get("traceparent", "")


class Scheduler:
    """All requests of one engine core. Its methods run on the scheduler's thread."""

    def __init__(
        self, settings: Settings, link: Link, groups: Sequence[GroupPlan], ranks: int, stages: int, *, loads: bool,
        step_tokens: int, events: KVEvents | None = None,
    ) -> None:
        """``ranks`` per pipeline stage. ``loads`` is false where the engine could not recover from a failed load.
        ``step_tokens`` is the most that the engine computes in a step."""
        self._settings, self._link, self._groups = settings, link, groups
        self._chunk = groups[0].chunk_tokens
        self._ranks, self._stages = ranks, stages
        self._loads_allowed = loads
        self._events = events  # None: the engine publishes none
        self._requests: dict[str, Tracked] = {}
        self._last_number = 0
        self._last_order = 0
        self._generation = b""
        self._orders = StepOrders()
        self._unread: dict[int, tuple[Tracked, int]] = {}  # by order: whose, and how many ranks have not read it
        self._bad: OrderedDict[bytes, None] = OrderedDict()
        self._worker_epochs: dict[tuple[int, int], int] = {}
        self._choice = LoadOrCompute(step_tokens, self._chunk)
        self._steps: deque[tuple[float, int]] = deque()  # (when scheduled, tokens) of steps without output yet
        self._last_output = 0.0
        self.counts: dict[str, int] = {}  # since they were last taken

    def _count(self, name: str, n: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + n

    # ---- requests ----------------------------------------------------------------------------------------------------

    def track(self, request: Any) -> Tracked | None:
        """None for a request whose KV its token ids do not determine."""
        if getattr(request, "prompt_embeds", None) is not None:
            return None
        t = self._requests.get(request.request_id)
        if t is None:
            self._last_number = self._last_number % 0xFFFFFFFF + 1
            t = Tracked(request, self._last_number, self._chain(request))
            self._requests[request.request_id] = t
        return t

    def _chain(self, request: Any) -> KeyChain:
        lora = request.lora_request
        return KeyChain(
            self._chunk,
            lora_name=lora.lora_name if lora else "",
            lora_path=lora.lora_path if lora else "",
            salt=request.cache_salt or "",
            items=[Item(f.mm_position.offset, f.mm_position.length, f.identifier) for f in request.mm_features],
            generation=self._generation,
        )

    def matched(self, request: Any, computed: int) -> int | None:
        """How many tokens beyond the ``computed`` ones can be loaded; None to be asked again."""
        t = self.track(request)
        if t is None:
            return 0
        t.hit, t.local, t.table = 0, computed, []
        if not self._ready():
            return 0
        keys = t.chain.extend(request.all_token_ids, request.num_tokens)
        if not keys or not t.may_load or getattr(request, "skip_reading_prefix_cache", False):
            return 0
        if t.lookup is not None and t.lookup.done() and not t.lookup.fresh:
            t.lookup.release()
            t.lookup = None
        if t.lookup is None and not self._ask(t, keys):
            return 0
        lookup = t.lookup
        assert lookup is not None
        if not lookup.done(0 if t.waited else self._settings.lookup_wait):
            t.waited = True
            if time.monotonic() - lookup.began < self._settings.lookup_timeout:
                return None
            self._count("lookups_timed_out")
            t.may_load, t.lookup = False, None
            return 0
        there = lookup.hit(len(keys))
        t.stored = max(t.stored, there)
        if self._events is not None:
            self._events.found(keys[:there])
        take = self._worth(lookup, self._before_bad(keys, there), computed)
        if not take:
            lookup.release()
            t.lookup = None
            return 0
        t.hit = take
        return take * self._chunk - computed

    def _ready(self) -> bool:
        """Whether the host answers, and every worker has a session in the same epoch."""
        epoch = self._link.epoch
        return (
            epoch >= 0
            and len(self._worker_epochs) == self._ranks * self._stages
            and all(e == epoch for e in self._worker_epochs.values())
        )

    def _ask(self, t: Tracked, keys: Sequence[bytes]) -> bool:
        sessions = self._link.sessions()
        if not sessions:
            return False
        limit = min(s.limits.keys_per_lookup for s in sessions) or len(keys)
        if self._events is not None:
            self._events.describe(t.request, keys, 0, len(keys[:limit]))
        try:
            t.lookup = RequestLookup(
                sessions, self._groups, keys[:limit], t.number, (1 << self._ranks) - 1, self._settings.prefetch,
                t.traceparent,
            )
        except KvhostError:
            return False
        t.waited = False
        self._count("lookups")
        return True

    def _before_bad(self, keys: Sequence[bytes], hit: int) -> int:
        return next((i for i in range(hit) if keys[i] in self._bad), hit) if self._bad else hit

    def _worth(self, lookup: RequestLookup, hit: int, computed: int) -> int:
        """How many of the leading chunks that were found to load, 0 for none."""
        if hit * self._chunk <= computed or not self._loads_allowed:
            return 0
        if self._settings.load_when == "always":
            return hit
        parts = [Part(n * self._chunk - computed, s) for n, s in lookup.parts(computed // self._chunk, hit)]
        take = lookup.hit((computed + self._choice.choose(parts)) // self._chunk)
        if take < hit:
            self._count("hits_not_loaded_whole")
        return take if take * self._chunk > computed else 0

    def allocated(self, request: Any, table: Sequence[Sequence[int]], external: int) -> None:
        """The request has blocks; ``external`` of its tokens are to be loaded."""
        t = self._requests.get(request.request_id)
        if t is None:
            return
        for g in self._groups:
            known = len(t.table[g.id]) if t.table else t.local // g.block_tokens
            self._orders.reused += [b for b in table[g.id][known:] if b != NULL_BLOCK]
        t.table = [list(blocks) for blocks in table]
        lookup, t.lookup = t.lookup, None
        if not external:
            if lookup is not None:
                lookup.release()
            return
        assert lookup is not None and t.hit
        computed = t.local
        groups = []
        for at, g in enumerate(self._groups):
            chunks = []
            for i in g.needed(t.hit, computed // self._chunk):
                chunks.append(ChunkOrder(i, g.wanted_blocks(t.table[g.id], i, computed), t.chain.keys[i]))
            if chunks:
                groups.append(GroupLoad(g.id, lookup.leases(at), chunks))
        t.loading = True
        self._orders.loads.append(LoadOrder(request.request_id, self._link.epoch, external, groups))
        self._count("loads")
        self._count("tokens_loaded", external)

    def finished(self, request: Any) -> bool:
        """Whether the request's blocks must be kept until the host has read them."""
        t = self._requests.pop(request.request_id, None)
        if t is None:
            return False
        self._orders.ended.append((request.request_id, t.number))
        told = hints.of_request(request)
        for s in self._link.sessions():
            try:
                s.end_request(t.number, told, wait=False)  # and with it the leases of its lookups
            except KvhostError:
                pass
        if t.loading:
            self._orders.cancels.append(request.request_id)
            return False  # the engine keeps the blocks until the load has ended, anyway
        if t.unread:
            self._orders.held.append(request.request_id)
        return bool(t.unread)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def step(self, output: Any) -> StepOrders:
        """The orders for a step that was scheduled."""
        cached = output.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            new = cached.new_block_ids[at]
            t = self._requests.get(request_id)
            if t is None or new is None or request_id in cached.resumed_req_ids:
                continue  # allocated() has told of the blocks of a resumed one
            for g, blocks in enumerate(new):
                t.table[g] += blocks
                self._orders.reused += blocks
        if self._settings.store != "none" and self._link.epoch >= 0:
            for request_id, scheduled in output.num_scheduled_tokens.items():
                if (t := self._requests.get(request_id)) is not None and t.table:
                    self._order_stores(t, scheduled)
        self._steps.append((time.monotonic(), output.total_num_scheduled_tokens))
        orders, self._orders = self._orders, StepOrders()
        orders.epoch = self._link.wanted
        orders.forward = output.total_num_scheduled_tokens > 0
        return orders

    def _order_stores(self, t: Tracked, scheduled: int) -> None:
        """Orders the chunks that this step completes. Only final tokens count: no drafts, no placeholders."""
        r = t.request
        t.loading = False
        final = r.num_tokens if self._settings.store == "all" else r.num_prompt_tokens
        computed = r.num_computed_tokens
        end = min(computed + scheduled, final) // self._chunk
        if end <= t.stored:
            return
        keys = t.chain.extend(r.all_token_ids, r.num_tokens)
        if self._events is not None:
            self._events.describe(r, keys, t.stored, end)
        groups = []
        for g in self._groups:
            chunks = []
            for i in range(t.stored, end):
                blocks = g.chunk_blocks(t.table[g.id], i)
                if g.storable(i, computed) and NULL_BLOCK not in blocks and len(blocks) == g.blocks:
                    chunks.append(ChunkOrder(i, blocks, keys[i], keys[i - 1] if i else b""))
            if chunks:
                groups.append((g.id, chunks))
        self._count("chunks_ordered", end - t.stored)
        t.stored = end
        if not groups:
            return
        self._last_order += 1
        self._orders.stores.append(StoreOrder(self._last_order, r.request_id, t.number, groups, t.traceparent))
        self._unread[self._last_order] = (t, self._ranks * self._stages)
        t.unread.add(self._last_order)

    def output(self) -> None:
        """A step's output has come: the engine's rate follows from the time between outputs."""
        if not self._steps:
            return
        scheduled, tokens = self._steps.popleft()
        now = time.monotonic()
        self._choice.compute.step(tokens, now - max(scheduled, self._last_output))
        self._last_output = now

    def reported(self, report: WorkerReport) -> list[Any]:
        """Takes note of what the workers did; returns the requests whose loads failed."""
        if report.epochs:
            self._worker_epochs |= report.epochs
        for order, ranks in report.read.items():
            t, missing = self._unread.get(order, (None, 0))
            if t is None:
                continue
            if missing > ranks:
                self._unread[order] = (t, missing - ranks)
            else:
                del self._unread[order]
                t.unread.discard(order)
        for key in report.stored:
            self._bad.pop(key, None)
        self._count("chunks_stored", len(report.stored))
        for tokens, seconds in report.loads:
            self._choice.load.add(tokens, seconds)
        return self._failed_loads(report)

    def _failed_loads(self, report: WorkerReport) -> list[Any]:
        failed = []
        for request_id, chunks in report.failed.items():
            self._count("chunks_not_loaded", len(chunks))
            if (t := self._requests.get(request_id)) is None:
                continue
            t.may_load, t.loading = False, False
            t.stored = min(t.stored, min(chunks))
            failed.append(t.request)
            for i, bad in chunks.items():
                if bad:
                    self._bad[t.chain.keys[i]] = None
            while len(self._bad) > _REMEMBERED:
                self._bad.popitem(last=False)
        return failed

    def handshake(self, epochs: Mapping[tuple[int, int], int]) -> None:
        """The workers, all of which must have a session before anything is promised."""
        self._worker_epochs = dict(epochs)

    def new_generation(self, generation: bytes) -> None:
        """What was stored so far is not found any more: the engine's weights have changed."""
        self._generation = generation
        if self._events is not None:
            self._events.forget()
        for t in self._requests.values():
            t.may_load, t.stored = False, 1 << 62  # its chain is of the old weights

    def take_events(self) -> list[Any]:
        """vLLM's events for what the host stored and removed since the last call."""
        return self._events.take() if self._events is not None else []

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
        self._link.close()
