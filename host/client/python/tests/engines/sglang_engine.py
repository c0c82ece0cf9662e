"""SGLang itself on the processor, whole: its scheduler, model, attention and unified cache, in processes of their own. A command is a line
of JSON on standard input, an answer one that begins with ANSWER."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processes import DEADLINE, wait_for

HERE = Path(__file__).resolve().parent
#: SGLang's tree in Rust is built for another torch than the one that runs on processors.
_ENVIRONMENT = {
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python", "HF_HUB_OFFLINE": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",  # the pools are adopted, which pages of the heap cannot be
}


class Engine:
    """One life of SGLang. Without ``linker`` it has no cache but its own."""

    def __init__(self, model: Path, log: Path, linker: dict[str, Any] | None = None, **options: Any) -> None:
        if linker is not None:
            options |= {
                "enable_unified_cache_external_linker": True, "unified_cache_external_linker_backend": "dynamic",
                "unified_cache_external_linker_config": {
                    "linker": "KvhostLinker", "linker_module_path": "kvhost.sglang", "linker_extra_config": linker,
                },
            }
        options = {
            "model_path": str(model), "device": "cpu", "attention_backend": "torch_native", "dtype": "float32", "page_size": 16,
            "skip_tokenizer_init": True, "max_total_tokens": 4096, "mem_fraction_static": 0.3, "context_length": 2048,
            "disable_overlap_schedule": True, "disable_cuda_graph": True, "random_seed": 1, "log_level": "info", **options,
        }
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "sglang_engine.py"), json.dumps(options)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True, env={**os.environ, **_ENVIRONMENT},
            )
        self._late = threading.Timer(DEADLINE, self._process.kill)
        self._late.daemon = True
        self._late.start()
        self._answer()

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int = 8) -> list[dict[str, Any]]:
        """For each prompt: its tokens, how many of its prompt were cached, and why it ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        return list(self._answer())

    def flush(self) -> None:
        """SGLang's own cache is empty. SGLang refuses that until what a request has to store is stored or taken back."""

        def flushed() -> bool:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"flush": True}) + "\n")
            self._process.stdin.flush()
            return bool(self._answer())

        wait_for("SGLang's cache is flushed", flushed)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise AssertionError(f"SGLang has ended: {self.output()[-4000:]}")

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._late.cancel()


def main() -> None:
    from sglang.srt.entrypoints.engine import Engine as SGLang

    engine = SGLang(**json.loads(sys.argv[1]))
    _say(None)
    for line in sys.stdin:
        command = json.loads(line)
        if "flush" in command:
            _say(bool(engine.flush_cache().success))
            continue
        parameters = {"temperature": 0, "max_new_tokens": command["tokens"], "ignore_eos": True}
        answers = []
        try:
            answers = engine.generate(input_ids=command["prompts"], sampling_params=parameters)
        except Exception as e:
            _say([{"tokens": [], "cached": 0, "ended": f"{type(e).__name__}: {e}"} for _ in command["prompts"]])
            continue
        _say([
            {"tokens": a["output_ids"], "cached": a["meta_info"].get("cached_tokens", 0), "ended": str(a["meta_info"]["finish_reason"])}
            for a in answers
        ])
    engine.shutdown()


def _say(answer: Any) -> None:
    print("ANSWER " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
