"""The counters of all routers as one: behind one address, a scrape must not depend on who happens to answer it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric


class Sample(msgspec.Struct, frozen=True):
    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, frozen=True):
    """One metric of one router, as it crosses between routers."""

    name: str
    documentation: str
    type: str
    samples: tuple[Sample, ...]


class RouterFamilies(Protocol):
    """Asks every router, this one included, for its own metrics."""

    async def families(self) -> Sequence[Sequence[Family]]:
        """Per router that answers in time."""
        ...


def families_of(registry: CollectorRegistry) -> tuple[Family, ...]:
    """What a registry holds now; the times at which counters were created are left out, for they cannot be added."""
    return tuple(
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            tuple(
                Sample(sample.name, dict(sample.labels), sample.value)
                for sample in metric.samples
                if not sample.name.endswith("_created")
            ),
        )
        for metric in registry.collect()
    )


class OneRouter:
    """RouterFamilies of a router that is alone."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    async def families(self) -> Sequence[Sequence[Family]]:
        return [families_of(self._registry)]


def summed(routers: Iterable[Iterable[Family]]) -> Iterator[Metric]:
    """Equal samples added up: right for counters, histograms and gauges that count."""
    metrics: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for families in routers:
        for family in families:
            if family.name not in metrics:
                metrics[family.name] = Metric(family.name, family.documentation, family.type)
            sums = values.setdefault(family.name, {})
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.items()))
                sums[key] = sums.get(key, 0.0) + sample.value
    for name, metric in metrics.items():
        for (sample_name, labels), value in values[name].items():
            metric.add_sample(sample_name, dict(labels), value)
        yield metric
