"""Reads the trace files of its node for routers on other nodes: an actor of its own, so that no pool waits for it.

It holds nothing that the files do not hold, and ends with the router that was the first to ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from remora.cache_actors.cluster_names import ray_namespace
from remora.platform.base.config import ClusterConfig
from remora.platform.base.paths import default_state_dir
from remora.platform.base.span_file import StoredSpan, folder_id, traces_dir
from remora.platform.base.trace_store import TraceKey, TraceQuery, TraceStore, TraceSummary

_NAME_PREFIX: Final = "traces-"


class FoundSummaries(msgspec.Struct, frozen=True):
    #: Of the folder that was read: nodes may share one.
    folder_id: str
    summaries: tuple[TraceSummary, ...]


class TraceReaderActor:
    """Methods run one at a time; everything crosses as bytes (msgpack)."""

    def __init__(self, state_dir: Path | None) -> None:
        """None: the node's default."""
        directory = traces_dir(state_dir or default_state_dir())
        self._store = TraceStore(directory)
        self._directory = directory

    def search(self, query: bytes) -> bytes:
        """FoundSummaries of a TraceQuery."""
        return self._encode(self._store.search(msgspec.msgpack.decode(query, type=TraceQuery)))

    def summaries(self, keys: Sequence[TraceKey]) -> bytes:
        """FoundSummaries of those of the traces that are here."""
        return self._encode(self._store.summaries(keys))

    def spans(self, trace_id: str, namespaces: frozenset[str] | None) -> bytes:
        """The list of StoredSpan of one trace."""
        return msgspec.msgpack.encode(self._store.spans(trace_id, namespaces=namespaces))

    def _encode(self, summaries: list[TraceSummary]) -> bytes:
        return msgspec.msgpack.encode(FoundSummaries(folder_id(self._directory), tuple(summaries)))


class RemoteTraces:
    """The traces of another node (deployments/cluster_traces.py: NodeTraces). Ray's errors come through."""

    def __init__(self, cluster: ClusterConfig, node_id: str) -> None:
        self._actor = (
            ray.remote(TraceReaderActor)
            .options(
                name=f"{_NAME_PREFIX}{node_id}",
                namespace=ray_namespace(cluster.name),
                get_if_exists=True,
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            .remote(cluster.state_dir)
        )

    async def search(self, query: TraceQuery) -> FoundSummaries:
        return _decode(await self._actor.search.remote(msgspec.msgpack.encode(query)))

    async def summaries(self, keys: Sequence[TraceKey]) -> FoundSummaries:
        return _decode(await self._actor.summaries.remote(keys))

    async def spans(self, trace_id: str, namespaces: frozenset[str] | None) -> list[StoredSpan]:
        return msgspec.msgpack.decode(await self._actor.spans.remote(trace_id, namespaces), type=list[StoredSpan])


def _decode(answer: Any) -> FoundSummaries:
    return msgspec.msgpack.decode(answer, type=FoundSummaries)
