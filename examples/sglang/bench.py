"""Measures the time to the first token of SGLang on a GPU. Each prompt was computed before; its KV comes from kvhost's linker,
from HiCache over kvhost, from HiCache over files or from the GPU's cache, or it is computed again.

  KVHOST_BIN=bin/kvhost PYTHONPATH=host/client/python bench.py --folder DIR [--faults] [--float32]

All engines run at the same time. Each has made-up weights (a Llama of 32 layers, 4,096 wide) and a share of the GPU. They
answer one request at a time, in turns; the order of the engines changes from turn to turn. A turn begins with a flush of the
engine's own caches. The tokens are compared with those that the GPU's cache gives. These need more time, which ``--seconds``
bounds, and run in this order:

  --float32   compares the tokens of a small model: computed, loaded one by one, loaded at the same time, computed after a damage
  --kills N   kills the linker's host N times, at different moments of a load
  --graphs    another linker, with SGLang's own choice of CUDA graphs, asks for what the first has stored
  --stop      stops the linker's host in the middle of a load

``--smoke`` runs a model of two layers alone, which also compiles kernels, and ``--tiny`` tries the script without a GPU. A line of
output that begins with RESULT holds JSON."""

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
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
START = time.monotonic()
MOMENTS = 0.08, 0.03, 0.14, 0.2, 0.05  # seconds into a load at which its host is killed
LENGTHS = {1024: 3, 4096: 2, 16384: 1, 65536: 1}  # number of prompts, by their tokens


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
                    answer.append({"ms": round(1e3 * (time.perf_counter() - began), 1), **told(a)})
        except Exception as e:
            answer = {"error": str(e)[:200], "seconds": round(time.perf_counter() - began, 2)}
        print("ANSWER " + json.dumps(answer), flush=True)
    engine.shutdown()


def told(answer):
    """Returns the tokens of an answer and how many of its prompt were cached, or lists of these for several prompts."""
    if isinstance(answer, list):
        return {name: [told(a)[name] for a in answer] for name in ("tokens", "cached")}
    return {"tokens": answer["output_ids"], "cached": answer["meta_info"].get("cached_tokens", 0)}


class Engine:
    def __init__(self, args, name, model, environment=(), **options):
        self.name, self.log, self._patience = name, args.folder / f"{name}.log", args.patience
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", json.dumps({"model_path": model, **common(args), **options})], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self.log.open("wb"), text=True, start_new_session=True,
            env={**os.environ, **dict(environment)},
        )

    def answer(self, seconds=0):
        late = threading.Timer(seconds or self._patience, self.kill)
        late.daemon = True
        late.start()
        try:
            for line in self._process.stdout:
                if line.startswith("ANSWER "):
                    return json.loads(line.removeprefix("ANSWER "))
        finally:
            late.cancel()
        raise RuntimeError(f"{self.name} has ended: {self.log.read_text(errors='replace')[-2500:]}")

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
    return {"enable_hierarchical_cache": True, "hicache_ratio": 2.2, "hicache_mem_layout": "page_first_direct", "hicache_io_backend": "direct",
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
        return [bench.model_dir(args.folder / "tiny", 3, 256, 2, 2)] * 3
    sizes = {"big": (32, 4096, 32, 8), "small": (8, 2048, 16, 8), "thin": (2, 4096, 32, 8)}
    wanted = {"thin"} if args.smoke else {"big", "small"} if args.float32 else {"big"}
    return [bench.model_dir(args.models / name, *size) if name in wanted else "" for name, size in sizes.items()]


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
    for n in sorted(LENGTHS)[:-1]:  # warms up: one prompt of each length but the longest, in all engines
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


def host_process(argument=b"--socket"):
    """Returns the process of the host that an engine has started."""
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            words = pathlib.Path(path).read_bytes().split(b"\0")
        except OSError:
            continue
        if any(w.endswith(b"kvhost") for w in words[:1]) and b"--socket" in words and any(w.startswith(argument) for w in words):
            return int(path.split("/")[2])
    raise RuntimeError("no host runs")


def fault(args, engine, number, moment):
    """Kills or stops the host at a moment of the load of the longest prompt."""
    longest = prompts(1)[max(LENGTHS)]
    for _ in range(4):  # until the killed host's successor has the prompt
        turn(engine, {1: longest})
        time.sleep(args.settle)
        if (before := turn(engine, {1: longest}, 8)[1][0])["cached"] >= max(LENGTHS):
            break
    engine.ask("flush")
    engine.send({"prompts": longest, "tokens": 8})
    time.sleep(moment)
    began = time.monotonic()
    os.kill(host_process(b"memory:"), number)
    answer = engine.answer()
    waited = round(time.monotonic() - began, 2)
    began = time.monotonic()
    again = engine.generate(longest, 8)[0]
    late = time.monotonic() - began
    if not isinstance(answer, dict):
        answer = {"ms": answer[0]["ms"], "cached": answer[0]["cached"], "same_tokens": answer[0]["tokens"] == before["tokens"]}
    result(host=number.name, moment=moment, hit=before["cached"], waited_s=waited, answer=answer, again_s=round(late, 2),
           again_cached=again["cached"], same_tokens=again["tokens"] == before["tokens"])


def damage(folder):
    """Writes to the middle of each file of a root's chunks."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.stat().st_size > 64 << 10]
    for path in files:
        with path.open("r+b") as f:
            f.seek(path.stat().st_size // 2)
            f.write(b"\xa5" * 64)
    return len(files)


def exact(args, engine, root):
    """Compares tokens: computed, loaded one by one, loaded at the same time, and computed after all files were damaged."""
    asked = {n: ps for n, ps in prompts(3).items() if n <= 4096}
    every = [p for ps in asked.values() for p in ps]
    computed = turn(engine, {1: every}, 8)[1]
    time.sleep(args.settle)
    loaded = turn(engine, {1: every}, 8)[1]
    engine.ask("flush")
    together = engine.ask({"prompts": [every], "tokens": 8})[0]
    engine.ask("flush")
    damaged = damage(root)
    failed = engine.ask({"prompts": every[-1:], "tokens": 8})
    engine.ask("flush")
    again = engine.generate(every[-1:], 8)[0]
    want = [a["tokens"] for a in computed]
    result(engine=engine.name, of=len(every), loaded_same=sum(a["tokens"] == w for a, w in zip(loaded, want)), cached=[a["cached"] for a in loaded],
           together_same=sum(a == w for a, w in zip(together["tokens"], want)), together_cached=together["cached"], damaged_files=damaged,
           damaged=failed if isinstance(failed, dict) else {"same_tokens": failed[0]["tokens"] == want[-1], "cached": failed[0]["cached"]},
           again_same=again["tokens"] == want[-1], again_cached=again["cached"])


def graphs(args, model, first, every):
    """Ends the engines that are not needed any more, since there is no room for one more, and starts a linker with CUDA graphs."""
    wanted = turn(first, prompts(1), 8)
    for engine in every:
        if engine is not first:
            engine.kill()
    time.sleep(2.0)
    every.append(Engine(args, "linker-graphs", model, **linker({"memory": args.memory}) | {"disable_cuda_graph": args.tiny}))
    every[-1].answer(args.start)
    second_life(args, every[-1], wanted)


def second_life(args, engine, computed):
    """Measures hits of a linker that has stored nothing."""
    for n in sorted(LENGTHS)[:-1]:
        engine.generate(prompts(2)[n][:1], 2)
    times, answers = {n: [] for n in LENGTHS}, {}
    for _ in range(args.turns):
        answers = turn(engine, prompts(1), 8)
        for n, a in turn(engine, prompts(1)).items():
            times[n].append(ms(a))
    result(engine=engine.name, hit_ms=times, cached={n: [a["cached"] for a in answers[n]] for n in LENGTHS},
           same_tokens={n: sum(a["tokens"] == b["tokens"] for a, b in zip(answers[n], computed[n])) for n in LENGTHS})


def status(args):
    """Writes what the hosts have counted, the routes of their bytes among it."""
    for i, socket in enumerate(sorted(glob.glob(f"{os.environ.get('XDG_RUNTIME_DIR') or '/tmp'}/kvhost-{os.geteuid()}/*.sock"))):
        command = ["timeout", "10", os.environ.get("KVHOST_BIN", "kvhost"), "status", "--json", "--socket", socket]
        if text := subprocess.run(command, capture_output=True, text=True).stdout:
            (args.folder / f"status-{i}.json").write_text(text)
            result(routes=[[r["root"], r["direction"], r["route"], r["gpu"], r["bytes"], r["errors"], round(r["busy"], 2)]
                           for r in json.loads(text)["routes"]])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("/tmp/kvhost-sglang-bench"))
    p.add_argument("--models", type=pathlib.Path, default=pathlib.Path("/dev/shm/models"), help="where made weights are written, 15 GB")
    p.add_argument("--memory", default="40GiB", help="of the host that the engines start")
    p.add_argument("--engines", default="linker,hicache-kvhost,hicache-file,gpu")
    p.add_argument("--attention", default="fa3")
    p.add_argument("--turns", type=int, default=3)
    p.add_argument("--settle", type=float, default=3.0)
    p.add_argument("--seconds", type=float, default=1e6, help="no work begins after these")
    p.add_argument("--patience", type=float, default=90.0, help="seconds that an engine's answer may take")
    p.add_argument("--start", type=float, default=150.0, help="seconds that an engine's start may take")
    p.add_argument("--float32", action="store_true")
    p.add_argument("--kills", type=int, default=0)
    p.add_argument("--graphs", action="store_true")
    p.add_argument("--stop", action="store_true")
    p.add_argument("--smoke", action="store_true")
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--make", action="store_true", help="makes the models, and nothing else")
    p.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.serve is not None:
        return serve(args.serve)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    args.folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", "/dev/shm/hicache")
    if args.tiny:
        LENGTHS.clear()
        LENGTHS.update({256: 2, 512: 1})
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    big, small, thin = made(args)
    say("weights are made")
    if args.make:
        return
    root = pathlib.Path(f"/tmp/kvhost-bench-{os.getpid()}")
    root.mkdir()
    # Without memory before it, since what is damaged is to be read.
    rooted = linker({"root": f"{root}=8GiB"}) | {"environment": {"KVHOST_STORE_MEMORY": "0"}}
    every = []
    if args.smoke:
        every.append(Engine(args, "smoke", thin, **rooted))
    else:
        every += [Engine(args, name, big, **options) for name, options in engines(args).items()]
        if args.float32:
            single = {} if args.tiny else {"dtype": "float32", "attention_backend": "torch_native"}
            every.append(Engine(args, "float32", small, **rooted | single))
    alive, failed = {}, []
    try:
        for engine in every:
            try:
                engine.answer(args.start)
                alive[engine.name] = engine
            except RuntimeError as e:
                failed.append(engine.name)
                say(e)
        say("ready:", *alive)
        result(ready=list(alive), failed=failed, attention=args.attention, seconds=round(time.monotonic() - START))
        first = alive.get("linker")
        if args.smoke:
            works = [(5, lambda: exact(args, alive["smoke"], root))]
        else:
            works = [(30, lambda: measure(args, [alive[n] for n in engines(args) if n in alive]))]
        if "float32" in alive:
            works.append((15, lambda: exact(args, alive["float32"], root)))
        if first is not None:
            works += [(20, lambda i=i: fault(args, first, signal.SIGKILL, MOMENTS[i % len(MOMENTS)])) for i in range(args.kills)]
            if args.graphs:
                works.append((75, lambda: graphs(args, big, first, every)))
            if args.stop:
                works.append((45, lambda: fault(args, first, signal.SIGSTOP, MOMENTS[0])))
        for needs, work in works:
            if time.monotonic() - START + needs > args.seconds:
                say("left out, for time")
                continue
            try:
                work()
            except Exception as e:
                say(type(e).__name__, e)
                result(failed=str(e)[:300])
            status(args)
    finally:
        for engine in every:
            engine.kill()


if __name__ == "__main__":
    sys.exit(main())
