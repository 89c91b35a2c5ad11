"""What each namespace could use if everybody who wants memory wanted all he can get: guarantee plus weighted remainder.

Only those who use memory or wait for it take part. What the others hold within their guarantees is not there to be
shared; the rest of their guarantees is lent out. Shares above a limit go to the others. Branches of a tree share what
the tree has in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from remora.namespaces.quotas import Namespace

Wants = Callable[[Namespace], bool]


def fair_shares(roots: Iterable[Namespace], arena_bytes: int, waits: Wants) -> dict[Namespace, float]:
    """Bytes by namespace, its descendants' included; 0 for those who want nothing. `waits`: has parked requests."""
    shares: dict[Namespace, float] = {}
    _share(list(roots), float(arena_bytes), waits, shares)
    return shares


def _share(members: list[Namespace], total: float, waits: Wants, shares: dict[Namespace, float]) -> None:
    wanting = [member for member in members if member.tree_used_bytes or _anyone_waits(member, waits)]
    for member in members:
        shares[member] = 0.0
        if member not in wanting:
            total -= min(member.tree_cached_bytes, member.guaranteed_bytes)
    rest = total - sum(member.guaranteed_bytes for member in wanting)
    unlimited = list(wanting)
    while True:
        weights = sum(member.quota.weight for member in unlimited)
        full = {}
        for member in unlimited:
            share = member.guaranteed_bytes + max(0.0, rest) * member.quota.weight / weights
            shares[member] = min(share, member.quota.limit_bytes)
            if share > member.quota.limit_bytes:
                full[member] = member.quota.limit_bytes - member.guaranteed_bytes
        rest -= sum(full.values())
        unlimited = [member for member in unlimited if member not in full]
        if not full or not unlimited:
            break
    for member in wanting:
        _share(member.children, shares[member], waits, shares)


def _anyone_waits(account: Namespace, waits: Wants) -> bool:
    return waits(account) or any(_anyone_waits(child, waits) for child in account.children)
