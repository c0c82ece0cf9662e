"""The connector's methods against the interface of the vLLM releases that it is for, as read from their wheels."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ENGINES = Path(__file__).parent / "engines"
sys.path.insert(0, str(ENGINES))

from vllm_signatures import classes  # noqa: E402

RELEASES: dict[str, Any] = json.loads((ENGINES / "vllm_signatures.json").read_text())
SOURCE = Path(__file__).parents[1] / "kvhost" / "vllm" / "connector.py"
OURS = classes(SOURCE.read_text())["KvhostConnector"]["methods"]

#: Methods of the interface that are there in some releases only.
NOT_IN = {
    "0.26.0": {
        "get_transfer_results", "unregister_kv_caches", "restore_kv_caches", "requires_kv_delivery",
        "has_pending_block_frees",
    },
    "0.32.0": {"register_cross_layers_kv_cache", "unregister_kv_caches", "restore_kv_caches"},
    "0.33.0": {"register_cross_layers_kv_cache"},
}


def interface(release: str) -> dict[str, Any]:
    read = RELEASES[release]
    methods: dict[str, Any] = {**read["KVConnectorBase_V1"]["methods"], **read["SupportsHMA"]["methods"]}
    return methods


def test_releases() -> None:
    assert set(RELEASES) == set(NOT_IN)


@pytest.mark.parametrize("release", RELEASES)
def test_every_override_has_the_signature_of_the_release(release: str) -> None:
    theirs = interface(release)
    public = {name for name in OURS if not name.startswith("_")} | {"__init__"}
    assert public - theirs.keys() == NOT_IN[release]
    for name in public & theirs.keys():
        want = {**theirs[name], "abstract": False}
        assert OURS[name] == want, name


@pytest.mark.parametrize("release", RELEASES)
def test_nothing_abstract_is_left(release: str) -> None:
    assert {name for name, m in interface(release).items() if m["abstract"]} <= OURS.keys()


def test_transfer_results() -> None:
    assert "KVConnectorTransferResults" not in RELEASES["0.26.0"]
    for release in ("0.32.0", "0.33.0"):
        fields = RELEASES[release]["KVConnectorTransferResults"]["fields"]
        assert fields == ["finished_sending", "finished_recving", "failed_recving"], release


def test_the_worker_metadata_aggregates() -> None:
    ours = classes((SOURCE.parent / "orders.py").read_text())["WorkerReport"]["methods"]["aggregate"]
    for release, read in RELEASES.items():
        want = read["KVConnectorWorkerMetadata"]["methods"]["aggregate"]
        assert {**want, "abstract": False} == ours, release
