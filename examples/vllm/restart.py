"""Loads a prompt's KV from kvhost after a restart of vLLM and kvhost.

    python restart.py [--model NAME_OR_PATH] [--root DIR]

The script starts a vLLM engine, which starts kvhost, and computes a prompt. Then it ends both, starts the engine again and
asks for the same prompt. It prints the time to the first token and the number of tokens that came from kvhost, and exits
with 1 if there were none. Without --model it makes a small Llama with random weights, which also runs on a CPU. It needs
vLLM 0.26 and kvhost: a wheel of make dist, or pip install ./host/client/python with the program's path in KVHOST_BIN. On a
CPU, set TORCHDYNAMO_DISABLE=1 to skip a long compilation."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

PROMPT_TOKENS = 3000


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="", help="a model for vLLM; default: a small one with random weights")
    p.add_argument("--root", default="", help="where kvhost keeps chunks; default: a folder that is deleted at the end")
    p.add_argument("--engine", nargs=2, metavar=("MODEL", "ROOT"), help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.engine:
        run_engine(*args.engine)
        return
    with tempfile.TemporaryDirectory(prefix="kvhost-vllm-") as folder:
        model = args.model or make_model(pathlib.Path(folder) / "model")
        root = args.root or folder + "/kv"
        results = []
        for turn in ("first", "second"):
            engine = subprocess.run([sys.executable, __file__, "--engine", model, root], stdout=subprocess.PIPE, text=True, check=True)
            host = pathlib.Path(root, ".kvhost/lock").read_text().split()[0]
            os.kill(int(host), signal.SIGTERM)
            while os.path.exists(f"/proc/{host}/exe"):
                time.sleep(0.05)
            result = json.loads(engine.stdout.splitlines()[-1])
            results.append(result)
            print(f"{turn} run: {result['milliseconds']:.0f} ms to the first token, "
                  f"{result['cached']} of {PROMPT_TOKENS} tokens from kvhost", flush=True)
    sys.exit(0 if results[1]["cached"] else "the second run hit nothing")


def run_engine(model: str, root: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    llm = LLM(
        model=model, skip_tokenizer_init=True, enforce_eager=True, max_model_len=4096, gpu_memory_utilization=0.5,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KvhostConnector", kv_role="kv_both",
            kv_load_failure_policy="recompute", kv_connector_extra_config={"root": root + "=8GiB"},
        ),
    )
    first = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    rng = random.Random(1)
    llm.generate([{"prompt_token_ids": [rng.randrange(3, 900) for _ in range(200)]}], first, use_tqdm=False)  # warm-up
    rng = random.Random(2)
    prompt = [rng.randrange(3, 900) for _ in range(PROMPT_TOKENS)]
    start = time.monotonic()
    out = llm.generate([{"prompt_token_ids": prompt}], first, use_tqdm=False)[0]
    elapsed = time.monotonic() - start
    llm.llm_engine.engine_core.shutdown()
    print(json.dumps({"milliseconds": 1e3 * elapsed, "cached": out.num_cached_tokens}), flush=True)


def make_model(path: pathlib.Path) -> str:
    """A Llama of four layers with random weights."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=1024, max_position_embeddings=8192,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    path.mkdir()
    config.architectures = ["LlamaForCausalLM"]
    config.torch_dtype = "bfloat16"
    config.save_pretrained(path)
    state = {name: t.contiguous() for name, t in model.state_dict().items()}
    save_file(state, str(path / "model.safetensors"), metadata={"format": "pt"})
    return str(path)


if __name__ == "__main__":
    main()
