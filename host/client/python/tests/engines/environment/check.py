"""Runs vLLM with two workers, without kvhost: fails on a machine where it cannot run."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import vllm_model as model  # noqa: E402
from vllm_engine import environment  # noqa: E402


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ.update(environment(folder))
        from vllm import LLM, SamplingParams

        model.write(folder / "model", model.config(1), seed=1)
        llm = LLM(
            model=str(folder / "model"), skip_tokenizer_init=True, dtype="float32", max_model_len=1024,
            enforce_eager=True, num_gpu_blocks_override=16, tensor_parallel_size=2,
        )  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=2, detokenize=False, ignore_eos=True)
        out = llm.generate([{"prompt_token_ids": list(range(5, 205))}], params, use_tqdm=False)
        assert len(out[0].outputs[0].token_ids) == 2


if __name__ == "__main__":
    main()
