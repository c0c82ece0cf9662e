"""Environment variables that change the number formats of an engine's computation."""

from __future__ import annotations

import os
from collections.abc import Mapping

# Parts of the names of engines' own variables. Variables that only change the order of additions, such as the choice of
# a kernel, are left out.
_NUMBERS = (
    "ACCUM", "BATCH_INVARIANT", "E8M0", "EMULATION", "FORCE_A16", "FP4", "FP8", "IGNORED_LAYERS", "INPUT_DTYPE", "INT4", "INT8",
    "LOW_PRECISION", "MATMUL_PRECISION", "QUANT", "ROUTING", "SKIP_SOFTMAX",
)
_ALL = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")


def numbers(prefix: str, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables that are set. ``prefix`` is that of the engine's own variables."""
    return {
        name: value for name, value in env.items()
        if name in _ALL or name.startswith(prefix) and any(word in name for word in _NUMBERS)
    }
