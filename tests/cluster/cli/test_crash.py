"""Ends that nobody planned: signals while starting, and kill -9 of everything."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from remora.platform.cli.processes import kill_processes

if TYPE_CHECKING:
    from tests.cluster.cli.conftest import Up

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

#: More than four blocks of 32 tokens.
LONG_PROMPT = "The remora is a fish that travels with a larger one and changes its host. " * 12


def cached_tokens(up: Up) -> int:
    """Answers a long prompt; how much of it was in the cache."""
    response = httpx.post(
        f"{up.record.url}/v1/completions",
        json={"model": "tiny", "prompt": LONG_PROMPT, "max_tokens": 2, "temperature": 0},
        timeout=60,
        trust_env=False,
    )
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def call(up: Up, method: str, path: str, body: Any = None) -> Any:
    response = httpx.request(method, f"{up.record.url}{path}", json=body, timeout=60, trust_env=False)
    assert response.status_code == 200, response.text
    return response.json()


def say(up: Up, content: str) -> Any:
    """A turn of the session "s"."""
    body = {"model": "tiny", "session_id": "s", "messages": [{"role": "user", "content": content}], "max_tokens": 8}
    return call(up, "POST", "/v1/chat/completions", body)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_starting_leaves_nothing(make_up: Callable[[str], Up], number: signal.Signals) -> None:
    up = make_up(f"early-{number.name.lower()}")
    up.start()
    up.await_line("pool cpu0: created")
    record = up.record
    # A terminal's Ctrl-C reaches the whole group, and impatient people press it twice.
    for _ in range(2):
        os.killpg(up.process.pid, number)
        time.sleep(0.2)
    assert up.await_end(90) == 0, up.text
    up.assert_nothing_left(record)


def test_case_11_after_kill_9_of_everything_cache_and_sessions_are_there_and_go_on(
    make_up: Callable[[str], Up],
) -> None:
    """A turn is under way when everything is killed: it leaves no trace."""
    up = make_up("crash")
    up.start()
    up.await_line("ready: ")
    assert cached_tokens(up) == 0
    assert cached_tokens(up) > 100
    call(up, "POST", "/v1/sessions", {"model": "tiny", "id": "s"})
    say(up, LONG_PROMPT)
    before = call(up, "GET", "/v1/sessions/s?include_tokens=true")["token_ids"]
    time.sleep(0.5)
    killed = up.record
    turn = {"model": "tiny", "session_id": "s", "messages": [{"role": "user", "content": "More."}], "stream": True,
            "max_tokens": 500, "ignore_eos": True}  # fmt: skip
    url = f"{killed.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=turn, timeout=60, trust_env=False) as response:
        assert next(response.iter_lines())
        kill_processes([killed.process, killed.platform, *up.processes()])
    up.process.wait(10)
    assert up.files() != []
    assert "Nothing is running" in up.run("status").stdout

    up.start()
    up.await_line("ready: ")
    assert "left by an earlier instance" in up.text
    assert "pool cpu0: adopted" in up.text
    assert cached_tokens(up) > 100
    shown = call(up, "GET", "/v1/sessions/s?include_tokens=true")
    assert (shown["token_ids"], shown["busy"], shown["num_turns"]) == (before, False, 1)
    assert list(shown["blocks"]["device"].values()) == [len(before) // 32]
    usage = say(up, "More.")["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= len(before) // 32 * 32
    after = call(up, "GET", "/v1/sessions/s?include_tokens=true")
    assert after["token_ids"][: len(before)] == before
    assert after["num_turns"] == 2
    record = up.record
    assert record.instance_id != killed.instance_id
    up.process.send_signal(signal.SIGTERM)
    assert up.await_end(90) == 0, up.text
    up.assert_nothing_left(record)


def test_down_clears_what_an_up_that_was_killed_has_left(make_up: Callable[[str], Up]) -> None:
    up = make_up("orphans")
    up.start()
    up.await_line("pool cpu0: created")
    record = up.record
    kill_processes([record.process, record.platform])
    up.process.wait(10)
    done = up.run("down", "--name", "orphans")
    assert done.returncode == 0, done.stderr
    assert "Cleared what 'orphans' had left" in done.stdout
    up.assert_nothing_left(record)


def test_an_up_whose_ray_dies_stops_and_clears_everything(make_up: Callable[[str], Up]) -> None:
    up = make_up("rayless")
    up.start()
    up.await_line("pool cpu0: created")
    record = up.record
    kill_processes(up.processes())
    assert up.await_end(120) != 0, up.text
    up.assert_nothing_left(record)
