"""Measures the processor time that kvhost adds to a vLLM engine without hits, and the host's own processor time.

    PYTHONPATH=host/client/python:host/client/python/tests/engines python processor.py [--model DIR] [--turns 6]

It needs no GPU. KVHOST_BIN names the host's program. Three engines do the same work in turns: one with KvhostConnector, one
with a connector that does nothing, and one without a connector. No prompt returns, so that all chunks are stored and none is
loaded. A turn ends when the host has published its chunks. The script prints the processor seconds of each turn (user and
system, of all processes of an engine), and the median of the turns' ratios."""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import vllm_model
from processes import Host, wait_for
from vllm_engine import Engine

TICK = os.sysconf("SC_CLK_TCK")
#: By name: concurrent requests, tokens of each prompt, tokens that each request generates.
WORK = {"prefill": (1, 1500, 1), "decode": (4, 100, 60), "mixed": (2, 1500, 30)}


def seconds(session: int) -> float:
    """Returns the processor time of all processes of a session."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        if int(fields[3]) == session:
            total += int(fields[11]) + int(fields[12])
    return total / TICK


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="", help="default: a Llama of 8 layers, 768 wide, with random weights")
    p.add_argument("--turns", type=int, default=6)
    p.add_argument("--work", default=",".join(WORK))
    p.add_argument("--step", type=int, default=2048, help="tokens that a step computes at most")
    p.add_argument("--one-process", action="store_true", help="vLLM in one process, where none waits for another in a loop")
    p.add_argument("--other", default="", help="host/client/python of another tree, for a further engine with its connector")
    p.add_argument("--rest", type=float, default=0.3, help="seconds after a turn's answers that count for it, too")
    p.add_argument("--root", default="", help="of the host; default: a folder that is deleted at the end")
    a = p.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvhost-processor-", dir=a.root or None) as name:
        run(a, Path(name))


def run(a: argparse.Namespace, folder: Path) -> None:
    model, vocabulary = Path(a.model), 1024
    if not a.model:
        model = folder / "model"
        wide = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_key_value_heads": 4}
        vllm_model.write(model, vllm_model.config(8) | wide, seed=1)
    host = Host(folder, "16GiB")
    host.start()
    vllm = {"max_num_batched_tokens": a.step, "disable_log_stats": True}
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0" if a.one_process else "1"}
    kvhost = {
        "kv_connector": "KvhostConnector", "kv_connector_module_path": "kvhost.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"socket": host.socket},
    }
    nothing = {"kv_connector": "NothingConnector", "kv_connector_module_path": "nothing", "kv_role": "kv_both"}
    here = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])}
    kinds: list[tuple[str, Host | None, dict, dict]] = [
        ("without", None, {}, {}), ("nothing", None, {"kv_transfer_config": nothing}, here), ("with", host, {"kv_transfer_config": kvhost}, {}),
    ]
    if a.other:
        path = os.pathsep.join([str(Path(vllm_model.__file__).parent), a.other])
        kinds.append(("other", host, {"kv_transfer_config": kvhost}, {"PYTHONPATH": path}))
    with ThreadPoolExecutor() as starts:
        started = [
            starts.submit(Engine, folder, name, model, host, blocks=512, vllm=vllm | more, env=env | other, forked=False)
            for name, host, more, other in kinds
        ]
    engines = [s.result() for s in started]
    print("processes:", *(e.process.pid for e in engines), "host:", host.pid(), flush=True)
    every = [(work, kind) for work in a.work.split(",") for kind, *_ in kinds[1:]]
    ratios: dict[tuple[str, str], list[float]] = {w: [] for w in every}
    hosts: dict[tuple[str, str], list[float]] = {w: [] for w in every}
    try:
        rng = random.Random(1)
        for turn in range(-1, a.turns):  # turn -1 warms up
            for work in a.work.split(","):
                requests, tokens, generated = WORK[work]
                took: dict[str, float] = {}
                of_host: dict[str, float] = {}
                order = list(range(len(engines)))
                for i in order if turn % 2 else reversed(order):
                    # Each engine has its own prompts: it would load what another one has stored.
                    prompts = [[rng.randrange(3, vocabulary) for _ in range(tokens)] for _ in range(requests)]
                    before = [seconds(engines[i].process.pid), seconds(host.pid())]
                    engines[i].generate(prompts, generated)
                    wait_for("the host has published all", host.idle)
                    time.sleep(a.rest)
                    took[kinds[i][0]] = seconds(engines[i].process.pid) - before[0]
                    of_host[kinds[i][0]] = seconds(host.pid()) - before[1]
                for kind in [k for k, *_ in kinds[1:] if turn >= 0]:
                    ratios[work, kind].append(took[kind] / took["without"])
                    hosts[work, kind].append(of_host[kind] / took["without"])
                print(f"{turn} {work}:", *(f"{k} {t:.2f} s," for k, t in took.items()), f"host {max(of_host.values()):.2f}", flush=True)
        for (work, kind), of in ratios.items():
            print(f"{work}, {kind}: {statistics.median(of):.3f} ({min(of):.3f} to {max(of):.3f}), the host beside it "
                  f"{statistics.median(hosts[work, kind]):.3f}", flush=True)
    finally:
        for e in engines:
            e.kill()
        host.kill()


if __name__ == "__main__":
    main()
