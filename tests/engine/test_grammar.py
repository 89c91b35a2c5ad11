"""Constrained output is valid, whatever the model would rather say."""

from __future__ import annotations

import json

import numpy as np
import pytest
from engine_support import EOS, VOCAB, Harness, expected_greedy, history_logits

from remora.deployments.engine.messages import Grammar

PROMPT = "Answer in JSON: "


def schema(**properties) -> dict:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS = {
    "integers and an enumeration": schema(
        count={"type": "integer", "minimum": 0, "maximum": 99}, kind={"enum": ["x", "yy"]}
    ),
    "a bounded text": schema(name={"type": "string", "maxLength": 8}),
    "a nested array": schema(
        rows={"type": "array", "minItems": 1, "maxItems": 3, "items": schema(ok={"type": "boolean"})}
    ),
    "one of several": {"anyOf": [schema(a={"type": "null"}), schema(b={"const": 7})]},
    "an array at the top": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 2, "maxItems": 4},
}


@pytest.fixture
def harness():
    made: list[Harness] = []

    def make(**options) -> Harness:
        made.append(Harness(**{"num_blocks": 400, **options}))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert one.num_referenced_blocks == 0


def finish(one: Harness) -> None:
    """The grammar is compiled by a thread: wait for it between steps."""
    for _ in range(20_000):
        if one.is_done:
            return
        if not one.engine.step():
            one.engine._wake.wait(0.01)
    raise AssertionError("not done")


def valid(value, wanted: dict) -> bool:
    """As much of JSON schema as SCHEMAS uses."""
    if "anyOf" in wanted:
        return any(valid(value, one) for one in wanted["anyOf"])
    if "enum" in wanted:
        return value in wanted["enum"]
    if "const" in wanted:
        return value == wanted["const"]
    match wanted["type"]:
        case "object":
            names = wanted["properties"]
            return set(value) == set(names) and all(valid(value[name], names[name]) for name in names)
        case "array":
            fits = wanted["minItems"] <= len(value) <= wanted["maxItems"]
            return fits and all(valid(item, wanted["items"]) for item in value)
        case "integer":
            return isinstance(value, int) and wanted["minimum"] <= value <= wanted["maximum"]
        case "string":
            return isinstance(value, str) and len(value) <= wanted["maxLength"]
        case "boolean":
            return isinstance(value, bool)
        case _:
            return value is None


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("options", [{}, {"ignore_eos": True}, {"min_tokens": 30}], ids=str)
def test_output_follows_its_schema(harness, name, options) -> None:
    one = harness()
    grammar = Grammar(kind="json_schema", text=json.dumps(SCHEMAS[name]))
    ids = [
        one.submit(f"{seed}{PROMPT}", grammar=grammar, max_tokens=400, temperature=1.0, seed=seed, **options)
        for seed in range(4)
    ]
    free = one.submit(PROMPT, max_tokens=10)
    finish(one)
    for request_id in ids:
        output = one.outputs[request_id, 0]
        assert output.finish_reason == "stop", output.error_message
        assert valid(json.loads(output.text), SCHEMAS[name])
    assert one.outputs[free, 0].token_ids == expected_greedy(PROMPT, 10)


def test_json_object_gives_an_object(harness) -> None:
    one = harness()

    def rather_closing(history):
        logits = history_logits(history)
        for character, bonus in (("}", 12.0), ('"', 9.0), ("]", 9.0), ("1", 5.0)):
            logits[ord(character)] += bonus
        return logits

    one.model.decoder.logits_of = rather_closing
    ids = [
        one.submit(f"{seed}", grammar=Grammar(kind="json_object"), temperature=1.0, seed=seed, max_tokens=400)
        for seed in range(6)
    ]
    finish(one)
    for request_id in ids:
        assert isinstance(json.loads(one.outputs[request_id, 0].text), dict)


def test_each_choice_has_its_own_place_in_the_grammar(harness) -> None:
    one = harness()
    grammar = Grammar(kind="json_schema", text=json.dumps(SCHEMAS["integers and an enumeration"]))
    request_id = one.submit(PROMPT, n=4, grammar=grammar, temperature=1.5, seed=1, max_tokens=300)
    finish(one)
    texts = [one.outputs[request_id, choice].text for choice in range(4)]
    assert all(valid(json.loads(text), SCHEMAS["integers and an enumeration"]) for text in texts)
    assert len(set(texts)) > 1


@pytest.mark.parametrize("text", ["not json", '{"type": "unheard of"}', "[1]", '{"$ref": "#/nowhere"}', ""])
def test_a_wrong_schema_is_answered_as_such_and_the_next_request_works(harness, text) -> None:
    one = harness()
    request_id = one.submit(PROMPT, n=2, grammar=Grammar(kind="json_schema", text=text))
    finish(one)
    for choice in range(2):
        output = one.outputs[request_id, choice]
        assert (output.finish_reason, output.error) == ("error", "InvalidRequest")
        assert "response_format" in (output.error_message or "")
    assert one.run(PROMPT).token_ids == expected_greedy(PROMPT, 8)


def test_a_request_can_be_cancelled_while_its_grammar_is_compiled(harness) -> None:
    one = harness()
    request_id = one.submit(PROMPT, grammar=Grammar(kind="json_object"))
    one.cancel(request_id)
    finish(one)
    assert one.outputs[request_id, 0].finish_reason == "abort"
    for _ in range(50):
        one.engine.step()
        one.engine._wake.wait(0.002)
    assert one.engine.stats().num_waiting == 0


def test_a_constrained_request_goes_on_behind_its_tokens_after_a_failover(harness) -> None:
    grammar = Grammar(kind="json_schema", text=json.dumps(SCHEMAS["a nested array"]))
    options = {"grammar": grammar, "temperature": 1.0, "seed": 5, "max_tokens": 300}
    one = harness()
    request_id = one.submit(PROMPT, **options)
    finish(one)
    whole = one.outputs[request_id, 0].token_ids
    for num_given in (1, 5, len(whole) - 1):
        other = harness()
        resumed = other.submit(PROMPT, given=(tuple(whole[:num_given]),), **options)
        finish(other)
        assert other.outputs[resumed, 0].token_ids == whole


def test_a_constrained_request_that_is_preempted_keeps_its_place(harness) -> None:
    grammar = Grammar(kind="json_schema", text=json.dumps(SCHEMAS["a nested array"]))
    texts = []
    for num_blocks in (400, 30):
        one = harness(num_blocks=num_blocks)
        ids = [one.submit(f"{i} {PROMPT}", grammar=grammar, temperature=1.0, seed=i, max_tokens=90) for i in range(4)]
        finish(one)
        texts.append([one.outputs[request_id, 0].text for request_id in ids])
    assert one.engine.stats().num_preemptions > 0
    assert texts[0] == texts[1]


def test_the_end_token_ends_a_complete_output_and_is_not_in_its_text(harness) -> None:
    one = harness()
    number = b"12"

    def spell(history):
        at = len(history) - len(PROMPT)
        return np.eye(VOCAB, dtype=np.float32)[number[at] if at < len(number) else EOS] * 9

    one.model.decoder.logits_of = spell
    request_id = one.submit(PROMPT, grammar=Grammar(kind="json_schema", text='{"type": "integer"}'), max_tokens=20)
    finish(one)
    output = one.outputs[request_id, 0]
    assert (output.text, output.finish_reason, output.token_ids) == ("12", "stop", [*number, EOS])
