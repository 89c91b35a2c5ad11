"""What the routes work with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from remora.cache_actors.pool_messages import PoolDescription
from remora.deployments.cluster_traces import Found
from remora.deployments.model_states import ModelStates
from remora.deployments.models.tokenizer import ChatTokenizer
from remora.deployments.router import RouterCore
from remora.deployments.session_turns import SessionTurns
from remora.namespaces.commands import Compacted, Quota, Trimmed
from remora.namespaces.geometry import KVPrecision
from remora.namespaces.quantise_commands import Quantise, Quantised
from remora.platform.base.config import RemoraConfig
from remora.platform.base.ids import BlockHash, ModelId, NamespaceId
from remora.platform.base.model_config import ModelConfig
from remora.platform.base.span_file import StoredSpan
from remora.platform.base.trace_store import TraceQuery, TraceSummary
from remora.platform.http.http_stats import HttpStats
from remora.platform.http.router_metrics import RouterFamilies
from remora.platform.http.running_moves import RunningMoves

#: Texts longer than this are tokenized in a thread, so that a long prompt delays nobody's tokens.
INLINE_TEXT_CHARS = 4096


class PoolReports(Protocol):
    """Asks the pool actors how they are."""

    async def reports(self) -> Mapping[str, PoolDescription]:
        """Pool id → description, of the pools that answer in time."""
        ...

    async def find_blocks(
        self, namespace_id: NamespaceId, fingerprint: bytes, hashes: Sequence[BlockHash]
    ) -> Mapping[str, int]:
        """Pool id → how many of the first blocks of a chain it has, of the pools that answer in time."""
        ...

    async def set_quota(
        self, namespace_id: NamespaceId, change: Callable[[Quota], Quota], kv_precision: KVPrecision | None = None
    ) -> None:
        """Changes a namespace's quota, and precision if given, in every pool that has it.

        Raises InvalidRequest, Unavailable."""
        ...

    async def trim(self, namespace_id: NamespaceId, target_bytes: int | None) -> Mapping[str, Trimmed]:
        """Gives up its cache down to a size in each pool. Raises Unavailable."""
        ...

    async def quantise(self, namespace_id: NamespaceId, command: Quantise) -> dict[str, Quantised]:
        """Re-encodes its cache in each pool. Raises InvalidRequest, Unavailable."""
        ...

    async def compact(self, namespace_id: NamespaceId) -> Mapping[str, Compacted]:
        """Moves its geometry's blocks together in each pool. Raises Unavailable."""
        ...


class Traces(Protocol):
    """Asks every node of the instance what its processes have written about requests."""

    async def search(self, query: TraceQuery) -> Found[TraceSummary]:
        """Newest first."""
        ...

    async def spans(self, trace_id: str, namespaces: frozenset[str] | None) -> Found[StoredSpan]:
        """All spans of a trace by start time, of these namespaces; empty when there are none."""
        ...


#: Puts a model that has nothing to do to sleep. Raises Conflict, Unavailable.
Sleep = Callable[[ModelId], Awaitable[None]]


class Tokenizers:
    """The models' tokenizers, each loaded once, in a thread."""

    def __init__(self, models: Mapping[ModelId, ModelConfig], load: Callable[[ModelConfig], ChatTokenizer]) -> None:
        self._models = models
        self._load = load
        self._loading: dict[ModelId, asyncio.Task[ChatTokenizer]] = {}

    async def get(self, model_id: ModelId) -> ChatTokenizer:
        """Raises ModelError if it cannot be loaded; a later call tries again."""
        task = self._loading.get(model_id)
        if task is None or (task.done() and task.exception() is not None):
            task = asyncio.create_task(asyncio.to_thread(self._load, self._models[model_id]))
            self._loading[model_id] = task
        # The first caller's client may leave; the others still want the result.
        return await asyncio.shield(task)

    async def preload(self) -> None:
        """Loads all of them. Failures show when the tokenizer is used."""
        await asyncio.gather(*(self.get(model_id) for model_id in self._models), return_exceptions=True)


async def encode(tokenizer: ChatTokenizer, text: str, *, add_special_tokens: bool, field: str) -> tuple[int, ...]:
    """Token ids of a text, off the event loop when it is long."""
    if len(text) <= INLINE_TEXT_CHARS:
        return tuple(tokenizer.encode(text, add_special_tokens, field=field))
    return tuple(await asyncio.to_thread(tokenizer.encode, text, add_special_tokens, field=field))


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    config: RemoraConfig
    core: RouterCore
    tokenizers: Tokenizers
    pools: PoolReports
    routers: RouterFamilies
    stats: HttpStats
    turns: SessionTurns
    running_moves: RunningMoves
    traces: Traces
    states: ModelStates
    sleep: Sleep
