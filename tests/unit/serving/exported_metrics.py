"""Every metric that the platform exports, taken from the code that makes them."""

from __future__ import annotations

from typing import NamedTuple

from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from remora.deployments.router import RouterCore
from remora.deployments.router_stats import RouterStats
from remora.platform.base.config import parse_config
from remora.platform.base.ids import ReplicaId, RouterId
from remora.platform.http.http_stats import HttpStats
from remora.platform.http.metrics import _Answers


class Exported(NamedTuple):
    name: str
    type: str
    labels: tuple[str, ...]
    text: str


def exported_metrics() -> dict[str, Exported]:
    """By the name that is scraped; a histogram's is without _bucket, _sum and _count."""
    stats = RouterStats()
    HttpStats(stats.registry)
    counters = [each for each in stats.registry._collector_to_names if isinstance(each, MetricWrapperBase)]
    found = [_exported(metric, each._labelnames) for each in counters for metric in each.collect()]

    def connect(_: ReplicaId) -> None:
        raise AssertionError("nobody is connected")

    core = RouterCore(parse_config({"models": [{"name": "m", "source": "/m"}]}), connect, router_id=RouterId("r"))
    found += [
        _exported(metric, getattr(metric, "_labelnames", ())) for metric in _Answers(core, [], {}, {}, {}).collect()
    ]
    return {each.name: each for each in found}


def _exported(metric: Metric, labels: tuple[str, ...]) -> Exported:
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    return Exported(name, metric.type, tuple(labels), metric.documentation)


def sample_names() -> set[str]:
    """What a query may name."""
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    return {each.name + suffix for each in exported_metrics().values() for suffix in suffixes.get(each.type, ("",))}
