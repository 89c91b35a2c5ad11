"""What crosses between router and replica: requests in, one feed message a step out.

Text that leaves an engine is whole: no broken UTF-8, no part of a stop string.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from remora.cache_actors.port import KVSource
from remora.namespaces.edits import ContextOutcome, ContextPlan
from remora.platform.base.ids import BlockHash, Epoch, ModelId, NamespaceId, ReplicaId, RequestId, RouterId, SessionId

FinishReason = Literal["stop", "length", "abort", "error"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's and vLLM's meanings; neutral values are the defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    #: With the choice's index and the position it fixes every random draw; None: the router draws one per request.
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    #: Top alternatives a token; None: no logprobs at all, 0: only the chosen token's.
    logprobs: int | None = None
    skip_special_tokens: bool = True


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint on the output: "json_object", or "json_schema" with the schema's JSON text."""

    kind: Literal["json_object", "json_schema"]
    text: str = ""


class EventFrame(msgspec.Struct, frozen=True, array_like=True):
    """One choice's server-sent event without its text, which stands between the two as a JSON string."""

    head: bytes
    tail: bytes


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    request_id: RequestId
    router_id: RouterId
    model_id: ModelId
    namespace_id: NamespaceId
    prompt_token_ids: tuple[int, ...]
    #: Chain hashes of the prompt's full blocks (up to where its context is edited first), computed once by the router.
    block_hashes: tuple[BlockHash, ...]
    sampling: SamplingParams
    num_choices: int = 1
    grammar: Grammar | None = None
    priority: int = 0
    #: Seconds from submission in which generation must have started; afterwards the request is answered over quota.
    queue_timeout_s: float = 60.0
    session_id: SessionId | None = None
    epoch: Epoch = Epoch(0)
    #: Tokens a client has already received, per choice: after a failover generation goes on behind them.
    output_token_ids: tuple[tuple[int, ...], ...] = ()
    #: Of a session whose tokens are not, or will not be, all that was said; only with one choice.
    context: ContextPlan | None = None
    #: Another pool that may have blocks of it: they are copied instead of computed.
    kv_source: KVSource | None = None
    #: Tokens at the beginning that its session had before: what is cached of them in another precision is converted.
    num_kept_tokens: int = 0
    #: Of a standby: the epoch under which pools know the attempt beside which it runs, and which counts until its
    #: Resumption. It computes all but the last token, says that it is ready, and waits. Only with one choice and
    #: without a context.
    standby_of: Epoch | None = None
    #: Of an answer that is streamed, one for each choice: texts come as events that are ready to be sent.
    frames: tuple[EventFrame, ...] = ()
    #: Whether the router wants the tokens besides; without them nobody can go on with what has begun.
    wants_token_ids: bool = True
    #: W3C trace context headers.
    trace_context: dict[str, str] = {}


class TailBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A block of an arena, and the CRC-32 of its bytes while its owner stood still."""

    block: int
    checksum: int


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """A request that stands still between two steps, for the replica that goes on with it.

    Its last blocks lie in an arena that processes of `node_id` can map. They are the tokens' KV only as long as the
    checksums hold: their owner may be gone at any time, and nobody keeps them for the reader.
    """

    #: Tokens of prompt and output whose KV is computed.
    num_tokens: int
    #: Chain hash of exactly these tokens, the last block as far as it goes.
    tokens_hash: bytes
    fingerprint: bytes
    node_id: str
    arena_path: str
    #: Number of the first of `blocks` within the request.
    first: int = 0
    blocks: tuple[TailBlock, ...] = ()


class Resumption(msgspec.Struct, frozen=True, kw_only=True):
    """What a standby still lacks: it goes on behind these tokens."""

    request_id: RequestId
    #: Output behind what the standby was sent with.
    token_ids: tuple[int, ...]
    handover: Handover


class FreezeOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Stops a request at a step boundary; what lies in blocks behind `num_tokens` is wanted."""

    request_id: RequestId
    num_tokens: int


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token_id: int
    logprob: float


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one choice produced since its last delta. `first_token_index` makes gaps and repeats visible."""

    request_id: RequestId
    choice_index: int
    epoch: Epoch
    first_token_index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    #: In place of the text, where the request has frames.
    events: bytes = b""
    #: Tokens that are not in `token_ids`, because nobody wants them.
    num_unlisted_tokens: int = 0
    #: Per token: the chosen one first, then the top alternatives.
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    #: Set once, in a choice's last delta.
    finish_reason: FinishReason | None = None
    #: The stop string or token id that ended it (vLLM's field).
    stop_reason: str | int | None = None
    #: Prompt tokens found in the cache; in the first delta of choice 0 (others repeat it), never over prompt tokens.
    num_cached_tokens: int | None = None
    #: Tokens whose KV was copied from another pool, output of earlier attempts included; with num_cached_tokens.
    num_copied_tokens: int = 0
    #: The same for tokens whose KV was converted from another precision.
    num_converted_tokens: int = 0
    #: For finish_reason "error": class name in platform/base/errors.py and sentence.
    error: str | None = None
    error_message: str | None = None
    retry_after_s: float | None = None
    #: In the last delta of a choice whose context was edited.
    context: ContextOutcome | None = None
    #: Instead of tokens: a standby needs nothing but its Resumption; a request was stopped, as it was asked to be.
    is_ready: bool = False
    handover: Handover | None = None


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica has in work and in its queue, for routers."""

    #: Of all live choices.
    load_tokens: int = 0
    #: Of those that wait for a slot or for memory.
    waiting_tokens: int = 0
    #: Of those, parked by the pool: no memory. (The engine lets one sequence of a namespace wait there.)
    parked_tokens: int = 0


class FeedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a replica has for one router since the last message; one a step at most."""

    replica_id: ReplicaId
    message_no: int
    deltas: tuple[TokenDelta, ...]
    load: LoadReport = LoadReport()
    #: ModelCard.card_no of now: another one than known means that `describe` has news.
    card_no: int = 0
