"""What an engine is given and what it reports: the interface between an engine and the replica around it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from remora.deployments.engine.messages import TokenDelta
from remora.deployments.pipeline.base import StageTime
from remora.kernels.base import Decoder, KVMemory
from remora.namespaces.geometry import KVGeometry
from remora.namespaces.hashing import Derivation
from remora.platform.base.ids import BlockHash, NamespaceId, RouterId

#: Takes what one step produced for one router. Called from the engine's thread; must return at once and not raise.
EmitDeltas = Callable[[RouterId, tuple[TokenDelta, ...]], None]


class Detokenizer(Protocol):
    """One sequence's output as text (deployments/models/detokenizer.py: IncrementalDetokenizer)."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class EngineTokenizer(Protocol):
    """What the engine needs of a tokenizer (deployments/models/tokenizer.py: ChatTokenizer)."""

    def detokenizer(self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer: ...

    def grammar_tokenizer(self, num_logits: int) -> Any:
        """The llguidance.LLTokenizer for masks of `num_logits` bits."""
        ...


class EngineModel(Protocol):
    """What the engine needs of a loaded model (deployments/models/load.py: LoadedModel)."""

    @property
    def name(self) -> str: ...

    @property
    def decoder(self) -> Decoder: ...

    @property
    def tokenizer(self) -> EngineTokenizer: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def eos_token_ids(self) -> Collection[int]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def rope_inv_freq(self) -> NDArray[np.float32] | None:
        """Frequencies of the rotation of K; None: stored K cannot be moved to other positions."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSibling:
    """Another precision of the model in which the namespace's sessions may have KV in the pool."""

    geometry: KVGeometry
    fingerprint: bytes
    #: As EngineNamespace.root.
    root: BlockHash


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNamespace:
    """What the engine must know of a namespace."""

    #: Parent of a sequence's first block (namespaces/hashing.py: chain_root of fingerprint and sharing domain).
    root: BlockHash
    #: Of its KV (namespaces/hashing.py: kv_fingerprint): what other pools are asked for.
    fingerprint: bytes = b""
    #: Share of admissions under contention, relative to the other namespaces of the model.
    weight: float = 1.0
    #: The arena in the precision of its KV; None: in the model's. A request keeps what it began with.
    memory: KVMemory | None = None
    siblings: tuple[KVSibling, ...] = ()
    #: KV of other fingerprints that sessions may bring, and its geometry where it comes from.
    takes: Mapping[Derivation, KVGeometry] = field(default_factory=dict)


#: Called once, when the lease is lost: nothing may run or leave any more and the replica must restart.
OnFenced = Callable[[str], None]
#: Looks a namespace up; raises NotFound, which ends the request and not the engine.
FindNamespace = Callable[[NamespaceId], EngineNamespace]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine's own settings; the first three come from ModelConfig."""

    #: Sequences that one step computes at most.
    max_num_seqs: int = 32
    #: Tokens that one step computes at most.
    max_step_tokens: int = 512
    #: Of the time of a step in which sequences decode, what prompts may take at most, one block apart; 1: all of it.
    prompt_share: float = 0.75
    #: Blocks that a running sequence holds beyond its tokens, so that it need not wait for the pool.
    num_reserve_blocks: int = 1
    #: Least time between two publications of sealed blocks, ends of sequences apart.
    publish_interval_s: float = 0.05
    #: Pause before the pool is asked again after it refused to extend a sequence.
    extend_retry_s: float = 0.005
    #: Longest sleep of the engine's thread while requests wait; bounds how late their deadlines are noticed.
    idle_wait_s: float = 0.05
    #: The same while there are none: whatever happens then wakes it.
    rest_wait_s: float = 2.0
    #: Runs check_integrity() whenever the engine is idle.
    debug: bool = False

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.max_step_tokens < 1 or self.num_reserve_blocks < 0:
            raise ValueError(
                f"max_num_seqs and max_step_tokens must be positive, num_reserve_blocks not negative: {self}"
            )
        if not 0 <= self.prompt_share <= 1:
            raise ValueError(f"prompt_share must be in 0 .. 1: {self}")


class HistogramStats(msgspec.Struct, frozen=True, kw_only=True):
    """`counts[i]` observations since the start lay in (bounds[i - 1], bounds[i]], the last ones above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


@dataclass(slots=True)
class Histogram:
    """Counts observations in fixed buckets; one writer, any reader."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    sum: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def stats(self) -> HistogramStats:
        return HistogramStats(bounds=self.bounds, counts=tuple(self.counts), sum=self.sum)


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start and gauges of now; for metrics, the router's load view and the status page."""

    #: Choices that hold blocks.
    num_running: int
    #: Choices that wait for a slot or for memory, children of an unfinished prompt included.
    num_waiting: int
    #: Of those, parked by the pool.
    num_parked: int
    #: Tokens of all live choices, waiting or running.
    load_tokens: int
    num_requests: int
    num_steps: int
    num_failed_steps: int
    num_preemptions: int
    #: Prompt tokens that were computed; recomputed ones after a preemption included.
    num_prompt_tokens: int
    num_cached_tokens: int
    #: Tokens whose KV came from other pools, or was handed over; blocks of a wrong checksum, which were computed.
    num_copied_tokens: int
    num_converted_tokens: int
    num_damaged_blocks: int
    num_output_tokens: int
    num_published_blocks: int
    #: Finish reason → choices.
    num_finished: dict[str, int]
    #: The lease is lost: nothing runs and nothing leaves any more; the replica must restart.
    is_fenced: bool
    #: Seconds for which it had its device's turn: against other replicas', its share of the device.
    turn_s: float
    step_s: HistogramStats
    #: Of that, outside the decoder and its turn.
    step_overhead_s: HistogramStats
    #: Of a step, waiting for the device's turn at the step lock.
    turn_wait_s: HistogramStats
    time_to_first_token_s: HistogramStats
    inter_token_s: HistogramStats
    #: What each stage of a pipeline did since the start, seen from here; empty without one.
    stages: tuple[StageTime, ...] = ()
