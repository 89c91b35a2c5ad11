"""What a client asks to be generated, before any replica is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from remora.deployments.engine.messages import Grammar, SamplingParams
from remora.namespaces.edits import ContextPlan
from remora.platform.base.ids import Epoch, ModelId, NamespaceId, ReplicaId, RequestId, SessionId

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
    #: The session's last replica, preferred as long as it is not loaded too much.
    owner: ReplicaId | None = None
    #: The replica to use, whatever its load; another one only if it is gone.
    target: ReplicaId | None = None
    #: W3C headers of the request's span.
    trace_context: Mapping[str, str] | None = None
