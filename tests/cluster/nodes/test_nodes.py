"""Several nodes: a stream moves between two of them, and outlives the death of the one that it runs on."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from tests.e2e.test_losses import LONG, Reading

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

MODEL = "smollm2"
TURN = {"model": MODEL, "prompt": LONG, "max_tokens": 160, "temperature": 0, "ignore_eos": True}
BLOCK_TOKENS = 32


def session_of(nodes: Any, namespace: str) -> str:
    return str(nodes.post("/v1/sessions", {"model": MODEL, "namespace": namespace})["id"])


def expected_text(nodes: Any, **more: Any) -> str:
    """Of a run that nothing happens to; in a namespace that shares blocks with no other."""
    return str(nodes.post("/v1/completions", {**TURN, "namespace": "once", **more})["choices"][0]["text"])


def test_a_stream_moves_to_another_node_and_reads_as_if_it_had_not(nodes: Any) -> None:
    nodes.complete()
    prompt = "Of streams that move. " + LONG
    expected = expected_text(nodes, prompt=prompt, namespace="twice")
    session = session_of(nodes, "once")
    reading = Reading(nodes, {**TURN, "prompt": prompt, "session_id": session})
    nodes.eventually(lambda: len(reading.documents) > 10, 30, what="the stream has begun")
    origin = nodes.busy_node()
    (target,) = [each["node"] for each in nodes.replicas() if each["node"] != origin]
    moved = nodes.post(f"/v1/sessions/{session}/migrate", {"to": {"node": target}})
    reading.join(60)
    assert reading.done
    assert reading.text == expected
    assert moved["running"]
    assert nodes.replica_on(target)["id"] == moved["to"]
    assert moved["tokens"]["copied"] > 200
    assert moved["tokens"]["recomputed"] < BLOCK_TOKENS, "the unsealed tail is handed over"
    assert nodes.replica_on(target)["stats"]["num_damaged_blocks"] == 0
    loads = nodes.eventually(lambda: spans_of(nodes, reading.trace_id, "tier.load"), 20, what="the trace")
    assert {each["attributes"]["remora.load.path"] for each in loads} == {"linked"}


def spans_of(nodes: Any, trace_id: str, name: str) -> list[dict[str, Any]]:
    return [each for each in nodes.get(f"/v1/traces/{trace_id}")["spans"] if each["name"] == name]


def kill_under(nodes: Any, namespace: str, prompt: str) -> tuple[dict[str, Any], int]:
    """A durable session's second turn streams, and the node that it runs on is killed. The figures of the survivor's
    engine for what came after, and how many tokens were on another node before."""
    nodes.complete()
    session = session_of(nodes, namespace)
    follow = f"{prompt} And then?"
    first = {**TURN, "prompt": prompt, "max_tokens": 8, "session_id": session}
    nodes.post("/v1/completions", first)
    copied = nodes.copies("twice")["copied_blocks"] if namespace == "twice" else 0
    reading = Reading(nodes, {**TURN, "prompt": follow, "session_id": session})
    nodes.eventually(lambda: len(reading.documents) > 10, 30, what="the stream has begun")
    if namespace == "twice":
        at_least = copied + len(follow) // 8 // BLOCK_TOKENS
        nodes.eventually(lambda: nodes.copies("twice")["copied_blocks"] >= at_least, 30, what="copies")
    num_copied = int(nodes.copies("twice")["copied_blocks"] - copied) if namespace == "twice" else 0
    gone = nodes.busy_node()
    (survivor,) = [each for each in nodes.replicas() if each["node"] != gone]
    nodes.kill_node(gone)
    assert not reading.done, "the kill was to come in the middle"
    reading.join(120)
    assert reading.done
    assert not any("error" in document for document in reading.documents)
    assert reading.documents[-1]["usage"]["completion_tokens"] == TURN["max_tokens"]
    after = nodes.replica_on(survivor["node"])["stats"]
    # The same two turns without a death.
    calm = session_of(nodes, "once")
    nodes.post("/v1/completions", {**first, "session_id": calm, "namespace": "once"})
    assert reading.text == expected_text(nodes, prompt=follow, session_id=calm)
    # Nothing of it is lost, and the session goes on.
    log = nodes.get(f"/v1/sessions/{session}?include_tokens=true")
    assert log["num_turns"] == 2
    assert log["token_ids"] == nodes.get(f"/v1/sessions/{calm}?include_tokens=true")["token_ids"]
    nodes.post("/v1/completions", {**TURN, "prompt": "More.", "max_tokens": 4, "session_id": session})
    # What was there is forgotten, and nothing waits for it.
    nodes.eventually(lambda: gone not in {each["node"] for each in nodes.get("/v1/replicas")["data"]}, 30, what="gone")
    assert len(nodes.get("/v1/pools")["data"]) == 1
    assert f'pool="cpu0-{gone[:8]}' not in nodes.http.get("/metrics").text
    return {key: after[key] - survivor["stats"][key] for key in after if isinstance(after[key], int)}, num_copied


def test_with_a_copy_on_another_node_a_stream_goes_on_there_from_its_blocks(nodes: Any) -> None:
    figures, num_copied = kill_under(nodes, "twice", "Of nodes that die. " + LONG)
    assert num_copied >= 7
    assert figures["num_cached_tokens"] >= num_copied * BLOCK_TOKENS, "what had been copied was not computed again"
    assert figures["num_copied_tokens"] == 0, "nobody asks a dead node"
    files = list((nodes.state_dir / "traces").glob("pool-*.jsonl"))
    assert any('"replicate"' in path.read_text() for path in files), "copying is traced"


def test_without_a_copy_it_is_computed_again_from_the_tokens(nodes: Any) -> None:
    figures, _ = kill_under(nodes, "once", "Of nodes that die alone. " + LONG)
    assert figures["num_cached_tokens"] == 0
    assert figures["num_prompt_tokens"] > 200


@pytest.mark.soak
@pytest.mark.parametrize("number", range(20))
@pytest.mark.parametrize("namespace", ["twice", "once"])
def test_twenty_nodes_die_and_no_session_is_lost(nodes: Any, namespace: str, number: int) -> None:
    kill_under(nodes, namespace, f"{namespace} {number}. " + LONG)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(20))
def test_twenty_replicas_die_and_the_other_node_goes_on(nodes: Any, number: int) -> None:
    nodes.complete()
    prompt = f"Of replica {number}. " + LONG
    reading = Reading(nodes, {**TURN, "prompt": prompt, "namespace": "twice"})
    nodes.eventually(lambda: len(reading.documents) > 3 + 5 * number % 60, 60, what="the stream has begun")
    os.kill(nodes.replica_on(nodes.busy_node())["card"]["pid"], signal.SIGKILL)
    reading.join(120)
    assert reading.done
    assert reading.text == expected_text(nodes, prompt=prompt)
