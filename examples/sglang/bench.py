"""Measures the time to the first token of SGLang on a GPU. Each prompt was computed before; its KV comes from kvhost's linker,
from HiCache over kvhost, from HiCache over files or from the GPU's cache, or it is computed again.

  KVHOST_BIN=bin/kvhost PYTHONPATH=host/client/python bench.py --folder DIR [--faults] [--float32]

All engines run at the same time. Each has made-up weights (a Llama of 32 layers, 4,096 wide) and a share of the GPU. They
answer one request at a time, in turns; the order of the engines changes from turn to turn. A turn begins with a flush of the
engine's own caches. The tokens are compared with those that the GPU's cache gives. ``--faults`` kills and stops the linker's
host in the middle of a load. ``--float32`` compares the tokens of a small model. ``--tiny`` tries the script without a GPU.
A line of output that begins with RESULT holds JSON."""

import argparse
import glob
import importlib.util
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
START = time.monotonic()
LENGTHS = {1024: 3, 4096: 3, 16384: 2, 65536: 1}  # number of prompts, by their tokens


def say(*words):
    print(f"[{time.monotonic() - START:6.1f}]", *words, flush=True)


def serve(options):
    """Runs an engine in its own process. Each command is a line of JSON on standard input. Each answer is a line of output
    that begins with ANSWER."""
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(**options)
    print("ANSWER {}", flush=True)
    for line in sys.stdin:
        command, answer = json.loads(line), []
        began = time.perf_counter()
        try:
            if command == "flush":
                while not engine.flush_cache().success:
                    time.sleep(0.02)
            else:
                for prompt in command["prompts"]:
                    began = time.perf_counter()
                    parameters = {"temperature": 0, "max_new_tokens": command["tokens"], "ignore_eos": True}
                    a = engine.generate(input_ids=prompt, sampling_params=parameters)
                    ms = round(1e3 * (time.perf_counter() - began), 1)
                    answer.append({"ms": ms, "tokens": a["output_ids"], "cached": a["meta_info"].get("cached_tokens", 0)})
        except Exception as e:
            answer = {"error": str(e)[:200], "seconds": round(time.perf_counter() - began, 2)}
        print("ANSWER " + json.dumps(answer), flush=True)
    engine.shutdown()


class Engine:
    def __init__(self, args, name, model, **options):
        self.name, self.log = name, args.folder / f"{name}.log"
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", json.dumps({"model_path": model, **common(args), **options})], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self.log.open("wb"), text=True, start_new_session=True,
        )

    def answer(self):
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise RuntimeError(f"{self.name} has ended: {self.log.read_text(errors='replace')[-1500:]}")

    def ask(self, command):
        self.send(command)
        return self.answer()

    def send(self, command):
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def generate(self, prompts, tokens=1):
        answer = self.ask({"prompts": prompts, "tokens": tokens})
        if isinstance(answer, dict):
            raise RuntimeError(f"{self.name}: {answer}")
        return answer

    def kill(self):
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def common(args):
    options = {
        "page_size": 64, "skip_tokenizer_init": True, "sampling_backend": "pytorch", "disable_cuda_graph": True, "random_seed": 1,
        "max_running_requests": 8, "context_length": max(LENGTHS) + 64, "max_total_tokens": max(LENGTHS) + 6400, "log_level": "info",
    }
    if args.tiny:
        return options | {"device": "cpu", "attention_backend": "torch_native", "dtype": "float32", "mem_fraction_static": 0.3,
                          "page_size": 16, "disable_overlap_schedule": True}
    return options | {"attention_backend": args.attention, "dtype": "bfloat16", "mem_fraction_static": 0.9}


def linker(extra):
    return {"enable_unified_cache_external_linker": True, "unified_cache_external_linker_backend": "dynamic", "unified_cache_external_linker_config": {
        "linker": "KvhostLinker", "linker_module_path": "kvhost.sglang", "linker_extra_config": extra}}


def hicache(backend, extra):
    return {"enable_hierarchical_cache": True, "hicache_ratio": 1.2, "hicache_mem_layout": "page_first_direct", "hicache_io_backend": "direct",
            "hicache_storage_prefetch_policy": "wait_complete", "hicache_storage_backend": backend,
            "hicache_storage_backend_extra_config": json.dumps(extra)}


def engines(args):
    own = {"memory": args.memory}
    kvhost = {"backend_name": "kvhost", "module_path": "kvhost.sglang", "class_name": "KvhostStorage", "interface_v1": 1, "allocator": "shm",
              "kvhost": own}
    every = {"linker": linker(own), "hicache-kvhost": hicache("dynamic", kvhost), "hicache-file": hicache("file", {}), "gpu": {}}
    return {name: every[name] for name in args.engines.split(",")}


def made(args):
    """Makes the models, with the weights of vLLM's benchmark."""
    spec = importlib.util.spec_from_file_location("vllm_bench", HERE.parent / "vllm" / "bench.py")
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    if args.tiny:
        return bench.model_dir(args.folder / "tiny", 3, 256, 2, 2), ""
    big = bench.model_dir(args.models / "big", 32, 4096, 32, 8)
    return big, bench.model_dir(args.models / "small", 8, 2048, 16, 8) if args.float32 else ""


def prompts(seed):
    """Returns prompts of each length. Each has one more token, since a hit leaves the last token to compute."""
    r = random.Random(seed)
    return {n: [[r.randrange(3, 32000) for _ in range(n + 1)] for _ in range(count)] for n, count in LENGTHS.items()}


def turn(engine, asked, tokens=1):
    if not isinstance(flushed := engine.ask("flush"), list):
        raise RuntimeError(f"{engine.name}: {flushed}")
    return {n: engine.generate(ps, tokens) for n, ps in asked.items()}


def cached(engine, asked, tokens=1):
    """Measures hits in the GPU's cache: it asks for each prompt twice and keeps the second answer."""
    return {n: [engine.generate([p, p], tokens)[1] for p in ps] for n, ps in asked.items()}


def ms(answers):
    return round(statistics.median(a["ms"] for a in answers), 1)


def result(**what):
    print("RESULT " + json.dumps(what), flush=True)


def measure(args, alive):
    warm, asked = prompts(2), prompts(1)
    for n in LENGTHS:  # warms up: one prompt of each length, in all engines
        for engine in alive:
            engine.generate(warm[n][:1], 2)
    computed = {}
    for engine in alive:
        computed[engine.name] = turn(engine, asked)
        say(engine.name, "computed", {n: ms(a) for n, a in computed[engine.name].items()})
    time.sleep(args.settle)
    right = cached(alive[-1], asked, 8)
    times = {e.name: {n: [] for n in LENGTHS} for e in alive}
    for i in range(args.turns):
        for engine in alive[i % len(alive):] + alive[:i % len(alive)]:
            answers = (cached if engine.name == "gpu" else turn)(engine, asked)
            for n, a in answers.items():
                times[engine.name][n].append(ms(a))
            say("turn", i, engine.name, {n: (ms(a), a[0]["cached"]) for n, a in answers.items()})
    for engine in alive:
        loaded = (cached if engine.name == "gpu" else turn)(engine, asked, 8)
        same = {n: sum(a["tokens"] == b["tokens"] for a, b in zip(loaded[n], right[n])) for n in LENGTHS}
        result(engine=engine.name, computed_ms={n: ms(a) for n, a in computed[engine.name].items()}, hit_ms=times[engine.name],
               same_tokens=same, of={n: len(ps) for n, ps in asked.items()}, cached={n: [a["cached"] for a in loaded[n]] for n in LENGTHS})


def host_process():
    """Returns the process of the host that the linker has started."""
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            words = pathlib.Path(path).read_bytes().split(b"\0")
        except OSError:
            continue
        if any(w.endswith(b"kvhost") for w in words[:1]) and b"--socket" in words:
            return int(path.split("/")[2])
    raise RuntimeError("no host runs")


def faults(args, engine):
    """Kills the host, and then stops its successor, during the load of the longest prompt."""
    longest = prompts(1)[max(LENGTHS)]
    for name, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
        for _ in range(20):  # until the killed host's successor has the prompt
            turn(engine, {1: longest})
            time.sleep(args.settle)
            if (before := turn(engine, {1: longest}, 8)[1][0])["cached"] >= max(LENGTHS):
                break
        engine.ask("flush")
        engine.send({"prompts": longest, "tokens": 8})
        time.sleep(args.moment)
        began = time.monotonic()
        os.kill(host_process(), number)
        answer = engine.answer()
        waited = round(time.monotonic() - began, 2)
        began = time.monotonic()
        again = engine.generate(longest, 8)[0]
        result(host=name, hit=before["cached"], answer=answer if isinstance(answer, dict) else answer[0], waited_s=waited,
               again_s=round(time.monotonic() - began, 2), again_cached=again["cached"], same_tokens=again["tokens"] == before["tokens"])


def same_in_float32(args, engine):
    asked = {n: ps for n, ps in prompts(3).items() if n <= 4096}
    computed = turn(engine, asked, 8)
    time.sleep(1.0)
    loaded = turn(engine, asked, 8)
    result(float32={n: sum(a["tokens"] == b["tokens"] for a, b in zip(computed[n], loaded[n])) for n in asked},
           of={n: len(ps) for n, ps in asked.items()}, cached={n: [a["cached"] for a in loaded[n]] for n in asked})


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("/tmp/kvhost-sglang-bench"))
    p.add_argument("--models", type=pathlib.Path, default=pathlib.Path("/dev/shm/models"), help="where made weights are written, 15 GB")
    p.add_argument("--memory", default="44GiB", help="of the host that the engines start")
    p.add_argument("--engines", default="linker,hicache-kvhost,hicache-file,gpu")
    p.add_argument("--attention", default="fa3")
    p.add_argument("--turns", type=int, default=3)
    p.add_argument("--settle", type=float, default=3.0)
    p.add_argument("--moment", type=float, default=0.08, help="seconds into a load at which its host is killed or stopped")
    p.add_argument("--faults", action="store_true")
    p.add_argument("--float32", action="store_true")
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.serve is not None:
        return serve(args.serve)
    args.folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", "/dev/shm/hicache")
    if args.tiny:
        LENGTHS.clear()
        LENGTHS.update({256: 2, 512: 1})
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    big, small = made(args)
    say("weights are made")
    every = [Engine(args, name, big, **options) for name, options in engines(args).items()]
    if args.float32:
        every.append(Engine(args, "float32", small, **linker({"memory": args.memory}) | {"dtype": "float32", "attention_backend": "torch_native"}))
    alive = []
    try:
        for engine in every:
            try:
                engine.answer()
                alive.append(engine)
            except RuntimeError as e:
                say(e)
        say("ready:", *(e.name for e in alive))
        measured = [e for e in alive if e.name != "float32"]
        try:
            measure(args, measured)
        except RuntimeError as e:
            say(e)
        for socket in glob.glob(f"{os.environ.get('XDG_RUNTIME_DIR') or '/tmp'}/kvhost-{os.geteuid()}/*.sock"):
            status = subprocess.run([os.environ.get("KVHOST_BIN", "kvhost"), "status", "--json", "--socket", socket], capture_output=True, text=True)
            (args.folder / "status.json").write_text(status.stdout)
        for engine in alive:
            if engine.name == "float32":
                same_in_float32(args, engine)
        if args.faults:
            faults(args, next(e for e in alive if e.name == "linker"))
    finally:
        for engine in every:
            engine.kill()


if __name__ == "__main__":
    main()
