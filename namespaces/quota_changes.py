"""From the quotas that a pool has to those that are wanted, one command at a time, each of which the pool accepts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from remora.namespaces.commands import Quota, SetQuota
from remora.namespaces.report import NamespaceReport
from remora.platform.base.ids import LeaseId, NamespaceId
from remora.platform.base.namespace_tree import parent_of


def quota_changes(present: Sequence[NamespaceReport], wanted: Sequence[SetQuota]) -> list[SetQuota]:
    """Guarantees go down before any goes up, below a parent before the parent, so that they always fit; they go up the
    other way round. A namespace that is wanted no more keeps what it holds until somebody else wants it, and of its
    guarantee what is wanted below it."""
    known = {namespace.namespace_id: namespace for namespace in present}
    targets = {command.namespace_id: command for command in wanted}
    names = {*known, *targets}
    for name in sorted(known.keys() - targets.keys(), key=_depth, reverse=True):
        below = [each for child, each in targets.items() if parent_of(child, names) == name]
        quota = msgspec.structs.replace(
            quota_of(known[name]), guaranteed_bytes=sum(each.quota.guaranteed_bytes for each in below)
        )
        if quota.guaranteed_bytes > quota.limit_bytes:
            quota = msgspec.structs.replace(quota, limit_bytes=quota.guaranteed_bytes)
        targets[name] = change_of(known[name], quota)

    def guaranteed(name: NamespaceId) -> int:
        return known[name].guaranteed_bytes if name in known else 0

    steps: list[tuple[bool, int, int, SetQuota]] = []
    for name, command in targets.items():
        growth = command.quota.guaranteed_bytes - guaranteed(name)
        depth = _depth(name)
        if name not in known or not _is_as_wanted(known[name], command):
            steps.append((growth > 0, depth if growth > 0 else -depth, growth, command))
    return [command for *_, command in sorted(steps, key=lambda step: step[:3])]


def change_of(namespace: NamespaceReport, quota: Quota) -> SetQuota:
    """The command that gives a namespace of the pool this quota."""
    return SetQuota(
        lease_id=LeaseId(""),
        namespace_id=namespace.namespace_id,
        model_id=namespace.model_id,
        quota=quota,
        tenant=namespace.tenant,
        share_group=namespace.share_group,
        kv_precision=namespace.kv_precision,
    )


def quota_of(namespace: NamespaceReport) -> Quota:
    """The quota a namespace has."""
    return Quota(
        guaranteed_bytes=namespace.guaranteed_bytes, limit_bytes=namespace.limit_bytes, weight=namespace.weight
    )


def _depth(name: NamespaceId) -> int:
    return name.count("/")


def _is_as_wanted(namespace: NamespaceReport, command: SetQuota) -> bool:
    return change_of(namespace, quota_of(namespace)) == command
