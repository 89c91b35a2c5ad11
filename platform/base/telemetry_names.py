"""Every span, attribute and metric name, in one place.

Where the OpenTelemetry GenAI semantic conventions have a name it is used, pinned here as text: the conventions are
still in development and the packaged constants move. Everything else starts with `remora.`.
"""

from __future__ import annotations

# ---- spans -----------------------------------------------------------------------------------------------------------

ROUTER_ROUTE = "router.route"
MODEL_WAKE = "model.wake"
POOL_ADMIT = "pool.admit"
POOL_EVICT = "pool.evict"
QUOTA_BORROW = "quota.borrow"
QUOTA_REVOKE = "quota.revoke"
ENGINE_PREFILL = "engine.prefill"
ENGINE_DECODE = "engine.decode"
TIER_LOAD = "tier.load"
MIGRATE_PRECOPY = "migrate.precopy"
MIGRATE_FREEZE = "migrate.freeze"
MIGRATE_COMMIT = "migrate.commit"
REPLICATE = "replicate"


def stage_span(stage: int) -> str:
    """Name of what one stage of a pipeline did for a request."""
    return f"stage.{stage}"


def request_span(operation: str, model: str) -> str:
    """Name of a request's outermost span: `{gen_ai.operation.name} {gen_ai.request.model}`."""
    return f"{operation} {model}"


# ---- attributes: GenAI conventions -----------------------------------------------------------------------------------

GEN_AI_OPERATION_NAME = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K = "gen_ai.request.top_k"
GEN_AI_REQUEST_SEED = "gen_ai.request.seed"
GEN_AI_REQUEST_STREAM = "gen_ai.request.stream"
GEN_AI_REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
GEN_AI_RESPONSE_ID = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
GEN_AI_USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_CONVERSATION_ID = "gen_ai.conversation.id"
#: JSON texts; only with telemetry.capture_content.
GEN_AI_INPUT_MESSAGES = "gen_ai.input.messages"
GEN_AI_OUTPUT_MESSAGES = "gen_ai.output.messages"

#: Values of GEN_AI_OPERATION_NAME and GEN_AI_PROVIDER_NAME.
OPERATION_CHAT = "chat"
OPERATION_TEXT_COMPLETION = "text_completion"
#: Of a request that forks a session and generates on every branch: first word of its span's name.
FORK = "fork"
PROVIDER = "remora"

# ---- attributes: general conventions ---------------------------------------------------------------------------------

SERVICE_NAME = "service.name"
SERVICE_VERSION = "service.version"
SERVICE_INSTANCE_ID = "service.instance.id"
PROCESS_PID = "process.pid"
HOST_NAME = "host.name"
ERROR_TYPE = "error.type"

# ---- attributes: Remora ----------------------------------------------------------------------------------------------

REMORA_REQUEST_ID = "remora.request.id"
REMORA_CHOICE_INDEX = "remora.choice.index"
REMORA_NAMESPACE = "remora.namespace"
REMORA_REPLICA_ID = "remora.replica.id"
REMORA_SESSION_ID = "remora.session.id"
REMORA_EPOCH = "remora.session.epoch"
#: Why a replica was chosen: "prefix", "load", "owner" (the session's last), "moved", "only".
REMORA_ROUTE_REASON = "remora.route.reason"
#: Which attempt at the request this is, from 0; each lost replica starts another.
REMORA_ROUTE_ATTEMPT = "remora.route.attempt"
#: Leading blocks of the prompt that the router believed to be cached where it sent it.
REMORA_ROUTE_OVERLAP_BLOCKS = "remora.route.overlap_blocks"
REMORA_MIGRATE_SOURCE = "remora.migrate.source"
#: How the tokens before a move are to get to the target: "shared" in the pool, or "copied" from another.
REMORA_MIGRATE_TRANSFER = "remora.migrate.transfer"
#: How many of them did, and how many were computed there.
REMORA_MIGRATE_SHARED_TOKENS = "remora.migrate.shared_tokens"
REMORA_MIGRATE_COPIED_TOKENS = "remora.migrate.copied_tokens"
REMORA_MIGRATE_CONVERTED_TOKENS = "remora.migrate.converted_tokens"
REMORA_MIGRATE_RECOMPUTED_TOKENS = "remora.migrate.recomputed_tokens"
#: The same in order: "0-2048 copied of smollm2".
REMORA_MIGRATE_RANGES = "remora.migrate.ranges"
REMORA_MIGRATE_PAUSE = "remora.migrate.pause_s"
#: Of blocks that came from another pool: which one, how much, how ("mapped", "linked", "streamed",
#: "none"), and why not all came.
REMORA_LOAD_SOURCE = "remora.load.source"
REMORA_LOAD_TOKENS = "remora.load.tokens"
REMORA_LOAD_BLOCKS = "remora.load.blocks"
REMORA_LOAD_BYTES = "remora.load.bytes"
REMORA_LOAD_PATH = "remora.load.path"
#: Of the source, K/V, when blocks were converted.
REMORA_LOAD_PRECISION = "remora.load.precision"
REMORA_LOAD_PROBLEM = "remora.load.problem"
#: Of sealed blocks that were copied to another node: the pool there, what came, how long their chain is, and
#: why not all came.
REMORA_REPLICATE_TARGET = "remora.replicate.target"
REMORA_REPLICATE_BLOCKS = "remora.replicate.blocks"
REMORA_REPLICATE_BYTES = "remora.replicate.bytes"
REMORA_REPLICATE_CHAIN_BLOCKS = "remora.replicate.chain_blocks"
REMORA_REPLICATE_PROBLEM = "remora.replicate.problem"
#: "admitted" or "over_quota".
REMORA_ADMIT_ANSWER = "remora.admit.answer"
REMORA_ADMIT_CACHED_TOKENS = "remora.admit.cached_tokens"
#: Of the cached ones, those that another running sequence held at that time.
REMORA_ADMIT_SHARED_TOKENS = "remora.admit.shared_tokens"
#: Tokens that had been computed for this request before, and must be again.
REMORA_ADMIT_RECOMPUTED_TOKENS = "remora.admit.recomputed_tokens"
REMORA_ADMIT_BLOCKS = "remora.admit.blocks"
REMORA_WAIT_S = "remora.wait_s"
REMORA_PREFILL_STEPS = "remora.prefill.steps"
REMORA_DECODE_STEPS = "remora.decode.steps"
REMORA_PREEMPTIONS = "remora.preemptions"
#: Why cached blocks went to make room: a cause of namespaces/blocks.py.
REMORA_EVICT_CAUSE = "remora.evict.cause"
REMORA_EVICT_BLOCKS = "remora.evict.blocks"
#: By how much more than before the namespace holds above its guarantee.
REMORA_BORROWED_BYTES = "remora.quota.borrowed_bytes"
#: Why a running sequence lost its memory.
REMORA_REVOKE_REASON = "remora.revoke.reason"
#: Of a pipeline's stage: micro-batches with a part of the request, computing them, waiting for the device's turn,
#: waiting for the stage before, and what the hop from there took and carried. All of it counts whole micro-batches.
REMORA_STAGE_MICRO_BATCHES = "remora.stage.micro_batches"
REMORA_STAGE_COMPUTE_S = "remora.stage.compute_s"
REMORA_STAGE_TURN_WAIT_S = "remora.stage.turn_wait_s"
REMORA_STAGE_BUBBLE_S = "remora.stage.bubble_s"
REMORA_STAGE_HOP_S = "remora.stage.hop_s"
REMORA_STAGE_HOP_BYTES = "remora.stage.hop_bytes"
