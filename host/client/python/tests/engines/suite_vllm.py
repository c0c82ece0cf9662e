"""vLLM's own tests of connectors, with KvhostConnector in the place of their default one.

  suite_vllm.py    fetches the tests of the installed vLLM's release into .build/suites, runs them, and compares

As a plugin of pytest it changes the default, and the model, which the tests would download. Exit code 1: a test failed that
UNFIT does not name."""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import os
import re
import sys
import tarfile
import tempfile
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import zygote

HERE = Path(__file__).resolve().parent
SUITES = HERE.parents[4] / ".build" / "suites"
UNIT = "tests/v1/kv_connector/unit"
FILES = [
    f"{UNIT}/test_{name}.py"
    for name in (
        "cache_pollution_prevention", "error_propagation", "invalid_blocks_correctness", "kv_connector_lifecycle",
        "kv_load_failure_recovery", "multi_connector", "remote_decode_lifecycle", "remote_prefill_lifecycle",
        "scheduler_kv_connector_override",
    )
]
#: The source of a release: its SHA-256 as PyPI says it.
SOURCES = {
    "0.26.0": "23e9fa19d7e20ce7dcc1c074d41503e2116d23f19e688f5d5ea91b741f958502",
    "0.32.0": "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad",
}
#: Tests that no other connector than their own can pass, by reason.
UNFIT = {
    "asks NIXL's parameters to fetch from, or to keep for, another node": [
        "remote_decode_lifecycle.py::test_abort_during_kv_transfer",
        "remote_decode_lifecycle.py::test_basic_lifecycle",
        "remote_decode_lifecycle.py::test_prefix_cache_lifecycle",
        "remote_decode_lifecycle.py::test_short_prompt_lifecycle",
        "remote_prefill_lifecycle.py::test_basic_lifecycle",
        "remote_prefill_lifecycle.py::test_cannot_recv",
        "remote_prefill_lifecycle.py::test_cannot_schedule_after_recv",
        "remote_prefill_lifecycle.py::test_full_block_prompt",
        "remote_prefill_lifecycle.py::test_interleaved_lifecycle",
        "remote_prefill_lifecycle.py::test_kv_fetch_stages_cleared_on_abort",
        "remote_prefill_lifecycle.py::test_no_spurious_prefix_caching",
        "remote_prefill_lifecycle.py::test_p_side_chunked_prefill_mamba",
    ],
    "names a model that only Hugging Face's hub has": [
        "multi_connector.py::test_multi_example_connector_consistency",
        "scheduler_kv_connector_override.py::test_connector_block_state_covers_steps_without_new_blocks",
        "scheduler_kv_connector_override.py::test_connector_receives_block_hashes",
    ],
}


def fetch(version: str, folder: Path) -> None:
    if (folder / UNIT).exists():
        return
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    with urllib.request.urlopen(f"{index}/vllm/", timeout=60) as page:
        links = re.findall(r'href="([^"#]+/vllm-' + re.escape(version) + r"\.tar\.gz)[#\"]", page.read().decode())
    if not links:
        sys.exit(f"{index} has no source of vLLM {version}")
    with urllib.request.urlopen(links[0], timeout=600) as answer:
        source = answer.read()
    if (got := hashlib.sha256(source).hexdigest()) != SOURCES.get(version):
        sys.exit(f"{links[0]} has the SHA-256 {got}, want {SOURCES.get(version)} of {Path(__file__).name}")
    with tarfile.open(fileobj=io.BytesIO(source)) as tar:
        for member in tar:
            member.name = member.name.partition("/")[2]
            if member.name.startswith("tests/") and member.name != "tests/conftest.py":  # which wants all that vLLM is tested with
                tar.extract(member, folder, filter="data")


def write_model(folder: Path) -> str:
    import vllm_model

    vllm_model.write(folder, vllm_model.config(3), seed=7)
    words = {"type": "WordLevel", "vocab": {"a": 0, "</s>": 2}, "unk_token": "a"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": words}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}))
    return str(folder)


def pytest_configure() -> None:
    """As a plugin."""
    import kvhost.vllm
    from tests.v1.kv_connector.unit import utils

    kvhost.vllm.register()
    folder = Path(os.environ["SUITE_MODEL"])
    change(utils.create_vllm_config, kv_connector="KvhostConnector", model=write_model(folder), max_model_len=4096)


def change(function: Any, **new: Any) -> None:
    """Changes defaults."""
    defaults = {p.name: p.default for p in inspect.signature(function).parameters.values() if p.default is not p.empty}
    if lacking := new.keys() - defaults.keys():
        sys.exit(f"{function.__name__} of vLLM's tests has no {', '.join(lacking)}")
    function.__defaults__ = tuple((defaults | new).values())


def main() -> int:
    import vllm

    version = vllm.__version__.partition("+")[0]
    folder = SUITES / version
    fetch(version, folder)
    pytest = find_spec("pytest.__main__")
    assert pytest is not None and pytest.origin is not None
    path = os.pathsep.join([str(folder), str(HERE), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as made:
        log = Path(made, "log")
        code = zygote.Fork(
            [pytest.origin, "-q", "-p", Path(__file__).stem, "-p", "no:cacheprovider", "-rfEs", "--tb=short",
             "--rootdir", str(folder), *(str(folder / f) for f in FILES if (folder / f).exists())],
            log, os.environ | {"PYTHONPATH": path, "SUITE_MODEL": f"{made}/model", "HF_HUB_OFFLINE": "1"},
        ).wait()
        said = log.read_text(errors="replace").splitlines()
    failed = {found[1] for line in said if (found := re.match(rf"(?:FAILED|ERROR) \S*{UNIT}/test_(\S+)", line))}
    unfit = {name for names in UNFIT.values() for name in names}
    wrong = sorted(failed - unfit)
    whole = code in (0, 1)
    print(*(line for line in said if wrong or not whole or line.startswith("SKIPPED")), sep="\n")
    for reason, names in UNFIT.items():
        print(f"{len(failed & set(names))} {reason}")
    print(f"vLLM {version}'s own tests with KvhostConnector: {said[-1]}; {len(wrong)} failed that should not: {wrong}")
    return 0 if whole and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
