"""Which KV of a session another model can go on behind, and where it lies.

own KV of the target's model   as far as its pool has it
KV of the session's model      behind that, if the target takes it: of a compatible model, or of another precision
the rest                       computed
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from remora.cache_actors.port import KVSource, OtherChain
from remora.deployments.model_card import ModelCard
from remora.deployments.placement import place
from remora.namespaces.edits import Edits, chain_edits, derived, first_derived
from remora.namespaces.hashing import chain_hashes
from remora.namespaces.rendezvous import affinity_key
from remora.namespaces.session_log import ModelLog, SessionState
from remora.platform.base.errors import Unavailable
from remora.platform.base.ids import BlockHash, NamespaceId, PoolId, ReplicaId
from remora.platform.http.services import Services


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """Where a log goes on, and what is taken over there."""

    replica: ReplicaId
    #: As the log's KV is named there, if all that is to be taken over comes.
    edits: Edits
    #: None: nothing is taken over; KV of equal fingerprints may be copied all the same.
    source: KVSource | None = None
    #: Tokens before it are the target's own.
    start: int = 0


async def choose_landing(
    services: Services, state: SessionState, log: ModelLog, token_ids: tuple[int, ...], card: ModelCard
) -> Landing:
    """The replica of the log's model that has most of it, with bounded load. `token_ids`: what is to be computed;
    `state` and `log`: the session with its model and with the other.

    Raises Unavailable when no replica takes it.
    """
    core = services.core
    candidates = core.fleet.candidates(log.model_id)
    if not candidates:
        raise Unavailable(f"No replica of {log.model_id!r} takes requests now; try again.")
    fingerprint = card.of(log.namespace_id).fingerprint
    hashes = _names(services, log.namespace_id, fingerprint, token_ids, card.block_tokens, log.edits)
    chain = _other_chain(services, state, log, token_ids, card)
    asked = [services.pools.find_blocks(log.namespace_id, fingerprint, hashes)]
    if chain is not None:
        asked.append(services.pools.find_blocks(state.namespace_id, chain.derivation.fingerprint, chain.hashes))
    own, *found = await asyncio.gather(*asked)
    others: Mapping[str, int] = found[0] if found else {}
    overlap = {PoolId(pool): max(own.get(pool, 0), others.get(pool, 0)) for pool in {*own, *others}}
    key = affinity_key(log.namespace_id, hashes)
    replica = place(key, candidates, len(token_ids), state.owner, overlap).replica_id
    pool_id = next(each.pool_id for each in candidates if each.replica_id == replica)
    # Its own pool first: of equal ones it costs no other pool's time.
    best = max(others, key=lambda pool: (others[pool], pool == pool_id), default=None)
    source = None if best is None else core.placer.sources.of_pool(PoolId(best))
    if chain is None or best is None or source is None:
        return Landing(replica=replica, edits=log.edits)
    first = min([own.get(pool_id, 0), *(edit.position // card.block_tokens for edit in state.edits)])
    start, end = first * card.block_tokens, others[best] * card.block_tokens
    if end <= start:
        return Landing(replica=replica, edits=log.edits)
    taken = OtherChain(
        derivation=chain.derivation,
        namespace_id=state.namespace_id,
        hashes=chain.hashes[: others[best]],
        first=first,
    )
    return Landing(
        replica=replica,
        edits=derived(state.edits, chain.derivation, start, end),
        source=KVSource(pool_id=source.pool_id, actor_name=source.actor_name, other=taken),
        start=start,
    )


def _other_chain(
    services: Services, state: SessionState, log: ModelLog, token_ids: tuple[int, ...], card: ModelCard
) -> OtherChain | None:
    """What the log's blocks are called with its present model, as far as the other one takes them; None: not at all.

    KV that was itself taken over is not taken over again: what that costs was never measured.
    """
    known = services.core.fleet.known_card(state.model_id)
    if known is None or known.block_tokens != card.block_tokens or log.token_bytes != state.token_bytes:
        return None
    fingerprint = known.of(state.namespace_id).fingerprint
    derivation = next((each for each in card.of(log.namespace_id).takes if each.fingerprint == fingerprint), None)
    # At least one token is always computed.
    num_tokens = min(len(token_ids) - 1, first_derived(state.edits, len(token_ids)))
    if derivation is None or num_tokens < card.block_tokens:
        return None
    hashes = _names(services, state.namespace_id, fingerprint, token_ids[:num_tokens], card.block_tokens, state.edits)
    return OtherChain(derivation=derivation, namespace_id=state.namespace_id, hashes=tuple(hashes), first=0)


def _names(
    services: Services,
    namespace_id: NamespaceId,
    fingerprint: bytes,
    token_ids: tuple[int, ...],
    block_tokens: int,
    edits: Edits,
) -> list[BlockHash]:
    root = services.core.catalog.chain_root(namespace_id, fingerprint)
    return chain_hashes(root, token_ids, block_tokens, chain_edits(edits))
