"""Counters of several routers read as one page."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from remora.deployments.router_stats import RouterStats
from remora.platform.base.ids import ModelId
from remora.platform.http.http_stats import HttpStats
from remora.platform.http.router_metrics import families_of, summed


class _Page(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def router(*durations_s: float) -> CollectorRegistry:
    stats = RouterStats()
    http = HttpStats(stats.registry)
    for duration_s in durations_s:
        stats.routed(ModelId("m"), "prefix")
        http.duration_s.labels("m", "n").observe(duration_s)
        http.in_flight.labels("m", "n").inc()
    return stats.registry


def page(*registries: CollectorRegistry) -> str:
    merged = CollectorRegistry()
    merged.register(_Page(list(summed(families_of(registry) for registry in registries))))
    return generate_latest(merged).decode()


def test_counters_gauges_and_histograms_of_routers_add_up() -> None:
    text = page(router(0.2, 0.3), router(20.0), router())
    assert 'remora_router_routed_requests_total{model="m",reason="prefix"} 3.0' in text
    assert 'remora_generations_in_flight{model="m",namespace="n"} 3.0' in text
    assert 'remora_generation_duration_seconds_count{model="m",namespace="n"} 3.0' in text
    assert 'remora_generation_duration_seconds_bucket{le="0.5",model="m",namespace="n"} 2.0' in text
    assert 'remora_generation_duration_seconds_sum{model="m",namespace="n"} 20.5' in text
    assert text.count("# TYPE remora_router_routed_requests_total counter") == 1


def test_one_router_reads_as_itself() -> None:
    registry = router(0.2, 3.0)
    own = {line for line in generate_latest(registry).decode().splitlines() if "_created" not in line}
    assert set(page(registry).splitlines()) == own
