"""What operators see: sockets, traces, metrics, namespaces, pools, replicas."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from remora.deployments.accuracy.gate import ARITHMETIC, Bars, Verdict, VerdictStore
from remora.kernels.native.weight_memory import shared_memory_is_fast
from remora.platform.cli.processes import command_of, marked_processes

pytestmark = pytest.mark.e2e

_LISTENING = "0A"


def _listening_sockets() -> dict[str, str]:
    """Inode → local address of every listening TCP socket of the machine."""
    sockets = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING:
                sockets[fields[9]] = fields[1]
    return sockets


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    raw = bytes.fromhex(text.partition(":")[0])
    words = struct.unpack(f">{len(raw) // 4}I", raw)
    return ipaddress.ip_address(struct.pack(f"<{len(words)}I", *words))


def test_every_listening_socket_is_on_loopback(platform: Any) -> None:
    """Ray's, Serve's and HAProxy's own included."""
    session = os.environ["REMORA_TEST_SESSION"]
    pids = [os.getpid(), *(process.pid for process in marked_processes("REMORA_TEST_SESSION", session))]
    listening = _listening_sockets()
    seen: dict[str, str] = {}
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(fd)
            except OSError:
                continue
            inode = target.removeprefix("socket:[").removesuffix("]")
            if target.startswith("socket:[") and inode in listening:
                seen[listening[inode]] = f"{pid}: {command_of(pid)}"
    ports = {int(each.partition(":")[2], 16) for each in seen}
    assert platform.config.http.port in ports, "the test sees the platform's sockets"
    assert len(seen) > 5
    open_to_others = {
        f"{_address(each)}:{int(each.partition(':')[2], 16)}": command
        for each, command in seen.items()
        if not (
            _address(each).is_loopback
            or getattr(_address(each), "ipv4_mapped", None) == ipaddress.ip_address("127.0.0.1")
        )
    }
    assert open_to_others == {}


def _spans(platform: Any) -> list[dict[str, Any]]:
    folder = Path(platform.config.cluster.state_dir) / "traces"
    return [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]


def test_one_trace_holds_the_router_the_pool_and_the_engine(platform: Any) -> None:
    trace_id = os.urandom(16).hex()
    response = platform.http.post(
        "/v1/chat/completions",
        json={"model": "smollm2", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
        headers={"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"},
    )
    assert response.headers["x-remora-trace-id"] == trace_id
    wanted = {"chat smollm2", "router.route", "pool.admit", "engine.prefill", "engine.decode"}

    def names() -> set[str]:
        return {span["name"] for span in _spans(platform) if trace_id in json.dumps(span)}

    platform.eventually(lambda: names() >= wanted, 5, what=f"{wanted} in one trace")

    def at_collector() -> set[str]:
        return {span.name for _, span in platform.collector.trace(trace_id)}

    platform.eventually(lambda: at_collector() >= wanted, 10, what=f"{wanted} at the OTLP collector")
    services = {span.name: service for service, span in platform.collector.trace(trace_id)}
    assert (services["chat smollm2"], services["engine.decode"]) == ("remora.router", "remora.replica-smollm2")


def test_metrics_cover_router_engines_and_pools(platform: Any) -> None:
    platform.chat("hi", max_tokens=2)
    page = platform.http.get("/metrics").text
    for name in (
        'remora_http_requests_total{route="/v1/chat/completions",status="200"}',
        'remora_time_to_first_token_seconds_count{model="smollm2",namespace="smollm2"}',
        'remora_model_ready{model="smollm2-int8"} 1.0',
        "remora_engine_step_seconds_bucket{",
        "remora_engine_output_tokens_total{",
        "remora_pool_arena_bytes{",
        'remora_namespace_limit_bytes{namespace="smollm2/small"',
    ):
        assert name in page, name


def test_namespaces_and_pools_show_quotas_and_usage(platform: Any) -> None:
    platform.chat("hi", max_tokens=2)
    namespaces = {each["id"]: each for each in platform.get("/v1/namespaces")["data"]}
    assert set(namespaces) == {"smollm2", "smollm2/small", "smollm2/queue", "smollm2-int8"}
    assert namespaces["smollm2"]["guaranteed_bytes"] == 96 * 2**20
    (usage,) = namespaces["smollm2"]["pools"].values()
    assert usage["cached_bytes"] > 0
    pool = platform.pool()
    assert pool["used_bytes"] + pool["cached_bytes"] <= pool["data_bytes"]
    assert {lease["model"] for lease in pool["leases"]} == {"smollm2", "smollm2-int8"}
    replicas = platform.get("/v1/replicas")["data"]
    assert sorted(each["model"] for each in replicas if each["connected"]) == ["smollm2", "smollm2", "smollm2-int8"]


def test_replicas_of_a_model_use_one_copy_of_its_weights(platform: Any) -> None:
    cards = [each["card"] for each in platform.get("/v1/replicas")["data"] if each["connected"]]
    assert {card["shares_weights"] for card in cards} == {shared_memory_is_fast()}
    mapped: dict[str, list[frozenset[str]]] = {}
    for card in cards:
        maps = Path(f"/proc/{card['pid']}/maps").read_text()
        inodes = frozenset(re.findall(r" r--s \S+ \S+ (\d+) +/memfd:remora-weights", maps))
        mapped.setdefault(card["model_id"], []).append(inodes)
        assert card["weights_bytes"] > 2**26
        assert list(card["start_s"]) == ["process", "pool", "model", "lease", "engine", "registry"]
    if shared_memory_is_fast():
        first, second = mapped["smollm2"]
        (other,) = mapped["smollm2-int8"]
        assert first == second
        assert len(first) == len(other) == len(first ^ other) / 2 == 1


def test_a_namespace_gets_another_kv_precision_while_a_request_runs(platform: Any) -> None:
    path = "/v1/namespaces/smollm2-int8"
    prompt = "Name one fish that travels with rays and sharks, and say in a few words why it does."

    def say(**more: Any) -> tuple[str, int]:
        answer = platform.chat(prompt, model="smollm2-int8", **more).json()
        return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    before, _ = say(max_tokens=64)
    with ThreadPoolExecutor(max_workers=1) as pool:
        running = pool.submit(say, max_tokens=64)
        platform.eventually(lambda: platform.referenced_blocks() > 0, 10, what="it runs")
        changed = platform.http.put(path, json={"kv_precision": "int4"}).json()
        assert changed["kv_precision"] == {"k": "int5", "v": "int4"}
        assert say(max_tokens=2)[1] == 0, "nothing of another precision is found"
        assert say(max_tokens=2)[1] > 0
        assert running.result()[0] == before
    (card,) = [each["card"] for each in platform.replicas("smollm2-int8")]
    platform.http.put(path, json={"kv_precision": "bf16"})
    text, num_cached = say(max_tokens=64)
    assert (text, num_cached > 0) == (before, True), "what was cached in bf16 is found again"
    verdict = Verdict(
        arithmetic=ARITHMETIC,
        model="smollm2-int8", weights="int8", k_precision="int4", v_precision="int4", reference="r", text="t",
        num_tokens=100, reference_perplexity=10.0, perplexity=12.0, kl_divergence=1.0, top1_agreement=0.5,
        bars=Bars(max_perplexity_change=0.04), has_passed=False, decoder="d",
    )  # fmt: skip
    fingerprint = bytes.fromhex(card["namespaces"]["smollm2-int8"]["fingerprint"])
    VerdictStore(platform.config.cluster.state_dir).save(fingerprint, verdict)
    refused = platform.http.put(path, json={"kv_precision": "int4"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (409, "kv_precision")
    assert "namespaces.smollm2-int8" in refused.json()["error"]["message"]
    assert platform.get(path)["kv_precision"] == {"k": "bf16", "v": "bf16"}


def test_sessions_keep_their_cache_through_changes_of_kv_precision_and_strangers_find_nothing_of_it(
    platform: Any,
) -> None:
    path, model = "/v1/namespaces/smollm2-int8", "smollm2-int8"
    long = "Tell me about rays that live at the bottom of the sea, and about the fish that travel with them. " * 5

    def turn(session_id: str, content: str) -> Any:
        answer = platform.chat(content, model=model, session_id=session_id, max_tokens=16)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]

    def begin(content: str) -> tuple[str, int]:
        made = platform.http.post("/v1/sessions", json={"model": model}).json()["id"]
        usage = turn(made, content)
        return made, (usage["total_tokens"] - 1) // 32 * 32

    one, num_full = begin(long)
    assert num_full >= 96
    platform.http.put(path, json={"kv_precision": "int8"})
    details = turn(one, "And who eats them?")["prompt_tokens_details"]
    assert details["converted_tokens"] == details["cached_tokens"] == num_full
    log = platform.get(f"/v1/sessions/{one}?include_tokens=true")["token_ids"]
    stranger = {"model": model, "prompt": log, "max_tokens": 1, "temperature": 0}
    assert platform.http.post("/v1/completions", json=stranger).json()["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 0
    }
    details = turn(one, "Why?")["prompt_tokens_details"]
    assert "converted_tokens" not in details
    assert details["cached_tokens"] > num_full
    platform.http.put(path, json={"kv_precision": "bf16"})
    other, num_full = begin("Say it in French, please. " + long)
    answer = platform.http.post(f"{path}/quantize", json={}).json()
    assert answer["kv_precision"] == {"k": "int8", "v": "int8"}, "the default where nothing is quantised"
    (pool,) = answer["pools"].values()
    assert pool["num_converted_blocks"] >= num_full // 32
    assert pool["after_bytes"] < pool["before_bytes"]
    details = turn(other, "And who eats them?")["prompt_tokens_details"]
    assert details == {"cached_tokens": num_full}, "found as it was re-encoded"
    platform.http.put(path, json={"kv_precision": "bf16"})
    for session_id in (one, other):
        platform.http.delete(f"/v1/sessions/{session_id}")


def test_models_are_listed_ready(platform: Any) -> None:
    models = {each["id"]: each for each in platform.get("/v1/models")["data"]}
    assert {model: each["ready"] for model, each in models.items()} == {"smollm2": True, "smollm2-int8": True}
    assert platform.get("/v1/models/smollm2")["max_model_len"] == 2048
    assert platform.http.get("/ready").status_code == 200
    assert platform.http.get("/health").status_code == 200
    assert platform.http.get("/v1/models/nothing").status_code == 404


def test_a_quota_changes_and_blocks_move_while_a_request_runs(platform: Any) -> None:
    path = "/v1/namespaces/smollm2"

    def say() -> str:
        answer = platform.chat("Tell me about ships.", max_tokens=48)
        return str(answer.json()["choices"][0]["message"]["content"])

    before = say()
    changed = platform.http.put(path, json={"limit": "120MiB", "weight": 2}).json()
    assert (changed["limit_bytes"], changed["weight"]) == (120 * 2**20, 2.0)
    with ThreadPoolExecutor(max_workers=1) as pool:
        running = pool.submit(say)
        while not running.done():
            assert platform.http.post(f"{path}/compact", json={}).status_code == 200
        assert running.result() == before
    trimmed = platform.http.post(f"{path}/trim", json={"to": "0"}).json()["pools"]
    assert sum(each["trimmed_bytes"] for each in trimmed.values()) > 0
    refused = platform.http.put(path, json={"guaranteed": "1TiB", "limit": "2TiB"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "guaranteed")
    restored = platform.http.put(path, json={"limit": "1TiB", "weight": 1}).json()
    assert restored["limit_bytes"] is None
