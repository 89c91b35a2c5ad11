"""The Prometheus page: the routers' counters, and what replicas and pools say when asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from remora.deployments.model_states import ModelState
from remora.deployments.router import RouterCore
from remora.platform.base.ids import ModelId, ReplicaId
from remora.platform.http.pool_documents import Pools
from remora.platform.http.pool_metrics import pool_metrics
from remora.platform.http.router_metrics import Family, summed

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Replica → its engine's figures (deployments/engine/base.py: EngineStats) as plain data.
ReplicaFigures = Mapping[tuple[ReplicaId, ModelId], Mapping[str, Any]]

_REPLICA_LABELS = ("replica", "model")
#: Field of EngineStats → name and help.
_ENGINE_GAUGES = {
    "num_running": ("remora_engine_running_sequences", "Sequences that hold blocks."),
    "num_waiting": ("remora_engine_waiting_sequences", "Sequences that wait for a slot or for memory."),
    "num_parked": ("remora_engine_parked_sequences", "Of those, parked by the pool."),
    "load_tokens": ("remora_engine_load_tokens", "Tokens of all live sequences."),
    "is_fenced": ("remora_engine_fenced", "1 when the lease is lost and the replica must restart."),
}
_ENGINE_COUNTERS = {
    "num_requests": ("remora_engine_requests", "Requests taken."),
    "num_steps": ("remora_engine_steps", "Engine steps."),
    "num_failed_steps": ("remora_engine_failed_steps", "Engine steps that raised."),
    "num_preemptions": ("remora_engine_preemptions", "Sequences that gave their blocks back to go on later."),
    "num_prompt_tokens": ("remora_engine_prompt_tokens", "Prompt tokens computed."),
    "num_cached_tokens": ("remora_engine_cached_tokens", "Prompt tokens found in the cache."),
    "num_copied_tokens": ("remora_engine_copied_tokens", "Tokens whose KV was copied."),
    "num_converted_tokens": (
        "remora_engine_converted_tokens",
        "Tokens whose blocks were converted from another KV precision.",
    ),
    "num_damaged_blocks": ("remora_engine_damaged_blocks", "Blocks that came with a wrong checksum; computed instead."),
    "num_output_tokens": ("remora_engine_output_tokens", "Tokens generated."),
    "turn_s": ("remora_engine_turn_seconds", "Time for which it had its device's turn."),
    "num_published_blocks": ("remora_engine_published_blocks", "Blocks sealed and published."),
}
#: Field of StageTime → name and help.
_STAGE_COUNTERS = {
    "num_micro_batches": ("remora_stage_micro_batches", "Micro-batches computed."),
    "compute_s": ("remora_stage_compute_seconds", "Time for which it computed."),
    "turn_wait_s": ("remora_stage_turn_wait_seconds", "Time for which it waited for its device's turn."),
    "bubble_s": ("remora_stage_bubble_seconds", "Time without work while the pipeline had some."),
    "hop_s": ("remora_stage_hop_seconds", "Time that hidden states took from the stage before."),
    "hop_bytes": ("remora_stage_hop_bytes", "What came from the stage before."),
}
_ENGINE_HISTOGRAMS = {
    "step_s": ("remora_engine_step_seconds", "Duration of a step."),
    "step_overhead_s": ("remora_engine_step_overhead_seconds", "Of that, outside the decoder and its turn."),
    "turn_wait_s": ("remora_engine_turn_wait_seconds", "Of a step, waiting for the device's turn at the step lock."),
    "time_to_first_token_s": ("remora_engine_time_to_first_token_seconds", "From submission to the first token."),
    "inter_token_s": ("remora_engine_inter_token_seconds", "Between two tokens of a sequence."),
}


class _Answers(Collector):
    """What was collected for one page."""

    def __init__(
        self,
        core: RouterCore,
        routers: Sequence[Sequence[Family]],
        replicas: ReplicaFigures,
        pools: Pools,
        states: Mapping[ModelId, ModelState],
    ) -> None:
        self._core = core
        self._states = states
        self._routers = routers
        self._replicas = replicas
        self._pools = pools

    def collect(self) -> Iterable[Metric]:
        yield from summed(self._routers)
        yield from self._router()
        yield from self._engines()
        yield from pool_metrics(self._pools)

    def _router(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily(
            "remora_model_ready", "1 when a replica of the model is connected.", labels=("model",)
        )
        asleep = GaugeMetricFamily(
            "remora_model_asleep", "1 when its replicas are stopped until the next request.", labels=("model",)
        )
        for model_id, state in self._states.items():
            ready.add_metric((model_id,), float(state == "ready"))
            asleep.add_metric((model_id,), float(state == "asleep"))
        yield ready
        yield asleep
        weight = GaugeMetricFamily(
            "remora_model_step_weight",
            "The model's part of its device's time, against other busy models.",
            labels=("model",),
        )
        for model_id, model in self._core.catalog.models.items():
            weight.add_metric((model_id,), self._core.config.step_weight_of(model))
        yield weight
        yield GaugeMetricFamily("remora_router_open_requests", "Unfinished requests.", value=self._core.num_open)
        yield GaugeMetricFamily(
            "remora_router_waiting_requests", "Of those, without a replica.", value=self._core.num_waiting
        )

    def _engines(self) -> Iterator[Metric]:
        for field, (name, text) in _ENGINE_GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=_REPLICA_LABELS)
            for labels, figures in self._replicas.items():
                gauge.add_metric(labels, float(figures[field]))
            yield gauge
        for field, (name, text) in _ENGINE_COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=_REPLICA_LABELS)
            for labels, figures in self._replicas.items():
                counter.add_metric(labels, float(figures[field]))
            yield counter
        finished = CounterMetricFamily(
            "remora_engine_finished_sequences", "Sequences that ended, by reason.", labels=(*_REPLICA_LABELS, "reason")
        )
        for labels, figures in self._replicas.items():
            for reason, count in figures["num_finished"].items():
                finished.add_metric((*labels, reason), float(count))
        yield finished
        for field, (name, text) in _STAGE_COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=(*_REPLICA_LABELS, "stage"))
            for labels, figures in self._replicas.items():
                for stage in figures["stages"]:
                    counter.add_metric((*labels, str(stage["stage"])), float(stage[field]))
            yield counter
        for field, (name, text) in _ENGINE_HISTOGRAMS.items():
            histogram = HistogramMetricFamily(name, text, labels=_REPLICA_LABELS)
            for labels, figures in self._replicas.items():
                histogram.add_metric(labels, _buckets(figures[field]), sum_value=figures[field]["sum"])
            yield histogram


def _buckets(stats: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound."""
    buckets: list[tuple[str, float]] = []
    total = 0.0
    for bound, count in zip((*map(str, stats["bounds"]), "+Inf"), stats["counts"], strict=True):
        total += count
        buckets.append((bound, total))
    return buckets


def render_metrics(
    core: RouterCore,
    routers: Sequence[Sequence[Family]],
    replicas: ReplicaFigures,
    pools: Pools,
    states: Mapping[ModelId, ModelState],
) -> bytes:
    """The page's text."""
    answers = CollectorRegistry()
    answers.register(_Answers(core, routers, replicas, pools, states))
    return generate_latest(answers)
