"""A vLLM engine that a test drives over a socket: vllm_process.py <socket> <options as JSON>."""

from __future__ import annotations

import json
import sys
from multiprocessing.connection import Connection, Listener
from typing import Any


def serve(connection: Connection, options: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import KVEventsConfig, KVTransferConfig
    from vllm.lora.request import LoRARequest

    for name, config in (("kv_transfer_config", KVTransferConfig), ("kv_events_config", KVEventsConfig)):
        if name in options:
            options[name] = config(**options[name])
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
        elif op == "reset":  # empties the engine's own prefix cache, and the connector's, too?
            connection.send(llm.reset_prefix_cache(reset_connector=args[0]))
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


def main() -> None:
    with Listener(sys.argv[1], "AF_UNIX") as listener, listener.accept() as connection:
        serve(connection, json.loads(sys.argv[2]))


if __name__ == "__main__":
    main()
