"""The official OpenAI client, unchanged, against two real models."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("model", ["smollm2", "smollm2-int8"])
def test_a_chat_answers_whole_and_streamed_alike(client: Any, model: str) -> None:
    arguments = {"model": model, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**arguments)
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[0].choices[0].delta.role == "assistant"


def test_the_model_knows_the_capital_of_france(client: Any) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=24, temperature=0)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_completions_take_text_and_token_ids_alike(client: Any, platform: Any) -> None:
    arguments = {"model": "smollm2", "max_tokens": 8, "temperature": 0}
    text = client.completions.create(prompt="The sun rises in the", **arguments)
    tokens = platform.http.post("/tokenize", json={"model": "smollm2", "prompt": "The sun rises in the"}).json()[
        "tokens"
    ]
    ids = client.completions.create(prompt=tokens, **arguments)
    assert text.choices[0].text == ids.choices[0].text
    assert text.usage.completion_tokens == 8
    streamed = client.completions.create(prompt=["The sun rises in the", tokens], stream=True, **arguments)
    texts = ["", ""]
    for chunk in streamed:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [text.choices[0].text] * 2


def test_a_repeated_prompt_is_reported_as_cached(client: Any) -> None:
    messages = [{"role": "user", "content": "Tell me about rivers, lakes and seas. " * 20}]
    usages = [
        client.chat.completions.create(model="smollm2", messages=messages, max_tokens=4, temperature=0).usage
        for _ in range(2)
    ]
    assert usages[0].prompt_tokens == usages[1].prompt_tokens > 160
    assert usages[1].prompt_tokens_details.cached_tokens >= usages[1].prompt_tokens - 64
    assert usages[1].prompt_tokens_details.cached_tokens < usages[1].prompt_tokens


def test_case_07_n_choices_of_a_seed_differ_and_repeat(client: Any) -> None:
    """And case 8."""
    arguments = {
        "model": "smollm2", "messages": [{"role": "user", "content": "Invent a name for a boat that nobody has."}],
        "n": 3, "seed": 7, "temperature": 1, "max_tokens": 16,
    }  # fmt: skip
    first, second = (client.chat.completions.create(**arguments) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in second.choices]
    assert first.usage.prompt_tokens_details.cached_tokens <= first.usage.prompt_tokens


def test_case_24_a_seeded_answer_does_not_depend_on_its_neighbours(client: Any, platform: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def ask(seed: int | None) -> str:
        body = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 24, "temperature": 1, "seed": seed}
        return str(platform.http.post("/v1/completions", json=body).json()["choices"][0]["text"])

    alone = ask(42)
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(ask, [42, None, 42, None, None, 42, None, None]))
    assert {together[i] for i in (0, 2, 5)} == {alone}


def test_logprobs_are_of_the_tokens_that_were_said(client: Any) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=QUESTION, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == answer.choices[0].message.content
    for entry in content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == pytest.approx(max(top.logprob for top in entry.top_logprobs), abs=1e-4)


def test_a_stop_string_ends_the_answer_before_it(client: Any) -> None:
    arguments = {"model": "smollm2", "prompt": "1, 2, 3, 4, 5,", "max_tokens": 32, "temperature": 0}
    free = client.completions.create(**arguments)
    assert " 9" in free.choices[0].text
    stopped = client.completions.create(stop=[" 9"], **arguments)
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == free.choices[0].text.partition(" 9")[0]
    chunks = client.completions.create(stop=[" 9"], stream=True, **arguments)
    assert "".join(chunk.choices[0].text for chunk in chunks) == stopped.choices[0].text


@pytest.mark.parametrize("model", ["smollm2", "smollm2-int8"])
def test_a_json_schema_is_kept(client: Any, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Who are you? Answer in JSON."}],
        max_tokens=100,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}},
    )
    person = json.loads(answer.choices[0].message.content)
    assert set(person) == {"name", "age"}
    assert 0 <= person["age"] <= 99


def test_a_json_object_is_an_object(client: Any) -> None:
    stream = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": 'Answer only {"ok": true}.'}],
        max_tokens=200,
        temperature=0,
        response_format={"type": "json_object"},
        stream=True,
    )
    text, reason = "", None
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
    assert text.lstrip().startswith("{")
    if reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_case_22_a_prompt_that_ends_inside_a_character_is_not_echoed(client: Any, platform: Any) -> None:
    whole = platform.http.post("/tokenize", json={"model": "smollm2", "prompt": "Hello 𓂀"}).json()["tokens"]
    chunks = list(
        client.completions.create(model="smollm2", prompt=whole[:-1], max_tokens=4, temperature=0, stream=True)
    )
    assert "Hello" not in chunks[0].choices[0].text
    assert "".join(chunk.choices[0].text for chunk in chunks).count("Hello") <= 1


def test_tokenizing_is_reversible(platform: Any) -> None:
    text = "Grüße, 世界! <|im_start|>"
    answer = platform.http.post("/tokenize", json={"model": "smollm2", "prompt": text}).json()
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 2048
    back = platform.http.post("/detokenize", json={"model": "smollm2", "tokens": answer["tokens"]}).json()
    assert back["prompt"] == text
