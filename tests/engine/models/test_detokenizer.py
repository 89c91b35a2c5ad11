"""Streams of text: whole characters only, and joined they are the decoded output."""

from __future__ import annotations

import random
import timeit

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from remora.deployments.models.detokenizer import DetokenizerState, IncrementalDetokenizer
from remora.deployments.models.token_pieces import TokenPieces
from remora.deployments.models.tokenizer import ChatTokenizer

TEXT = "Hello wörld 👩‍👩‍👧 日本語\n\n  def f(): return '½'"


def sentencepiece_tokenizer() -> ChatTokenizer:
    """As Llama 2's: word marks, byte fallback, and a first space that is no text."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁world", "!"]
    tokenizer = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    return ChatTokenizer(tokenizer, eos_token_ids=[2])


def stream(tokenizer: ChatTokenizer, prompt: list[int], output: list[int], **options: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt, **options)
    return [detokenizer.push(token_id) for token_id in output] + [detokenizer.flush()]


def test_joined_deltas_are_the_decoded_text(smollm2_tokenizer: ChatTokenizer) -> None:
    ids = smollm2_tokenizer.encode(TEXT, add_special_tokens=False)
    for cut in range(len(ids)):
        deltas = stream(smollm2_tokenizer, [1, 4093, 198], ids[cut:])
        want = smollm2_tokenizer.decode(ids[cut:])
        assert "".join(deltas) == want
        for delta in deltas[1:]:
            delta.encode()


def test_no_delta_holds_a_part_of_a_character(smollm2_tokenizer: ChatTokenizer) -> None:
    ids = smollm2_tokenizer.encode(TEXT, add_special_tokens=False)
    assert any("\ufffd" in smollm2_tokenizer.token_text(i) for i in ids), "the text must split characters over tokens"
    for end in range(len(ids) + 1):
        text = "".join(stream(smollm2_tokenizer, [1], ids[:end]))
        assert "\ufffd" not in text
        assert TEXT.startswith(text)


def test_random_ids_stream_what_they_decode_to(smollm2_tokenizer: ChatTokenizer) -> None:
    rng = random.Random(3)
    for _ in range(200):
        # Bytes alone (ids of the byte alphabet) make every kind of broken UTF-8.
        ids = [rng.choice([rng.randint(17, 300), rng.randint(17, 49151)]) for _ in range(30)]
        # An ASCII token at the end makes sure that nothing is held back.
        ids += smollm2_tokenizer.encode("!", add_special_tokens=False)
        assert "".join(stream(smollm2_tokenizer, [], ids)) == smollm2_tokenizer.decode(ids)


def test_a_prompt_that_ends_inside_a_character_is_not_echoed(smollm2_tokenizer: ChatTokenizer) -> None:
    """vLLM#48853: ids for "Hello " + the first 2 of 3 bytes; only what is generated may come out."""
    single = {smollm2_tokenizer.token_bytes(i): i for i in range(17, 400)}
    euro = "€".encode()
    prompt = [
        *smollm2_tokenizer.encode("Hello ", add_special_tokens=False),
        single[euro[:1]],
        single[euro[1:2]],
    ]
    exclamation = smollm2_tokenizer.encode("!", add_special_tokens=False)
    assert stream(smollm2_tokenizer, prompt, [single[euro[2:]], *exclamation]) == ["€", "!", ""]
    assert stream(smollm2_tokenizer, prompt, exclamation) == ["!", ""], "the prompt's broken bytes are no output"
    assert stream(smollm2_tokenizer, prompt, [single[euro[:1]], *exclamation]) == ["", "\ufffd!", ""]


def test_special_tokens_are_text_only_when_asked_for(smollm2_tokenizer: ChatTokenizer) -> None:
    ids = smollm2_tokenizer.encode("a<|im_end|>b", add_special_tokens=False)
    assert "".join(stream(smollm2_tokenizer, [], ids)) == "ab"
    assert "".join(stream(smollm2_tokenizer, [], ids, skip_special_tokens=False)) == "a<|im_end|>b"


def test_a_word_mark_is_a_space_except_at_the_start_of_a_text() -> None:
    tokenizer = sentencepiece_tokenizer()
    hello, world, exclamation = 260, 261, 262
    for prompt in ([], [1]):
        assert "".join(stream(tokenizer, prompt, [hello, world, exclamation])) == "Hello world!"
    assert "".join(stream(tokenizer, [1, hello], [world, exclamation])) == " world!"
    assert tokenizer.decode([1, hello, world]) == "Hello world"
    byte_ids = [3 + byte for byte in "é€".encode()]
    assert stream(tokenizer, [1, hello], byte_ids) == ["", "é", "", "", "€", ""]


@pytest.mark.parametrize("cut", range(12))
def test_a_moved_state_goes_on_without_a_gap(smollm2_tokenizer: ChatTokenizer, cut: int) -> None:
    ids = smollm2_tokenizer.encode("日本👩‍👩‍👧 x", add_special_tokens=False)
    first = smollm2_tokenizer.detokenizer([1])
    before = "".join(first.push(i) for i in ids[:cut])
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(first.state()), type=DetokenizerState)
    second = IncrementalDetokenizer.from_state(smollm2_tokenizer.pieces, state)
    assert before + "".join(second.push(i) for i in ids[cut:]) == "日本👩‍👩‍👧 x"


def test_a_token_costs_a_few_microseconds(smollm2_tokenizer: ChatTokenizer) -> None:
    ids = smollm2_tokenizer.encode(TEXT * 50, add_special_tokens=False)
    detokenizer = smollm2_tokenizer.detokenizer([1])
    seconds = min(timeit.repeat(lambda: [detokenizer.push(i) for i in ids], number=1, repeat=5))
    assert seconds / len(ids) < 20e-6


def test_pieces_of_negative_ids_are_a_bug(smollm2_tokenizer: ChatTokenizer) -> None:
    pieces: TokenPieces = smollm2_tokenizer.pieces
    with pytest.raises(IndexError):
        pieces[-1]
