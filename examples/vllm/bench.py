"""Measures vLLM with kvhost: tokens, first-token times, decode throughput. One engine per call; prints a RESULT line.

  PYTHONPATH=host/client/python:host/client/python/tests/engines bench.py MODE ..., where MODE is one of

  bench.py tokens --connector none|kvhost     mid-size Llama, random weights; prints tokens (compare the calls)
  bench.py times  --connector none|offloading|kvhost   32 x 4096, 16k prompts; medians, and whether eight tokens are as computed
  bench.py decode --connector none|kvhost     64 running requests, with 16k hits coming in
  bench.py trace  --connector none|offloading|kvhost --trace FILE   requests of a trace at their times; first-token times
"""

import argparse
import gzip
import hashlib
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

START = time.monotonic()


def say(*words):
    print(f"[bench {time.monotonic() - START:7.2f}]", *words, flush=True)


def model_dir(path, layers, hidden, heads, kv_heads, vocab):
    path = pathlib.Path(path)
    head = hidden // heads
    c = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": hidden * 7 // 2, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head, "vocab_size": vocab, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "attention_bias": False,
    }
    if not (path / "config.json").exists():
        path.mkdir(parents=True, exist_ok=True)
        write_weights(path, c)
        (path / "config.json").write_text(json.dumps(c))
    return str(path)


def write_weights(path, c):
    """Made weights with which each token depends on all KV before it: with weights that are all alike (load_format="dummy") a wrong KV
    changes no token. A GPU makes those of 32 x 4096 in seconds; one file has one layer."""
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


def connector(a):
    from vllm.config import KVTransferConfig

    common = dict(kv_role="kv_both", kv_load_failure_policy="recompute")
    if a.connector == "kvhost":
        extra = {"socket": a.socket, "load_when": a.load_when, **json.loads(a.extra)}
        probe = a.mode == "tokens"
        return KVTransferConfig(kv_connector="ProbeConnector" if probe else "KvhostConnector",
                                kv_connector_module_path="vllm_probe" if probe else "kvhost.vllm",
                                kv_connector_extra_config=extra, **common)
    if a.connector == "offloading":
        return KVTransferConfig(kv_connector="OffloadingConnector",
                                kv_connector_extra_config={"cpu_bytes_to_use": int(a.cpu_gib * (1 << 30))}, **common)
    return None


def engine(a, **more):
    from vllm import LLM

    options = dict(model=a.model, skip_tokenizer_init=True, dtype=a.dtype, enforce_eager=not a.graphs, seed=0,
                   tensor_parallel_size=a.tp, pipeline_parallel_size=a.pp, disable_log_stats=True, **more)
    if a.on_gpu:
        options["gpu_memory_utilization"] = a.gpu_memory
    if a.blocks:
        options["num_gpu_blocks_override"] = a.blocks
    if a.graphs:  # no compilation: only decode steps are captured
        options["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 64]}
    if (c := connector(a)) is not None:
        options["kv_transfer_config"] = c
    t = time.monotonic()
    llm = LLM(**options)
    say(f"engine ready after {time.monotonic() - t:.1f} s, blocks", llm.llm_engine.vllm_config.cache_config.num_gpu_blocks)
    return llm


def params(n):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=n, detokenize=False, ignore_eos=True)


def one(llm, prompt, n):
    t = time.monotonic()
    out = llm.generate([{"prompt_token_ids": prompt}], params(n), use_tqdm=False)[0]
    return 1e3 * (time.monotonic() - t), list(out.outputs[0].token_ids), out.num_cached_tokens


def reset(llm):
    t = time.monotonic()
    while not llm.reset_prefix_cache():
        time.sleep(0.05)
        assert time.monotonic() - t < 60, "blocks are not given back"
    return time.monotonic() - t


def prompts(a, count, length, seed):
    rng = random.Random(seed)
    return [[rng.randrange(3, a.vocab) for _ in range(length)] for _ in range(count)]


def tokens(a):
    """Steps of 512 tokens, so that a hit changes no step's shape; the last 104 tokens are always computed together."""
    llm = engine(a, max_model_len=8192, max_num_batched_tokens=512, max_num_seqs=8)
    ps = prompts(a, 4, a.prompt or 4200, 1)
    result = {"cold": [one(llm, p, 16) for p in ps]}
    reset(llm)
    time.sleep(2)
    result["again"] = [one(llm, p, 16) for p in ps]
    emit(a, {k: [{"ms": round(ms, 1), "tokens": t, "cached": c} for ms, t, c in v] for k, v in result.items()})
    stop(llm)


def eight(llm, ps):
    """The first tokens of prompts whose KV the GPU has: all of both sets come from steps of the same shape."""
    return [one(llm, p, 8)[1] for p in ps]


def times(a):
    n = a.prompt or 16384
    llm = engine(a, max_model_len=n + 128, max_num_batched_tokens=n + 64, max_num_seqs=8)
    warm = prompts(a, 2, n, 99)
    for p in warm:
        one(llm, p, 4)
    reset(llm)
    ps = prompts(a, a.count, n, 1)
    cold = [one(llm, p, 1) for p in ps]
    computed = eight(llm, ps)
    result = {"cold_ms": stats(cold), "cold_cached": cold[0][2]}
    if a.connector == "none":
        result["gpu_hit_ms"] = stats([one(llm, p, 1) for p in ps])
    else:
        result["blocks_back_s"] = round(reset(llm), 3)
        time.sleep(a.settle)
        first = [one(llm, p, 1) for p in ps]
        reset(llm)
        second = [one(llm, p, 1) for p in ps]
        loaded = eight(llm, ps)
        result |= {"hit_ms": stats(second), "hit_first_round_ms": stats(first), "hit_cached": [c for _, _, c in second],
                   "same_tokens": f"{sum(a == b for a, b in zip(computed, loaded))} of {len(ps)}"}
    emit(a, result)
    stop(llm)


def decode(a):
    """64 requests decode; meanwhile 16k prompts arrive that hit in kvhost, or in the GPU's cache for the comparison. The
    64 prompts' own chunks and what they generate are stored while they run."""
    n = a.prompt or 16384
    llm = engine(a, max_model_len=n + 128, max_num_batched_tokens=n + 64, max_num_seqs=72)
    core = llm.llm_engine
    ps = prompts(a, a.count, n, 1)  # those of times: stored already if the root is the same
    hot = [one(llm, p, 1) for p in ps]
    if a.connector == "kvhost":
        reset(llm)
        time.sleep(a.settle)
    results = {}
    for name, arrivals in (("alone", []), ("with_hits", ps), ("alone_again", []), ("with_hits_again", ps)):
        if a.connector == "kvhost":
            reset(llm)
        small = prompts(a, 64, a.small, hash(name) & 0xFFFF)
        for i, p in enumerate(small):
            core.add_request(f"{name}-{i}", {"prompt_token_ids": p}, params(a.generate))
        first, last, got, cached, pending = {}, {}, {}, [], list(arrivals)
        began = due = None
        while core.has_unfinished_requests():
            for o in core.step():
                now = time.monotonic()
                if o.request_id.startswith(name + "-"):
                    first.setdefault(o.request_id, now)
                    last[o.request_id], got[o.request_id] = now, len(o.outputs[0].token_ids)
                elif o.finished:
                    cached.append(o.num_cached_tokens)
            if len(first) == 64 and began is None:
                began = due = time.monotonic()
                at = sum(got.values())
            if began and pending and time.monotonic() >= due:
                core.add_request(f"hit-{name}-{len(pending)}", {"prompt_token_ids": pending.pop()}, params(1))
                due += a.every
        seconds = max(last.values()) - began
        results[name] = {"tokens_per_s": round((64 * a.generate - at) / seconds, 1), "seconds": round(seconds, 2),
                         "arrivals": len(cached), "cached": cached[:3]}
        say(name, results[name])
    results["ratio"] = round((results["with_hits"]["tokens_per_s"] + results["with_hits_again"]["tokens_per_s"])
                             / (results["alone"]["tokens_per_s"] + results["alone_again"]["tokens_per_s"]), 4)
    emit(a, results)
    stop(llm)


def requests(a):
    """Requests of a trace in Mooncake's format. Each hash id stands for 512 tokens there and for 512/scale here; its tokens
    follow from the id, so that equal prefixes of ids are equal prefixes of tokens."""
    if a.trace.endswith(".zst"):
        text = subprocess.run(["zstd", "-dc", a.trace], check=True, capture_output=True).stdout
    else:
        text = (gzip.open if a.trace.endswith(".gz") else open)(a.trace, "rb").read()
    lines = [json.loads(line) for line in text.splitlines()[a.skip:a.skip + a.requests]]
    begin, block = lines[0]["timestamp"], 512 // a.scale
    for i, r in enumerate(lines):
        prompt = []
        for h in r["hash_ids"]:
            rng = random.Random(h)
            prompt += [rng.randrange(3, a.vocab) for _ in range(block)]
        rng = random.Random(-1 - i)  # the last block is not full; its tokens are this request's alone
        tail = r["input_length"] // a.scale % block or block
        prompt[-block:] = [rng.randrange(3, a.vocab) for _ in range(tail)]
        yield (r["timestamp"] - begin) / 1e3 / a.speed, prompt, max(1, r["output_length"] // a.scale)


def trace(a):
    """Requests arrive at the trace's times (open loop). A first token's time counts from the arrival, queueing included."""
    work = list(requests(a))
    longest = max(len(p) + n for _, p, n in work)
    llm = engine(a, max_model_len=longest + 16, max_num_batched_tokens=8192, max_num_seqs=64)
    core = llm.llm_engine
    for p in prompts(a, 2, min(4096, longest), 99):
        one(llm, p, 4)
    reset(llm)
    say(len(work), "requests,", sum(len(p) for _, p, _ in work), "tokens, longest", longest, "over", round(work[-1][0], 1), "s")
    begin, arrived, first, cached, tokens = time.monotonic(), {}, {}, {}, {}
    waiting = list(reversed(work))
    while waiting or core.has_unfinished_requests():
        now = time.monotonic() - begin
        while waiting and waiting[-1][0] <= now:
            at, p, n = waiting.pop()
            name = f"trace-{len(arrived)}"
            arrived[name] = at
            core.add_request(name, {"prompt_token_ids": p}, params(n))
        if not core.has_unfinished_requests():
            time.sleep(max(0, waiting[-1][0] - (time.monotonic() - begin)))
            continue
        for o in core.step():
            if o.outputs and o.outputs[0].token_ids:
                first.setdefault(o.request_id, time.monotonic() - begin)
                cached[o.request_id] = o.num_cached_tokens or 0
                if o.finished:
                    tokens[o.request_id] = list(o.outputs[0].token_ids)
    waits = sorted(1e3 * (first[name] - at) for name, at in arrived.items())
    emit(a, {"requests": len(waits), "first_token_ms": {"mean": round(statistics.mean(waits), 1), "median": round(statistics.median(waits), 1),
                                                        "p95": round(waits[int(0.95 * len(waits))], 1), "max": round(waits[-1], 1)},
             "cached_share": round(sum(cached.values()) / sum(len(p) for _, p, _ in work), 4),
             "seconds": round(time.monotonic() - begin, 1), "tokens_hash": hash_of(tokens)})
    stop(llm)


def hash_of(tokens):
    return hashlib.sha256(json.dumps(tokens, sort_keys=True).encode()).hexdigest()[:16]


def stats(runs):
    ms = [m for m, _, _ in runs]
    return {"median": round(statistics.median(ms), 1), "min": round(min(ms), 1), "max": round(max(ms), 1), "n": len(ms)}


def emit(a, result):
    line = {"mode": a.mode, "connector": a.connector, "name": a.name or a.connector, **result}
    print("RESULT " + json.dumps(line), flush=True)
    if os.environ.get("OUT"):
        with open(os.path.join(os.environ["OUT"], "results.jsonl"), "a") as f:
            f.write(json.dumps(line) + "\n")


def stop(llm):
    llm.llm_engine.engine_core.shutdown()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("mode", choices=["tokens", "times", "decode", "trace"])
    p.add_argument("--connector", choices=["none", "offloading", "kvhost"], default="none")
    p.add_argument("--name", default="")
    p.add_argument("--socket", default="/tmp/kvhost.sock")
    p.add_argument("--load-when", default="always")
    p.add_argument("--extra", default="{}")
    p.add_argument("--prompt", type=int, default=0)
    p.add_argument("--count", type=int, default=5)
    p.add_argument("--settle", type=float, default=4.0)
    p.add_argument("--cpu-gib", type=float, default=16)
    p.add_argument("--gpu-memory", type=float, default=0.6)
    p.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    p.add_argument("--graphs", action="store_true")
    p.add_argument("--tp", type=int, default=1)
    p.add_argument("--pp", type=int, default=1)
    p.add_argument("--blocks", type=int, default=0)
    p.add_argument("--generate", type=int, default=400)
    p.add_argument("--small", type=int, default=512)
    p.add_argument("--every", type=float, default=0.5)
    p.add_argument("--trace", default="examples/traces/mixed.jsonl.zst")
    p.add_argument("--skip", type=int, default=1000, help="requests of the trace to leave out at the beginning")
    p.add_argument("--requests", type=int, default=200)
    p.add_argument("--scale", type=int, default=4, help="lengths are divided by this")
    p.add_argument("--speed", type=float, default=1.0, help="the trace's times are divided by this")
    p.add_argument("--tiny", action="store_true", help="a tiny model, to try the script on a CPU")
    a = p.parse_args()
    a.on_gpu = os.path.exists("/dev/nvidiactl")
    a.vocab = 32000
    if a.tiny:
        a.vocab = 1024
        a.model = model_dir("/tmp/model-tiny", 3, 128, 2, 2, a.vocab)
    elif a.mode == "tokens":
        a.model = model_dir("/tmp/model-mid", 8, 2048, 16, 8, a.vocab)
    else:
        a.model = model_dir("/tmp/model-big", 32, 4096, 32, 8, a.vocab)
    {"tokens": tokens, "times": times, "decode": decode, "trace": trace}[a.mode](a)
    say("done")


if __name__ == "__main__":
    main()
