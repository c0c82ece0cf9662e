"""Measures the time to the first token of vLLM engines with kvhost, with vLLM's own offloading, and without either.

  PYTHONPATH=host/client/python python bench.py [--work near,second,trace,decode] ENGINE ...

An ENGINE is NAME[@GPU]=JSON, or NAME[@GPU] with a name from ENGINES below. The JSON has the connector's name ("kvhost",
"offloading" or "none"), its settings as "extra", and "run": "eager", "graphs" (for decode steps alone) or "compiled" (vLLM's
default). All engines run at the same time, each in its own process. They answer in turns, so that figures to be compared are
measured within a minute. The works, in the order of their names on the command line:

  near     prompts of --lengths: computed, their cache emptied, then asked again in --turns turns
  second   engines with a root end, their hosts too, the page cache is dropped, and what near has stored is asked again in turns
  trace    requests of --trace at their times, --rounds rounds with other tokens; engines on different GPUs at the same time
  decode   24 requests decode, alone and while long prompts hit

Each result is a line of JSON in $OUT/results.jsonl, or on standard output. The tokens of a hit are compared with those that
the same engine computed."""

import argparse
import gzip
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

START = time.monotonic()
VOCABULARY = 32000
MODELS = {"big": (32, 4096, 32, 8), "tiny": (3, 128, 2, 2)}  # layers, width, heads, heads of keys and values
#: Number of prompts by their tokens. A turn takes about as long for each length.
COUNT = {1024: 5, 4096: 3, 16384: 3}
ENGINES = {
    "none": {"connector": "none"},
    "kvhost": {"connector": "kvhost", "extra": {"memory": "20GiB"}},
    "offloading": {"connector": "offloading", "extra": {"cpu_bytes_to_use": 20 << 30, "sync_load_budget_bytes": 1 << 40}},
}


def say(*words):
    print(f"[bench {time.monotonic() - START:7.2f}]", *words, file=sys.stderr, flush=True)


def model_dir(path, layers, hidden, heads, kv_heads):
    path = pathlib.Path(path)
    head = hidden // heads
    c = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": hidden * 7 // 2, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "attention_bias": False,
    }
    if not (path / "config.json").exists():
        path.mkdir(parents=True, exist_ok=True)
        write_weights(path, c)
        (path / "config.json").write_text(json.dumps(c))
    return str(path)


def write_weights(path, c):
    """Makes weights with which each token depends on all KV before it. With equal weights (load_format="dummy") wrong KV
    changes no token. A GPU makes 32 layers, 4,096 wide, in seconds. Each file has one layer."""
    import torch
    from safetensors.torch import save_file

    on = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(7)
    h, ffn, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d

    def m(rows, columns, gain=1.0):
        return (torch.randn(rows, columns, device=on) * gain / columns**0.5).bfloat16().cpu()

    where = {}

    def save(n, t):
        save_file(t, str(path / f"model-{n:05d}.safetensors"), metadata={"format": "pt"})
        where.update(dict.fromkeys(t, f"model-{n:05d}.safetensors"))

    with ThreadPoolExecutor(8) as saving:
        jobs = [saving.submit(save, 0, {"model.embed_tokens.weight": m(c["vocab_size"], h, h**0.5), "lm_head.weight": m(c["vocab_size"], h),
                                        "model.norm.weight": torch.ones(h).bfloat16()})]
        for i in range(c["num_hidden_layers"]):
            at = f"model.layers.{i}."
            jobs.append(saving.submit(save, i + 1, {
                at + "self_attn.q_proj.weight": m(q, h, 2), at + "self_attn.k_proj.weight": m(kv, h, 2),
                at + "self_attn.v_proj.weight": m(kv, h), at + "self_attn.o_proj.weight": m(h, q, 4),
                at + "mlp.gate_proj.weight": m(ffn, h), at + "mlp.up_proj.weight": m(ffn, h),
                at + "mlp.down_proj.weight": m(h, ffn), at + "input_layernorm.weight": torch.ones(h).bfloat16(),
                at + "post_attention_layernorm.weight": torch.ones(h).bfloat16()}))
        for job in jobs:
            job.result()
    size = sum((path / f).stat().st_size for f in set(where.values()))
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": where}))


# The engine's process. Each command is a line of JSON, and so is each answer.


def serve(settings, answers):
    llm = start(settings)
    answer = {"ready": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks}
    works = {"one": one, "reset": reset, "trace": trace, "decode": decode}
    while True:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        line = json.loads(sys.stdin.readline() or '["stop"]')
        if line[0] == "stop":
            llm.llm_engine.engine_core.shutdown()
            return
        answer = works[line[0]](llm, *line[1:])


def start(s):
    from vllm import LLM
    from vllm.config import KVTransferConfig

    options = dict(model=s["model"], skip_tokenizer_init=True, dtype=s.get("dtype", "bfloat16"), seed=0, disable_log_stats=True,
                   enforce_eager=s.get("run") == "eager", **s.get("vllm", {}))
    if s.get("run", "graphs") == "graphs":
        options["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
    names = {"kvhost": ("KvhostConnector", {"kv_connector_module_path": "kvhost.vllm"}), "offloading": ("OffloadingConnector", {})}
    if s["connector"] != "none":
        name, more = names[s["connector"]]
        options["kv_transfer_config"] = KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_load_failure_policy="recompute",
                                                         kv_connector_extra_config=s.get("extra", {}), **more)
    return LLM(**options)


def params(n):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=n, detokenize=False, ignore_eos=True)


def prompt_of(seed, length):
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(length)]


def one(llm, seed, length, n):
    prompt = prompt_of(seed, length)
    t = time.monotonic()
    out = llm.generate([{"prompt_token_ids": prompt}], params(n), use_tqdm=False)[0]
    return {"ms": 1e3 * (time.monotonic() - t), "tokens": list(out.outputs[0].token_ids), "cached": out.num_cached_tokens or 0}


def reset(llm):
    t = time.monotonic()
    while not llm.reset_prefix_cache():
        time.sleep(0.01)
        assert time.monotonic() - t < 120, "blocks are not given back"
    return {"seconds": time.monotonic() - t}


def requests(path, skip, count, scale, salt):
    """Reads the requests of a trace in Mooncake's format. A hash id stands for 512 tokens in the trace and for 512/scale
    tokens here. The tokens follow from the id, so that equal prefixes of ids give equal prefixes of tokens."""
    if path.endswith(".zst"):
        text = subprocess.run(["zstd", "-dc", path], check=True, capture_output=True).stdout
    else:
        text = (gzip.open if path.endswith(".gz") else open)(path, "rb").read()
    lines = [json.loads(line) for line in text.splitlines()[skip:skip + count]]
    begin, block = lines[0]["timestamp"], 512 // scale
    for i, r in enumerate(lines):
        prompt = []
        for h in r["hash_ids"]:
            prompt += prompt_of(f"{salt} {h}", block)
        tail = r["input_length"] // scale % block or block
        prompt[-block:] = prompt_of(f"{salt} last {i}", tail)  # the last block is not full, and no other request has its tokens
        yield (r["timestamp"] - begin) / 1e3, prompt, max(1, r["output_length"] // scale)


def trace(llm, path, skip, count, scale, speed, salt):
    """Sends requests at the trace's times (open loop). The time to the first token begins at the arrival, so it includes
    queueing."""
    work = list(requests(path, skip, count, scale, salt))
    core = llm.llm_engine
    begin, arrived, first, cached = time.monotonic(), {}, {}, {}
    waiting = list(reversed(work))
    while waiting or core.has_unfinished_requests():
        now = (time.monotonic() - begin) * speed
        while waiting and waiting[-1][0] <= now:
            at, prompt, n = waiting.pop()
            name = f"{salt}-{len(arrived)}"
            arrived[name] = at / speed
            core.add_request(name, {"prompt_token_ids": prompt}, params(n))
        if not core.has_unfinished_requests():
            time.sleep(max(0, waiting[-1][0] / speed - (time.monotonic() - begin)))
            continue
        for o in core.step():
            if o.outputs and o.outputs[0].token_ids:
                first.setdefault(o.request_id, time.monotonic() - begin)
                cached[o.request_id] = o.num_cached_tokens or 0
    waits = sorted(1e3 * (first[name] - at) for name, at in arrived.items())
    return {"requests": len(waits), "seconds": round(time.monotonic() - begin, 1), "mean": round(statistics.mean(waits), 1),
            **{f"p{p}": round(waits[len(waits) * p // 100], 1) for p in (50, 95, 99)},
            "cached_share": round(sum(cached.values()) / sum(len(p) for _, p, _ in work), 4)}


def decode(llm, generate, arrivals):
    """Decodes 24 requests while prompts, given as [seed, length], arrive one after another."""
    core, name = llm.llm_engine, f"decode-{time.monotonic()}"
    for i in range(24):
        core.add_request(f"{name}-{i}", {"prompt_token_ids": prompt_of(f"{name} {i}", 256)}, params(generate))
    last, gaps, hits, sent, pending, due, counts = {}, [], [], {}, list(arrivals), 0.0, {}
    while core.has_unfinished_requests():
        for o in core.step():
            now = time.monotonic()
            if o.request_id in sent:
                if o.finished:
                    hits.append({"ms": round(1e3 * (now - sent[o.request_id]), 1), "cached": o.num_cached_tokens or 0})
            elif (n := len(o.outputs[0].token_ids)) > counts.get(o.request_id, 0):
                if o.request_id in last and len(last) == 24:
                    gaps.append(1e3 * (now - last[o.request_id]))
                last[o.request_id], counts[o.request_id] = now, n
        if len(last) == 24 and not due:
            gaps, due = [], time.monotonic() + 0.2
        if due and pending and time.monotonic() > due and len(hits) == len(sent):
            seed, length = pending.pop(0)
            hit = f"{name}-hit-{len(sent)}"
            sent[hit] = time.monotonic()
            core.add_request(hit, {"prompt_token_ids": prompt_of(seed, length)}, params(1))
    gaps.sort()
    return {"p50": round(gaps[len(gaps) // 2], 1), "p99": round(gaps[len(gaps) * 99 // 100], 1), "max": round(gaps[-1], 1), "hits": hits}


# The driver


class Engine:
    def __init__(self, a, name, gpu, settings):
        self.name, self.gpu, self.settings = name, gpu, {"model": a.model, **settings}
        self.settings["vllm"] = {"max_model_len": a.longest + 256, "max_num_batched_tokens": a.step, "max_num_seqs": 64, **a.vllm,
                                 **settings.get("vllm", {})}
        self.folder = pathlib.Path(a.folder, name)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.computed = {}
        self.start()

    def start(self):
        own = self.folder / "run"  # a folder for each engine, since engines of one user with equal settings share a host
        own.mkdir(mode=0o700, exist_ok=True)
        env = os.environ | {"XDG_RUNTIME_DIR": str(own), "CUDA_VISIBLE_DEVICES": str(self.gpu), **self.settings.get("env", {})}
        there, here = os.pipe()
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen([sys.executable, __file__, "--serve", json.dumps(self.settings), "--answers", str(here)], env=env,
                                            stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[here], start_new_session=True)
        os.close(here)
        self.answers = os.fdopen(there)

    def ready(self):
        return self.answer()

    def answer(self):
        line = self.answers.readline()
        if not line:
            tail = (self.folder / "log").read_text(errors="replace")[-6000:]
            raise SystemExit(f"engine {self.name} ended:\n{tail}")
        return json.loads(line)

    def ask(self, *line):
        self.process.stdin.write((json.dumps(line) + "\n").encode())
        self.process.stdin.flush()
        return self.answer()

    def stop(self):
        """Ends the engine and the host that it has started."""
        self.process.stdin.write(b'["stop"]\n')
        self.process.stdin.flush()
        try:
            self.process.wait(60)
        finally:
            self.kill()
        for lock in pathlib.Path(self.root()).glob(".kvhost/lock") if self.root() else []:
            host = int(lock.read_text().split()[0])
            t = time.monotonic()
            try:
                os.kill(host, signal.SIGTERM)
                while os.path.exists(f"/proc/{host}/exe"):
                    time.sleep(0.05)
            except ProcessLookupError:
                pass
            say(self.name, f"its host ended after {time.monotonic() - t:.1f} s")

    def root(self):
        return self.settings.get("extra", {}).get("root", "").split("=")[0] if self.settings["connector"] == "kvhost" else ""

    def kill(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


def emit(**line):
    text = json.dumps(line)
    if os.environ.get("OUT"):
        with open(os.path.join(os.environ["OUT"], "results.jsonl"), "a") as f:
            f.write(text + "\n")
    else:
        print(text, flush=True)


def count(a, length):
    return a.count or next((n for at, n in sorted(COUNT.items()) if length <= at * 1.2), 1)


def asked(a, e, label, turn):
    """Asks for prompts of all lengths once. The first answer to a prompt is the computed one that later answers must equal."""
    for length in a.lengths:
        said = [e.ask("one", f"{length} {i}", length, a.tokens) for i in range(count(a, length))]
        same = sum(e.computed.setdefault((length, i), s["tokens"]) == s["tokens"] for i, s in enumerate(said))
        ms = [round(s["ms"], 1) for s in said]
        emit(work=label, engine=e.name, turn=turn, length=length, median=statistics.median(ms), ms=ms,
             cached=[s["cached"] for s in said], same=f"{same} of {len(said)}")
    e.ask("reset")


def near(a, engines):
    for e in engines:
        e.ask("one", "warm", a.longest, 4)
        for i in range(2):
            e.ask("one", f"warm {i}", min(a.lengths), 4)
        e.ask("reset")
    for e in engines:
        asked(a, e, "near", "computed")
    time.sleep(a.settle)
    for turn in range(a.turns):
        for e in engines[::-1] if turn % 2 else engines:
            asked(a, e, "near", turn)


def second(a, engines):
    lasting = [e for e in engines if e.root()]
    together(lambda e: e.stop(), lasting)
    os.sync()
    try:
        pathlib.Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError as err:
        say("the page cache is as it was:", err)
    for e in lasting:
        e.start()
    for e in lasting:
        e.ready()
    say("engines again:", *(e.name for e in lasting))
    if not lasting[0].computed:
        raise SystemExit("second asks for what near has stored: name near before it")
    for turn in range(a.turns + 1):
        for e in lasting:
            asked(a, e, "second", turn)


def together(do, engines):
    """Runs ``do`` with each engine: GPUs in parallel, and engines of one GPU one after another."""
    of = {gpu: [e for e in engines if e.gpu == gpu] for gpu in {e.gpu for e in engines}}
    with ThreadPoolExecutor(len(of)) as threads:
        for done in [threads.submit(lambda es: [do(e) for e in es], es) for es in of.values()]:
            done.result()


def traces(a, engines):
    def ask(e):
        e.ask("reset")
        r = e.ask("trace", a.trace, a.skip, a.requests, a.scale, a.speed, f"round {n}")
        emit(work="trace", engine=e.name, round=n, **r)

    for n in range(a.rounds):
        together(ask, engines[::-1] if n % 2 else engines)


def decodes(a, engines):
    for n in range(a.rounds):
        for e in engines:
            for name, arrivals in (("alone", []), ("with hits", [(f"{length} {i}", length) for length in a.lengths if length > 8192
                                                                 for i in range(count(a, length))])):
                e.ask("reset")
                emit(work="decode", engine=e.name, round=n, beside=name, **e.ask("decode", a.generate, arrivals))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("engines", nargs="*")
    p.add_argument("--work", default="near", help="of near, second, trace, decode; those of some engines alone as near:NAME+NAME")
    p.add_argument("--lengths", default="1024,4096,16384,65536")
    p.add_argument("--count", type=int, default=0, help="prompts of each length; default: 5, 3, 3 and 1")
    p.add_argument("--turns", type=int, default=3)
    p.add_argument("--tokens", type=int, default=1, help="tokens that each prompt generates")
    p.add_argument("--settle", type=float, default=4.0, help="seconds between the last store and the first hit")
    p.add_argument("--step", type=int, default=16448, help="tokens that a step computes at most")
    p.add_argument("--vllm", type=json.loads, default={}, help="more of vLLM's options, as JSON")
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--trace", default=str(pathlib.Path(__file__).parents[1] / "traces/mixed.jsonl.zst"))
    p.add_argument("--skip", type=int, default=1000, help="requests of the trace to leave out at the beginning")
    p.add_argument("--requests", type=int, default=200)
    p.add_argument("--scale", type=int, default=4, help="lengths are divided by this")
    p.add_argument("--speed", type=float, default=1.0, help="the trace's times are divided by this")
    p.add_argument("--generate", type=int, default=160)
    p.add_argument("--model", default="big", help="a path, or big (32 x 4096), or tiny, to try the script on a CPU")
    p.add_argument("--models", default="/dev/shm", help="the folder of models that are made")
    p.add_argument("--folder", default="", help="of logs and sockets; default: one that is deleted at the end")
    p.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    p.add_argument("--answers", type=int, help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.serve:
        with os.fdopen(a.answers, "w") as answers:
            serve(a.serve, answers)
        return
    a.lengths = [int(n) for n in a.lengths.split(",")]
    a.longest = max(a.lengths)
    if a.model in MODELS:
        subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r}); import bench; "
                        f"bench.model_dir({a.models + '/model-' + a.model!r}, *bench.MODELS[{a.model!r}])"], check=True)
        a.model = a.models + "/model-" + a.model
        say("model written")
    with tempfile.TemporaryDirectory(prefix="kvhost-bench-") as made:
        a.folder = a.folder or made
        run(a)


def run(a):
    engines = {}
    try:
        for spec in a.engines:
            name, _, text = spec.partition("=")
            name, _, gpu = name.partition("@")
            engines[name] = Engine(a, name, int(gpu or 0), json.loads(text) if text else ENGINES[name])
        for e in engines.values():
            e.ready()
        say("engines ready:", *engines)
        for work in a.work.split(","):
            work, _, names = work.partition(":")
            {"near": near, "second": second, "trace": traces, "decode": decodes}[work](
                a, [engines[n] for n in names.split("+")] if names else list(engines.values()))
            say(work, "done")
    finally:
        for e in engines.values():
            e.kill()


if __name__ == "__main__":
    main()
