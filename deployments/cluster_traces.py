"""The traces of all nodes as one: what the router's own node has, and what others answer in time.

    list   1. every node: its newest traces that match      2. every node: what it has of those that were found
    show      every node: its spans of the trace

The second question is there because a part of a trace may match a query (it took long, it failed) where others do not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

from ray.exceptions import RayError

from remora.cache_actors.trace_reader import FoundSummaries
from remora.platform.base.span_file import StoredSpan, folder_id
from remora.platform.base.trace_merge import merge_spans, merge_summaries
from remora.platform.base.trace_store import TraceKey, TraceQuery, TraceStore, TraceSummary

logger = logging.getLogger(__name__)

#: A node that is gone, busy or just starting its reader is left out of an answer rather than waited for.
TIMEOUT_S: Final = 2.0

Result = TypeVar("Result")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Found(Generic[Answer]):
    """What the nodes that answered have."""

    items: list[Answer]
    #: Nodes that did not answer: what they have is missing.
    silent_nodes: tuple[str, ...] = ()


class NodeTraces(Protocol):
    """The traces of one node; raises RayError or OSError when it cannot be asked."""

    async def search(self, query: TraceQuery) -> FoundSummaries: ...

    async def summaries(self, keys: Sequence[TraceKey]) -> FoundSummaries: ...

    async def spans(self, trace_id: str, namespaces: frozenset[str] | None) -> list[StoredSpan]: ...


class LocalTraces:
    """NodeTraces of the node of this process, read in a thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._store = TraceStore(directory)

    async def search(self, query: TraceQuery) -> FoundSummaries:
        return self._found(await asyncio.to_thread(self._store.search, query))

    async def summaries(self, keys: Sequence[TraceKey]) -> FoundSummaries:
        return self._found(await asyncio.to_thread(self._store.summaries, keys))

    async def spans(self, trace_id: str, namespaces: frozenset[str] | None) -> list[StoredSpan]:
        return await asyncio.to_thread(self._store.spans, trace_id, namespaces=namespaces)

    def _found(self, summaries: list[TraceSummary]) -> FoundSummaries:
        return FoundSummaries(folder_id(self._directory), tuple(summaries))


class ClusterTraces:
    """Owned by a router's event loop."""

    def __init__(
        self,
        own_node_id: str,
        own: NodeTraces,
        *,
        list_nodes: Callable[[], Awaitable[Collection[str]]],
        connect: Callable[[str], NodeTraces],
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`list_nodes`: where processes of the instance run; `connect`: how to ask another node."""
        self._own_node_id = own_node_id
        self._nodes: dict[str, NodeTraces] = {own_node_id: own}
        self._list_nodes = list_nodes
        self._connect = connect
        self._timeout_s = timeout_s

    async def search(self, query: TraceQuery) -> Found[TraceSummary]:
        """Newest first, of all nodes together."""
        nodes = await self._all_nodes()
        matching = await self._ask(nodes, lambda node: node.search(query))
        newest = merge_summaries(each.summaries for each in _one_a_folder(matching.values()))[: query.limit]
        if len(matching) == 1:
            return Found(newest, _without(nodes, matching))
        keys = [(each.trace_id, each.namespace) for each in newest]
        # Not those that were silent: an answer would take as long again.
        parts = await self._ask(matching, lambda node: node.summaries(keys))
        merged = merge_summaries(each.summaries for each in _one_a_folder(parts.values()))
        return Found(merged, _without(nodes, parts))

    async def spans(self, trace_id: str, namespaces: frozenset[str] | None) -> Found[StoredSpan]:
        """All spans of a trace by start time, of these namespaces; empty when there are none."""
        nodes = await self._all_nodes()
        parts = await self._ask(nodes, lambda node: node.spans(trace_id, namespaces))
        return Found(merge_spans(parts.values()), _without(nodes, parts))

    async def _all_nodes(self) -> list[str]:
        return sorted({self._own_node_id, *await self._list_nodes()})

    async def _ask(
        self, nodes: Iterable[str], question: Callable[[NodeTraces], Awaitable[Result]]
    ) -> dict[str, Result]:
        """Answers of the nodes that answer in time."""
        wanted = list(nodes)
        answers = await asyncio.gather(*(self._ask_one(node_id, question) for node_id in wanted))
        return {node_id: answer for node_id, answer in zip(wanted, answers, strict=True) if answer is not None}

    async def _ask_one(self, node_id: str, question: Callable[[NodeTraces], Awaitable[Result]]) -> Result | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                if node_id not in self._nodes:
                    self._nodes[node_id] = await asyncio.to_thread(self._connect, node_id)
                return await question(self._nodes[node_id])
        except TimeoutError:
            logger.warning("node %s does not say what traces it has", node_id)
        except (RayError, OSError) as error:
            if node_id != self._own_node_id:
                self._nodes.pop(node_id, None)
            logger.warning("node %s cannot say what traces it has: %s", node_id, str(error).partition("\n")[0])
        return None


def _without(nodes: Iterable[str], answers: Collection[str]) -> tuple[str, ...]:
    """The nodes that have not answered."""
    return tuple(node_id for node_id in nodes if node_id not in answers)


def _one_a_folder(found: Iterable[FoundSummaries]) -> Iterable[FoundSummaries]:
    """Nodes that share a folder answer with the same."""
    return {each.folder_id: each for each in found}.values()
