"""Traces of several nodes are shown as one, and who did not answer is named."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
from ray.exceptions import ActorUnavailableError

from remora.cache_actors.trace_reader import FoundSummaries
from remora.deployments.cluster_traces import ClusterTraces, LocalTraces, NodeTraces
from remora.platform.base import telemetry_names as names
from remora.platform.base.span_file import StoredSpan, folder_id
from remora.platform.base.trace_store import EVERYTHING, TraceKey, TraceQuery

MS = 1_000_000


def write(folder: Path, trace: str, span_id: str, start_ms: int, end_ms: int, **changes: Any) -> None:
    """Appends a span to a node's file; a span "root" is a request's own."""
    attributes = {names.REMORA_NAMESPACE: changes.pop("namespace", "chat"), **changes.pop("attributes", {})}
    if span_id == "root":
        attributes |= {names.GEN_AI_OPERATION_NAME: "chat", names.GEN_AI_USAGE_OUTPUT_TOKENS: 7}
    span = StoredSpan(
        trace_id=trace * 32,
        span_id=f"{trace}-{span_id}",
        name=span_id,
        process=f"remora.{folder.name}",
        start_ns=start_ms * MS,
        end_ns=end_ms * MS,
        attributes=attributes,
        **changes,
    )
    folder.mkdir(exist_ok=True)
    with (folder / "process-1.jsonl").open("ab") as stream:
        stream.write(msgspec.json.encode(span) + b"\n")


class Hanging:
    """A node that is there and does not answer."""

    num_asked = 0

    async def search(self, query: TraceQuery) -> FoundSummaries:
        return await self._never()

    async def summaries(self, keys: Sequence[TraceKey]) -> FoundSummaries:
        return await self._never()

    async def spans(self, trace_id: str, namespaces: frozenset[str] | None) -> list[StoredSpan]:
        return await self._never()

    async def _never(self) -> Any:
        self.num_asked += 1
        await asyncio.Event().wait()


def traces(own: Path, others: dict[str, NodeTraces], *, timeout_s: float = 5.0) -> ClusterTraces:
    async def list_nodes() -> list[str]:
        return list(others)

    return ClusterTraces(
        "own", LocalTraces(own), list_nodes=list_nodes, connect=others.__getitem__, timeout_s=timeout_s
    )


async def test_parts_of_a_trace_on_two_nodes_are_one_trace(tmp_path: Path) -> None:
    here, there = tmp_path / "a", tmp_path / "b"
    write(here, "1", "root", 100, 200)
    write(here, "2", "root", 300, 310)
    # The other node's clock is behind: its span begins before the request.
    session = {names.REMORA_SESSION_ID: "trip"}
    write(there, "1", "engine.decode", 90, 190, attributes=session, error_type="KernelError", error="nan")
    found = traces(here, {"b": LocalTraces(there)})
    newest, merged = (await found.search(EVERYTHING)).items
    assert [newest.trace_id[0], merged.trace_id[0]] == ["2", "1"]
    assert (merged.name, merged.duration_ms, merged.num_spans, merged.session) == ("root", 100.0, 2, "trip")
    assert (merged.complete, merged.output_tokens, merged.num_errors, merged.error) == (True, 7, 1, "nan")
    spans = (await found.spans("1" * 32, None)).items
    assert [(span.name, span.process) for span in spans] == [("engine.decode", "remora.b"), ("root", "remora.a")]


async def test_a_part_that_alone_would_not_match_counts_all_the_same(tmp_path: Path) -> None:
    here, there = tmp_path / "a", tmp_path / "b"
    write(here, "1", "root", 100, 900)
    write(there, "1", "engine.decode", 200, 210)
    write(there, "2", "engine.decode", 950, 960)
    found = traces(here, {"b": LocalTraces(there)})
    (slow,) = (await found.search(TraceQuery(min_ms=500))).items
    assert (slow.trace_id[0], slow.num_spans) == ("1", 2)
    (newest,) = (await found.search(TraceQuery(limit=1))).items
    assert newest.trace_id[0] == "2"


async def test_nodes_that_share_a_folder_count_once(tmp_path: Path) -> None:
    here = tmp_path / "a"
    write(here, "1", "root", 0, 10)
    write(here, "1", "engine.decode", 2, 8)
    (tmp_path / "mounted").symlink_to(here)
    found = traces(here, {"b": LocalTraces(tmp_path / "mounted")})
    (one,) = (await found.search(EVERYTHING)).items
    assert one.num_spans == 2
    assert len((await found.spans("1" * 32, None)).items) == 2
    assert folder_id(here) == folder_id(tmp_path / "mounted") != folder_id(tmp_path)


async def test_a_silent_node_is_named_and_does_not_hold_the_others_up(tmp_path: Path) -> None:
    here, there = tmp_path / "a", tmp_path / "b"
    write(here, "1", "root", 0, 10)
    write(there, "1", "engine.decode", 2, 8)
    lost = Hanging()
    found = traces(here, {"b": LocalTraces(there), "lost": lost}, timeout_s=0.5)
    listed = await found.search(EVERYTHING)
    assert lost.num_asked == 1
    assert ([each.num_spans for each in listed.items], listed.silent_nodes) == ([2], ("lost",))
    shown = await found.spans("1" * 32, None)
    assert (len(shown.items), shown.silent_nodes) == (2, ("lost",))


async def test_a_node_whose_reader_has_died_gets_another(tmp_path: Path) -> None:
    there = tmp_path / "b"
    write(there, "1", "root", 0, 10)
    connected: list[NodeTraces] = []

    class Dead(Hanging):
        async def _never(self) -> Any:
            raise ActorUnavailableError("the reader is gone", b"0" * 16)

    async def list_nodes() -> list[str]:
        return ["b"]

    def connect(_: str) -> NodeTraces:
        connected.append(LocalTraces(there) if connected else Dead())
        return connected[-1]

    (tmp_path / "a").mkdir()
    found = ClusterTraces("own", LocalTraces(tmp_path / "a"), list_nodes=list_nodes, connect=connect)
    assert (await found.search(EVERYTHING)).silent_nodes == ("b",)
    again = await found.search(EVERYTHING)
    assert (len(again.items), again.silent_nodes) == (1, ())


async def test_namespaces_stay_apart_on_every_node(tmp_path: Path) -> None:
    here, there = tmp_path / "a", tmp_path / "b"
    write(here, "1", "root", 0, 10)
    write(there, "1", "other", 2, 8, namespace="code")
    found = traces(here, {"b": LocalTraces(there)})
    mine = frozenset({"chat"})
    (one,) = (await found.search(TraceQuery(namespaces=mine))).items
    assert (one.namespace, one.num_spans) == ("chat", 1)
    assert [span.name for span in (await found.spans("1" * 32, mine)).items] == ["root"]
    assert len((await found.search(EVERYTHING)).items) == 2


async def test_the_api_shows_all_nodes_and_who_is_silent(server: Any, http: httpx.AsyncClient, tmp_path: Path) -> None:
    folder = tmp_path / "node-b"
    server.nodes["node-b"] = LocalTraces(folder)
    write(folder, "1", "root", 0, 10)
    listed = (await http.get("/v1/traces")).json()
    assert ([each["id"] for each in listed["data"]], listed["silent_nodes"]) == (["1" * 32], [])
    shown = (await http.get(f"/v1/traces/{'1' * 32}")).json()
    assert ([each["name"] for each in shown["spans"]], shown["silent_nodes"]) == (["root"], [])
    server.nodes["node-c"] = Hanging()
    missing, listed_again = await asyncio.gather(http.get(f"/v1/traces/{'2' * 32}"), http.get("/v1/traces"))
    assert missing.status_code == 404
    assert "nodes that do not answer: node-c" in json.dumps(missing.json())
    assert listed_again.json()["silent_nodes"] == ["node-c"]
