"""Whatever a client sends as messages: a prompt, or a 400 that names the field."""

from __future__ import annotations

from typing import Any

import pytest

from remora.deployments.models.chat_template import ChatTemplate
from remora.platform.base.errors import InvalidRequest, ModelError

PLAIN = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
TOOLS = (
    "{% if tools %}[{% for t in tools %}{{ t | tojson }}{% endfor %}]{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments.city }}){% endfor %};{% endfor %}"
)
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}


def render(source: str, messages: Any, tools: Any = None, arguments: Any = None) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(messages, tools=tools, add_generation_prompt=True, arguments=arguments or {})


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        (["hi"], "messages.0"),
        ([{"content": "hi"}], "messages.0.role"),
        ([{"role": "", "content": "hi"}], "messages.0.role"),
        ([{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}], "messages.1.content"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": 3}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages.0.content.0"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "messages.0.content.0"),
        ([{"role": "assistant", "content": "x", "tool_calls": []}], "messages.0.tool_calls"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "messages.0.tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages.0.tool_calls.0.function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages.0.tool_calls.0.function.arguments",
        ),
    ],
)
def test_messages_that_cannot_be_rendered_name_the_field(messages: Any, field: str) -> None:
    """llama.cpp#13178 and vLLM#13978: null content and empty tool calls were server errors."""
    for source in (PLAIN, TOOLS):
        with pytest.raises(InvalidRequest) as caught:
            render(source, messages)
        assert caught.value.field == field
        assert field in str(caught.value)


def test_the_templates_own_complaint_reaches_the_caller() -> None:
    """llama.cpp#11402: the template's exception was hidden."""
    source = "{{ raise_exception('roles must alternate user/assistant') }}"
    with pytest.raises(InvalidRequest, match="roles must alternate user/assistant") as caught:
        render(source, [{"role": "user", "content": "x"}])
    assert caught.value.field == "messages"


@pytest.mark.parametrize("source", ["{{ messages[5].content }}{{ nothing.at.all }}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}"])
def test_a_template_that_breaks_is_an_invalid_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot render"):
        render(source, [{"role": "user", "content": "x"}])


def test_templates_cannot_reach_the_interpreter() -> None:
    with pytest.raises(InvalidRequest):
        render("{{ messages.__class__.__mro__[1].__subclasses__() }}", [{"role": "user", "content": "x"}])
    with pytest.raises(InvalidRequest):
        render("{{ messages.append(1) }}", [{"role": "user", "content": "x"}])


def test_a_template_that_does_not_compile_is_the_models_fault() -> None:
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate("{% for %}", {})


def test_text_parts_and_null_fields_become_plain_text() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None}
    ]
    assert render(PLAIN, messages) == "<user>a\nb</s>"
    assert render(PLAIN, [{"role": "user", "content": ""}]) == "<user></s>"


def test_tool_calls_arrive_as_objects_and_tools_need_a_place() -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    tools = [{"type": "function", "function": {"name": "weather", "description": "<>&'"}}]
    text = render(TOOLS, messages, tools)
    assert text.startswith('[{"type": "function", "function": {"name": "weather", "description": "<>&\'"}}]')
    assert text.endswith("assistant:(weather Bonn);")
    with pytest.raises(InvalidRequest) as caught:
        render(PLAIN, messages, tools)
    assert caught.value.field == "tools"


def test_arguments_reach_the_template_but_replace_nothing_of_the_server() -> None:
    source = (
        "{{ bos_token }}{% if enable_thinking %}think{% endif %}"
        "{% generation %}g{% endgeneration %}{{ strftime_now('%Y')[:2] }}"
    )
    assert render(source, [{"role": "user", "content": "x"}], arguments={"enable_thinking": True}) == "<s>thinkg20"
    with pytest.raises(InvalidRequest) as caught:
        render(source, [{"role": "user", "content": "x"}], arguments={"messages": []})
    assert caught.value.field == "chat_template_kwargs.messages"
