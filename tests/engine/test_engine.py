"""What a client gets from the engine: the model's own tokens, whatever goes on around them."""

from __future__ import annotations

import numpy as np
import pytest
from engine_support import BLOCK_TOKENS, EOS, VOCAB, expected_greedy, history_logits

PROMPT = "The remora travels with a ray."


def test_a_greedy_request_gives_the_models_tokens_and_ends_at_max_tokens(harness) -> None:
    output = harness().run(PROMPT, max_tokens=20)
    assert output.token_ids == expected_greedy(PROMPT, 20)
    assert output.finish_reason == "length"
    assert output.num_cached_tokens == 0


def test_text_is_the_tokens_text_and_never_a_broken_character(harness) -> None:
    one = harness()
    text = "añ日本🐟 end"
    data = text.encode()

    def spell(history):
        logits = np.full(VOCAB, -9.0, np.float32)
        at = len(history) - 3
        logits[data[at] if at < len(data) else EOS] = 9.0
        return logits

    one.model.decoder.logits_of = spell
    output = one.run("abc", max_tokens=100)
    assert output.text == text
    assert output.finish_reason == "stop"
    assert output.token_ids == [*data, EOS]


def test_case_22_a_prompt_that_ends_inside_a_character_is_never_echoed(harness) -> None:
    one = harness()
    fish = "日".encode()
    one.model.decoder.logits_of = lambda history: np.eye(VOCAB, dtype=np.float32)[
        fish[2] if history[-1] == fish[1] else EOS
    ]
    output = one.run(list(b"Hello ") + list(fish[:2]), max_tokens=5)
    assert output.text == "日"


@pytest.mark.parametrize("budget", [1, 3, 7, 64])
def test_chunks_of_a_prompt_change_nothing(harness, budget) -> None:
    output = harness(max_step_tokens=budget).run(PROMPT, max_tokens=12)
    assert output.token_ids == expected_greedy(PROMPT, 12)


def test_case_02_serial_requests_with_shared_prefixes_are_served_from_the_cache_unchanged(harness) -> None:
    one = harness()
    rng = np.random.default_rng(0)
    prompts = [PROMPT[: int(rng.integers(3, len(PROMPT)))] + "xyz"[: int(rng.integers(0, 3))] for _ in range(60)]
    num_cached = 0
    for prompt in prompts:
        output = one.run(prompt, max_tokens=6)
        assert output.token_ids == expected_greedy(prompt, 6)
        assert output.num_cached_tokens <= len(prompt) - 1
        num_cached += output.num_cached_tokens
    assert num_cached > 0


def test_case_01_a_prefix_of_a_cached_prompt_starts_like_a_cold_run(harness) -> None:
    one = harness()
    one.run(PROMPT + "Z Z Z", max_tokens=4)
    output = one.run(PROMPT[: len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS], max_tokens=5)
    assert output.token_ids == expected_greedy(PROMPT[: len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS], 5)
    assert output.num_cached_tokens == len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS - BLOCK_TOKENS


def test_a_second_turn_finds_the_answer_of_the_first_in_the_cache(harness) -> None:
    one = harness()
    first = one.run(PROMPT, max_tokens=18)
    turn = list(PROMPT.encode()) + first.token_ids + list(b" and then?")
    second = one.run(turn, max_tokens=4)
    assert second.token_ids == expected_greedy(turn, 4)
    computed = len(PROMPT) + 17
    assert second.num_cached_tokens == computed // BLOCK_TOKENS * BLOCK_TOKENS


def test_case_06_neighbours_with_other_text_at_the_same_positions_change_nothing(harness) -> None:
    one = harness(num_blocks=256)
    ids = {one.submit(f"{i} {PROMPT}", max_tokens=10 + i): i for i in range(8)}
    one.finish()
    for request_id, i in ids.items():
        assert one.outputs[request_id, 0].token_ids == expected_greedy(f"{i} {PROMPT}", 10 + i)
    assert max(len(step) for step in one.model.decoder.steps) == 8


def test_case_24_a_seeded_request_is_the_same_alone_and_among_others(harness) -> None:
    sampling = {"temperature": 1.0, "seed": 42, "max_tokens": 16}
    alone = harness().run(PROMPT, **sampling).token_ids
    for count in (1, 4):
        one = harness(num_blocks=256)
        for i in range(count):
            one.submit(f"{i}", temperature=1.5, max_tokens=20)
        one.step(3)
        request_id = one.submit(PROMPT, **sampling)
        one.finish()
        assert one.outputs[request_id, 0].token_ids == alone


def test_requests_without_a_seed_differ_by_their_id(harness) -> None:
    one = harness()
    outputs = [one.run(PROMPT, temperature=1.0, max_tokens=12).token_ids for _ in range(3)]
    assert len({tuple(tokens) for tokens in outputs}) == 3


def test_case_07_choices_of_one_seed_differ_and_repeat(harness) -> None:
    one = harness()
    texts = []
    for _ in range(2):
        request_id = one.submit(PROMPT, n=3, seed=7, temperature=1.0, max_tokens=10)
        one.finish()
        texts.append([tuple(one.outputs[request_id, choice].token_ids) for choice in range(3)])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3


def test_case_08_further_choices_report_the_first_ones_cached_tokens(harness) -> None:
    one = harness()
    request_id = one.submit(PROMPT, n=4, temperature=1.0, max_tokens=6)
    one.finish()
    assert [one.outputs[request_id, choice].num_cached_tokens for choice in range(4)] == [0, 0, 0, 0]
    # The prompt was computed once: the others found its full blocks.
    assert one.engine.stats().num_prompt_tokens == len(PROMPT) + 3 * (len(PROMPT) - (len(PROMPT) - 1) // 4 * 4)


def test_further_choices_of_a_prompt_shorter_than_a_block_are_served(harness) -> None:
    one = harness()
    request_id = one.submit("ab", n=3, max_tokens=5)
    one.finish()
    for choice in range(3):
        assert one.outputs[request_id, choice].token_ids == expected_greedy("ab", 5)


def test_logprobs_stand_beside_their_tokens(harness) -> None:
    output = harness().run(PROMPT, max_tokens=9, logprobs=2)
    assert len(output.logprobs) == 9
    history = list(PROMPT.encode())
    for token_id, entries in zip(output.token_ids, output.logprobs, strict=True):
        logits = history_logits(np.array(history, np.int32)).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum())
        assert entries[0].token_id == entries[1].token_id == token_id
        assert len(entries) == 3
        for entry in entries:
            assert entry.logprob == pytest.approx(logprobs[entry.token_id], abs=1e-4)
        history.append(token_id)


def test_a_stop_string_across_tokens_ends_the_text_before_it(harness) -> None:
    one = harness()
    answer = b"the answer is: END of it"
    one.model.decoder.logits_of = lambda history: np.eye(VOCAB, dtype=np.float32)[
        answer[len(history) - len(PROMPT)] if len(history) - len(PROMPT) < len(answer) else EOS
    ]
    output = one.run(PROMPT, max_tokens=60, stop=("END", "never"))
    assert (output.text, output.finish_reason, output.stop_reason) == ("the answer is: ", "stop", "END")


def test_min_tokens_delays_the_end_and_ends_of_all_kinds_are_kept_out(harness) -> None:
    one = harness()

    def eager(history):
        logits = history_logits(history)
        logits[EOS] = 50.0
        logits[65] = 40.0
        return logits

    one.model.decoder.logits_of = eager
    output = one.run(PROMPT, max_tokens=20, min_tokens=5, stop_token_ids=(65,))
    assert output.finish_reason == "stop"
    assert len(output.token_ids) == 6
    assert not {EOS, 65} & set(output.token_ids[:5])


@pytest.mark.parametrize("num_given", [0, 1, 5, 11])
def test_a_failed_over_request_goes_on_behind_its_tokens_with_the_same_stream(harness, num_given) -> None:
    sampling = {"temperature": 0.9, "seed": 3, "max_tokens": 12, "presence_penalty": 0.5, "request_id": "same"}
    whole = harness().run(PROMPT, **sampling)
    resumed = harness().run(PROMPT, given=(tuple(whole.token_ids[:num_given]),), **sampling)
    assert resumed.token_ids == whole.token_ids
    assert resumed.finish_reason == whole.finish_reason


def test_a_failed_over_text_joins_where_it_broke_off(harness) -> None:
    answer = "日本 STO STOP it".encode()

    def spell(history):
        at = len(history) - len(PROMPT)
        return np.eye(VOCAB, dtype=np.float32)[answer[at] if at < len(answer) else EOS]

    whole = harness()
    whole.model.decoder.logits_of = spell
    expected = whole.run(PROMPT, max_tokens=40, stop=("STOP",))
    assert expected.text == "日本 STO "
    for num_given in range(1, len(expected.token_ids)):
        first_part = "".join(delta.text for delta in whole.deltas[:num_given])
        other = harness()
        other.model.decoder.logits_of = spell
        given = (tuple(expected.token_ids[:num_given]),)
        output = other.run(PROMPT, max_tokens=40, stop=("STOP",), given=given)
        assert first_part + output.text == expected.text
        assert output.stop_reason == "STOP"


def test_a_failed_over_choice_that_was_at_its_end_ends_at_once(harness) -> None:
    one = harness()
    done = tuple(expected_greedy(PROMPT, 6))
    request_id = one.submit(PROMPT, n=2, max_tokens=6, given=(done, done[:2]))
    one.finish()
    assert one.outputs[request_id, 0].finish_reason == "length"
    assert one.outputs[request_id, 1].token_ids == list(done)


def test_cached_tokens_never_exceed_the_prompt_after_a_failover(harness) -> None:
    one = harness()
    whole = one.run(PROMPT, max_tokens=24)
    again = one.run(PROMPT, max_tokens=24, given=(tuple(whole.token_ids[:20]),))
    assert again.token_ids == whole.token_ids
    assert again.num_cached_tokens == len(PROMPT)


def test_a_repeated_request_replaces_the_first(harness) -> None:
    one = harness()
    one.submit(PROMPT, request_id="twice", max_tokens=12)
    one.step(4)
    one.submit(PROMPT, request_id="twice", max_tokens=12)
    one.finish()
    assert one.outputs["twice", 0].token_ids == expected_greedy(PROMPT, 12)


def test_stats_count_what_happened(harness) -> None:
    one = harness()
    one.submit(PROMPT, max_tokens=5)
    one.submit("", max_tokens=5)
    one.finish()
    stats = one.engine.stats()
    assert stats.num_requests == 2
    assert stats.num_finished == {"stop": 0, "length": 1, "abort": 0, "error": 1}
    assert (stats.num_prompt_tokens, stats.num_output_tokens) == (len(PROMPT), 5)
    assert sum(stats.time_to_first_token_s.counts) == 1
    assert sum(stats.inter_token_s.counts) == 4
    assert 0 < stats.turn_s < stats.step_s.sum
    assert (stats.num_running, stats.num_waiting, stats.load_tokens) == (0, 0, 0)
    assert stats.num_published_blocks == (len(PROMPT) + 4) // BLOCK_TOKENS
