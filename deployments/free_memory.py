"""How much KV namespaces could still have in each pool, for a router that looks for room elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from remora.cache_actors.pool_messages import PoolDescription
from remora.deployments.model_card import ModelCard
from remora.namespaces.report import NamespaceReport, PoolReport
from remora.platform.base.ids import NamespaceId, PoolId


def free_tokens(pools: Mapping[str, PoolDescription], card: ModelCard) -> dict[tuple[PoolId, NamespaceId], int]:
    """Pool and namespace of the card's model → tokens. What is only cached counts as free.

    An estimate: memory comes in extents, and what others are guaranteed is left to them.
    """
    return {
        (PoolId(pool_id), namespace.namespace_id): _free_bytes(description.report, namespace)
        // card.of(namespace.namespace_id).block_bytes
        * card.block_tokens
        for pool_id, description in pools.items()
        for namespace in description.report.namespaces
        if namespace.model_id == card.model_id
    }


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
