"""What a user sees of each command: its output, its one-sentence errors and its exit code."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from remora.platform.cli.chat import Conversation, _talk
from remora.platform.cli.client import ServerRefused

if TYPE_CHECKING:
    from tests.unit.platform.conftest import FakeServer

Run = Callable[..., Any]
NOBODY = "http://127.0.0.1:9"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_question_on_the_command_line_is_answered_once(run: Run, server: FakeServer) -> None:
    ran = run("chat", "--url", server.url, "-s", "Be brief.", "--seed", "7", "What", "is", "it?")
    assert (ran.code, ran.out, ran.err) == (0, "A remora is a fish.\n", "")
    (body,) = server.bodies
    assert body["model"] == "tiny"
    assert body["stream"] is True
    assert body["seed"] == 7
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is it?"},
    ]
    assert "namespace" not in body


def test_a_question_on_standard_input_is_answered_once(
    run: Run, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("What is it?\n"))
    ran = run("chat", "--url", server.url, "-m", "other")
    assert ran.out == "A remora is a fish.\n"
    assert server.bodies[0]["model"] == "other"


def test_a_conversation_in_a_terminal_remembers_what_was_said(
    run: Run, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = iter(["Hello", "", "/help", "And you?", "/clear", "Anew", "/exit"])
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda _prompt: next(typed))
    ran = run("chat", "--url", server.url)
    assert ran.code == 0
    assert ran.out.count("A remora is a fish.\n") == 3
    assert [[message["content"] for message in body["messages"]] for body in server.bodies] == [
        ["Hello"],
        ["Hello", "A remora is a fish.", "And you?"],
        ["Anew"],
    ]


def test_an_error_in_a_terminal_is_told_and_the_question_is_forgotten(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = iter(["Hello"])

    def read(_prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    server.error_in_stream = "the replica went away"
    with httpx.Client(base_url=server.url) as client:
        conversation = Conversation(client, "tiny", None, {})
        _talk(conversation)
        assert conversation.messages == []
        with pytest.raises(ServerRefused, match="the replica went away"):
            list(conversation.ask("Hello"))
    assert "error: the replica went away" in capsys.readouterr().err


def test_a_refusal_of_the_server_is_one_sentence_and_exit_code_1(run: Run, server: FakeServer) -> None:
    server.error = (404, "The model 'x' does not exist.")
    ran = run("chat", "--url", server.url, "-m", "x", "Hello")
    assert (ran.code, ran.out, ran.err) == (1, "", "remora: 404: The model 'x' does not exist.\n")


@pytest.mark.parametrize("command", [["chat", "Hello"], ["ns", "list"], ["bench", "http"], ["status"]])
def test_a_server_that_is_not_there_is_named_with_the_way_out(run: Run, command: list[str]) -> None:
    ran = run(*command, "--url", NOBODY)
    assert ran.code == 1
    assert ran.err.startswith(f"remora: no server answers at {NOBODY}")
    assert "remora up" in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("command", ["status"])
def test_without_an_instance_status_says_so(run: Run, command: str) -> None:
    ran = run(command)
    assert ran.code == 1
    assert "Nothing is running" in ran.out


def test_down_without_an_instance_is_no_error(run: Run) -> None:
    ran = run("down")
    assert (ran.code, ran.out) == (0, "No Remora named 'default' is running.\n")


def test_bench_counts_tokens_requests_and_times(run: Run, server: FakeServer) -> None:
    ran = run(
        "bench",
        "http",
        "--url",
        server.url,
        "--clients",
        "1,3",
        "--requests",
        "2",
        "--output-tokens",
        "9",
        "--output",
        "jsonl",
    )
    assert ran.code == 0, ran.err
    summaries = [json.loads(line) for line in ran.out.splitlines()]
    assert [(each["clients"], each["requests"]) for each in summaries] == [(1, 2), (3, 6)]
    assert all(each["tokens_per_s"] > 0 for each in summaries)
    assert all(0 < each["ttft_p50_s"] <= each["ttft_p99_s"] < 60 for each in summaries)
    # One run to warm up, then 2 and 6 requests, none with a prompt of another.
    assert len(server.bodies) == 2 + 2 + 6
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(prompts)) == len(prompts)
    assert {len(prompt) for prompt in prompts} == {128}
    assert {body["max_tokens"] for body in server.bodies} == {9}


def test_bench_sends_at_a_rate_with_lengths_from_a_range_and_counts_what_kept_the_bounds(
    run: Run, server: FakeServer, tmp_path: Path
) -> None:
    plot = tmp_path / "load.svg"
    loads = (
        "--rates",
        "40",
        "--requests",
        "1",
        "--prompt-tokens",
        "3-6",
        "--output-tokens",
        "8~0.5",
        "--plot",
        str(plot),
    )
    good = run("bench", "http", "--url", server.url, *loads, "--output", "jsonl")
    assert good.code == 0, good.err
    (line,) = (json.loads(text) for text in good.out.splitlines())
    assert (line["requests_per_s"], line["requests"]) == (40.0, 40)
    assert {len(body["prompt"]) for body in server.bodies} == {3, 4, 5, 6}
    assert len({body["max_tokens"] for body in server.bodies}) > 3
    assert line["goodput_requests_per_s"] > 0
    assert "first, p99" in plot.read_text()
    late = run("bench", "http", "--url", server.url, *loads, "--max-ttft-s", "0", "--output", "jsonl")
    assert json.loads(late.out)["goodput_requests_per_s"] == 0


def test_bench_stops_at_the_first_refusal(run: Run, server: FakeServer) -> None:
    server.error = (429, "over quota")
    ran = run("bench", "http", "--url", server.url, "--clients", "2")
    assert ran.code == 1
    assert "429" in ran.err
    assert "over quota" in ran.err


def test_validate_accepts_a_good_file_and_names_what_is_wrong_in_a_bad_one(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("models:\n- {name: a, source: org/a}\n")
    assert run("validate", "--no-models", str(path)).code == 0
    path.write_text("models:\n- {name: a, source: org/a, weights: int3}\n")
    ran = run("validate", "--no-models", str(path))
    assert ran.code == 2
    assert "models.0.weights: 'int3' is not allowed" in ran.err


def test_validate_finds_a_model_that_is_not_there(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(f"models:\n- {{name: a, source: {tmp_path}/nowhere/model}}\n")
    ran = run("validate", str(path))
    assert ran.code == 1
    assert "nowhere/model" in ran.err


def test_ns_list_adds_up_the_pools_of_each_tier_and_show_prints_one(run: Run, server: FakeServer) -> None:
    figures = {"tier": "device", "used_bytes": 1024, "cached_bytes": 2048, "borrowed_bytes": 0}
    quota = {"guaranteed_bytes": 1048576, "limit_bytes": None, "weight": 1.0}
    namespace = {
        "id": "chat",
        "model": "tiny",
        **quota,
        "kv_precision": {"k": "int8", "v": "int4"},
        "tiers": {"device": quota, "another": {**quota, "limit_bytes": 4096}},
        "pools": {"one": figures, "two": figures},
    }
    server.documents["/v1/namespaces"] = {"data": [namespace]}
    lines = run("ns", "list", "--url", server.url).out.splitlines()[-2:]
    assert [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines] == [
        ["chat", "tiny", "int8/int4", "device", "1 MiB", "the arena", "1.0", "2 KiB", "4 KiB", "0 B"],
        ["chat", "tiny", "int8/int4", "another", "1 MiB", "4 KiB", "1.0", "0 B", "0 B", "0 B"],
    ]
    assert json.loads(run("ns", "show", "chat", "--url", server.url).out) == namespace
    missing = run("ns", "show", "cat", "--url", server.url)
    assert (missing.code, missing.err) == (1, "remora: no namespace 'cat'; one of: chat\n")


def test_ns_trim_and_compact_say_what_each_pool_did(run: Run, server: FakeServer) -> None:
    server.documents["/v1/namespaces/chat/trim"] = {
        "pools": {"one": {"trimmed_bytes": 2048, "num_released_extents": 3}}
    }
    moved = {"num_moved_blocks": 7, "num_moving_blocks": 2, "num_released_extents": 1, "num_extents": 4}
    server.documents["/v1/namespaces/chat/compact"] = {"pools": {"one": moved}}
    assert run("ns", "trim", "chat", "--url", server.url).out.splitlines()[-1].split() == ["one", "2", "KiB", "3"]
    assert run("ns", "compact", "chat", "--url", server.url).out.splitlines()[-1].split() == ["one", "7", "2", "1", "4"]


def test_ns_quantize_says_what_each_pool_wrote_freed_and_holds(run: Run, server: FakeServer) -> None:
    done = {"num_converted_blocks": 7, "num_freed_blocks": 6, "num_left_blocks": 1, "before_bytes": 4096,
            "after_bytes": 2048}  # fmt: skip
    server.documents["/v1/namespaces/chat/quantize"] = {"pools": {"one": done}}
    ran = run("ns", "quantize", "chat", "--kv", "int8", "--url", server.url)
    assert ran.out.splitlines()[-1].split() == ["one", "7", "6", "1", "4", "KiB", "2", "KiB"]


def test_ns_set_asks_for_something_to_change(run: Run, server: FakeServer) -> None:
    ran = run("ns", "set", "chat", "--url", server.url)
    assert ran.code == 2
    assert "at least one of --guaranteed" in ran.err


def test_ns_advise_says_what_more_memory_would_gain(run: Run, server: FakeServer) -> None:
    curve = [{"size_bytes": 1024, "hit_rate": 0.25}, {"size_bytes": 4096, "hit_rate": 0.5}]
    advice = {"working_set_bytes": 8192, "curve": curve, "enough_bytes": 4096}
    pool = {"used_bytes": 1024, "cached_bytes": 2048, "advice": advice}
    fresh = {**pool, "advice": {"working_set_bytes": 0, "curve": [], "enough_bytes": 0}}
    server.documents["/v1/namespaces/chat/a"] = {"id": "chat/a", "pools": {"one": pool, "two": fresh}}
    lines = run("ns", "advise", "chat/a", "--url", server.url).out.splitlines()
    assert lines[0] == (
        "one: 8 KiB used in the last hour, 3 KiB held; more than 4 KiB would gain less than 5 % of the hit rate"
    )
    assert [line.split() for line in lines[2:5]] == [
        ["CACHE", "FOUND"],
        ["1", "KiB", "25.0", "%"],
        ["4", "KiB", "50.0", "%"],
    ]
    assert lines[-1].endswith("nothing has been looked up twice yet")
    shown = json.loads(run("ns", "advise", "chat/a", "--json", "--url", server.url).out)
    assert shown == {"one": advice, "two": fresh["advice"]}


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["up", "--port", "70000"],
        ["bench", "http", "--clients", "x"],
        ["bench", "http", "--prompt-tokens", "9-1"],
    ],
)
def test_a_wrong_command_line_has_exit_code_2(run: Run, arguments: list[str]) -> None:
    ran = run(*arguments)
    assert ran.code == 2
    assert "Error:" in ran.err
