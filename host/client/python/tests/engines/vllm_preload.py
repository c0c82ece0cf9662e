"""What a zygote imports for vLLM's engines and their tests, and changes in its forks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import vllm.entrypoints.llm
import vllm.model_executor.models.llama
import vllm.v1.engine.async_llm
import vllm.v1.engine.core
import vllm.v1.executor.multiproc_executor
import vllm.v1.worker.cpu_worker
from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform

_check: Any = CpuPlatform.check_and_update_config


def _checked(platform: Any, config: Any) -> None:
    """vLLM has the workers of processors spawned, for other libraries than their parent has."""
    _check(config)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


def _inspected(inspect: Callable[[], Any]) -> Any:
    """vLLM starts an interpreter to look at a model's class, since that could start CUDA."""
    return inspect()


CpuPlatform.check_and_update_config = classmethod(_checked)
registry._run_in_subprocess = _inspected
