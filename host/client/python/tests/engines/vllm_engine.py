"""vLLM engines, each in a process of its own, and the host that they share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from processes import DEADLINE, Host, wait_for
from zygote import Fork

HERE = Path(__file__).resolve().parent
BLOCK, CHUNK = 128, 256  # tokens; vLLM's CPU backend has blocks of 128
#: Of engines with stages: 0.32's workers make what one stage sends to the next when they warm up, and eager ones do not.
WARM: dict[str, Any] = {"enforce_eager": False}

Tokens = list[int]
Answers = list[tuple[Tokens, int]]


class Engine:
    """A vLLM engine, with kvhost if it is given a host."""

    def __init__(
        self,
        folder: Path,
        name: str,
        model: Path,
        host: Host | None,
        *,
        blocks: int,
        vllm: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        forked: bool = True,
        **options: Any,
    ) -> None:
        """``vllm`` are more of vLLM's own options, ``env`` more of its environment, ``options`` the connector's. A
        ``kv_transfer_config`` among vLLM's options is left as it is; the host is then waited for and nothing else. An engine
        that is not ``forked`` has interpreters of its own, as users start it."""
        settings: dict[str, Any] = {
            "model": str(model), "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 4096,
            "enforce_eager": True, "seed": 0, "num_gpu_blocks_override": blocks, "max_num_batched_tokens": CHUNK,
            "max_num_seqs": 8, "disable_log_stats": False, **(vllm or {}),
        }
        if host is not None and "kv_transfer_config" not in settings:
            extra = {"socket": host.socket, "load_when": "always", "lookup_timeout": 5.0, **options}
            settings["kv_transfer_config"] = {
                "kv_connector": "ProbeConnector", "kv_connector_module_path": "vllm_probe", "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra,
            }
        self._host = host
        self.log = folder / f"{name}.log"
        address = str(folder / f"{name}.sock")
        command, env = [str(HERE / "vllm_process.py"), address, json.dumps(settings)], environment(folder) | (env or {})
        self.log.unlink(missing_ok=True)
        self.process: Fork | subprocess.Popen[bytes]
        if forked:
            self.process = Fork(command, self.log, env)
        else:
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    [sys.executable, *command], env=env, stdout=log, stderr=log, start_new_session=True
                )
        try:
            wait_for(f"engine {name} starts", lambda: self._connects(address))
            self._receive()
        except BaseException:
            self.kill()  # whatever has made it does not have it yet
            raise

    def _connects(self, address: str) -> bool:
        try:
            self._connection = Client(address, "AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):  # the socket's file is there before it listens
            assert self.process.poll() is None, f"the engine ended: {self.log.read_text(errors='replace')[-8000:]}"
            return False
        return True

    def _receive(self) -> Any:
        try:
            assert self._connection.poll(DEADLINE), f"no answer within {DEADLINE} s, see {self.log}"
            return self._connection.recv()
        except (EOFError, ConnectionError):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(60)  # it still writes why
            tail = self.log.read_text(errors="replace")[-8000:]
            raise AssertionError(f"the engine ended: {tail}") from None

    def ask(self, op: str, *args: Any) -> Any:
        self._connection.send((op, *args))
        return self._receive()

    def generate(self, prompts: Sequence[Tokens], tokens: int = 8, lora: tuple[str, int, str] | None = None) -> Answers:
        """``lora`` is an adapter's name, number and path."""
        answers: Answers = self.ask("generate", list(prompts), tokens, lora)
        return answers

    def one_by_one(self, prompts: Sequence[Tokens], tokens: int = 8) -> Answers:
        return [self.generate([p], tokens)[0] for p in prompts]

    def comes_to(self, prompts: Sequence[Tokens], answers: Answers) -> None:
        """Asks with an empty cache until the hits are those of the answers: of a host that was silent an engine hears later. The tokens
        are the same each time."""

        def hits() -> bool:
            self.reset()
            said = self.one_by_one(prompts)
            assert [t for t, _ in said] == [t for t, _ in answers]
            return said == answers

        wait_for(f"hits of {[c for _, c in answers]} tokens", hits)

    def send(self, op: str, *args: Any) -> None:
        """Like ``ask``, but the answer is fetched by ``answer``."""
        self._connection.send((op, *args))

    def answers(self, seconds: float) -> bool:
        return self._connection.poll(seconds)

    def answer(self) -> Any:
        return self._receive()

    def reset(self, *, connector: bool = False) -> None:
        """``connector``: as for new weights."""
        wait_for("the engine's cache is empty", lambda: self.ask("reset", connector))
        if self._host is not None and self._host.alive():
            wait_for("the host has published all", self._host.idle)

    def said(self, text: str) -> bool:
        return self.count(text) > 0

    def count(self, text: str) -> int:
        """How often the engine's log has a text."""
        return self.log.read_text(errors="replace").count(text)

    def stop(self) -> None:
        self.ask("stop")
        try:
            self.process.wait(DEADLINE)
        finally:
            self.kill()

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(DEADLINE)


def tiered(host: Host, kept: int = 16 << 20) -> dict[str, Any]:
    """vLLM's options for its own offloading, of so many bytes, with the host as its tier."""
    tier = {"type": "kvhost", "socket": host.socket, "lookup_timeout": 1.0}
    return {"kv_transfer_config": {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
            "spec_name": "TiersSpec", "spec_module_path": "vllm_offloading", "cpu_bytes_to_use": kept, "secondary_tiers": [tier],
        },
    }}


def environment(folder: Path) -> dict[str, str]:
    env = dict(os.environ)
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # without .pyc files every start takes minutes
    path = [str(HERE), str(HERE.parents[1]), *filter(None, [env.get("PYTHONPATH")])]
    # n-grams are compiled for two seconds in each engine, where Python finds them at once
    return env | {
        "PROBE_DIR": str(folder), "PYTHONPATH": os.pathsep.join(path), "TORCHDYNAMO_DISABLE": "1",
        "VLLM_USE_AOT_COMPILE": "0", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1", "NUMBA_DISABLE_JIT": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
