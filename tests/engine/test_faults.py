"""Whoever breaks something ends alone; the engine goes on."""

from __future__ import annotations

import re
import time

import msgspec
import numpy as np
import pytest
from engine_support import EOS, VOCAB, expected_greedy, history_logits

from remora.platform.base.clock import SystemClock
from remora.platform.base.errors import KernelError, Unavailable

PROMPT = "The remora travels with a ray."


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_end_their_own_request_only(harness, value) -> None:
    one = harness()

    def logits_of(history):
        logits = history_logits(history)
        if history[0] == ord("!") and len(history) > 6:
            logits[100] = value
        return logits

    one.model.decoder.logits_of = logits_of
    bad, good = one.submit("!bad", max_tokens=10), one.submit(PROMPT, max_tokens=10)
    one.finish()
    assert (one.outputs[bad, 0].finish_reason, one.outputs[bad, 0].error) == ("error", "KernelError")
    assert len(one.outputs[bad, 0].token_ids) == 3
    assert one.outputs[good, 0].token_ids == expected_greedy(PROMPT, 10)


def test_kv_that_is_not_finite_ends_its_own_request_and_its_blocks_are_never_shared(harness) -> None:
    one = harness(max_step_tokens=16)
    prompt = "!" + PROMPT * 2
    one.model.decoder.is_bad = lambda history: history[0] == ord("!") and len(history) == 40
    bad, good = one.submit(prompt, max_tokens=10), one.submit(PROMPT, max_tokens=60)
    one.finish()
    assert (one.outputs[bad, 0].finish_reason, one.outputs[bad, 0].error) == ("error", "KernelError")
    assert re.search(r"KV of tokens \d+ to \d+ is not finite", one.outputs[bad, 0].error_message)
    assert one.outputs[good, 0].token_ids == expected_greedy(PROMPT, 60)
    one.model.decoder.is_bad = lambda history: False
    again = one.submit(prompt, max_tokens=10)
    one.finish()
    assert one.outputs[again, 0].token_ids == expected_greedy(prompt, 10)
    # Steps before the bad one were published; nothing from the bad one on was.
    assert 0 < one.outputs[again, 0].num_cached_tokens < 40


def test_a_step_that_fails_is_repeated_without_the_sequence_that_broke_it(harness) -> None:
    one = harness()

    def trouble(history):
        if history[0] == ord("!") and len(history) == 8:
            raise KernelError("that one")

    one.model.decoder.trouble = trouble
    good = [one.submit(f"{i}{PROMPT}", max_tokens=10) for i in range(2)]
    bad = one.submit("!bad", max_tokens=10)
    good.append(one.submit(f"2{PROMPT}", max_tokens=10))
    one.finish()
    assert (one.outputs[bad, 0].error, one.outputs[bad, 0].error_message) == ("KernelError", "that one")
    for i, request_id in enumerate(good):
        assert one.outputs[request_id, 0].token_ids == expected_greedy(f"{i}{PROMPT}", 10)
    assert one.engine.stats().num_failed_steps == 1


def test_a_step_that_fails_as_a_whole_ends_its_sequences_and_the_next_request_works(harness) -> None:
    one = harness()
    broken = [True]

    def trouble(history):
        if broken[0]:
            raise RuntimeError("the back-end is upset")

    one.model.decoder.trouble = trouble
    ids = [one.submit(f"{i}{PROMPT}") for i in range(3)]
    one.finish()
    assert all(one.outputs[request_id, 0].error == "RemoraError" for request_id in ids)
    assert one.num_referenced_blocks == 0
    broken[0] = False
    assert one.run(PROMPT).token_ids == expected_greedy(PROMPT, 8)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, VOCAB]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "x" * 512}, "512"),
        ({"prompt": "a", "stop_token_ids": (VOCAB,)}, "stop_token_ids"),
        ({"prompt": "a", "logit_bias": ((VOCAB, 1.0),)}, "logit_bias"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature"),
        ({"prompt": "a", "temperature": -1.0}, "temperature"),
        ({"prompt": "a", "top_p": 0.0}, "top_p"),
        ({"prompt": "a", "min_p": 2.0}, "min_p"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "n": 0}, "n:"),
        ({"prompt": "a", "namespace": "nowhere"}, "nowhere"),
        ({"prompt": "a", "given": ((1, EOS, 2),)}, "output_token_ids"),
        ({"prompt": "a", "given": ((1,) * 9,)}, "output_token_ids"),
    ],
)
def test_case_25_a_request_that_cannot_be_served_is_answered_and_the_next_one_works(harness, options, field) -> None:
    one = harness()
    one.submit(**options)
    one.finish()
    (output,) = one.outputs.values()
    assert output.finish_reason == "error"
    assert output.error in ("InvalidRequest", "ContextLengthExceeded", "NotFound")
    assert field in (output.error_message or "")
    assert one.run(PROMPT).token_ids == expected_greedy(PROMPT, 8)


def test_the_context_bounds_the_output(harness) -> None:
    output = harness(num_blocks=200).run("x" * 505, max_tokens=100)
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 7


def wait_for(condition, timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "took too long"
        time.sleep(0.002)


def test_the_engine_serves_from_a_thread_of_its_own(harness) -> None:
    one = harness(clock=SystemClock(), delivery="threads", num_blocks=40, idle_wait_s=0.01, extend_retry_s=0.001)
    one.engine.start()
    ids = {one.submit(f"{i}{PROMPT}", max_tokens=15): i for i in range(12)}
    wait_for(lambda: one.is_done)
    for request_id, i in ids.items():
        assert one.outputs[request_id, 0].token_ids == expected_greedy(f"{i}{PROMPT}", 15)


def test_an_engine_without_requests_rests_until_one_comes(harness, monkeypatch) -> None:
    one = harness(clock=SystemClock(), delivery="threads", num_blocks=40, rest_wait_s=600.0)
    steps = []
    plain_step = one.engine.step
    monkeypatch.setattr(one.engine, "step", lambda: steps.append(1) or plain_step())
    one.engine.start()
    for _ in range(2):
        request_id = one.submit(PROMPT, max_tokens=15)
        wait_for(lambda: one.is_done)
        assert one.outputs[request_id, 0].token_ids == expected_greedy(PROMPT, 15)
        wait_for(lambda: one.num_referenced_blocks == 0)
        time.sleep(0.05)
        num_steps = len(steps)
        time.sleep(0.25)
        assert len(steps) == num_steps


def test_stopping_answers_what_is_live_as_unavailable_and_gives_its_blocks_back(harness) -> None:
    one = harness(clock=SystemClock(), num_blocks=200)
    one.model.decoder.trouble = lambda history: time.sleep(0.001)
    one.engine.start()
    request_id = one.submit(PROMPT, max_tokens=400)
    wait_for(lambda: one.outputs[request_id, 0].token_ids)
    one.engine.stop()
    output = one.outputs[request_id, 0]
    assert (output.finish_reason, output.error) == ("error", "Unavailable")
    assert output.retry_after_s > 0
    assert one.num_referenced_blocks == 0
    with pytest.raises(Unavailable):
        one.submit(PROMPT)


def test_a_bug_in_a_step_ends_what_is_live_and_the_thread_lives_on(harness, monkeypatch) -> None:
    one = harness(clock=SystemClock())
    one.engine.start()
    calls = []

    def broken_plan():
        calls.append(1)
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(one.engine._scheduler, "plan_step", broken_plan)
        request_id = one.submit(PROMPT)
        wait_for(lambda: one.is_done)
    assert one.outputs[request_id, 0].error == "RemoraError"
    assert "ZeroDivisionError" in (one.outputs[request_id, 0].error_message or "")
    again = one.submit(PROMPT)
    wait_for(lambda: one.outputs[again, 0].finish_reason is not None)
    assert one.outputs[again, 0].token_ids == expected_greedy(PROMPT, 8)
    assert calls


def test_a_detokenizer_that_breaks_ends_its_own_request_only(harness) -> None:
    one = harness()
    bad, good = one.submit("bad", max_tokens=10), one.submit(PROMPT, max_tokens=10)
    one.step(3)

    def broken(token_id):
        raise IndexError("no such token")

    one.engine._book.live[bad].sequences[0].output._detokenizer = type("Broken", (), {"push": staticmethod(broken)})()
    one.finish()
    assert (one.outputs[bad, 0].finish_reason, one.outputs[bad, 0].error) == ("error", "RemoraError")
    assert one.outputs[good, 0].token_ids == expected_greedy(PROMPT, 10)


def test_a_router_that_cannot_be_reached_does_not_stop_the_others(harness) -> None:
    one = harness()
    receive = one.engine._emit_deltas

    def emit(router_id, deltas):
        if router_id == "gone":
            raise ConnectionError("nobody there")
        receive(router_id, deltas)

    one.engine._emit_deltas = emit
    lost = one.request("lost", max_tokens=5)
    one.engine.submit(msgspec.structs.replace(lost, router_id="gone"))
    assert one.run(PROMPT).token_ids == expected_greedy(PROMPT, 8)
