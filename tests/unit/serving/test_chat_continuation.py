"""What a template writes behind an answer."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from remora.deployments.models.chat_continuation import join_continuation, render_continuation
from remora.deployments.models.tokenizer import ChatTokenizer
from remora.platform.base.errors import InvalidRequest

CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}<s>[INST] {{ m.content | trim }} [/INST]{% else %} {{ m.content | trim }} </s>{% endif %}"
    "{% endfor %}"
)
HI = [{"role": "user", "content": "Hi"}]


def tokenizer_with(template: str) -> ChatTokenizer:
    vocab = {"a": 0, "b": 1}
    tokenizer = Tokenizer(WordLevel(vocab=vocab, unk_token="a"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>"])
    return ChatTokenizer(tokenizer, chat_template=template, eos_token_ids=(2,))


def test_the_end_of_the_answers_turn_comes_first_and_no_system_prompt_is_repeated() -> None:
    text = render_continuation(tokenizer_with(CHATML), HI, add_generation_prompt=True)
    assert text == "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_it_is_what_the_template_writes_for_the_whole_conversation() -> None:
    for template in (CHATML, LLAMA2):
        tokenizer = tokenizer_with(template)
        history = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "ANSWER"}]
        whole = tokenizer.render([*history, *HI], None, add_generation_prompt=True)
        assert whole.partition("ANSWER")[2] == render_continuation(tokenizer, HI, add_generation_prompt=True)


def test_an_end_of_turn_that_was_generated_is_not_written_twice() -> None:
    tokenizer = tokenizer_with(CHATML)
    assert join_continuation(tokenizer, [0, 2], [2, 1, 0]) == (1, 0)
    assert join_continuation(tokenizer, [0, 1], [2, 1, 0]) == (2, 1, 0)
    assert join_continuation(tokenizer, [0, 1], [1, 0]) == (1, 0)
    assert join_continuation(tokenizer, [], [2]) == (2,)
    assert join_continuation(tokenizer, [2], []) == ()


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([{"role": "user", "content": "ok"}, {"role": "user", "content": None}], "messages.1.content"),
        ([{"content": "ok"}], "messages.0.role"),
        ([], "messages"),
    ],
)
def test_faults_are_named_by_the_callers_numbers(messages: list[Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render_continuation(tokenizer_with(CHATML), messages, add_generation_prompt=True)
    assert caught.value.field == field


def test_what_the_template_refuses_is_the_messages_fault() -> None:
    with pytest.raises(InvalidRequest, match="alternate"):
        render_continuation(tokenizer_with(LLAMA2), [{"role": "assistant", "content": "x"}], add_generation_prompt=True)


@pytest.mark.parametrize("template", ["{{ messages[-1].content }}", "{{ messages[1].content * 2 }}"])
def test_a_template_that_cannot_be_continued_is_refused_by_name(template: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render_continuation(tokenizer_with(template), HI, add_generation_prompt=True)
    assert caught.value.field == "session_id"
