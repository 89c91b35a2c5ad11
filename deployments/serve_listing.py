"""Which replicas Serve's handles in this process list, for calls that do not pass through Serve.

A module of its own: Serve pickles the request router's module by value, and what it notes must be found again here.
"""

from __future__ import annotations

from weakref import WeakSet

from ray.serve.request_router import RequestRouter

from remora.platform.base.errors import ReplicaLeaving
from remora.platform.base.ids import ReplicaId

_routers: WeakSet[RequestRouter] = WeakSet()


def note_router(router: RequestRouter) -> None:
    """From now on what it lists counts, for as long as it is there."""
    _routers.add(router)


def check_listed(replica_id: ReplicaId) -> None:
    """Raises ReplicaLeaving, as a call through Serve would, unless one of the handles lists the replica."""
    if not any(each.unique_id == replica_id for router in _routers for each in router.curr_replicas):
        raise ReplicaLeaving(f"Serve lists no replica {replica_id!r} (any more, or yet)")
