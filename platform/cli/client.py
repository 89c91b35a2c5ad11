"""Talking to a running platform, or to any server that speaks OpenAI's API."""

from __future__ import annotations

import os
from typing import Any

import click
import httpx

from remora.platform.base.errors import RemoraError
from remora.platform.base.paths import default_state_dir
from remora.platform.cli.instance import running_instances

DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT = httpx.Timeout(10.0, read=600.0)


class CannotReach(RemoraError):
    """Nothing answers at the URL."""

    code = "cannot_reach"


class ServerRefused(RemoraError):
    """The server answered with an error; the message is the server's."""

    code = "server_refused"


#: Adds `--url` to a command.
url_option = click.option(
    "--url", envvar="REMORA_URL", help="Base URL of the server; default: the instance that runs on this machine."
)


def base_url(url: str | None) -> str:
    """The given URL, else that of the first running instance of this user, else the default port."""
    if url is not None:
        return url.rstrip("/").removesuffix("/v1")
    running = running_instances(default_state_dir())
    return running[0].url if running else DEFAULT_URL


def key_headers() -> dict[str, str]:
    """The header with the API key of the environment variable REMORA_API_KEY, if it is set."""
    key = os.environ.get("REMORA_API_KEY")
    return {"authorization": f"Bearer {key}"} if key else {}


def make_client(url: str | None) -> httpx.Client:
    """A client for one server, with the environment's API key but without its proxies."""
    return httpx.Client(base_url=base_url(url), timeout=_TIMEOUT, trust_env=False, headers=key_headers())


def get_json(client: httpx.Client, path: str) -> Any:
    """Raises CannotReach or ServerRefused."""
    return send_json(client, "GET", path)


def send_json(client: httpx.Client, method: str, path: str, body: Any = None) -> Any:
    """Raises CannotReach or ServerRefused."""
    try:
        response = client.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise cannot_reach(client, error) from None
    check(response)
    return response.json()


def cannot_reach(client: httpx.Client, error: httpx.HTTPError) -> CannotReach:
    """The error as one sentence."""
    return CannotReach(
        f"no server answers at {client.base_url} ({error}); start one with `remora up` or name one with --url"
    )


def check(response: httpx.Response) -> None:
    """Raises ServerRefused with the server's own sentence for any status but 2xx."""
    if response.is_success:
        return
    response.read()
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text.strip()[:200] or response.reason_phrase
    raise ServerRefused(f"{response.status_code}: {message}")
