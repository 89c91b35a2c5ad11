"""Scarce memory, ends at any moment, and answers that come late: outputs stay the same and every block comes back."""

from __future__ import annotations

import random

import pytest
from engine_support import BLOCK_TOKENS, FAKE_GEOMETRY, FINGERPRINT, Harness, expected_greedy

from remora.cache_actors.local_pool import LocalDevice
from remora.namespaces.commands import Admit, Admitted, Extend, Granted, Refused
from remora.platform.base.clock import ManualClock
from remora.platform.base.ids import ModelId, NamespaceId, SequenceId

PROMPT = "The remora travels with a ray."


def test_case_21_more_than_fits_at_once_is_served_one_after_the_other_exactly(harness) -> None:
    # Four requests of 12 + 20 tokens (8 blocks each) in 16 blocks.
    one = harness(num_blocks=16)
    prompts = [f"prompt {i:04d}" for i in range(4)]
    ids = [one.submit(prompt, max_tokens=20) for prompt in prompts]
    one.finish()
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert one.outputs[request_id, 0].token_ids == expected_greedy(prompt, 20)
    assert one.engine.stats().num_preemptions > 0


def test_a_preempted_and_resumed_sampled_request_says_the_same(harness) -> None:
    sampling = {"temperature": 1.0, "max_tokens": 24, "frequency_penalty": 0.3}
    prompts = [f"prompt {i:04d}" for i in range(5)]
    tight, roomy = harness(num_blocks=14), harness(num_blocks=200)
    for one in (tight, roomy):
        for i, prompt in enumerate(prompts):
            one.submit(prompt, request_id=f"q{i}", seed=i, **sampling)
        one.finish()
    assert tight.engine.stats().num_preemptions > 0
    assert roomy.engine.stats().num_preemptions == 0
    for key, output in tight.outputs.items():
        assert output.token_ids == roomy.outputs[key].token_ids
        assert output.text == roomy.outputs[key].text


def test_case_15_waiting_requests_with_hits_in_a_nearly_full_pool_equal_serial_runs(harness) -> None:
    one = harness(num_blocks=20)
    one.run(PROMPT, max_tokens=4)
    prompts = [PROMPT[:20] + f"{i}" for i in range(4)] + [f"{i}" * 20 for i in range(4)]
    ids = [one.submit(prompt, max_tokens=8) for prompt in prompts]
    one.finish()
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert one.outputs[request_id, 0].token_ids == expected_greedy(prompt, 8)


def test_a_request_that_can_never_fit_is_over_quota_at_once(harness) -> None:
    one = harness(num_blocks=16, namespaces={"ns": 4})
    output = one.run(PROMPT, max_tokens=50)
    assert (output.finish_reason, output.error) == ("error", "OverQuota")
    assert output.retry_after_s > 0
    assert one.run("ab", max_tokens=5).token_ids == expected_greedy("ab", 5)


def test_a_request_that_waits_past_its_deadline_is_over_quota_with_a_time_to_come_back(harness) -> None:
    clock = ManualClock(5.0)
    one = harness(num_blocks=16, clock=clock)
    first = one.submit("a" * 40, max_tokens=20)
    one.step(2)
    second = one.submit("b" * 40, max_tokens=20, timeout_s=3.0)
    third = one.submit("c" * 40, max_tokens=20, timeout_s=3.0, n=2)
    one.step(2)
    assert one.outputs[second, 0].finish_reason is None
    clock.advance(3.1)
    one.step(1)
    for key in ((second, 0), (third, 0), (third, 1)):
        assert (one.outputs[key].error, one.outputs[key].retry_after_s) == ("OverQuota", 2.0)
    one.finish()
    assert one.outputs[first, 0].token_ids == expected_greedy("a" * 40, 20)


def test_a_request_that_waits_for_a_slot_has_a_deadline_too(harness) -> None:
    clock = ManualClock(5.0)
    one = harness(clock=clock, max_num_seqs=1)
    one.submit("a", max_tokens=30)
    one.step(2)
    second = one.submit("b", timeout_s=1.0)
    clock.advance(2.0)
    one.step(1)
    assert one.outputs[second, 0].error == "OverQuota"


def test_once_started_a_request_has_no_deadline_even_when_it_is_preempted(harness) -> None:
    clock = ManualClock(5.0)
    one = harness(num_blocks=14, clock=clock)
    ids = [one.submit(f"prompt {i:04d}", max_tokens=24, timeout_s=10.0) for i in range(3)]
    one.step(6)
    clock.advance(60.0)
    one.finish()
    assert one.engine.stats().num_preemptions > 0
    for i, request_id in enumerate(ids):
        assert one.outputs[request_id, 0].finish_reason == "length"
        assert one.outputs[request_id, 0].token_ids == expected_greedy(f"prompt {i:04d}", 24)


def test_one_namespace_that_is_full_does_not_hold_up_another(harness) -> None:
    one = harness(num_blocks=64, namespaces={"full": 12, "free": None})
    for i in range(6):
        one.submit(f"{i} of the full", namespace="full", max_tokens=25)
    one.step(4)
    quick = one.submit("quick", namespace="free", max_tokens=3)
    one.step(5)
    assert one.outputs[quick, 0].finish_reason == "length"
    one.finish()


def test_memory_is_asked_for_ahead_so_that_nobody_pauses_while_there_is_some(harness) -> None:
    one = harness()
    one.submit(PROMPT, max_tokens=40)
    one.finish()
    assert len(one.model.decoder.steps) == 40


def test_publication_is_rate_limited_but_an_end_publishes_at_once() -> None:
    clock = ManualClock(5.0)
    one = Harness(clock=clock, publish_interval_s=0.05)
    sent = []
    one.pool.deny = lambda command: sent.append(type(command).__name__)
    one.submit("x" * 20, max_tokens=20)
    one.step(3)
    clock.advance(0.01)
    one.step(10)
    assert sent.count("Publish") == 1
    clock.advance(0.06)
    one.step(1)
    assert sent.count("Publish") == 2
    one.finish()
    assert sent[-2:] == ["Publish", "Release"]
    one.close()


def test_blocks_of_different_namespaces_are_never_shared(harness) -> None:
    one = harness(namespaces={"a": None, "b": None})
    assert one.run(PROMPT, namespace="a").num_cached_tokens == 0
    assert one.run(PROMPT, namespace="b").num_cached_tokens == 0
    assert one.run(PROMPT, namespace="a").num_cached_tokens > 0


def test_two_engines_share_prefixes_through_the_pool() -> None:
    clock = ManualClock(1.0)
    device = LocalDevice(
        data_bytes=64 * FAKE_GEOMETRY.block_bytes, extent_bytes=64 * FAKE_GEOMETRY.block_bytes, clock=clock
    )
    device.set_quota(NamespaceId("ns"), ModelId("model"))
    engines = [
        Harness(clock=clock, pool=device.attach(FAKE_GEOMETRY, model_id=ModelId("model"), fingerprint=FINGERPRINT))
        for _ in range(2)
    ]
    assert engines[0].run(PROMPT).num_cached_tokens == 0
    output = engines[1].run(PROMPT)
    assert output.token_ids == expected_greedy(PROMPT, 8)
    assert output.num_cached_tokens == (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    for one in engines:
        one.close()


# ---- ends


def test_a_cancelled_request_frees_its_blocks_and_stops_within_one_step(harness) -> None:
    one = harness()
    request_id = one.submit(PROMPT, max_tokens=50)
    one.step(5)
    assert one.num_referenced_blocks > 0
    num_steps = len(one.model.decoder.steps)
    one.cancel(request_id)
    one.step(1)
    assert one.num_referenced_blocks == 0
    assert len(one.model.decoder.steps) == num_steps
    assert one.outputs[request_id, 0].finish_reason == "abort"


def test_cancelling_queued_parked_and_held_requests_leaves_nothing(harness) -> None:
    one = harness(num_blocks=16, max_num_seqs=2)
    running = one.submit("a" * 40, max_tokens=20)
    one.step(2)
    ids = [one.submit("b" * 40, max_tokens=20), one.submit("c", max_tokens=3), one.submit("d" * 9, n=3, max_tokens=3)]
    one.step(1)
    assert one.engine.stats().num_parked == 1
    for request_id in ids:
        one.cancel(request_id)
    one.step(1)
    assert all(one.outputs[key].finish_reason == "abort" for key in one.outputs if key[0] in ids)
    assert (one.engine.stats().num_waiting, one.engine.stats().num_parked) == (0, 0)
    one.finish()
    assert one.outputs[running, 0].token_ids == expected_greedy("a" * 40, 20)


def test_case_20_a_turn_after_an_aborted_one_has_the_whole_history(harness) -> None:
    one = harness()
    history = list(PROMPT.encode())
    first = one.run(history, max_tokens=6)
    history += first.token_ids + list(b" turn 1")
    dropped = one.submit(history, max_tokens=40)
    one.step(2)
    assert len(one.outputs[dropped, 0].token_ids) >= 1
    one.cancel(dropped)
    one.step(1)
    assert one.num_referenced_blocks == 0
    history += list(b" turn 2")
    second = one.run(history, max_tokens=6)
    assert second.token_ids == expected_greedy(history, 6)
    assert second.num_cached_tokens > 0


def test_unknown_and_repeated_cancellations_are_ignored(harness) -> None:
    one = harness()
    one.cancel("never seen")
    request_id = one.submit(PROMPT)
    one.cancel(request_id)
    one.cancel(request_id)
    one.step(2)
    assert one.outputs[request_id, 0].finish_reason == "abort"


def test_case_18_hundred_aborts_while_the_pool_does_not_answer_leave_the_baseline(harness) -> None:
    one = harness(delivery="manual")
    for i in range(100):
        request_id = one.submit(f"{i}" + PROMPT, max_tokens=10)
        one.step(1)
        one.cancel(request_id)
        one.step(1)
        assert one.num_referenced_blocks == 0
    one.pool.deliver_answers()
    one.step(2)
    assert one.num_referenced_blocks == 0
    assert one.run(PROMPT).token_ids == expected_greedy(PROMPT, 8)


def test_case_19_a_late_grant_for_an_aborted_request_is_given_back(harness) -> None:
    one = harness(num_blocks=16, delivery="manual")
    first = one.submit("a" * 40, max_tokens=20)
    one.step(1)
    one.pool.deliver_answers()
    one.step(1)
    second = one.submit("b" * 40, max_tokens=20)
    one.step(1)
    one.pool.deliver_answers()
    one.step(1)
    assert one.engine.stats().num_parked == 1
    one.cancel(first)
    one.step(1)  # the pool grants the second now; the event is on its way
    one.cancel(second)
    one.step(1)
    one.pool.deliver_events()
    one.pool.deliver_answers()
    one.step(2)
    assert one.num_referenced_blocks == 0


def test_an_event_that_overtakes_its_answer_is_understood(harness) -> None:
    one = harness(num_blocks=16, delivery="manual")
    first = one.submit("a" * 40, max_tokens=20)
    one.step(1)
    one.pool.deliver_answers()
    one.step(1)
    second = one.submit("b" * 40, max_tokens=3)
    one.step(1)
    one.cancel(first)
    one.step(1)
    one.pool.deliver_events()
    one.step(1)
    one.pool.deliver_answers()
    for _ in range(20):
        one.step(1)
        one.pool.deliver_answers()
    assert one.outputs[second, 0].token_ids == expected_greedy("b" * 40, 3)


@pytest.mark.parametrize("delivery", ["inline", "threads"])
@pytest.mark.parametrize("seed", range(3))
def test_block_counts_return_to_the_baseline_after_200_mixed_requests_half_of_them_aborted(
    harness, seed, delivery
) -> None:
    one = harness(num_blocks=48, delivery=delivery, seed=seed, max_num_seqs=6, max_step_tokens=32)
    rng = random.Random(seed)
    todo = list(range(200))
    live: dict[str, tuple[str, int, int]] = {}
    to_abort: list[tuple[int, str]] = []
    step = 0
    while todo or not one.is_done:
        step += 1
        for _ in range(rng.randint(0, 3)):
            if not todo:
                break
            number = todo.pop()
            prompt = PROMPT[: rng.randint(1, 30)] + "xy"[: rng.randint(0, 2)]
            count, n = rng.randint(1, 20), rng.choice([1, 1, 1, 3])
            request_id = one.submit(prompt, max_tokens=count, n=n, priority=rng.choice([0, 0, 1]), timeout_s=1e6)
            live[request_id] = (prompt, count, n)
            if number % 2:
                to_abort.append((step + rng.randint(0, 12), request_id))
        for when, request_id in list(to_abort):
            if when <= step:
                one.cancel(request_id)
                to_abort.remove((when, request_id))
        one.step(1)
        assert step < 20_000
    for request_id, (prompt, count, n) in live.items():
        for choice in range(n):
            output = one.outputs[request_id, choice]
            expected = expected_greedy(prompt, count)
            assert output.token_ids == expected[: len(output.token_ids)]
            if output.finish_reason != "abort":
                assert (output.finish_reason, output.token_ids) == ("length", expected)
    one.settle()
    assert one.num_referenced_blocks == 0
    assert one.engine.stats().load_tokens == 0


# ---- what breaks


def test_a_refused_admission_ends_that_request_and_no_other(harness) -> None:
    one = harness()
    one.pool.deny = lambda command: (
        Refused(error="InvalidRequest", message="no")
        if isinstance(command, Admit) and command.num_tokens == 3
        else None
    )
    bad, good = one.submit("abc"), one.submit(PROMPT)
    one.finish()
    assert (one.outputs[bad, 0].finish_reason, one.outputs[bad, 0].error) == ("error", "InvalidRequest")
    assert one.outputs[good, 0].token_ids == expected_greedy(PROMPT, 8)


def test_a_refused_extension_ends_only_the_sequence_that_is_to_blame(harness) -> None:
    one = harness()
    bad, good = one.submit("abc", max_tokens=20), one.submit("defg", max_tokens=20)
    one.step(2)
    bad_sequence_id = one.engine._book.live[bad].sequences[0].sequence_id

    def deny(command):
        if isinstance(command, Extend) and any(item.sequence_id == bad_sequence_id for item in command.items):
            return Refused(error="UnknownSequence", message="who?")
        return None

    one.pool.deny = deny
    one.finish()
    assert one.outputs[bad, 0].error == "UnknownSequence"
    assert one.outputs[good, 0].token_ids == expected_greedy("defg", 20)


def test_a_grant_of_a_run_that_nobody_knows_is_released(harness) -> None:
    one = harness()
    commands = []
    one.pool.deny = lambda command: commands.append(command)
    late = Admitted(sequence_id=SequenceId("of another time"), blocks=(1, 2), num_cached_blocks=0)
    one.engine._on_event(Granted(event_no=1, admitted=late))
    one.step(1)
    assert [command.sequence_ids for command in commands] == [("of another time",)]
