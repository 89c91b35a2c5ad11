"""How much KV namespaces could still have in each pool, for a router that looks for room elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from remora.cache_actors.pool_messages import PoolDescription
from remora.namespaces.report import NamespaceReport, PoolReport
from remora.platform.base.ids import NamespaceId, PoolId


def free_tokens(pools: Mapping[str, PoolDescription]) -> dict[tuple[PoolId, NamespaceId], int]:
    """Pool and namespace → tokens, for models that have a replica there. What is only cached counts as free.

    An estimate: memory comes in extents, and what others are guaranteed is left to them.
    """
    found: dict[tuple[PoolId, NamespaceId], int] = {}
    for pool_id, description in pools.items():
        report = description.report
        geometries = {each.geometry_id: each for each in report.geometries}
        of_model = {lease.model_id: geometries.get(lease.geometry_id) for lease in report.leases}
        for namespace in report.namespaces:
            geometry = of_model.get(namespace.model_id)
            if geometry is not None:
                num_blocks = _free_bytes(report, namespace) // geometry.block_bytes
                found[PoolId(pool_id), namespace.namespace_id] = num_blocks * geometry.block_tokens
    return found


def _free_bytes(report: PoolReport, namespace: NamespaceReport) -> int:
    by_name = {each.namespace_id: each for each in report.namespaces}
    root, free = namespace, namespace.limit_bytes - _used(namespace)
    while root.parent is not None:
        root = by_name[root.parent]
        free = min(free, root.limit_bytes - _used(root))
    left_to_others = sum(
        max(0, each.guaranteed_bytes - _used(each))
        for each in report.namespaces
        if each.parent is None and each.namespace_id != root.namespace_id
    )
    return max(0, min(free, report.data_bytes - report.used_bytes - left_to_others))


def _used(namespace: NamespaceReport) -> int:
    """With all below it."""
    return max(namespace.used_bytes, namespace.tree_used_bytes)
