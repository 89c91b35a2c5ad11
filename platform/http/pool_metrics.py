"""What pools say, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from remora.cache_actors.pool_messages import PoolDescription
from remora.namespaces.replication import ReplicationReport
from remora.namespaces.report import NamespaceReport
from remora.platform.base.config_types import DEVICE_TIER
from remora.platform.http.pool_documents import Pools

_POOL_GAUGES: dict[str, tuple[str, Callable[[PoolDescription], float]]] = {
    "remora_pool_arena_bytes": ("Size of the arena's data.", lambda pool: pool.report.data_bytes),
    "remora_pool_used_bytes": ("KV that running sequences hold.", lambda pool: pool.report.used_bytes),
    "remora_pool_cached_bytes": ("KV that is only cached.", lambda pool: pool.report.cached_bytes),
    "remora_pool_referenced_blocks": (
        "Blocks that running sequences hold.",
        lambda pool: pool.report.num_referenced_blocks,
    ),
    "remora_pool_unleased_extents": ("Extents of no geometry.", lambda pool: pool.report.num_unleased_extents),
    "remora_pool_reservable_bytes": (
        "Device memory besides KV that replicas may reserve.",
        lambda pool: pool.report.reservable_bytes,
    ),
    "remora_pool_reserved_bytes": ("Of that, reserved.", lambda pool: pool.report.reserved_bytes),
    "remora_pool_leases": ("Replicas attached.", lambda pool: len(pool.report.leases)),
    "remora_pool_journal_bytes": ("Size of the journal since its snapshot.", lambda pool: pool.journal_bytes),
    "remora_pool_restarts": ("Times the pool came back to its arena.", lambda pool: pool.num_restarts),
}
#: What a namespace holds is counted by where it lies; the device is the only place so far.
_BY_NAMESPACE = ("pool", "namespace")
_BY_TIER = (*_BY_NAMESPACE, "tier")
_TIER_GAUGES: dict[str, tuple[str, Callable[[NamespaceReport], float]]] = {
    "remora_namespace_guaranteed_bytes": ("What nobody can take from it.", lambda each: each.guaranteed_bytes),
    "remora_namespace_limit_bytes": ("The most it may hold.", lambda each: each.limit_bytes),
    "remora_namespace_used_bytes": ("Held by running sequences.", lambda each: each.used_bytes),
    "remora_namespace_cached_bytes": ("Held as cache.", lambda each: each.cached_bytes),
    "remora_namespace_borrowed_bytes": ("Held above its guarantee.", lambda each: each.borrowed_bytes),
}
_NAMESPACE_GAUGES: dict[str, tuple[str, Callable[[NamespaceReport], float]]] = {
    "remora_namespace_running_sequences": ("Sequences that hold blocks.", lambda each: each.num_running),
    "remora_namespace_waiting_sequences": ("Sequences parked for memory.", lambda each: each.num_waiting),
}
_NAMESPACE_COUNTERS: dict[str, tuple[str, Callable[[NamespaceReport], float]]] = {
    "remora_namespace_admitted_sequences": ("Admissions.", lambda each: each.num_admitted),
    "remora_namespace_preempted_sequences": (
        "Sequences told to give their memory back.",
        lambda each: each.num_preempted,
    ),
    "remora_namespace_lookup_tokens": ("Prompt tokens of admitted sequences.", lambda each: each.lookup_tokens),
}
_TIER_COUNTERS: dict[str, tuple[str, Callable[[NamespaceReport], float]]] = {
    "remora_namespace_revoked_bytes": (
        "Of its cache, taken back because it was borrowed or its quota was lowered.",
        lambda each: each.revoked_bytes,
    ),
    "remora_namespace_hit_tokens": ("Of those, found in the cache.", lambda each: each.hit_tokens),
}

#: Of namespaces whose blocks are copied to other nodes.
_REPLICATION_GAUGES: dict[str, tuple[str, Callable[[ReplicationReport], float]]] = {
    "remora_replication_lag_blocks": ("Sealed blocks that are on no other node yet.", lambda each: each.lag_blocks),
    "remora_replication_lag_bytes": ("Their bytes.", lambda each: each.lag_bytes),
    "remora_replication_lag_seconds": ("Age of the oldest of them.", lambda each: each.lag_s),
}
_REPLICATION_COUNTERS: dict[str, tuple[str, Callable[[ReplicationReport], float]]] = {
    "remora_replication_copied_blocks": ("Blocks copied to other nodes.", lambda each: each.copied_blocks),
    "remora_replication_copied_bytes": ("Their bytes.", lambda each: each.copied_bytes),
    "remora_replication_dropped_blocks": (
        "Blocks given up because there is no room for them on another node.",
        lambda each: each.dropped_blocks,
    ),
}


def pool_metrics(pools: Pools) -> Iterator[Metric]:
    """Figures of every pool, and of every namespace in it."""
    for name, (text, value_of_pool) in _POOL_GAUGES.items():
        gauge = GaugeMetricFamily(name, text, labels=("pool",))
        for pool_id, pool in pools.items():
            gauge.add_metric((pool_id,), value_of_pool(pool))
        yield gauge
    namespaces = [
        ((pool_id, str(report.namespace_id)), report)
        for pool_id, pool in pools.items()
        for report in pool.report.namespaces
    ]
    kind: type[GaugeMetricFamily | CounterMetricFamily]
    for kind, families, labels, tier in (
        (GaugeMetricFamily, _NAMESPACE_GAUGES, _BY_NAMESPACE, ()),
        (GaugeMetricFamily, _TIER_GAUGES, _BY_TIER, (DEVICE_TIER,)),
        (CounterMetricFamily, _NAMESPACE_COUNTERS, _BY_NAMESPACE, ()),
        (CounterMetricFamily, _TIER_COUNTERS, _BY_TIER, (DEVICE_TIER,)),
    ):
        for name, (text, value) in families.items():
            family = kind(name, text, labels=labels)
            for where, report in namespaces:
                family.add_metric((*where, *tier), value(report))
            yield family
    for kind, replication in (
        (GaugeMetricFamily, _REPLICATION_GAUGES),
        (CounterMetricFamily, _REPLICATION_COUNTERS),
    ):
        for name, (text, value_of_copies) in replication.items():
            family = kind(name, text, labels=_BY_NAMESPACE)
            for pool_id, pool in pools.items():
                for namespace_id, copies in pool.replication.items():
                    family.add_metric((pool_id, str(namespace_id)), value_of_copies(copies))
            yield family
    evicted = CounterMetricFamily(
        "remora_namespace_evicted_blocks", "Blocks evicted, by cause.", labels=(*_BY_TIER, "cause")
    )
    for where, report in namespaces:
        for cause, count in report.evicted_blocks.items():
            evicted.add_metric((*where, DEVICE_TIER, cause), float(count))
    yield evicted
