"""Each choice leaves its spans in the request's own trace."""

from __future__ import annotations

import json
from unittest.mock import patch

import msgspec
import pytest
from engine_support import BLOCK_TOKENS, FAKE_GEOMETRY, Harness

from remora.deployments.engine.spans import SequenceSpans
from remora.deployments.pipeline.base import StageTime
from remora.platform.base.config import TelemetryConfig
from remora.platform.base.ids import ModelId, NamespaceId
from remora.platform.base.telemetry import flush_telemetry, inject, setup_telemetry, shutdown_telemetry, start_span

PROMPT = "The remora travels with a ray."


@pytest.fixture
def read_spans(tmp_path):
    setup_telemetry("engine-test", TelemetryConfig(), tmp_path)

    def read() -> list[dict]:
        flush_telemetry()
        (path,) = (tmp_path / "traces").glob("*.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()]

    yield read
    shutdown_telemetry()


def test_a_choice_writes_admission_prefill_and_decode_into_the_requests_trace(read_spans) -> None:
    one = Harness()
    root = start_span("router.route")
    one.run(PROMPT, max_tokens=4)
    request = one.request(PROMPT, max_tokens=6)
    one.outputs[request.request_id, 0] = type(one.outputs["r1", 0])()
    one.engine.submit(msgspec.structs.replace(request, trace_context=inject(root)))
    one.finish()
    root.end()
    one.close()
    spans = read_spans()
    trace_id = next(span["trace_id"] for span in spans if span["name"] == "router.route")
    mine = {span["name"]: span for span in spans if span["trace_id"] == trace_id}
    assert set(mine) == {"router.route", "pool.admit", "engine.prefill", "engine.decode"}
    cached = (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert mine["pool.admit"]["attributes"]["remora.admit.cached_tokens"] == cached
    assert mine["engine.prefill"]["attributes"]["gen_ai.usage.input_tokens"] == len(PROMPT)
    assert mine["engine.prefill"]["attributes"]["gen_ai.usage.cache_read.input_tokens"] == cached
    assert mine["engine.prefill"]["attributes"]["remora.prefill.steps"] == 1
    assert mine["engine.decode"]["attributes"]["gen_ai.usage.output_tokens"] == 6
    assert mine["engine.decode"]["attributes"]["remora.decode.steps"] == 5
    assert list(mine["engine.decode"]["attributes"]["gen_ai.response.finish_reasons"]) == ["length"]
    assert mine["pool.admit"]["parent_span_id"] == mine["router.route"]["span_id"]


def test_what_was_evicted_for_a_choice_and_what_was_taken_from_it_is_in_its_trace(read_spans) -> None:
    one = Harness(num_blocks=16)
    ids = [one.submit(f"prompt {i:04d}", max_tokens=20) for i in range(4)]
    one.finish()
    num_preemptions = one.engine.stats().num_preemptions
    one.close()
    spans = [span["attributes"] | {"name": span["name"]} for span in read_spans()]
    revoked = [each for each in spans if each["name"] == "quota.revoke"]
    assert len(revoked) == num_preemptions > 0
    assert all("memory" in each["remora.revoke.reason"] for each in revoked)
    assert {each["remora.request.id"] for each in revoked} < set(ids)
    again = [each for each in spans if each.get("remora.admit.recomputed_tokens")]
    assert {each["remora.request.id"] for each in again} <= {each["remora.request.id"] for each in revoked}
    assert again, "what a sequence had computed before it was revoked is computed again"
    evicted = [each for each in spans if each["name"] == "pool.evict"]
    assert all(each["remora.evict.blocks"] > 0 and each["remora.evict.cause"] for each in evicted)
    assert {each["remora.request.id"] for each in evicted} <= set(ids)
    assert evicted


def test_a_choice_that_goes_above_its_namespaces_guarantee_says_by_how_much(read_spans) -> None:
    one = Harness(num_blocks=16)
    block_bytes = FAKE_GEOMETRY.block_bytes
    one.pool.device.set_quota(NamespaceId("ns"), ModelId("model"), guaranteed_bytes=3 * block_bytes)
    one.run("abcdefghij", max_tokens=10)
    one.close()
    spans = read_spans()
    admitting, growing = [each for each in spans if each["name"] == "quota.borrow"]
    (admitted,) = [each for each in spans if each["name"] == "pool.admit"]
    assert admitting["parent_span_id"] == admitted["span_id"] != growing["parent_span_id"]
    amounts = [each["attributes"]["remora.quota.borrowed_bytes"] for each in (admitting, growing)]
    assert amounts == [block_bytes, block_bytes], "of five blocks three are guaranteed"
    assert "quota.revoke" not in {each["name"] for each in spans}


def test_what_each_stage_of_a_pipeline_did_is_below_prefill_and_decode(read_spans) -> None:
    def did(stage: int, start_s: int) -> StageTime:
        numbers = {
            "compute_s": 0.5,
            "turn_wait_s": 0.25,
            "bubble_s": 0.125 * stage,
            "hop_s": 0.0,
            "hop_bytes": 64 * stage,
        }
        start_ns = start_s * 10**9
        return StageTime(
            stage=stage, num_micro_batches=2, start_unix_ns=start_ns, end_unix_ns=start_ns + 10**9, **numbers
        )

    one = Harness()
    plain_stepped = SequenceSpans.stepped
    steps = iter(range(1_000_000, 2_000_000, 10))

    def stepped(spans: SequenceSpans, stage_times: tuple[StageTime, ...]) -> None:
        assert stage_times == (), "the harness has no pipeline"
        start_s = next(steps)
        plain_stepped(spans, [did(stage, start_s + stage) for stage in range(2)])

    with patch.object(SequenceSpans, "stepped", stepped):
        one.run(PROMPT, max_tokens=4)
    one.close()
    spans = read_spans()
    parents = {span["span_id"]: span["name"] for span in spans}
    stages = [(parents.get(span["parent_span_id"]), span) for span in spans if span["name"].startswith("stage.")]
    assert [(parent, span["name"]) for parent, span in stages] == [
        ("engine.prefill", "stage.0"),
        ("engine.prefill", "stage.1"),
        ("engine.decode", "stage.0"),
        ("engine.decode", "stage.1"),
    ]
    last = stages[3][1]
    assert last["attributes"]["remora.stage.micro_batches"] == 6
    assert last["attributes"]["remora.stage.bubble_s"] == 0.375
    assert last["attributes"]["remora.stage.hop_bytes"] == 192
    assert (last["start_ns"], last["end_ns"]) == (1_000_011 * 10**9, 1_000_032 * 10**9)
