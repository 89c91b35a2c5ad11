"""One router's choice of replicas: what `place` decides, and what the router has learned of the pools' caches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from remora.deployments.engine.messages import TokenDelta
from remora.deployments.kv_sources import KVSources
from remora.deployments.model_card import ModelCard
from remora.deployments.placement import Candidate, Choice, place
from remora.deployments.prefix_hints import PrefixHints
from remora.deployments.request_stream import RequestStream
from remora.namespaces.rendezvous import NUM_KEY_BLOCKS, affinity_key, rendezvous_score
from remora.platform.base.ids import NamespaceId, PoolId, ReplicaId

#: For so long what is known of a pool's cache is kept without a replica there: one that is replaced comes back to it.
GONE_AFTER_S = 300.0


class Placer:
    """Owned by the router's event loop.

    What a pool has is learned from what was computed there and from what replicas say they found; the tokens of other
    routers' requests are unknown until one of ours finds them. A wrong guess costs a prefill, never more.
    """

    def __init__(self, replicated: Iterable[NamespaceId] = ()) -> None:
        """`replicated`: namespaces whose blocks are copied to another node as they are sealed."""
        self.sources = KVSources()
        self._replicated = frozenset(replicated)
        self._cached: dict[PoolId, PrefixHints] = {}
        #: Pools without a replica, and since when.
        self._left_s: dict[PoolId, float] = {}

    def choose(self, stream: RequestStream, candidates: Sequence[Candidate]) -> tuple[Choice, int]:
        """The replica for the request's next attempt, and how many blocks of its prompt are believed to be there; tells
        the stream which other pool may have them."""
        if stream.target is not None and any(each.replica_id == stream.target for each in candidates):
            choice = Choice(stream.target, "moved")
        else:
            choice = self.place(stream, candidates)
        pool_id = next(each.pool_id for each in candidates if each.replica_id == choice.replica_id)
        places = (stream.last_replica_id, stream.owner, choice.home)
        source = self.sources.find(places, pool_id)
        pools = {each.pool_id for each in candidates}
        if source is not None and source.pool_id not in pools and stream.request.namespace_id in self._replicated:
            # Most likely its node is gone: to ask it would cost a pause, and the backup has what was sealed there.
            backup = max(pools, key=lambda each: rendezvous_score(self._key(stream), each))
            source = None if backup == pool_id else self.sources.of_pool(backup)
        stream.kv_source = stream.given_source or source
        return choice, self._num_cached(pool_id, stream)

    def place(self, stream: RequestStream, candidates: Sequence[Candidate]) -> Choice:
        """Where the request would go by itself, wherever it is wanted."""
        overlap = {pool_id: self._num_cached(pool_id, stream) for pool_id in {each.pool_id for each in candidates}}
        return place(self._key(stream), candidates, stream.load_tokens, stream.owner, overlap)

    def learn(self, card: ModelCard | None, stream: RequestStream, delta: TokenDelta) -> None:
        """From the first delta of an attempt at the card's replica: the prompt is computed there, and so much of it had
        been found. Others say nothing."""
        if card is None or delta.num_cached_tokens is None:
            return
        hashes, num_cached_blocks = stream.request.block_hashes, delta.num_cached_tokens // card.block_tokens
        hints = self._cached.setdefault(card.pool_id, PrefixHints())
        if hints.num_leading(hashes) > num_cached_blocks:
            # What was believed to be behind has been evicted, and so has, most likely, what goes on from there.
            hints.discard(hashes[num_cached_blocks:])
        hints.add(hashes)

    def forget_gone(self, listed: Iterable[ReplicaId], now_s: float) -> None:
        """Drops what is known of the caches of pools that are gone: no listed replica was there for GONE_AFTER_S."""
        present = {self.sources.pool_of(replica_id) for replica_id in listed}
        self._left_s = {pool_id: self._left_s.get(pool_id, now_s) for pool_id in self._cached if pool_id not in present}
        for pool_id, left_s in self._left_s.items():
            if now_s - left_s >= GONE_AFTER_S:
                del self._cached[pool_id]

    @staticmethod
    def _key(stream: RequestStream) -> bytes:
        return affinity_key(stream.request.namespace_id, stream.leading_hashes(NUM_KEY_BLOCKS))

    def _num_cached(self, pool_id: PoolId, stream: RequestStream) -> int:
        hints = self._cached.get(pool_id)
        return 0 if hints is None else hints.num_leading(stream.request.block_hashes)
