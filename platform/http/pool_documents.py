"""Pools and namespaces as /v1/pools and /v1/namespaces show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from remora.cache_actors.pool_messages import PoolDescription
from remora.deployments.catalog import Catalog
from remora.namespaces.quota_changes import quota_of
from remora.platform.base.config_types import DEVICE_TIER
from remora.platform.base.ids import ModelId, NamespaceId
from remora.platform.base.namespace_tree import parent_of

Pools = Mapping[str, PoolDescription]


def pool_document(pool_id: str, pool: PoolDescription) -> dict[str, Any]:
    """One pool: its device and arena, what it holds, who may write into it."""
    report = msgspec.to_builtins(pool.report)
    del report["leases"]
    return {
        "id": pool_id,
        "object": "pool",
        "tier": DEVICE_TIER,
        "kind": pool.binding.kind,
        "device_uuid": pool.binding.device_uuid,
        "arena_path": pool.binding.arena_path,
        "backing": pool.binding.backing,
        "outcome": pool.binding.outcome,
        "pid": pool.pid,
        "num_restarts": pool.num_restarts,
        "journal_bytes": pool.journal_bytes,
        **report,
        "replication": msgspec.to_builtins(pool.replication),
        "leases": [
            {
                "id": lease.lease_id,
                "replica": lease.replica_id,
                "model": lease.model_id,
                "pid": lease.process.pid,
                "num_sequences": lease.num_sequences,
                "num_waiting": lease.num_waiting,
                "reserved_bytes": lease.reserved_bytes,
                "silent_s": pool.silent_s.get(lease.lease_id),
            }
            for lease in pool.report.leases
        ],
    }


def namespace_document(catalog: Catalog, pools: Pools, namespace_id: NamespaceId) -> dict[str, Any]:
    """One namespace with its quota in a pool, and what it holds in each; as configured where no pool has it. Quotas are
    by tier; beside the tiers stands that of the device."""
    namespace = catalog.namespaces[namespace_id]
    reports = {
        pool_id: report
        for pool_id, pool in sorted(pools.items())
        for report in pool.report.namespaces
        if report.namespace_id == namespace_id
    }
    quota = next((quota_of(report) for report in reports.values()), None)
    if quota is None:
        limit_bytes = None if namespace.limit is None else int(namespace.limit)
        guaranteed_bytes, weight = int(namespace.guaranteed), namespace.weight
    else:
        arena_bytes = max(pool.report.data_bytes for pool in pools.values())
        limit_bytes = None if quota.limit_bytes >= arena_bytes else quota.limit_bytes
        guaranteed_bytes, weight = quota.guaranteed_bytes, quota.weight
    quota_document = {"weight": weight, "guaranteed_bytes": guaranteed_bytes, "limit_bytes": limit_bytes}
    return {
        "id": namespace_id,
        "object": "namespace",
        "model": namespace.model,
        "tenant": namespace.tenant,
        "share_group": namespace.share_group,
        **quota_document,
        "tiers": {DEVICE_TIER: quota_document},
        "kv_precision": _kv_precision(catalog, pools, namespace_id),
        "pools": {pool_id: {"tier": DEVICE_TIER, **msgspec.to_builtins(report)} for pool_id, report in reports.items()},
    }


def _kv_precision(catalog: Catalog, pools: Pools, namespace_id: NamespaceId) -> dict[str, str]:
    """That of new requests: of the tree in a pool, else as configured, else the model's."""
    parent = parent_of(namespace_id, catalog.namespaces)
    root = catalog.namespaces[namespace_id if parent is None else parent]
    found = root.kv_precisions
    for pool in pools.values():
        for report in pool.report.namespaces:
            if report.namespace_id == root.name:
                found = report.kv_precision
    k_precision, v_precision = found or catalog.models[ModelId(root.model)].kv_precisions
    return {"k": k_precision, "v": v_precision}
