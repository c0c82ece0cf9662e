"""vLLM's own offloading with kvhost as the tier behind its CPU tier, whose rows are poisoned.

An engine's first life computes its tokens; what later lives say is compared with that. Prompts are prefilled in steps of
one chunk, so that a hit changes no step's shape."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace as Record
from typing import Any

import pytest
import vllm_model as model
from features import OLD
from needs import needs
from processes import DEADLINE, Host, wait_for
from vllm_engine import BLOCK, Answers, Engine, Tokens

needs("vllm")

LENGTH = 1500
HITS = LENGTH // BLOCK * BLOCK
ROW = 3 * 2 * BLOCK * 2 * 64 * 4  # of the Llama: layers, keys and values, tokens, heads, their size, float32


def prompts(seed: int, n: int = 2, length: int = LENGTH) -> list[Tokens]:
    rng = random.Random(seed)
    return [[rng.randrange(3, model.VOCAB) for _ in range(length)] for _ in range(n)]


def tokens(answers: Answers) -> list[Tokens]:
    return [t for t, _ in answers]


def cached(answers: Answers) -> list[int]:
    return [n for _, n in answers]


class Lives:
    """Engines with one model, one after the other, and their host."""

    def __init__(self, folder: Path, door: str = "tier", **vllm: Any) -> None:
        """``door``: "tier", "connector", or none."""
        self.folder, self.model, self.door, self.vllm = folder, folder / "model", door, vllm
        self.host = Host(folder)
        self.lookup_timeout = 5.0
        self._engines: list[Engine] = []

    def engine(
        self, tier: dict[str, Any] | None = None, env: dict[str, str] | None = None, *, door: str | None = None,
        **extra: Any,
    ) -> Engine:
        """``extra`` is of the offloading, ``tier`` of the tier instead of the host's socket."""
        for e in self._engines:
            e.kill()
        door = self.door if door is None else door
        options = dict(self.vllm)
        if door == "tier":
            options = {"kv_transfer_config": self.offloading(tier, **extra), **options}
        self._engines.append(Engine(
            self.folder, f"life{len(self._engines)}", self.model, None if tier or not door else self.host, blocks=96, vllm=options,
            env={"PYTHONHASHSEED": "0", **(env or {})},  # which 0.26 needs for others to find its blocks
        ))
        return self._engines[-1]

    def offloading(self, tier: dict[str, Any] | None = None, **extra: Any) -> dict[str, Any]:
        """vLLM's connector with the tier."""
        config = {
            "spec_name": "TiersSpec", "spec_module_path": "vllm_offloading", "cpu_bytes_to_use": 32 << 20,
            "secondary_tiers": [{"type": "kvhost", **(tier or {"socket": self.host.socket, "lookup_timeout": self.lookup_timeout})}], **extra,
        }
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": config}

    def published(self) -> None:
        """What the last step has computed, vLLM's offloading stores with the next one that it makes."""
        self._engines[-1].generate([[5] * 8] * 2)  # one for each data parallel rank
        wait_for("the host has published all", self.host.idle)

    def close(self) -> None:
        for e in self._engines:
            e.kill()
        self.host.kill()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tier")


@pytest.fixture
def llama(folder: Path) -> Iterator[Lives]:
    lives = Lives(folder)
    model.write(lives.model, model.config(3), seed=7)
    lives.host.start()
    yield lives
    lives.close()


def counted(engine: Engine, name: str) -> float | None:
    """One of the tier's counters. None in vLLM 0.26, which drops what is counted in steps without output."""
    found: dict[str, float] = engine.ask("counters")
    return None if OLD else found.get(f"vllm:kvhost_tier_{name}", 0)


def stored_parts(engine: Engine) -> list[int]:
    """The bytes of each group's chunks, as the tier says at its start."""
    return [int(n) for n in re.findall(r"group \d+: (\d+) of \d+ bytes per chunk", engine.log.read_text())]


def used_parts(folder: Path) -> list[int]:
    """As vLLM's worker copies them."""
    return [sum(size for _, size in runs) for runs in json.loads((folder / "rows").read_text())]


@pytest.mark.skipif(OLD, reason="vLLM 0.26 has no canonical rows, which is refused: see test_what_is_refused")
@pytest.mark.parametrize("block, heads", [(BLOCK, 2), (32, 1)])
def test_another_size_loads_what_one_has_stored(folder: Path, llama: Lives, block: int, heads: int) -> None:
    """Two ranks, each with a KV head or both with the same one, load what one has stored, and one what two have."""
    first, second, hits = prompts(1), prompts(2), LENGTH // block * block
    llama.model = folder / "shared"
    model.write(llama.model, model.config(3) | {"num_key_value_heads": heads}, seed=7)
    tier = {"socket": llama.host.socket, "lookup_timeout": 5.0, "share": "sizes"}

    def life(size: int, asked: list[Tokens]) -> Answers:
        llama.vllm = {"tensor_parallel_size": size, "block_size": block, "num_gpu_blocks_override": 96 * BLOCK // block, "enforce_eager": False}
        answers = llama.engine(tier, canonical_layout=True).one_by_one(asked)
        llama.published()
        return answers

    one = life(1, first)
    assert cached(one) == [0, 0]
    two = life(2, [*first, *second])
    assert tokens(two)[:2] == tokens(one) and cached(two) == [hits, hits, 0, 0]
    assert life(1, second) == [(t, hits) for t in tokens(two)[2:]]


def test_lives_of_a_model(llama: Lives) -> None:
    host, asked, away, hung = llama.host, prompts(1), prompts(2), prompts(3, 1)
    engine = llama.engine()
    computed = [engine.one_by_one(p) for p in (asked, away, hung)]
    assert [n for c in computed for n in cached(c)] == [0] * 5, "the first life computes"
    want, want_away, want_hung = (tokens(c) for c in computed)
    llama.published()
    engine.stop()

    engine = llama.engine(cpu_bytes_to_use=16 * ROW)  # the second prompt takes the first one's rows
    again = engine.one_by_one([*asked, *asked])
    assert (tokens(again), cached(again)) == (want * 2, [HITS] * 4)
    loaded = counted(engine, "chunks_loaded")
    assert loaded is None or loaded >= 2 * HITS // BLOCK, f"{loaded} chunks were loaded, want those of two prompts twice"

    host.kill()  # between jobs
    engine.reset()
    alone = engine.one_by_one(away)
    assert (tokens(alone), cached(alone)) == (want_away, [0, 0]), "while no host is there the engine computes"
    host.start()
    wait_for("the tier is connected again", lambda: engine.count("kvhost tier: connected") == 2)
    engine.reset()
    back = engine.one_by_one(asked)
    assert (tokens(back), cached(back)) == (want, [HITS] * 2)

    engine.reset()
    host.hang()
    engine.send("generate", hung, 8, None)
    assert engine.answers(DEADLINE), "want an answer though the host's process is stopped"
    assert tokens(engine.answer()) == want_hung
    assert counted(engine, "lookups_timed_out") != 0
    host.resume()
    llama.published()

    engine.reset()
    (llama.folder / "stop").write_text(str(host.pid()))  # after the lookup, before the load
    engine.send("generate", asked[:1], 8, None)
    assert engine.answers(DEADLINE), "want an answer though the host's process was stopped with a load in flight"
    assert tokens(engine.answer()) == want[:1]
    assert host.hangs() and engine.count("has not ended a load") == 1, "want a load that the host had and has not ended"
    assert tokens(engine.one_by_one(hung)) == want_hung
    host.resume()
    llama.published()
    engine.comes_to(asked[:1], [(want[0], HITS)])
    engine.reset()
    back = engine.one_by_one([*hung, *asked])
    assert (tokens(back), cached(back)) == (want_hung + want, [HITS] * 3)
    engine.stop()

    damaged = host.files()[0]
    raw = bytearray(damaged.read_bytes())
    raw[len(raw) // 2] ^= 1
    damaged.write_bytes(raw)
    engine = llama.engine()
    found = engine.one_by_one([*asked, *away])
    assert tokens(found) == want + want_away
    assert sorted(cached(found))[1:] == [HITS] * 3 and min(cached(found)) < HITS, f"{cached(found)}, want one chunk lost"
    assert counted(engine, "chunks_not_loaded") in (1, None), "want the damaged chunk"
    llama.published()
    engine.stop()

    engine = llama.engine(blocks_per_chunk=2)  # whose keys are those of every second block
    other = engine.one_by_one(asked)
    assert (tokens(other), cached(other)) == (want, [0, 0]), "rows of another size are no hits"
    llama.published()
    engine.stop()
    engine = llama.engine(blocks_per_chunk=2)
    other = engine.one_by_one(asked)
    assert (tokens(other), cached(other)) == (want, [LENGTH // (2 * BLOCK) * 2 * BLOCK] * 2)


@pytest.mark.parametrize("family", model.HYBRIDS)
def test_lives_of_a_hybrid(folder: Path, family: str) -> None:
    """A hit needs the states at its end and the pages before it. Behind it so few tokens are computed that the loaded states
    decide what is said; the kernels for processors keep no state from inside a step, which is why steps have one block."""
    if OLD:
        pytest.skip("vLLM 0.26 has neither kernel for processors: gated delta nets and Mamba")
    block = 384 if family == "qwen3_next" else 128
    steps = {"block_size": block, "max_num_batched_tokens": block}  # else the block depends on the processor
    lives = Lives(folder, dtype="bfloat16", enable_prefix_caching=True, mamba_cache_mode="align", **steps)
    model.write_hybrid(lives.model, family, seed=5)
    asked = prompts(1, 3, 1155)
    pieces: list[set[Path]] = []

    def stored() -> set[Path]:
        return set(lives.host.root.rglob("*_g*_r0.kv"))

    try:
        lives.host.start()
        engine = lives.engine()
        first: Answers = []
        for p in asked:
            before = stored()
            first += engine.one_by_one([p])
            lives.published()
            pieces.append(stored() - before)
        assert cached(first) == [0, 0, 0]
        assert len({tuple(t) for t in tokens(first)}) == 3, "want tokens that depend on the prompt"
        engine.stop()
        parts, used = stored_parts(engine), used_parts(folder)
        assert parts == used and min(parts) < max(parts), f"chunks have {parts} bytes, want {used}, states shorter than pages"

        engine = lives.engine()
        again = engine.one_by_one(asked)
        assert (tokens(again), cached(again)) == (tokens(first), [1152] * 3)
        assert not counted(engine, "chunks_not_loaded")
        engine.stop()

        lives.host.kill()
        kinds = json.loads((folder / "kinds").read_text())
        for of_prompt, kind in zip(pieces, ["MambaSpec", "FullAttentionSpec"], strict=False):  # the third keeps all
            lost = [piece for piece in of_prompt if f"_g{kinds.index(kind)}_" in piece.name]
            assert lost, f"want pieces of {kind} among {len(of_prompt)} of a prompt"
            for piece in lost:
                piece.unlink()
        lives.host.start()
        engine = lives.engine()
        less = engine.one_by_one(asked)
        assert (tokens(less), cached(less)) == (tokens(first), [0, 0, 1152])
    finally:
        lives.close()


def test_an_engine_starts_its_own_host(folder: Path) -> None:
    lives = Lives(folder)
    model.write(lives.model, model.config(3), seed=7)
    (folder / "run").mkdir(mode=0o700)
    env = {"KVHOST_BIN": lives.host.command[0], "XDG_RUNTIME_DIR": str(folder / "run"), "KVHOST_SESSION_IDLE_EXIT": "30s"}
    own = {"root": f"{folder / 'own'}=1GiB"}
    if not OLD:  # which knows no tier but by its registered name
        own |= {"type": "KvhostTier", "module_path": "kvhost.vllm.tier"}
    try:
        engine = lives.engine(own, env)
        secret = engine.ask("transfer", prompts(2, 1)[0], 8, {"kvhost": {"store": False}})
        first = engine.one_by_one(prompts(1))
        wait_for("all is stored", lambda: sum(p.stat().st_size > ROW for p in (folder / "own").rglob("*")) == 2 * HITS // BLOCK)
        engine.stop()
        engine = lives.engine(own, env)
        (unread,) = prompts(1)[:1]
        computed = engine.ask("transfer", unread, 8, {"kvhost": {"load": False}})
        assert (computed[0], computed[1]) == (tokens(first)[0], 0), "its client forbids to load"
        again = engine.one_by_one(prompts(1)[1:] + prompts(2, 1))
        assert (tokens(again), cached(again)) == ([tokens(first)[1], secret[0]], [HITS, 0]), "a client has forbidden to store"
    finally:
        lives.close()


@pytest.mark.skipif(not OLD, reason="a request of later releases ends after its stores")
def test_a_request_that_ended_is_stored_when_there_is_room() -> None:
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

    from kvhost.vllm.tier import KvhostTier

    region = Record(create_kv_memoryview=lambda: memoryview(bytearray(32)).cast("B", (1, 32)))
    spec = Record(kv_events_config=Record(enable_kv_cache_events=False))
    tier = KvhostTier(spec, region.create_kv_memoryview(), "kvhost", socket="/nowhere")
    manager = TieringOffloadingManager(CPUPrimaryTierOffloadingManager(1, region), [tier])
    first, late = (ReqContext(name) for name in ("first", "late"))
    one, other = (bytes([i]) * 32 + bytes(4) for i in (1, 2))
    for request in (first, late):
        manager.on_new_request(request)
    assert manager.prepare_store([one], first), "want the only row"
    assert manager.prepare_store([other], late) is None, "want no row left"
    manager.on_request_finished(late)
    manager.complete_store([one], first)
    manager.on_schedule_end(Record(new_req_ids=[]))  # the tier has let go of the row
    assert manager.prepare_store([other], late), "want the row, though the request has ended"
    manager.complete_store([other], late)
    manager.on_request_finished(first)
    assert not manager._req_state, f"want no request left, got {list(manager._req_state)}"
    tier.shutdown()


@pytest.mark.skipif(not OLD, reason="later releases have it mended")
@pytest.mark.parametrize(
    ("status", "prompt", "said", "blocks", "computed", "want"),
    [
        ("FINISHED_ABORTED", 64, 0, 0, 0, 0),  # it was never scheduled
        ("FINISHED_ABORTED", 64, 0, 2, 32, 2),  # in the middle of its prompt
        ("FINISHED_ABORTED", 64, 0, 4, 32, 2),  # likewise, with blocks for more
        ("FINISHED_STOPPED", 62, 2, 4, 63, 3),  # its last token fills a block, and was not computed
        ("FINISHED_STOPPED", 62, 3, 5, 64, 4),
        ("FINISHED_LENGTH_CAPPED", 64, 1, 4, 64, 4),
    ],
)
def test_what_has_no_kv_is_not_stored(status: str, prompt: int, said: int, blocks: int, computed: int, want: int) -> None:
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_offload.base import LookupResult, PrepareStoreOutput, RequestOffloadingContext
    from vllm.v1.request import Request, RequestStatus

    from kvhost.vllm import compat

    stored: list[Any] = []
    nothing = {name: lambda *_: None for name in ("on_request_finished", "on_schedule_end", "touch")}
    manager = Record(
        on_new_request=lambda _: RequestOffloadingContext(), lookup=lambda *_: LookupResult.MISS, **nothing,
        prepare_store=lambda keys, _: stored.extend(keys) or PrepareStoreOutput([*keys], None, []),
    )
    group = Record(kv_cache_spec=FullAttentionSpec.__new__(FullAttentionSpec), is_eagle_group=False)
    spec = Record(
        get_manager=lambda: manager, tokens_per_block=(16,), tokens_per_hash=16, blocks_per_chunk=1, offload_prompt_only=False,
        kv_events_config=Record(enable_kv_cache_events=False, self_describing_kv_events=False),
    )
    config = Record(
        parallel_config=Record(world_size=1), speculative_config=None, cache_config=Record(enable_prefix_caching=True)
    )
    compat.mend_offloading()
    offloading = OffloadingConnectorScheduler(spec, config, Record(kv_cache_groups=[group]))
    init_none_hash(sha256)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    request = Request("a", [*range(prompt)], params, None, block_hasher=get_request_block_hasher(16, sha256))
    offloading.on_new_request(request)
    assert offloading.get_num_new_matched_tokens(request, 0) == (0, False)
    offloading._req_status["a"].update_block_id_groups(([*range(1, blocks + 1)],))
    request.append_output_token_ids([7] * said)
    request.num_computed_tokens, request.status = computed, RequestStatus[status]
    offloading.request_finished(request)
    output = SchedulerOutput.make_empty()
    output.finished_req_ids = {"a"}
    offloading.build_connector_meta(output)
    assert len(stored) == want, f"{len(stored)} blocks are stored, want the {want} that were computed"


def test_clients_go_away(llama: Lives) -> None:
    """Some before their request was scheduled, and some in the middle of their prompt."""
    kept, gone = prompts(1), prompts(2, 12)
    engine = llama.engine()
    want = tokens(engine.one_by_one(kept))
    engine.reset()
    for n in (1, 3):
        doomed = [(p, n + i) for i, p in enumerate(gone)]
        assert engine.ask("crowd", kept, 8, doomed) == want, f"the first client went away after {n} steps"
        engine.reset()
    answers = engine.one_by_one(gone)
    llama.published()
    engine.stop()
    engine = llama.engine()
    again = engine.one_by_one(gone)
    assert tokens(again) == tokens(answers) and cached(again) == [HITS] * len(gone)


def test_routers_learn_what_the_host_has(folder: Path) -> None:
    if OLD:
        pytest.skip("vLLM 0.26 describes no events of its tiers, and refuses to")
    from test_vllm_events import Router
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

    at = {name: f"ipc://{folder}/{name}" for name in ("endpoint", "replay_endpoint")}
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv@node@model", **at}
    lives = Lives(folder, kv_events_config=events)
    model.write(lives.model, model.config(3), seed=7)
    router = Router(*at.values())

    def settled(kind: Any, count: int) -> list[Any]:
        """The hashes of a kind of event about storage, once there are so many."""

        def there() -> bool:
            engine.generate([[5] * 8])
            router.catch_up()
            return len(named()) >= count

        def named() -> list[Any]:
            storage = [e for e in router.seen if getattr(e, "medium", "GPU") not in ("GPU", "CPU")]
            return [h for e in storage if isinstance(e, kind) for h in e.block_hashes]

        wait_for(f"the engine's {kind.__name__}", there)
        return named()

    try:
        lives.host.start()
        engine = lives.engine({"socket": lives.host.socket, "enable_kv_events": True}, self_describing_kv_events=True)
        first, second = prompts(1)
        engine.one_by_one([first])
        gone = settled(BlockStored, HITS // BLOCK)
        pieces = lives.host.files()
        engine.one_by_one([second])
        stored = settled(BlockStored, 2 * HITS // BLOCK)
        assert len(set(stored)) == len(stored) == 2 * len(pieces), f"{len(stored)} were announced of {2 * len(pieces)}"
        described = [e for e in router.seen if isinstance(e, BlockStored) and set(e.block_hashes) & set(stored)]
        assert sum(len(e.token_ids) for e in described if e.medium not in ("GPU", "CPU")) == 2 * HITS

        wait_for("all is published", lives.host.idle)
        lives.host.kill()
        for piece in pieces:
            piece.unlink()
        lives.host.start()
        assert sorted(settled(BlockRemoved, len(gone))) == sorted(gone), "want what the host has no more, and nothing else"
    finally:
        lives.close()
        router.close()


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_rows_that_a_stopped_host_has(policy: str) -> None:
    """Requests go on without them, and vLLM gives them to nothing else until the load is answered."""
    from kvhost.vllm import compat
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    context: Any = ReqContext(req_id="a")
    cpu: Any = CPUOffloadingManager(4, cache_policy=policy)
    keys: Any = [bytes([n]) * 32 + bytes(4) for n in range(6)]

    def taken(*wanted: bytes) -> set[int] | None:
        prepared = cpu.prepare_store(wanted, context)
        ids = "chunk_ids" if hasattr(prepared and prepared.store_spec, "chunk_ids") else "block_ids"  # 0.26
        return prepared and {int(i) for i in getattr(prepared.store_spec, ids)}

    rows = taken(*keys[:2])
    load = Record(job_id=7, keys=keys[:2])
    assert not compat.set_aside(Record(), load) and load.keys == keys[:2], "want rows left alone where vLLM is another one"
    assert compat.set_aside(Record(_manager=Record(primary_tier=cpu)), load)
    assert [cpu.lookup(k, context).name for k in keys[:2]] == ["MISS"] * 2
    others = taken(*keys[1:3])
    assert rows and others and len(rows | others) == 4, f"rows {others} were given away, and the host has {rows}"
    cpu.complete_store(keys[1:3], context)
    assert taken(*keys[3:6]) is None, "want two rows for three chunks to be too few"
    cpu.complete_store(load.keys, context, False)
    assert cpu.lookup(keys[1], context).name == "HIT", "the load's end was another row's"
    assert taken(*keys[3:6]), "want the host's rows back"


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_rows_that_a_stopped_host_has_outlast_a_reset(policy: str) -> None:
    """vLLM empties its CPU tier, and gives the rows of loads that were left to the host to nothing until they are given back."""
    from kvhost.vllm import compat
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    context: Any = ReqContext(req_id="a")
    cpu: Any = CPUOffloadingManager(4, cache_policy=policy)
    spec, left = Record(_manager=Record(primary_tier=cpu)), {1, 3}
    keys: Any = [bytes([n]) * 32 + bytes(4) for n in range(9)]

    def taken(*wanted: bytes) -> set[int] | None:
        prepared = cpu.prepare_store(wanted, context)
        ids = "chunk_ids" if hasattr(prepared and prepared.store_spec, "chunk_ids") else "block_ids"  # 0.26
        return prepared and {int(i) for i in getattr(prepared.store_spec, ids)}

    assert not compat.leave_rows(Record(), lambda: left), "want no promise where vLLM is another one"
    assert compat.leave_rows(spec, lambda: left) and compat.leave_rows(spec, lambda: left)
    assert taken(*keys[:2]) == {0, 1}
    for _ in range(2):
        cpu.reset_cache()
        assert taken(*keys[:3]) is None and taken(*keys[2:4]) == {0, 2}, "want the rows that are left given to nothing"
    left.clear()
    compat.give_back_rows(spec, [1, 3])
    assert taken(*keys[4:6]) == {1, 3}, "want them used again"
    cpu.reset_cache()
    assert taken(*keys[:4]) == {0, 1, 2, 3}


@pytest.mark.parametrize(("backend", "nodes"), [("mp", 2), ("ray", 1), ("external_launcher", 1)])
def test_workers_on_other_nodes_are_refused(backend: str, nodes: int) -> None:
    """vLLM's CPU tier of the scheduler's node has nothing of theirs, and vLLM does not say so."""
    from kvhost.vllm import tierrows
    from kvhost.errors import Refused
    from kvhost.vllm.settings import Settings

    parallel = Record(distributed_executor_backend=backend, nnodes_within_dp=nodes)
    with pytest.raises(Refused, match="workers may be on other nodes"):
        tierrows.namespace(
            Record(lora_config=None, parallel_config=parallel), None, Record(parallel=Record(world_size=2)), Settings(), []
        )


def test_what_is_refused() -> None:
    from kvhost.vllm import tierrows
    from kvhost.errors import Refused
    from kvhost.vllm.settings import Settings
    from kvhost.vllm.tier import KvhostTier

    with pytest.raises(Refused, match="LoRA"):
        tierrows.namespace(Record(lora_config=Record()), None, None, Settings(), [])
    for canonical, agnostic in ((None, True), (False, True), (True, False)):  # 0.26 knows no such rows
        one = {} if canonical is None else {"canonical_layout": canonical}
        with pytest.raises(Refused, match='share is "sizes".* needs "canonical_layout": true'):
            tierrows.shares(Record(parallel=Record(is_parallelism_agnostic=agnostic), **one), Settings(share="sizes"))
    view = memoryview(bytearray(64)).cast("B", (4, 16))
    with pytest.raises(ValueError, match=r"secondary_tiers, kvhost: unknown setting 'sockets', known are socket, root"):
        KvhostTier(Record(), view, "kvhost", sockets="x")

    spec = Record(kv_events_config=Record(enable_kv_cache_events=True))
    tier = KvhostTier(spec, view, "kvhost", socket="/nowhere", enable_kv_events=True)  # no caller has the configuration
    context = Record(req_id="a", kv_transfer_params=None)
    key = bytes(32) + bytes(4)
    assert tier.lookup(key, context).name == "MISS"
    job = Record(job_id=1, keys=[key], chunk_ids=[0], block_ids=[0], req_context=context)
    tier.submit_store(job)
    assert [(r.job_id, r.success) for r in tier.get_finished_jobs()] == [(1, False)], "want one answer"
    secret = Record(req_id="b", kv_transfer_params={"kvhost": {"store": False}})
    tier.submit_store(Record(job_id=2, keys=[key], chunk_ids=[0], block_ids=[0], req_context=secret))
    assert [(r.job_id, r.success) for r in tier.get_finished_jobs()] == [(2, True)], "want an answer to what is not to be stored"
    assert (list(tier.get_finished_jobs()), list(tier.take_events()), tier.has_pending_work()) == ([], [], False)
    tier.shutdown()
