"""Keys are random, only their hashes are kept, and `up` says who can get in."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from remora.platform.base.config import parse_config
from remora.platform.base.tenants import key_hash, new_key
from remora.platform.cli.up import access_text

Run = Callable[..., Any]
MODELS = [{"name": "m", "source": "x"}]
TENANTS = [{"name": "ops", "operator": True, "key_sha256": [key_hash("rmr_x")]}]


def test_keys_are_long_and_different() -> None:
    keys = {new_key() for _ in range(1000)}
    assert len(keys) == 1000
    assert all(re.fullmatch(r"rmr_[\w-]{43}", key) for key in keys)


def test_a_new_key_is_printed_with_what_belongs_into_the_configuration(run: Run) -> None:
    out = run("keys", "new", "--tenant", "team-b").out
    (key,) = re.findall(r"rmr_[\w-]{43}", out)
    tenants = yaml.safe_load(out[out.index("  tenants:") :])["tenants"]
    assert tenants == [{"name": "team-b", "key_sha256": [key_hash(key)]}]
    namespaces = [{"name": "n", "model": "m", "tenant": "team-b"}]
    assert parse_config({"models": MODELS, "namespaces": namespaces, "tenants": tenants}).tenants[0].name == "team-b"


def test_a_key_is_hashed_from_a_pipe_and_other_secrets_are_not(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    key = new_key()
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{key}\n"))
    assert run("keys", "hash").out.strip() == key_hash(key)
    monkeypatch.setattr("sys.stdin", io.StringIO("password1\n"))
    assert run("keys", "hash").code == 2


def test_the_command_line_sends_the_key_of_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from remora.platform.cli.client import make_client

    monkeypatch.setenv("REMORA_API_KEY", "rmr_secret")
    with make_client("http://127.0.0.1:9") as client:
        assert client.headers["authorization"] == "Bearer rmr_secret"
    monkeypatch.delenv("REMORA_API_KEY")
    with make_client("http://127.0.0.1:9") as client:
        assert "authorization" not in client.headers


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "no API keys, so every socket is on loopback"),
        ({"tenants": TENANTS}, "with an API key, from this machine; tenants: ops"),
        ({"tenants": TENANTS, "http": {"host": "0.0.0.0"}}, "with an API key, on 0.0.0.0; tenants: ops"),
        ({"http": {"host": "0.0.0.0", "trusted_network": True}}, "NO API KEYS on 0.0.0.0"),
    ],
)
def test_up_says_who_can_get_in(changes: dict[str, Any], expected: str) -> None:
    assert expected in access_text(parse_config({"models": MODELS, **changes}))
