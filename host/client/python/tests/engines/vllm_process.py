"""A vLLM engine that a test drives over a socket: vllm_process.py <socket> <options as JSON>."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import time
from multiprocessing.connection import Connection, Listener
from typing import Any

# vLLM's workers wait for a step in a loop of this. Workers of two engines on two processors kept all other processes of a
# machine from running for a minute, those of its kernel (6.18) too. Each process of an engine comes here.
os.sched_yield = lambda: time.sleep(1e-4)


def serve(connection: Connection, options: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import KVEventsConfig, KVTransferConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.metrics.reader import Counter, Histogram

    for name, config in (("kv_transfer_config", KVTransferConfig), ("kv_events_config", KVEventsConfig)):
        if name in options:
            options[name] = config(**options[name])
    if "data_parallel_size" in options:
        asyncio.run(serve_ranks(connection, options))
        return
    llm = LLM(**options)
    engine = llm.llm_engine
    connection.send("ready")

    def params(tokens: int) -> Any:
        return SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True)

    while True:
        op, *args = connection.recv()
        if op == "generate":  # prompts, tokens each, LoRA adapter (name, number, path) or None -> [(tokens, cached)]
            tokens, lora = args[1:]
            prompts: Any = [{"prompt_token_ids": p} for p in args[0]]
            adapter = LoRARequest(*lora) if lora else None
            outs = llm.generate(prompts, params(tokens), use_tqdm=False, lora_request=adapter)
            connection.send([(list(o.outputs[0].token_ids), o.num_cached_tokens) for o in outs])
        elif op == "crowd":  # prompts, tokens each, (prompt, steps until it is aborted) -> tokens of each prompt
            connection.send(crowd(engine, params(args[1]), args[0], args[2]))
        elif op == "add_lora":  # LoRA adapter: loads it, in place of the one that has its number
            connection.send(engine.add_lora(LoRARequest(*args[0], load_inplace=True)))
        elif op == "remove_lora":  # number
            connection.send(engine.remove_lora(args[0]))
        elif op == "transfer":  # prompt, tokens, kv_transfer_params -> (tokens, cached, the answer's parameters)
            told = params(args[1])
            told.extra_args = {"kv_transfer_params": args[2]}
            (out,) = llm.generate([{"prompt_token_ids": args[0]}], told, use_tqdm=False)
            connection.send((list(out.outputs[0].token_ids), out.num_cached_tokens, out.kv_transfer_params))
        elif op == "queue":  # (prompt, tokens, kv_transfer_params) of each -> [(tokens, cached)]
            each = [params(n) for _, n, _ in args[0]]
            for p, (_, _, said) in zip(each, args[0], strict=True):
                p.extra_args = {"kv_transfer_params": said}
            outs = llm.generate([{"prompt_token_ids": p} for p, _, _ in args[0]], each, use_tqdm=False)
            connection.send([(list(o.outputs[0].token_ids), o.num_cached_tokens) for o in outs])
        elif op == "picture":  # prompt, a number for its picture, tokens -> (tokens, cached)
            from PIL import Image

            picture = Image.frombytes("RGB", (32, 32), random.Random(args[1]).randbytes(3 * 32 * 32))
            (out,) = llm.generate(
                [{"prompt_token_ids": args[0], "multi_modal_data": {"image": picture}}], params(args[2]), use_tqdm=False
            )
            connection.send((list(out.outputs[0].token_ids), out.num_cached_tokens))
        elif op == "counters":  # Prometheus' counters by name, and how many values histograms have
            metrics = llm.get_metrics()
            counts = {m.name: m.count for m in metrics if isinstance(m, Histogram)}
            connection.send(counts | {m.name: m.value for m in metrics if isinstance(m, Counter)})
        elif op == "reset":  # empties the engine's own prefix cache, and the connector's, too?
            connection.send(llm.reset_prefix_cache(reset_connector=args[0]))
        elif op == "sleep":  # level, of vLLM's: from 1 on the KV is lost
            llm.sleep(args[0])
            if args[0]:
                llm.collective_rpc("spoil_kv")
            connection.send(None)
        elif op == "wake":
            llm.wake_up()
            connection.send(None)
        elif op == "begin":  # id, prompt: a request that is not waited for
            engine.add_request(args[0], {"prompt_token_ids": args[1]}, params(8))
            connection.send(None)
        elif op == "abort":
            engine.abort_request([args[0]])
            connection.send(None)
        elif op == "stop":
            engine.engine_core.shutdown()
            connection.send(None)
            return


async def serve_ranks(connection: Connection, options: dict[str, Any]) -> None:
    """Engines that are data parallel: they take a call's prompts in turn, and all at once."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))
    connection.send("ready")
    ids = itertools.count()

    async def answer(prompt: list[int], tokens: int, rank: int) -> tuple[list[int], int]:
        params = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True)
        said = engine.generate({"prompt_token_ids": prompt}, params, f"request-{next(ids)}", data_parallel_rank=rank)
        out = [o async for o in said][-1]
        return list(out.outputs[0].token_ids), out.num_cached_tokens

    while True:
        op, *args = await asyncio.to_thread(connection.recv)
        if op == "generate":
            ranks = options["data_parallel_size"]
            connection.send(await asyncio.gather(*(answer(p, args[1], i % ranks) for i, p in enumerate(args[0]))))
        else:
            assert op == "stop", f"data parallel engines know no {op}"
            engine.shutdown()
            connection.send(None)
            return


def crowd(engine: Any, params: Any, prompts: list[list[int]], doomed: list[tuple[list[int], int]]) -> list[list[int]]:
    """Requests together with others that are aborted, each after some of the engine's steps."""
    for i, p in enumerate(prompts):
        engine.add_request(f"kept-{i}", {"prompt_token_ids": p}, params)
    aborts = {}
    for i, (p, steps) in enumerate(doomed):
        engine.add_request(f"doomed-{i}", {"prompt_token_ids": p}, params)
        aborts[f"doomed-{i}"] = steps
    said: dict[int, list[int]] = {}
    n = 0
    while len(said) < len(prompts):
        for out in engine.step():
            if out.finished and out.request_id.startswith("kept-"):
                said[int(out.request_id[5:])] = list(out.outputs[0].token_ids)
        n += 1
        if due := [id for id, steps in aborts.items() if steps <= n]:
            engine.abort_request(due)
            for id in due:
                del aborts[id]
    engine.abort_request(list(aborts))
    return [said[i] for i in range(len(prompts))]


def main() -> None:
    with Listener(sys.argv[1], "AF_UNIX") as listener, listener.accept() as connection:
        serve(connection, json.loads(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # an interpreter with all that vLLM imports takes seconds to end


if __name__ == "__main__":
    main()
