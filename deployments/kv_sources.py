"""Which pools may have the blocks of a request: those of the replicas where it, or its session, has been."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from remora.cache_actors.port import KVSource
from remora.deployments.model_card import ModelCard
from remora.platform.base.ids import PoolId, ReplicaId

#: Replicas that are remembered; their pools outlive them.
MAX_REPLICAS: Final = 4096


class KVSources:
    """Of one router."""

    def __init__(self) -> None:
        self._pools: OrderedDict[ReplicaId, KVSource] = OrderedDict()

    def note(self, card: ModelCard) -> None:
        """A replica said where it is."""
        if not card.pool_actor_name:
            return
        self._pools[card.replica_id] = KVSource(pool_id=card.pool_id, actor_name=card.pool_actor_name)
        self._pools.move_to_end(card.replica_id)
        if len(self._pools) > MAX_REPLICAS:
            self._pools.popitem(last=False)

    def pool_of(self, replica_id: ReplicaId | None) -> PoolId | None:
        """None for a replica that was never heard of."""
        source = None if replica_id is None else self._pools.get(replica_id)
        return None if source is None else source.pool_id

    def of_pool(self, pool_id: PoolId) -> KVSource | None:
        """None for a pool that was never heard of."""
        return next((source for source in reversed(self._pools.values()) if source.pool_id == pool_id), None)

    def find(self, replica_ids: Iterable[ReplicaId | None], pool_id: PoolId) -> KVSource | None:
        """The pool of the first of these replicas that is known; None if that is `pool_id` itself."""
        for replica_id in replica_ids:
            source = None if replica_id is None else self._pools.get(replica_id)
            if source is not None:
                return None if source.pool_id == pool_id else source
        return None
