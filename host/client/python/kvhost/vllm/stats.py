"""Counters and histograms for vLLM's log and its Prometheus endpoint."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

#: The counters, with their descriptions.
COUNTERS = {
    "lookups": "Prompts looked up in kvhost",
    "lookups_timed_out": "Lookups that kvhost did not answer in time",
    "adapters_not_known": "Requests computed without kvhost, because it was not known what their LoRA adapter holds",
    "hits_not_loaded_whole": "Hits of which all or the end was computed, because that is sooner or to measure the rate",
    "loads": "Requests with a load",
    "loads_in_step": "Of these, loads inside the step that computes behind the hit",
    "tokens_loaded": "Tokens whose load was ordered",
    "chunks_not_loaded": "Chunks whose load failed; the engine computed them",
    "chunks_ordered": "Chunks offered to kvhost",
    "chunks_dropped": "Chunks that were computed and not offered: no host was there, or it read too slowly",
    "chunks_stored": "Chunks that kvhost wrote anew",
}


#: The successive phases of a load, each with a histogram in seconds. A load inside a step has no last phase.
PHASES = {
    "lookup": "Until kvhost answered the lookup of a hit that was loaded",
    "wait": "From the answer until the engine had blocks for the hit and ordered its load",
    "load": "From the order until kvhost had ended the load",
    "notice": "From the end of a load until the engine's scheduler knew",
    "schedule": "From then until the request was in a step",
}
_BUCKETS = [0.0005 * 2**n for n in range(16)]  # to 16 s


class KvhostStats(KVConnectorStats):
    """Counts since the last report, by name, and the seconds of each load's phases."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, n in other.data.items():
            self.data[name] = self.data[name] + n if name in self.data else n
        return self

    def reduce(self) -> dict[str, int | float]:
        return {
            f"kvhost {name.replace('_', ' ')}": round(sum(n) / len(n), 4) if isinstance(n, list) else n
            for name, n in self.data.items() if n
        }

    def is_empty(self) -> bool:
        return not any(self.data.values())


_made: dict[tuple[type, str], Any] = {}


def _series(kind: type, name: str, **options: Any) -> Any:
    """Returns the series of a name. A process has one for each name: a second connector uses the first one's, which
    then count both."""
    try:
        _made[kind, name] = kind(name=name, **options)
    except ValueError:
        if (kind, name) not in _made:
            raise
    return _made[kind, name]


class KvhostPromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter for each of :data:`COUNTERS`, named ``vllm:kvhost_<name>``, and one histogram for each of
    :data:`PHASES`, named ``vllm:kvhost_<phase>_seconds``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, Any] = {
            name: _series(self._counter_cls, f"vllm:kvhost_{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        self._histograms: dict[str, Any] = {
            f"{phase}_seconds": _series(
                self._histogram_cls, f"vllm:kvhost_{phase}_seconds", documentation=text, labelnames=labelnames, buckets=_BUCKETS
            )
            for phase, text in PHASES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, n in transfer_stats_data.items():
            if name in self._counters and n:
                self._counters[name].labels(*labels).inc(n)
            elif name in self._histograms:
                for seconds in n:
                    self._histograms[name].labels(*labels).observe(seconds)
