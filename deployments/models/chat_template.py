"""Chat messages → prompt text, by the model's own Jinja template, with every fault named."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from remora.platform.base.errors import InvalidRequest, ModelError

#: Names the template receives from here; a request's own template arguments may not replace them.
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"})


class _GenerationTag(Extension):
    """`{% generation %}`: marks an assistant's turn for training; while serving its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads it from the class)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line_no = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line_no)


class _TemplateFault(jinja2.TemplateError):
    """The template itself called raise_exception: its sentence is meant for the caller."""


def _raise_exception(message: object) -> None:
    raise _TemplateFault(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which models have never seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)


class ChatTemplate:
    """A compiled template. Thread-safe; templates of a model are untrusted code and run in Jinja's sandbox."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: "bos_token", "eos_token", ... → text, as templates name them. Raises ModelError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            self._variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from None
        self._special_tokens = dict(special_tokens)

    @property
    def takes_tools(self) -> bool:
        """Whether the template reads `tools`; if not, tools in a request would be dropped without a word."""
        return "tools" in self._variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        arguments: Mapping[str, Any],
    ) -> str:
        """The prompt's text. Raises InvalidRequest, naming the field, for whatever the template cannot take."""
        reserved = sorted(_RESERVED & arguments.keys())
        if reserved:
            raise InvalidRequest(
                f"chat_template_kwargs: {reserved[0]!r} is set by the server and cannot be replaced.",
                field=f"chat_template_kwargs.{reserved[0]}",
            )
        if tools and not self.takes_tools:
            raise InvalidRequest("tools: this model's chat template has no place for tools.", field="tools")
        clean = clean_messages(messages)
        try:
            return self._template.render(
                {
                    **self._special_tokens,
                    **arguments,
                    "messages": clean,
                    "tools": list(tools) if tools else None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except _TemplateFault as fault:
            raise InvalidRequest(
                f"messages: the model's chat template refuses them: {fault}", field="messages"
            ) from None
        except Exception as error:
            # A template is the model's code: any error in it is this request's fault, not the server's.
            raise InvalidRequest(
                f"messages: the model's chat template cannot render them: {type(error).__name__}: {error}",
                field="messages",
            ) from None


def clean_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: content is text, tool-call arguments are objects.

    Text parts are joined by newlines (as vLLM and llama.cpp do). Raises InvalidRequest naming the field: null content
    without tool calls, an empty list of tool calls, a part that is not text, arguments that are not JSON.
    """
    if not messages:
        raise InvalidRequest("messages: at least one message is needed.", field="messages")
    clean = []
    for i, message in enumerate(messages):
        field = f"messages.{i}"
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"{field}: must be an object with a role and content.", field=field)
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise InvalidRequest(f"{field}.role: must be a non-empty string, not {role!r}.", field=f"{field}.role")
        result = {key: value for key, value in message.items() if value is not None}
        calls = message.get("tool_calls")
        if calls is not None:
            result["tool_calls"] = _clean_tool_calls(calls, f"{field}.tool_calls")
        result["content"] = _clean_content(message.get("content"), f"{field}.content", may_be_null=calls is not None)
        clean.append(result)
    return clean


def _clean_content(content: object, field: str, *, may_be_null: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if may_be_null:
            return ""
        raise InvalidRequest(f"{field}: may be null only beside tool_calls; send a string.", field=field)
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise InvalidRequest(f"{field}: must be a string or a list of text parts.", field=field)
    texts = []
    for j, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidRequest(
                f'{field}.{j}: only text parts, {{"type": "text", "text": "..."}}, can be served.', field=f"{field}.{j}"
            )
        texts.append(text)
    return "\n".join(texts)


def _clean_tool_calls(calls: object, field: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)) or not calls:
        raise InvalidRequest(f"{field}: must be a list of at least one tool call, or be left out.", field=field)
    clean = []
    for j, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{field}.{j}.function: must be an object with a name.", field=f"{field}.{j}.function")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            # OpenAI's wire format is JSON text; templates write the object themselves.
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except ValueError as error:
                where = f"{field}.{j}.function.arguments"
                raise InvalidRequest(f"{where}: is not JSON: {error}", field=where) from None
        clean.append({**call, "function": {**function, "arguments": arguments}})
    return clean
