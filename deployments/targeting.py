"""Sends a call through Ray Serve to one named replica.

Serve balances calls over the replicas of a deployment; here the router has chosen already (placement.py). The handle's
call carries the replica's id in the keyword `target`, and this request router obeys it. Against a plain actor call this
keeps Serve's transport (gRPC between replicas: less than half of an actor call's cost per streamed item), its notion of
who is alive, and its cancellation of streams when either side dies.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from remora.deployments.serve_listing import note_router
from remora.platform.base.errors import ReplicaLeaving

#: Keyword of a targeted call.
TARGET = "target"


class TargetedRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Every call goes to the replica whose unique id is its `target`, or fails with ReplicaLeaving at once."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        note_router(self)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        if not self.curr_replicas:
            # Serve would keep the call until there is a replica, which is another one, and asks nobody before.
            raise ReplicaLeaving("Serve lists no replica at all (any more, or yet)")
        return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The one group with the one replica."""
        if pending_request is None:
            return [list(candidate_replicas)]
        target = pending_request.kwargs.get(TARGET)
        found = [replica for replica in candidate_replicas if replica.replica_id.unique_id == target]
        if found:
            return [found]
        if not pending_request.future.done():
            pending_request.future.set_exception(
                ReplicaLeaving(f"Serve lists no replica {target!r} of {self._deployment_id.name!r} (any more, or yet)")
            )
        # Serve retries an empty answer for ever; with any group it looks at the request and finds it done.
        return [list(candidate_replicas)]
