"""What a client asks to be generated, before any replica is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from remora.cache_actors.port import KVSource
from remora.deployments.engine.messages import EventFrame, GenerationRequest, Grammar, SamplingParams
from remora.deployments.model_card import ModelCard
from remora.namespaces.edits import ContextPlan, chain_edits
from remora.namespaces.hashing import chain_hashes
from remora.platform.base.ids import (
    BlockHash,
    Epoch,
    ModelId,
    NamespaceId,
    ReplicaId,
    RequestId,
    RouterId,
    SessionId,
)

_NO_EPOCH = Epoch(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """A validated request: what to generate, not yet where."""

    request_id: RequestId
    model_id: ModelId
    namespace_id: NamespaceId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    num_choices: int = 1
    grammar: Grammar | None = None
    priority: int = 0
    session_id: SessionId | None = None
    #: Of the session's turn; attempts count up from it.
    epoch: Epoch = _NO_EPOCH
    #: Of a session whose context was or may be edited.
    context: ContextPlan | None = None
    #: Tokens at the beginning that the session had before; what is cached of them in another precision is converted.
    num_kept_tokens: int = 0
    #: The session's last replica, preferred as long as it is not loaded too much.
    owner: ReplicaId | None = None
    #: The replica to use, whatever its load; another one only if it is gone.
    target: ReplicaId | None = None
    #: Where blocks of it may be, if that is not where `owner` is.
    kv_source: KVSource | None = None
    #: See GenerationRequest.
    frames: tuple[EventFrame, ...] = ()
    wants_token_ids: bool = True
    #: W3C headers of the request's span.
    trace_context: Mapping[str, str] | None = None

    def request(
        self, *, router_id: RouterId, card: ModelCard, root: BlockHash, seed: int, queue_timeout_s: float
    ) -> GenerationRequest:
        """The job as replicas take it: with the hashes of the blocks that can be found, behind `root`."""
        context = self.context or ContextPlan()
        hashed = self.prompt_token_ids[: context.horizon(len(self.prompt_token_ids), card.max_model_len)]
        return GenerationRequest(
            request_id=self.request_id,
            router_id=router_id,
            model_id=self.model_id,
            namespace_id=self.namespace_id,
            prompt_token_ids=self.prompt_token_ids,
            block_hashes=tuple(chain_hashes(root, hashed, card.block_tokens, chain_edits(context.edits))),
            sampling=msgspec.structs.replace(self.sampling, seed=seed),
            num_choices=self.num_choices,
            grammar=self.grammar,
            priority=self.priority,
            queue_timeout_s=queue_timeout_s,
            session_id=self.session_id,
            epoch=self.epoch,
            context=self.context,
            num_kept_tokens=self.num_kept_tokens,
            frames=self.frames,
            wants_token_ids=self.wants_token_ids,
            trace_context=dict(self.trace_context or {}),
        )
