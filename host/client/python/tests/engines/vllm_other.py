"""A connector for MultiConnector that moves no KV: it promises, fails and keeps what a test says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA


@dataclass
class Plan:
    tokens: int = 0  # leading tokens that it has of each prompt
    asynchronous: bool = False  # whether it loads between steps
    keeps: bool = False  # whether a finished request's blocks wait until they are in ``sent``
    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    bad: set[int] = field(default_factory=set)  # blocks whose load has failed
    blocks: dict[str, list[int]] = field(default_factory=dict)  # of requests that it loads for


class Other(KVConnectorBase_V1, SupportsHMA):
    plan: ClassVar[Plan]

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        n = max(0, self.plan.tokens - num_computed_tokens)
        return n, bool(n) and self.plan.asynchronous

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.plan.blocks[request.request_id] = blocks.get_block_ids()[0]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.plan.keeps, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, self.plan.sent = self.plan.sent, set()
        received, self.plan.received = self.plan.received, set()
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self.plan.bad = self.plan.bad, set()
        return bad
