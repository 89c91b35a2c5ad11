"""`remora chat`: a conversation in the terminal, or one question from the command line."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import click
import httpx

from remora.platform.base.errors import RemoraError
from remora.platform.cli.client import ServerRefused, cannot_reach, check, get_json, make_client, url_option

_HELP = "/clear forgets the conversation, /system TEXT sets the system prompt, /exit or Ctrl-D ends."


@click.command()
@click.argument("question", nargs=-1)
@url_option
@click.option("-m", "--model", help="Model to talk to; default: the first one served.")
@click.option("-s", "--system", help="System prompt.")
@click.option("-n", "--namespace", help="Namespace of the model to use.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=512, show_default=True)
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.7, show_default=True)
@click.option("--seed", type=int)
def chat(
    question: tuple[str, ...],
    url: str | None,
    model: str | None,
    system: str | None,
    namespace: str | None,
    max_tokens: int,
    temperature: float,
    seed: int | None,
) -> None:
    """Talks to a model. With a QUESTION (or text on standard input) it answers once and ends."""
    parameters = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "namespace": namespace}
    with make_client(url) as client:
        model = model or str(get_json(client, "/v1/models")["data"][0]["id"])
        conversation = Conversation(
            client, model, system, {name: value for name, value in parameters.items() if value is not None}
        )
        text = " ".join(question)
        if not text and not sys.stdin.isatty():
            text = sys.stdin.read().strip()
        if text:
            _print_answer(conversation.ask(text))
        elif sys.stdin.isatty():
            _talk(conversation)
        else:
            raise click.UsageError("no question: give one as an argument or on standard input")


class Conversation:
    """The messages so far. A question that was not answered to the end leaves no trace in it."""

    def __init__(self, client: httpx.Client, model: str, system: str | None, parameters: dict[str, Any]) -> None:
        self.model = model
        self._client = client
        self._parameters = parameters
        self.messages: list[dict[str, str]] = []
        self.set_system(system)

    def set_system(self, text: str | None) -> None:
        """Starts over with another system prompt, or with none."""
        self.messages = [{"role": "system", "content": text}] if text else []

    def clear(self) -> None:
        """Forgets everything but the system prompt."""
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def ask(self, text: str) -> Iterator[str]:
        """Yields the answer piece by piece. Raises ServerRefused or CannotReach."""
        question = {"role": "user", "content": text}
        body = {"model": self.model, "messages": [*self.messages, question], "stream": True, **self._parameters}
        answer = ""
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                check(response)
                for piece in _pieces(response):
                    answer += piece
                    yield piece
        except httpx.HTTPError as error:
            raise cannot_reach(self._client, error) from None
        self.messages += [question, {"role": "assistant", "content": answer}]


def _pieces(response: httpx.Response) -> Iterator[str]:
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if data == line or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise ServerRefused(str(event["error"].get("message", event["error"])))
        for choice in event["choices"]:
            piece = choice["delta"].get("content")
            if piece:
                yield piece


def _print_answer(pieces: Iterator[str]) -> None:
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _talk(conversation: Conversation) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (gives input() line editing and history)
    click.echo(f"Talking to {conversation.model}. {_HELP}")
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            click.echo("")
            return
        except KeyboardInterrupt:
            click.echo("")
            continue
        if text in ("/exit", "/quit"):
            return
        if text == "/clear":
            conversation.clear()
        elif text.startswith("/system"):
            conversation.set_system(text.removeprefix("/system").strip() or None)
        elif text.startswith("/"):
            click.echo(_HELP)
        elif text:
            _answer(conversation, text)


def _answer(conversation: Conversation, text: str) -> None:
    """Ctrl-C stops the answer, an error is told, and the conversation goes on."""
    try:
        _print_answer(conversation.ask(text))
    except KeyboardInterrupt:
        click.echo("\n(stopped)")
    except RemoraError as error:
        click.echo(f"error: {error}", err=True)
