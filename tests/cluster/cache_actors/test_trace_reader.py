"""Another node's traces are read by an actor there."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from replica_probe import node_id

from remora.cache_actors.trace_reader import RemoteTraces
from remora.platform.base import telemetry
from remora.platform.base.config import ClusterConfig, TelemetryConfig
from remora.platform.base.trace_store import EVERYTHING

pytestmark = pytest.mark.cluster


async def test_a_reader_answers_what_its_node_has(ray_cluster: None, tmp_path: Path) -> None:
    telemetry.shutdown_telemetry()
    telemetry.setup_telemetry("router", TelemetryConfig(), tmp_path)
    with telemetry.span("work", {"remora.namespace": "chat"}, parent={}):
        pass
    telemetry.shutdown_telemetry()
    cluster = ClusterConfig(name=f"t{uuid.uuid4().hex[:8]}", state_dir=tmp_path)
    traces = RemoteTraces(cluster, node_id())
    (found,) = (await traces.search(EVERYTHING)).summaries
    assert (found.name, found.namespace, found.num_spans) == ("work", "chat", 1)
    again = await RemoteTraces(cluster, node_id()).summaries([(found.trace_id, "chat"), (found.trace_id, "code")])
    assert again.summaries == (found,)
    assert again.folder_id == (tmp_path / "traces" / "folder-id").read_text()
    mine, theirs = frozenset({"chat"}), frozenset({"code"})
    assert [span.name for span in await traces.spans(found.trace_id, mine)] == ["work"]
    assert await traces.spans(found.trace_id, theirs) == []
